// A chart over time on a canvas, with a legend that says the values in text: now, or where one points.
//
// For the keyboard and for screen readers it is a slider through time: arrow keys, Home and End, Escape for now.

import { clock } from "./format.js";

const LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 18; // px around the plot

export class Chart {
  #canvas;
  #legend;
  #values = [];
  #data = null;
  #at = -1; // index that is pointed at, or -1 for now
  #range = [0, 1];

  // `kind`: "stack", "lines" or "bars". `scale`: "linear" from zero, or "log". `top`: of the scale, if fixed.
  // `format`: of values, `axis`: of the scale's.
  constructor(place, { title, kind, series = [], scale = "linear", top = 0, least = 1, format, axis = format }) {
    this.kind = kind;
    this.scale = scale;
    this.top = top;
    this.least = least;
    this.format = format;
    this.axis = axis;
    this.#canvas = document.createElement("canvas");
    this.#legend = document.createElement("ul");
    this.#legend.className = "legend";
    const canvas = this.#canvas;
    canvas.tabIndex = 0;
    canvas.setAttribute("role", "slider");
    canvas.setAttribute("aria-label", `${title}, over time`);
    for (const name of ["min", "max", "now"]) canvas.setAttribute(`aria-value${name}`, "0");
    place.append(canvas, this.#legend);
    this.setSeries(series);
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => this.#show(-1));
    canvas.addEventListener("blur", () => this.#show(-1));
    canvas.addEventListener("keydown", (event) => this.#key(event));
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  // `series`: [{name, label, color}], color a CSS variable's name.
  setSeries(series) {
    const names = series.map((each) => `${each.name} ${each.label}`).join();
    if (this.names === names) return;
    this.names = names;
    this.series = series;
    this.#values = series.map((each) => {
      const item = document.createElement("li");
      const swatch = document.createElement("i");
      swatch.style.background = `var(${each.color})`;
      const value = document.createElement("b");
      item.append(swatch, each.label, " ", value);
      return { item, value };
    });
    this.#legend.replaceChildren(...this.#values.map((each) => each.item));
  }

  // `data` as History.since gives it for the series, `range` [from, to] in ms.
  set(data, range) {
    if (this.#at >= 0 && this.#data?.time.length) {
      // What is pointed at stays, while time goes on.
      const time = this.#data.time[this.#at];
      this.#at = data.time.findIndex((each) => each >= time);
    }
    this.#data = data;
    this.#range = range;
    this.draw();
    this.#say();
  }

  #say() {
    const data = this.#data;
    if (!data) return;
    const at = this.#at >= 0 ? this.#at : data.time.length - 1;
    const words = [];
    this.series.forEach((each, index) => {
      const value = this.format(at >= 0 ? data.columns[index][at] : NaN);
      const node = this.#values[index].value;
      if (node.textContent !== value) node.textContent = value;
      words.push(`${each.label} ${value}`);
    });
    const canvas = this.#canvas;
    canvas.setAttribute("aria-valuemin", "0");
    canvas.setAttribute("aria-valuemax", String(Math.max(0, data.time.length - 1)));
    canvas.setAttribute("aria-valuenow", String(Math.max(0, at)));
    const when = at >= 0 ? clock(data.time[at]) : "nothing yet";
    canvas.setAttribute("aria-valuetext", `${when}: ${words.join(", ")}`);
  }

  #show(at) {
    if (at === this.#at) return;
    this.#at = at;
    this.draw();
    this.#say();
  }

  #point(event) {
    const data = this.#data;
    if (!data?.time.length) return;
    const box = this.#canvas.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    const time = this.#range[0] + share * (this.#range[1] - this.#range[0]);
    let at = 0;
    while (at < data.time.length - 1 && data.time[at + 1] <= time) at++;
    this.#show(at);
  }

  #key(event) {
    const last = (this.#data?.time.length ?? 0) - 1;
    const at = this.#at >= 0 ? this.#at : last;
    const step = event.shiftKey ? 10 : 1;
    const to = {
      ArrowLeft: at - step, ArrowDown: at - step, ArrowRight: at + step, ArrowUp: at + step,
      PageDown: at - 60, PageUp: at + 60, Home: 0, End: last,
    }[event.key];
    if (event.key === "Escape") this.#show(-1);
    else if (to !== undefined && last >= 0) this.#show(Math.min(Math.max(to, 0), last));
    else return;
    event.preventDefault();
  }

