"use strict";
// Draws what tables cannot show, and hides what was not chosen. Names from outside reach the page as text only: no markup
// is ever made from a string here. Everything is drawn anew from `state` whenever something changes; that is cheap.
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($("data").textContent);
  const root = document.documentElement;
  const SVG = $("mark").namespaceURI;
  const state = { group: 0, phase: 0, moment: -1, cursor: null };
  const hidden = new Set();

  // --- Small tools ---------------------------------------------------------------------------------------------------

  function make(name, attributes = {}, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  function draw(parent, name, attributes = {}, words) {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, typeof value === "number" ? Number(value.toFixed(2)) : value);
    if (words !== undefined) node.textContent = words;
    parent.append(node);
    return node;
  }

  const bytes = (text) => Uint8Array.from(atob(text), (char) => char.charCodeAt(0));

  // [largest, base64 of 16-bit numbers]; 65535 stands for no value. See packing.py.
  function unpack([largest, text]) {
    const raw = bytes(text);
    const out = new Float64Array(raw.length / 2);
    for (let i = 0; i < out.length; i++) {
      const value = raw[2 * i] | (raw[2 * i + 1] << 8);
      out[i] = value === 65535 ? NaN : (value / 65534) * largest;
    }
    return out;
  }

  const opened = new Map();
  function seriesOf(run) {
    const index = run < 0 ? -1 : data.series_of[run];
    if (index < 0) return null;
    if (!opened.has(index)) {
      const packed = data.series[index];
      const one = { n: packed.n, usable: packed.usable, states: {} };
      for (const key of ["time", "fragmentation", "hits", "live", "refusals", "pseudo"]) one[key] = unpack(packed[key]);
      for (const [key, values] of Object.entries(packed.states)) one.states[key] = unpack(values).map((v) => v / packed.usable);
      // Long runs flicker from bucket to bucket; short ones are shown as they are.
      one.fragmentation = smooth(one.fragmentation, Math.floor(packed.n / 100));
      one.live = smooth(one.live, Math.floor(packed.n / 100));
      one.smooth = smooth(one.hits, Math.max(1, Math.round(packed.n / 40)));
      opened.set(index, one);
    }
    return opened.get(index);
  }

  // Mean of the known values up to `reach` buckets away.
  function smooth(values, reach) {
    return values.map((_, i) => {
      let sum = 0, seen = 0;
      for (let j = Math.max(0, i - reach); j <= Math.min(values.length - 1, i + reach); j++) {
        if (!Number.isNaN(values[j])) { sum += values[j]; seen++; }
      }
      return seen ? sum / seen : NaN;
    });
  }

  const count = (value) => Math.round(value).toLocaleString("en-US");
  const percent = (value) => `${value === 0 ? "0" : value < 9.995 ? value.toFixed(2) : value.toFixed(1)} %`;
  const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const unitOf = (span) => UNITS.find(([size]) => span >= 2 * size) || UNITS[3];
  function clock(seconds, span) {
    const [size, word] = unitOf(span);
    return `${(seconds / size).toFixed(span / size < 20 ? 1 : 0)} ${word}`;
  }

  function ticks(top, wanted) {
    if (!(top > 0)) return [0];
    const rough = top / wanted;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
    const out = [];
    for (let value = 0; value <= top * 1.0001; value += step) out.push(Number(value.toPrecision(10)));
    return out;
  }

  const group = () => data.groups[state.group];
  const columns = () => group().columns.filter((column) => !hidden.has(column.policy));
  const policyClass = (column) => `p${column.policy}`;
  const lineClass = (column) =>
    `${policyClass(column)} curve${column.dashed ? " dashed" : ""}${data.policies[column.policy] === "slotted" ? " ours" : ""}`;

  // --- Plots over time -----------------------------------------------------------------------------------------------

  let plots = []; // of {move(time)}: all follow one cursor

  function frame(title, note, label) {
    const figure = make("figure", { class: "plot" });
    figure.append(make("figcaption", {}, title, note ? make("small", {}, note) : ""));
    const svg = draw(figure, "svg", { role: "img", tabindex: "0", "aria-label": label });
    return { figure, svg };
  }

  function axes(svg, box, xTop, yTicks, yTop, words) {
    for (const value of yTicks) {
      const y = box.y(value);
      draw(svg, "line", { class: "grid", x1: box.left, x2: box.right, y1: y, y2: y });
      draw(svg, "text", { x: box.left - 6, y: y + 4, "text-anchor": "end" }, words(value, yTop));
    }
    const [size, unit] = unitOf(xTop);
    const marks = ticks(xTop / size, box.right - box.left < 380 ? 4 : 7);
    for (const value of marks) {
      const x = box.x(value * size);
      draw(svg, "line", { class: "grid", x1: x, x2: x, y1: box.bottom, y2: box.bottom + 4 });
      draw(svg, "text", { x, y: box.bottom + 16, "text-anchor": "middle" }, value === 0 ? `0 ${unit}` : value.toLocaleString("en-US"));
    }
  }

  function boxOf(svg, height, left, right, xTop, yTop) {
    const width = Math.max(240, svg.parentNode.clientWidth - 30);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("height", height);
    const box = { left, right: width - right, top: 8, bottom: height - 22, width };
    box.x = (value) => box.left + (value / (xTop || 1)) * (box.right - box.left);
    box.y = (value) => box.bottom - (value / (yTop || 1)) * (box.bottom - box.top);
    box.time = (x) => ((x - box.left) / (box.right - box.left)) * xTop;
    return box;
  }

  // How much time is shown, and who goes on longer: one policy that takes far longer than all others (where load waits for
  // memory, a poor one does) would press their lines into a corner.
  function spanOf(shown) {
    const ends = shown.map(({ column, series }) => [series.time[series.n - 1], column.label]).sort((a, b) => b[0] - a[0]);
    if (ends.length < 3 || ends[0][0] < 1.6 * ends[1][0]) return [ends[0][0], ""];
    return [1.1 * ends[1][0], `Not drawn to its end: ${ends[0][1]}, which takes ${clock(ends[0][0], ends[0][0])}.`];
  }

  const begin = (times) => (times.length > 1 ? Math.max(0, times[0] - (times[1] - times[0])) : times[0]);

  function pathOf(box, xs, ys) {
    // The first bucket began before its end, at which its point stands.
    const known = xs.length > 1 && !Number.isNaN(ys[0]);
    let out = known ? `M${box.x(begin(xs)).toFixed(1)} ${box.y(ys[0]).toFixed(1)}` : "", pen = known;
    for (let i = 0; i < xs.length; i++) {
      if (Number.isNaN(ys[i])) continue; // a bucket in which nothing happened does not break the line
      out += `${pen ? "L" : "M"}${box.x(xs[i]).toFixed(1)} ${box.y(ys[i]).toFixed(1)}`;
      pen = true;
    }
    return out;
  }

  let clips = 0;
  function clipTo(svg, box) {
    const id = `clip${clips++}`;
    draw(draw(svg, "clipPath", { id }), "rect", { x: box.left, y: box.top - 3, width: box.right - box.left + 2, height: box.bottom - box.top + 5 });
    return draw(svg, "g", { "clip-path": `url(#${id})` });
  }

  // Index of the bucket that holds `time`; -1 after the end of the run.
  function indexAt(times, time) {
    if (time > times[times.length - 1]) return -1;
    let low = 0, high = times.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (times[middle] < time) low = middle + 1; else high = middle;
    }
    return low;
  }

  function follow(svg, box, xTop) {
    const seek = (time, spoken) => {
      state.cursor = time === null ? null : Math.min(Math.max(time, 0), xTop);
      for (const plot of plots) plot.move(state.cursor);
      if (spoken && state.cursor !== null) {
        const readout = svg.parentNode.querySelector(".readout");
        $("say").textContent = readout ? readout.textContent : "";
      }
    };
    svg.addEventListener("pointermove", (event) => {
      const bounds = svg.getBoundingClientRect();
      seek(box.time(((event.clientX - bounds.left) / bounds.width) * box.width), false);
    });
    svg.addEventListener("pointerleave", () => seek(null, false));
    svg.addEventListener("blur", () => seek(null, false));
    svg.addEventListener("keydown", (event) => {
      const step = (xTop / 100) * (event.shiftKey ? 10 : 1);
      const now = state.cursor === null ? 0 : state.cursor;
      const to = { ArrowRight: now + step, ArrowLeft: now - step, Home: 0, End: xTop, Escape: null }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      seek(to, true);
    });
  }

  function lines(host, { title, note, unit, value, top, nothing, extra }) {
    const shown = columns().map((column) => ({ column, series: seriesOf(column.run) })).filter((each) => each.series);
    if (!shown.length) return;
    const [xTop] = spanOf(shown);
    const all = shown.flatMap(({ series }) => [...value(series)].filter((v, i) => !Number.isNaN(v) && series.time[i] <= xTop));
    const summary = shown.map(({ column, series }) => {
      const known = [...value(series)].filter((v) => !Number.isNaN(v));
      const mean = known.reduce((a, b) => a + b, 0) / (known.length || 1);
      return `${column.label} ${unit === "%" ? `${percent(mean)} on average` : count(known[known.length - 1] || 0)}`;
    }).join(", ");
    const { figure, svg } = frame(title, note, `${title}: ${summary}. Arrow keys read values.`);
    host.append(figure);
    if (!all.some((v) => v > 0)) {
      svg.remove();
      figure.append(make("p", { class: "none" }, nothing));
      return;
    }
    const yTop = top(all);
    const wide = figure.clientWidth > 430;
    const longest = Math.max(...shown.map(({ column }) => column.label.length));
    const box = boxOf(svg, 232, 44, wide ? Math.min(150, 18 + longest * 6.4) : 10, xTop, yTop);
    const words = (v) => (unit === "%" ? `${v} %` : v >= 10000 ? `${(v / 1000).toLocaleString("en-US")}k` : v.toLocaleString("en-US"));
    axes(svg, box, xTop, ticks(yTop, 4), yTop, words);
    const layer = clipTo(svg, box);
    // Ours last, so that it lies on top.
    const order = [...shown].sort((a, b) => (data.policies[a.column.policy] === "slotted") - (data.policies[b.column.policy] === "slotted"));
    for (const { column, series } of order) draw(layer, "path", { class: lineClass(column), d: pathOf(box, series.time, value(series)) });
    if (wide) names(svg, box, shown, value, xTop, yTop);
    const cursor = draw(svg, "line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
    const dots = shown.map(({ column }) => draw(svg, "circle", { class: `${policyClass(column)} dot`, r: 3.6, visibility: "hidden" }));
    const readout = make("p", { class: "readout" });
    figure.append(readout);
    const move = (time) => {
      readout.replaceChildren();
      cursor.setAttribute("visibility", time === null ? "hidden" : "visible");
      if (time !== null) {
        cursor.setAttribute("x1", box.x(time));
        cursor.setAttribute("x2", box.x(time));
        readout.append(make("span", {}, `at ${clock(time, xTop)}`));
      }
      shown.forEach(({ column, series }, i) => {
        const at = time === null ? -1 : indexAt(series.time, time);
        const now = at < 0 ? NaN : value(series)[at];
        const inside = !Number.isNaN(now) && now <= yTop;
        dots[i].setAttribute("visibility", inside ? "visible" : "hidden");
        if (inside) { dots[i].setAttribute("cx", box.x(series.time[at])); dots[i].setAttribute("cy", box.y(now)); }
        const words = time === null ? "" : at < 0 ? "ended" : Number.isNaN(now) ? "–" : unit === "%" ? percent(now) : count(now);
        const more = extra && at >= 0 ? extra(series, at) : "";
        readout.append(make("span", { class: policyClass(column) }, make("span", { class: `swatch${column.dashed ? " dashed" : ""}`, "aria-hidden": "true" }), `${column.label} `, make("b", {}, words), more));
      });
    };
    move(null);
    plots.push({ move });
    follow(svg, box, xTop);
  }

  // Names at the lines' ends, pushed apart so that none covers another.
  function names(svg, box, shown, value, xTop, yTop) {
    const placed = shown.map(({ column, series }) => {
      const ys = value(series);
      let last = series.n - 1;
      while (last > 0 && (Number.isNaN(ys[last]) || series.time[last] > xTop)) last--;
      return { column, x: box.x(series.time[last]) + 6, y: box.y(Math.min(ys[last] || 0, yTop)) + 4 };
    }).sort((a, b) => a.y - b.y);
    const gap = 14;
    const near = (a, b) => Math.abs(a.x - b.x) < 70;
    for (let i = 1; i < placed.length; i++) {
      for (let j = 0; j < i; j++) if (near(placed[i], placed[j])) placed[i].y = Math.max(placed[i].y, placed[j].y + gap);
    }
    // What was pushed out below comes up again, and pushes those above it.
    for (let i = placed.length - 1; i >= 0; i--) {
      let floor = box.bottom + 3;
      for (let j = i + 1; j < placed.length; j++) if (near(placed[i], placed[j])) floor = Math.min(floor, placed[j].y - gap);
      placed[i].y = Math.min(placed[i].y, floor);
    }
    for (const { column, x, y } of placed) draw(svg, "text", { class: `${policyClass(column)} name`, x, y }, column.label);
  }

  // A few early peaks must not press everything else flat: the scale ends a bit above what 99 % of all values stay below.
  function trimmed(values) {
    const sorted = [...values].sort((a, b) => a - b);
    const most = sorted[Math.floor(0.985 * (sorted.length - 1))] || 0;
    const peak = sorted[sorted.length - 1];
    const top = Math.max(most * 1.2, 0.5);
    return Math.min(top < peak ? top : Math.max(peak * 1.05, 0.5), 100);
  }

  const TIME_NOTE = $("time-note").textContent;

  function drawTime() {
    const host = $("plots");
    plots = [];
    host.replaceChildren();
    $("stacks").replaceChildren();
    $("states-legend").replaceChildren();
    lines(host, {
      title: "Empty slots in used blocks", unit: "%", value: (s) => s.fragmentation, top: trimmed,
      note: "share that holds no token; mean over a fiftieth of the run, peaks are in the table",
      nothing: "No slot of a used block ever stood empty.",
    });
    lines(host, {
      title: "Prompt tokens found cached", unit: "%", value: (s) => s.smooth, top: (all) => Math.min(100, Math.max(...all) * 1.08),
      note: "of requests as they were admitted; mean over a twentieth of the run",
      nothing: "Nothing was ever found cached.",
    });
    lines(host, {
      title: "Requests told to wait", unit: "", value: (s) => s.refusals, top: (all) => Math.max(...all) * 1.06,
      note: "running total; steep is bad",
      nothing: "No request had to wait.",
      extra: (s, at) => (s.pseudo[at] > 0.5 ? ` (${count(s.pseudo[at])} although there was room)` : ""),
    });
    lines(host, {
      title: "Running sequences", unit: "", value: (s) => s.live, top: (all) => Math.max(...all) * 1.08,
      note: "admitted and not yet finished; mean over a fiftieth of the run",
      nothing: "Nothing ran.",
    });
    drawStacks();
    const any = host.childElementCount > 0;
    $("time-note").hidden = !any;
    if (!any) host.append(make("p", { class: "note" }, columns().length ? "This result holds no series over time." : "No policy is chosen."));
  }

  function drawStacks() {
    const shown = columns().map((column) => ({ column, series: seriesOf(column.run) })).filter((each) => each.series);
    $("states-h").hidden = !shown.length;
    if (!shown.length) return;
    const present = data.states.filter(([key]) => shown.some(({ series }) => series.states[key]));
    $("states-legend").append(make("ul", { class: "legend", style: "margin:0 0 .8rem" },
      ...present.map(([key, word]) => make("li", {}, make("i", { class: `state-${key}`, "aria-hidden": "true" }), word))));
    const [xTop, longer] = spanOf(shown);
    $("time-note").textContent = `${TIME_NOTE} ${longer}`;
    for (const { column, series } of shown) {
      const averages = present.filter(([key]) => series.states[key])
        .map(([key, word]) => [word, (100 * series.states[key].reduce((a, b) => a + b, 0)) / series.n]);
      const means = averages.map(([word, share]) => `${word} ${percent(share)}`).join(", ");
      const { figure, svg } = frame("", "", `Occupancy by state over time, ${column.label}; on average ${means}. Arrow keys read values.`);
      figure.classList.add(policyClass(column));
      figure.querySelector("figcaption").append(make("span", { class: `swatch${column.dashed ? " dashed" : ""}`, "aria-hidden": "true" }), column.label,
        make("small", {}, `share of ${count(series.usable)} usable slots`));
      $("stacks").append(figure);
      const box = boxOf(svg, 190, 44, 10, xTop, 1);
      axes(svg, box, xTop, [0, 0.25, 0.5, 0.75, 1], 1, (v) => `${Math.round(v * 100)} %`);
      const within = clipTo(svg, box);
      let floor = new Float64Array(series.n);
      for (const [key] of present) {
        const values = series.states[key];
        if (!values) continue;
        const ceiling = floor.map((v, i) => Math.min(1, v + values[i]));
        const first = box.x(begin(series.time)).toFixed(1);
        let path = `M${first} ${box.y(ceiling[0]).toFixed(1)}`;
        for (let i = 0; i < series.n; i++) path += `L${box.x(series.time[i]).toFixed(1)} ${box.y(ceiling[i]).toFixed(1)}`;
        for (let i = series.n - 1; i >= 0; i--) path += `L${box.x(series.time[i]).toFixed(1)} ${box.y(floor[i]).toFixed(1)}`;
        draw(within, "path", { class: `state-${key} area`, d: `${path}L${first} ${box.y(floor[0]).toFixed(1)}Z` });
        floor = ceiling;
      }
      const cursor = draw(svg, "line", { class: "cursor", y1: box.top, y2: box.bottom, visibility: "hidden" });
      const readout = make("p", { class: "readout" });
      figure.append(readout);
      plots.push({
        move(time) {
          readout.replaceChildren();
          cursor.setAttribute("visibility", time === null ? "hidden" : "visible");
          if (time === null) {
            readout.append(make("span", {}, "on average"), ...averages.map(([word, share]) => make("span", {}, `${word} `, make("b", {}, percent(share)))));
            return;
          }
          cursor.setAttribute("x1", box.x(time));
          cursor.setAttribute("x2", box.x(time));
          const at = indexAt(series.time, time);
          readout.append(make("span", {}, `at ${clock(time, xTop)}`));
          if (at < 0) {
            readout.append(make("b", {}, "ended"));
            return;
          }
          for (const [key, word] of present) {
            const now = series.states[key] ? series.states[key][at] : 0;
            if (now > 0.0005) readout.append(make("span", {}, `${word} `, make("b", {}, percent(100 * now))));
          }
        },
      });
      plots[plots.length - 1].move(null);
      follow(svg, box, xTop);
    }
  }

  // --- Block sizes -----------------------------------------------------------------------------------------------------

  function drawSizes() {
    for (const host of document.querySelectorAll(".size-plots")) {
      const setup = Number(host.dataset.setup);
      if (setup !== group().setup) continue;
      host.replaceChildren();
      const groups = data.groups.filter((each) => each.setup === setup);
      for (const [key, title] of [["hits", "Prompt tokens found cached, by block size"], ["waste", "Empty slots in used blocks, by block size"]]) {
        const curves = new Map();
        groups.forEach((each, i) => {
          for (const column of each.columns) {
            if (hidden.has(column.policy)) continue;
            if (!curves.has(column.label)) curves.set(column.label, { column, points: [] });
            curves.get(column.label).points.push([i, column[key]]);
          }
        });
        const told = [...curves.values()].map(({ column, points }) => `${column.label} ${points.map(([i, v]) => `${percent(v)} at ${groups[i].block}`).join(", ")}`).join("; ");
        const { figure, svg } = frame(title, key === "hits" ? "more is better" : "mean over time; less is better", `${title}: ${told}`);
        svg.removeAttribute("tabindex");
        host.append(figure);
        const most = Math.max(...[...curves.values()].flatMap(({ points }) => points.map(([, v]) => v)), 0);
        const yTop = Math.min(100, Math.max(most * 1.1, 1));
        const longest = Math.max(4, ...[...curves.keys()].map((label) => label.length));
        const box = boxOf(svg, 232, 44, Math.min(150, 24 + longest * 6.4), groups.length - 1, yTop);
        axesBySize(svg, box, groups, ticks(yTop, 4));
        const placed = [];
        for (const { column, points } of curves.values()) {
          draw(svg, "path", { class: lineClass(column), d: pathOf(box, points.map(([x]) => x), points.map(([, y]) => y)) });
          for (const [x, y] of points) {
            const dot = draw(svg, "circle", { class: `${policyClass(column)} dot`, r: 4, cx: box.x(x), cy: box.y(y) });
            draw(dot, "title", {}, `${column.label}, blocks of ${groups[x].block}: ${percent(y)}`);
          }
          const [x, y] = points[points.length - 1];
          placed.push({ column, series: { n: 1, time: [x] }, at: [y] });
        }
        names(svg, box, placed.map(({ column, series, at }) => ({ column, series: Object.assign(series, { at }) })), (s) => s.at, Infinity, yTop);
      }
    }
  }

  function axesBySize(svg, box, groups, marks) {
    for (const value of marks) {
      draw(svg, "line", { class: "grid", x1: box.left, x2: box.right, y1: box.y(value), y2: box.y(value) });
      draw(svg, "text", { x: box.left - 6, y: box.y(value) + 4, "text-anchor": "end" }, `${value} %`);
    }
    groups.forEach((each, i) => draw(svg, "text", { x: box.x(i), y: box.bottom + 16, "text-anchor": "middle" }, each.block.toLocaleString("en-US")));
  }

  // --- Pictures of the pool ----------------------------------------------------------------------------------------------

  // Four bits a cell, the first in the high half of a byte: 0 empty, 15 full, the rest in between. See packing.py.
  function cellsOf([, , total, , text]) {
    const raw = bytes(text);
    return Uint8Array.from({ length: total }, (_, i) => (i % 2 ? raw[i >> 1] & 15 : raw[i >> 1] >> 4));
  }
  const fillOf = (level) => (level === 0 ? 0 : level === 15 ? 1 : (level - 0.5) / 14);

  // Custom properties hold both themes; a colour that is in use says which one counts.
  function colour(name) {
    const probe = make("i", { style: `color:var(${name})` });
    document.body.append(probe);
    const found = getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
    probe.remove();
    return found;
  }

  function drawPictures() {
    const host = $("pictures");
    const focused = host.contains(document.activeElement) ? state.moment : null;
    host.replaceChildren();
    const shown = columns()
      .map((column) => ({ column, pictures: column.run < 0 ? null : data.pictures[data.pictures_of[column.run]] }))
      .filter((each) => each.pictures);
    if (!shown.length) {
      host.append(make("p", { class: "note" }, columns().length ? "This result holds no pictures of the pool." : "No policy is chosen."));
      return;
    }
    const most = shown.reduce((a, b) => (b.pictures.length > a.pictures.length ? b : a)).pictures;
    if (state.moment < 0 || state.moment >= most.length) state.moment = Math.max(0, most.length - 2);
    const choice = make("fieldset", {}, make("legend", {}, "Moment, as a share of the requests started"));
    most.forEach((picture, i) => {
      const input = make("input", { type: "radio", name: "moment", value: i });
      input.checked = i === state.moment;
      input.addEventListener("change", () => { state.moment = i; drawPictures(); });
      choice.append(make("label", { class: "pick" }, input, make("span", {}, `${Math.round(100 * picture[1])} %`)));
    });
    const ramp = make("div", { class: "ramp" }, make("i", { class: "empty" }), "empty", make("i", { class: "scale" }), "nearly empty to full of tokens");
    host.append(make("div", { class: "moments" }, choice, ramp));
    const stacks = make("div", { class: "stacks" });
    host.append(stacks);
    const ground = colour("--cell-0"), stops = [1, 2, 3].map((i) => colour(`--cell-${i}`));
    const shades = Array.from({ length: 16 }, (_, level) => {
      if (level === 0) return ground;
      const at = ((level - 1) / 14) * 2, low = Math.min(1, Math.floor(at));
      return stops[low].map((v, k) => Math.round(v + (stops[low + 1][k] - v) * (at - low)));
    });
    for (const { column, pictures } of shown) picture(stacks, column, pictures[Math.min(state.moment, pictures.length - 1)], shades);
    if (focused !== null) choice.querySelectorAll("input")[focused].focus();
  }

  function picture(host, column, packed, shades) {
    const cells = cellsOf(packed);
    const series = seriesOf(column.run);
    const empty = cells.filter((level) => level === 0).length;
    const full = cells.filter((level) => level === 15).length;
    const slots = series ? series.usable / cells.length : 0;
    const block = group().block;
    const blocks = !data.without_blocks.includes(column.policy);
    const one = !slots ? "part" : blocks && Math.abs(slots - block) <= block * 0.02 ? `block of ${count(block)} slots` : `stretch of about ${count(slots)} slots`;
    const told = `${count(full)} full, ${count(cells.length - full - empty)} partly filled, ${count(empty)} empty`;
    const figure = make("figure", { class: `plot pool ${policyClass(column)}` },
      make("figcaption", {}, make("span", { class: `swatch${column.dashed ? " dashed" : ""}`, "aria-hidden": "true" }), column.label,
        make("small", {}, `at ${clock(packed[0], packed[0])} · a cell is one ${one}`)));
    const canvas = make("canvas", { role: "img", "aria-label": `The pool under ${column.label}: ${told}` });
    const readout = make("p", { class: "readout" }, told);
    figure.append(canvas, readout);
    host.append(figure);
    // Whole device pixels a cell, so that none is wider than its neighbour.
    const ratio = Math.max(1, window.devicePixelRatio || 1);
    const width = Math.round(Math.max(200, figure.clientWidth - 30) * ratio);
    const target = Math.sqrt((width * width * 0.62) / cells.length);
    const size = Math.max(2, Math.min(Math.round(26 * ratio), Math.floor(target)));
    const across = Math.max(1, Math.floor(width / size));
    const down = Math.ceil(cells.length / across);
    const gap = size >= 6 ? Math.max(1, Math.round(size / 9)) : 0; // lines between small cells would outshine them
    canvas.width = across * size;
    canvas.height = down * size;
    canvas.style.width = `${canvas.width / ratio}px`;
    const pen = canvas.getContext("2d");
    cells.forEach((level, i) => {
      pen.fillStyle = `rgb(${shades[level].join(",")})`;
      pen.fillRect((i % across) * size, Math.floor(i / across) * size, size - gap, size - gap);
    });
    canvas.addEventListener("pointermove", (event) => {
      const bounds = canvas.getBoundingClientRect();
      const x = Math.floor((((event.clientX - bounds.left) / bounds.width) * canvas.width) / size);
      const y = Math.floor((((event.clientY - bounds.top) / bounds.height) * canvas.height) / size);
      const i = y * across + x;
      if (x < 0 || x >= across || i < 0 || i >= cells.length) return;
      const level = cells[i];
      readout.textContent = `cell ${count(i)}: ${level === 0 ? "empty" : level === 15 ? "full" : `about ${Math.round(100 * fillOf(level))} % filled`}`;
    });
    canvas.addEventListener("pointerleave", () => { readout.textContent = told; });
  }

  // --- Choosing ------------------------------------------------------------------------------------------------------

  function picks(host, name, type, items, chosen, change) {
    for (const old of host.querySelectorAll(".pick")) old.remove();
    host.hidden = items.length < 2;
    items.forEach(([words, hint, extra], i) => {
      const input = make("input", { type, name, value: i });
      input.checked = chosen(i);
      input.addEventListener("change", () => change(i, input.checked));
      const span = make("span", {}, ...(extra ? [extra] : []), words);
      if (hint) span.title = hint;
      host.append(make("label", { class: "pick" }, input, span));
    });
  }

  function show() {
    const now = group();
    const [view, , meaning] = now.phases[state.phase];
    for (const each of document.querySelectorAll(".view")) each.hidden = each.id !== view;
    for (const each of document.querySelectorAll(".sizes, .pools")) each.hidden = Number(each.dataset.setup) !== now.setup;
    data.policies.forEach((_, i) => root.classList.toggle(`hide-p${i}`, hidden.has(i)));
    $("phase-note").textContent = state.phase > 0 && meaning ? `${now.phases[state.phase][1]}: ${meaning}.` : "";

    $("setup").value = now.setup;
    const siblings = data.groups.map((each, i) => [each, i]).filter(([each]) => each.setup === now.setup);
    picks($("sizes"), "size", "radio", siblings.map(([each]) => [each.block.toLocaleString("en-US")]), (i) => siblings[i][1] === state.group,
      (i) => choose(siblings[i][1]));
    picks($("phases"), "phase", "radio", now.phases.map(([, words, hint]) => [words, hint]), (i) => i === state.phase,
      (i) => { state.phase = i; show(); });
    const present = [...new Set(now.columns.map((column) => column.policy))];
    picks($("policies"), "policy", "checkbox", present.map((i) => [data.policies[i], "", make("i", { class: `swatch p${i} keep`, "aria-hidden": "true" })]),
      (i) => !hidden.has(present[i]),
      (i, on) => { if (on) hidden.delete(present[i]); else hidden.add(present[i]); redrawKeepingFocus(i); });
    plot();
  }

  // The boxes are made anew, so the one that was in use gets the focus back.
  function redrawKeepingFocus(i) {
    show();
    const boxes = $("policies").querySelectorAll("input");
    if (boxes[i]) boxes[i].focus();
  }

  function choose(index) {
    const words = group().phases[state.phase] ? group().phases[state.phase][1] : "";
    const kind = document.activeElement && document.activeElement.name;
    state.group = index;
    // The same phase, where this group has it.
    state.phase = Math.max(0, group().phases.findIndex((phase) => phase[1] === words));
    show();
    if (kind === "size") { const box = $("sizes").querySelector("input:checked"); if (box) box.focus(); }
  }

  function plot() { drawSizes(); drawTime(); drawPictures(); }

  // A view's id after the # chooses it: the links of "In short" work this way, and so does an address sent to a colleague.
  function fromAddress() {
    const wanted = location.hash.slice(1);
    for (let i = 0; i < data.groups.length; i++) {
      const at = data.groups[i].phases.findIndex(([id]) => id === wanted);
      if (at >= 0) {
        state.group = i;
        state.phase = at;
        show();
        $("figures").scrollIntoView();
        return true;
      }
    }
    return false;
  }

  // --- Definitions at the word -----------------------------------------------------------------------------------------

  const tip = $("tip");
  function showTip(term) {
    const meaning = document.getElementById(term.getAttribute("aria-describedby"));
    if (!meaning) return;
    const code = meaning.parentNode.querySelector("dt code");
    tip.replaceChildren(meaning.textContent, ...(code ? [make("code", {}, code.textContent)] : []));
    tip.hidden = false;
    const at = term.getBoundingClientRect();
    const left = Math.min(Math.max(8, at.left), document.documentElement.clientWidth - tip.offsetWidth - 8);
    const below = at.bottom + 8 + tip.offsetHeight < window.innerHeight;
    tip.style.left = `${Math.max(8, left) + window.scrollX}px`;
    tip.style.top = `${(below ? at.bottom + 6 : at.top - tip.offsetHeight - 6) + window.scrollY}px`;
  }
  const hideTip = () => { tip.hidden = true; };
  for (const term of document.querySelectorAll(".term")) {
    term.addEventListener("pointerenter", () => showTip(term));
    term.addEventListener("pointerleave", hideTip);
    term.addEventListener("focus", () => showTip(term));
    term.addEventListener("blur", hideTip);
    term.addEventListener("click", (event) => { event.preventDefault(); showTip(term); });
  }
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });

  // --- Theme -----------------------------------------------------------------------------------------------------------

  const themes = ["system", "light", "dark"];
  let theme = 0;
  function setTheme(index) {
    theme = index;
    if (theme === 0) delete root.dataset.theme; else root.dataset.theme = themes[theme];
    $("theme").textContent = `Theme: ${themes[theme]}`;
    if (data.groups.length) drawPictures();
  }
  $("theme").hidden = false;
  $("theme").addEventListener("click", () => setTheme((theme + 1) % themes.length));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (data.groups.length) drawPictures(); });

  // --- Start -------------------------------------------------------------------------------------------------------------

  if (data.groups.length) {
    data.setups.forEach(([trace, words], i) => $("setup").append(make("option", { value: i }, `${trace} · ${words}`)));
    $("setup").parentNode.hidden = data.setups.length < 2;
    $("setup").addEventListener("change", () => choose(data.groups.findIndex((each) => each.setup === Number($("setup").value))));
    $("choose").hidden = false;
    $("choose").addEventListener("submit", (event) => event.preventDefault());
    if (!fromAddress()) show();
    addEventListener("hashchange", fromAddress);
    let width = innerWidth, waiting = 0;
    addEventListener("resize", () => {
      if (innerWidth === width) return; // a phone's address bar changes the height alone
      width = innerWidth;
      clearTimeout(waiting);
      waiting = setTimeout(plot, 120);
    });
    // Paper is white: the pictures hold their colours, so they are drawn for it and drawn again afterwards.
    addEventListener("beforeprint", () => { root.dataset.theme = "light"; drawPictures(); });
    addEventListener("afterprint", () => setTheme(theme));
  } else {
    drawPicturesNone();
  }
  function drawPicturesNone() {
    $("pictures").append(make("p", { class: "note" }, "This result holds no runs."));
  }
  const asked = themes.indexOf(new URLSearchParams(location.search).get("theme"));
  if (asked > 0) setTheme(asked);
})();