  draw() {
    const canvas = this.#canvas;
    const width = canvas.clientWidth, height = canvas.clientHeight;
    const data = this.#data;
    if (!width || !height || !data) return;
    const ratio = devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(name).trim();
    const ctx = canvas.getContext("2d");
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.clearRect(0, 0, width, height);
    ctx.font = "11px system-ui, sans-serif";
    ctx.lineWidth = 1;

    const right = width - RIGHT, bottom = height - BOTTOM;
    const [from, to] = this.#range;
    const x = (time) => LEFT + ((time - from) / (to - from)) * (right - LEFT);
    const { ticks, y } = this.#vertical(data, bottom);

    ctx.fillStyle = color("--faint");
    ctx.strokeStyle = color("--line");
    ctx.textAlign = "right";
    ctx.textBaseline = "middle";
    for (const tick of ticks) {
      const at = Math.round(y(tick)) + 0.5;
      ctx.beginPath();
      ctx.moveTo(LEFT, at);
      ctx.lineTo(right, at);
      ctx.stroke();
      ctx.fillText(this.axis(tick), LEFT - 6, at);
    }
    ctx.textBaseline = "alphabetic";
    for (const [share, align] of [[0, "left"], [0.5, "center"], [1, "right"]]) {
      ctx.textAlign = align;
      const ago = ((1 - share) * (to - from)) / 1000;
      const label = share === 1 ? "now" : ago < 60 ? `−${ago} s` : `−${ago / 60} min`;
      ctx.fillText(label, LEFT + share * (right - LEFT), height - 4);
    }

    ctx.save();
    ctx.beginPath();
    ctx.rect(LEFT, 0, right - LEFT, bottom + 1);
    ctx.clip();
    if (this.kind === "stack") this.#stack(ctx, data, x, y, color);
    else if (this.kind === "bars") this.#bars(ctx, data, x, y, color);
    else this.#lines(ctx, data, x, y, color, bottom);
    if (this.#at >= 0 && this.#at < data.time.length) {
      const at = Math.round(x(data.time[this.#at])) + 0.5;
      ctx.strokeStyle = color("--text");
      ctx.beginPath();
      ctx.moveTo(at, TOP);
      ctx.lineTo(at, bottom);
      ctx.stroke();
    }
    ctx.restore();
    if (this.#at >= 0 && this.#at < data.time.length) {
      const at = x(data.time[this.#at]);
      ctx.fillStyle = color("--text");
      ctx.textAlign = at > width / 2 ? "right" : "left";
      ctx.fillText(clock(data.time[this.#at]), at + (at > width / 2 ? -5 : 5), TOP + 9);
    }
  }

  #vertical(data, bottom) {
    let most = 0;
    if (this.kind !== "stack") {
      for (const column of data.columns) for (const value of column) if (value > most) most = value;
    }
    if (this.scale === "log") {
      const low = Math.log10(this.least);
      const high = Math.max(Math.ceil(Math.log10(Math.max(most, this.least * 10)) - 1e-6), low + 2);
      const ticks = [];
      for (let power = low; power <= high; power++) ticks.push(10 ** power);
      return {
        ticks,
        y: (value) => bottom - ((Math.log10(Math.max(value, this.least)) - low) / (high - low)) * (bottom - TOP),
      };
    }
    const top = this.top || nice(most || this.least);
    return { ticks: [0, top / 2, top], y: (value) => bottom - (Math.min(value, top) / top) * (bottom - TOP) };
  }

  #lines(ctx, data, x, y, color, bottom) {
    this.series.forEach((each, index) => {
      const column = data.columns[index];
      ctx.strokeStyle = color(each.color);
      ctx.lineWidth = 1.5;
      ctx.lineJoin = "round";
      for (const [start, stop] of stretches(data.time, column)) {
        ctx.beginPath();
        for (let i = start; i < stop; i++) ctx.lineTo(x(data.time[i]), y(column[i]));
        if (stop - start === 1) ctx.lineTo(x(data.time[start]) + 1, y(column[start]));
        ctx.stroke();
        if (this.series.length === 1 && this.scale !== "log") {
          ctx.lineTo(x(data.time[stop - 1]), bottom);
          ctx.lineTo(x(data.time[start]), bottom);
          ctx.globalAlpha = 0.12;
          ctx.fillStyle = color(each.color);
          ctx.fill();
          ctx.globalAlpha = 1;
        }
      }
    });
  }

  #bars(ctx, data, x, y, color) {
    const wide = data.time.length > 1 ? Math.max(1, (x(data.time.at(-1)) - x(data.time[0])) / data.time.length) : 2;
    this.series.forEach((each, index) => {
      ctx.fillStyle = color(each.color);
      data.columns[index].forEach((value, i) => {
        if (value > 0) ctx.fillRect(x(data.time[i]) - wide, y(value), wide, y(0) - y(value));
      });
    });
  }

  #stack(ctx, data, x, y, color) {
    const base = new Float32Array(data.time.length);
    this.series.forEach((each, index) => {
      const column = data.columns[index];
      const upper = base.map((value, i) => value + (Number.isNaN(column[i]) ? 0 : column[i]));
      ctx.fillStyle = color(each.color);
      for (const [start, stop] of stretches(data.time, column)) {
        ctx.beginPath();
        for (let i = start; i < stop; i++) ctx.lineTo(x(data.time[i]), y(upper[i]));
        for (let i = stop - 1; i >= start; i--) ctx.lineTo(x(data.time[i]), y(base[i]));
        ctx.fill();
      }
      base.set(upper);
    });
  }
}

// Where there are values without a hole: neither unknown ones, nor time in which nobody listened.
function* stretches(time, column) {
  let start = -1;
  for (let i = 0; i <= column.length; i++) {
    const ends = i === column.length || Number.isNaN(column[i]) || (i > 0 && time[i] - time[i - 1] > 4000);
    if (ends && start >= 0) {
      yield [start, i];
      start = -1;
    }
    if (i < column.length && !Number.isNaN(column[i]) && start < 0) start = i;
  }
}

function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  for (const step of [1, 2, 4, 5, 10]) if (step * power >= value) return step * power;
  return value;
}
