// The page: what comes from the daemon, and where of the document it goes.
//
//   events ─► ticks ─► history ─► charts, tiles        log events ─► tail
//   views, each at its own pace, as long as the page is to be seen: map, sessions, fragmentation, gaps, latency, health

import { Chart } from "./chart.js";
import { Events } from "./events.js";
import { Feed, Refused, sleep, Unreachable } from "./feed.js";
import { bytes, clock, count, grouped, micros, percent, span } from "./format.js";
import { History } from "./history.js";
import { PoolMap, STATES } from "./map.js";
import { byId, define, fill, make, say } from "./table.js";

const KEPT = 1900; // ticks: half an hour
const STACK = ["cached", "private", "reserved", "fenced", "moving", "quarantined"];
const RATED = ["Allocate", "Extend", "Commit", "Free"];
const LATE_TICKS = 10; // that "10 s" goes over
const SPANS = [60, 120, 180, 300, 600, 900, 1200, 1800]; // seconds that a chart shows
const ROWS_MOST = 100;
const SESSIONS_MOST = 1024; // that are asked for

// -- what is known -------------------------------------------------------------------------------------------------

let stats = null;
let tick = null;
let poolName = "";
let healthy = null;
let link = { state: "connecting", since: Date.now(), reason: "" };
const pools = new Map(); // name -> { history, before: [ticks of this pool, with their times] }
const daemon = new History(KEPT);
const verbs = new Set();
const late = []; // Allocate in the latest ticks
const frag = new Map();
let sessions = [];
const notes = new Map();
const events = new Events();

const feed = new Feed({ hello, event, state, ask });
const map = new PoolMap(byId("map"), byId("map-base"), byId("map-over"), { look });

// -- charts --------------------------------------------------------------------------------------------------------

const per = (value) => (Number.isFinite(value) ? `${count(value)}/s` : "–");
const charts = {
  occupancy: new Chart(byId("c-occupancy"), {
    title: "Occupancy by state", kind: "stack", top: 100, format: percent,
    series: STACK.map((name) => ({ name, label: name, color: `--s-${name}` })),
  }),
  hit: new Chart(byId("c-hit"), {
    title: "Hit rate", kind: "lines", top: 100, format: percent,
    series: [{ name: "hit", label: "over 10 s", color: "--c-1" }],
  }),
  rate: new Chart(byId("c-rate"), { title: "Requests a second", kind: "lines", least: 10, format: per, axis: count }),
  latency: new Chart(byId("c-latency"), { title: "Latency", kind: "lines", scale: "log", least: 1, format: micros }),
  gaps: new Chart(byId("c-gaps"), {
    title: "Share of time in idle gaps", kind: "lines", top: 100, format: percent,
    series: [
      { name: "gap", label: "idle gaps", color: "--c-2" },
      { name: "granted", label: "given to copies", color: "--s-moving" },
    ],
  }),
  moved: new Chart(byId("c-moved"), {
    title: "Moved tokens a second", kind: "bars", least: 10, format: per, axis: count,
    series: [{ name: "moved", label: "tokens moved", color: "--s-moving" }],
  }),
};

function drawCharts() {
  const pool = pools.get(poolName);
  if (!pool || document.hidden) return;
  const now = Math.max(daemon.last, pool.history.last);
  // No more than there is to be shown, in round steps.
  const chosen = Number(byId("window").value);
  const there = (now - daemon.first) / 1000;
  const range = [now - 1000 * (SPANS.find((each) => each >= there || each >= chosen) ?? chosen), now];
  const verb = byId("verb").value || "Allocate";
  charts.rate.setSeries([
    { name: "rate", label: "all", color: "--text" },
    ...RATED.filter((each) => verbs.has(each)).map((each, at) => ({
      name: `rate:${each}`, label: each, color: `--c-${at + 1}`,
    })),
  ]);
  charts.latency.setSeries([
    { name: `p99:${verb}`, label: "99 of 100 below", color: "--c-4" },
    { name: `p50:${verb}`, label: "half below", color: "--c-1" },
  ]);
  for (const [name, chart] of Object.entries(charts)) {
    const history = name === "rate" || name === "latency" ? daemon : pool.history;
    chart.set(history.since(range[0] - 2000, chart.series.map((each) => each.name)), range);
  }
}

let wanted = false;
function draw() {
  if (wanted) return;
  wanted = true;
  requestAnimationFrame(() => {
    wanted = false;
    drawTiles();
    drawCharts();
    drawNotes();
  });
}

// -- events --------------------------------------------------------------------------------------------------------

function hello(fresh) {
  if (stats && stats.boot !== fresh.boot) {
    sequence = -1;
    for (const each of pools.values()) each.before = [];
    note("restarted", "quiet", `The daemon was started again at ${clock(Date.now() - fresh.uptime_s * 1000)}.`);
    setTimeout(() => note("restarted"), 60000);
  }
  stats = fresh;
}

function state(name, reason) {
  if (link.state !== name) link = { state: name, since: Date.now(), reason };
  link.reason = reason;
  draw();
}

function event(kind, data, number) {
  if (link.state !== "live") {
    link = { state: "live", since: Date.now(), reason: "" };
    for (const each of Object.values(loops)) each.soon();
  }
  if (kind === "log") events.add(number, data);
  else if (kind === "tick") take(data, number > stats.events_last);
  draw();
}

// `live`: it happens now, and is not told again of before.
function take(fresh, live) {
  tick = fresh;
  const time = Date.parse(fresh.time);
  const row = { rate: 0, refused: 0 };
  for (const each of fresh.verbs) {
    row.rate += each.count;
    row.refused += each.refused;
    row[`rate:${each.verb}`] = each.count;
    if (each.p99_us > 0) {
      row[`p50:${each.verb}`] = each.p50_us;
      row[`p99:${each.verb}`] = each.p99_us;
    }
    if (!verbs.has(each.verb)) {
      verbs.add(each.verb);
      offerVerbs();
    }
  }
  for (const each of verbs) row[`rate:${each}`] ??= 0;
  daemon.push(time, row);
  late.push(fresh.verbs.find((each) => each.verb === "Allocate" && each.p99_us > 0));
  if (late.length > LATE_TICKS) late.shift();
  for (const each of fresh.pools) takePool(each, time, fresh.uptime_s, live);
  if (!pools.has(poolName)) choose(fresh.pools[0].pool);
  offerPools(fresh.pools.map((each) => each.pool));
}

function takePool(fresh, time, uptime, live) {
  let pool = pools.get(fresh.pool);
  if (!pool) pools.set(fresh.pool, (pool = { history: new History(KEPT), before: [] }));
  const last = pool.before.at(-1);
  if (last && last.uptime > uptime) pool.before = []; // another process counts from zero
  const first = pool.before[0];
  const row = {};
  for (const name of STACK) row[name] = (100 * fresh[name]) / fresh.usable;
  if (first && fresh.prompt_tokens > first.tick.prompt_tokens) {
    row.hit = (100 * (fresh.hit_tokens - first.tick.hit_tokens)) / (fresh.prompt_tokens - first.tick.prompt_tokens);
  }
  if (last && uptime > last.uptime) {
    const passed = uptime - last.uptime;
    row.gap = Math.min(100, (100 * (fresh.gap_s - last.tick.gap_s)) / passed);
    row.granted = Math.min(100, (100 * (fresh.granted_s - last.tick.granted_s)) / passed);
    row.moved = (fresh.moved_tokens - last.tick.moved_tokens) / passed;
    row.evicted = (fresh.evicted_tokens - last.tick.evicted_tokens) / passed;
  }
  pool.history.push(time, row);
  pool.row = row;
  pool.before.push({ tick: fresh, uptime });
  if (pool.before.length > LATE_TICKS) pool.before.shift();
  if (live && fresh.pool === poolName) map.moved(fresh.moved);
}

// -- tiles and notes -----------------------------------------------------------------------------------------------

const STATE_WORDS = {
  connecting: "connecting", live: "live", gone: "gone", locked: "locked", refused: "refused",
};

function drawTiles() {
  const pill = byId("state");
  const draining = link.state === "live" && tick?.draining;
  say(pill, draining ? "draining" : STATE_WORDS[link.state]);
  pill.dataset.state = draining ? "draining" : link.state;
  document.body.dataset.state = link.state;
  if (stats && tick) {
    say("about", `${stats.version} · up ${span(tick.uptime_s)} · ${stats.socket}`);
  }
  const now = tick?.pools.find((each) => each.pool === poolName);
  const pool = pools.get(poolName);
  if (!now || !pool) return;
  const used = 1 - now.free / now.usable;
  const gone = link.state === "live" ? "" : `(${STATE_WORDS[link.state]}) `;
  document.title = `${gone}${Math.round(100 * used)} % · kvslot`;
  say("t-used", percent(100 * used));
  say("t-used-sub", `${count(now.usable - now.free)} of ${count(now.usable)} slots`);
  say("t-hit", percent(pool.row.hit ?? NaN));
  say("t-hit-sub", `${percent((100 * now.hit_tokens) / now.prompt_tokens)} since the start`);
  const rate = tick.verbs.reduce((sum, each) => sum + each.count, 0);
  const refused = tick.verbs.reduce((sum, each) => sum + each.refused, 0);
  say("t-rate", count(rate));
  say("t-rate-sub", `${count(refused)} refused`);
  const sampled = late.filter(Boolean);
  say("t-p99", micros(Math.max(...sampled.map((each) => each.p99_us))));
  const halves = sampled.map((each) => each.p50_us).sort((one, other) => one - other);
  say("t-p99-sub", `half below ${micros(halves[halves.length >> 1] ?? NaN)}`);
  say("t-free", count(now.blocks_free));
  say("t-free-sub", `longest run ${count(now.largest_free_run)} slots`);
  say("t-waste", percent(now.internal_fragmentation_pct));
  say("t-waste-sub", `pinned waste ${percent((100 * now.pinned_waste_tokens) / now.usable)}`);
  say("t-seq", count(now.sequences));
  say("t-seq-sub", `${count(now.sessions)} session${now.sessions === 1 ? "" : "s"}`);
  say("t-wait", count(now.tickets));
  say("t-wait-sub", `evicted ${per(pool.row.evicted ?? NaN)}`);
  byId("t-wait").classList.toggle("warm", now.tickets > 0);
  drawLegend(now);
  say("gap-state", now.compaction);
}

const legend = STATES.map((name, index) => {
  const button = make("button", { type: "button", "aria-pressed": "false" });
  const swatch = make("i");
  swatch.style.background = `var(--s-${name})`;
  const value = make("b");
  button.append(swatch, `${name} `, value);
  button.addEventListener("click", () => {
    map.only = map.only === index ? -1 : index;
    legend.forEach((each, at) => each.button.setAttribute("aria-pressed", String(at === map.only)));
    map.recolor();
  });
  return { button, value, name };
});
byId("map-legend").append(...legend.map((each) => make("li", {}, each.button)));

function drawLegend(now) {
  for (const { value, name } of legend) say(value, count(now[name]));
}

function note(name, kind = "", text = "") {
  if (text) notes.set(name, { kind, text });
  else notes.delete(name);
}

function drawNotes() {
  if (link.state === "gone") {
    note("gone", "bad", `The daemon is gone since ${clock(link.since)}: ${link.reason}. Trying again; what is shown is of before.`);
  } else if (link.state === "refused") note("gone", "bad", `The daemon refuses: ${link.reason}.`);
  else note("gone");
  const draining = link.state === "live" && tick?.draining;
  note("draining", "warm", draining ? "Draining: no new sessions and sequences are taken; the daemon ends when what runs has ended." : "");
  // Whoever records is none of the sessions, and sees what all of them ask.
  const recorded = link.state === "live" ? (tick?.recordings ?? []) : [];
  note("recorded", "", recorded.map((each) => `Recorded: pool ${each.pool}, by process ${each.pid}, since ${span(each.age_s)}; `
    + `${count(each.requests)} requests${each.values ? ", with their tokens" : ""}`).join(" · "));
  const wrong = healthy?.ok === false ? healthy.checks.filter((each) => !each.ok) : [];
  note("health", "bad", wrong.map((each) => `${each.name}: ${each.reason}`).join(" · "));
  const stalled = sessions.filter((each) => each.stalled);
  note("stalled", "warm", stalled.length
    ? `Stalled: ${stalled.slice(0, 4).map((each) => `${each.name || "session"} (${each.session}, pid ${each.pid})`).join(", ")}`
      + (stalled.length > 4 ? ` and ${stalled.length - 4} more` : "")
    : "");
  const list = byId("notes");
  const lines = [...notes.values()];
  while (list.children.length > lines.length) list.lastChild.remove();
  lines.forEach(({ kind, text }, at) => {
    const item = list.children[at] ?? list.appendChild(make("li"));
    item.className = kind;
    say(item, text);
  });
}

// -- which pool, which verb ----------------------------------------------------------------------------------------

function offer(select, names) {
  if (select.dataset.names === names.join("\n")) return;
  select.dataset.names = names.join("\n");
  const chosen = select.value;
  select.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
  if (names.includes(chosen)) select.value = chosen;
}

function offerPools(names) {
  offer(byId("pool"), names);
  byId("pool").value = poolName;
  byId("pool-label").hidden = names.length < 2;
}

function offerVerbs() {
  const select = byId("verb");
  offer(select, [...RATED, ...[...verbs].filter((each) => !RATED.includes(each)).sort()]);
}

function choose(name) {
  poolName = name;
  sequence = -1;
  sessions = [];
  for (const each of Object.values(loops)) each.soon();
  draw();
}

byId("pool").addEventListener("change", (change) => choose(change.target.value));
byId("window").addEventListener("change", draw);
byId("verb").addEventListener("change", draw);

// -- views, each at its own pace -----------------------------------------------------------------------------------

const of = (path, query = "") => `${path}?pool=${encodeURIComponent(poolName)}${query}`;

// Asks again and again, `every` ms after the answer, or as long as that took four times over; not while nobody looks.
function loop(every, ask) {
  let wake = () => {}, again = false;
  const told = {
    soon: () => {
      again = true;
      wake();
    },
  };
  (async () => {
    for (;;) {
      const began = performance.now();
      again = false;
      if (!document.hidden && link.state === "live" && poolName) {
        try {
          await ask();
        } catch (error) {
          // Of a daemon that is gone the stream tells.
          if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
        }
      }
      const wait = Math.max(every, 4 * (performance.now() - began));
      if (!again) await Promise.race([sleep(wait), new Promise((done) => (wake = done))]);
    }
  })();
  return told;
}

let sequence = -1; // of the map that is shown

const loops = {
  map: loop(1000, async () => {
    const pool = poolName;
    const since = sequence >= 0 ? `&since=${sequence}` : "";
    const { buffer, headers } = await feed.bytes(of("v1/blocks", since));
    const told = (name) => headers.get(`X-Kvslot-${name}`);
    if (pool !== poolName) return;
    sequence = Number(told("Sequence"));
    const blocks = Number(told("Blocks")), blockSize = Number(told("Block-Size"));
    map.apply(buffer, { whole: told("Whole") === "1", blocks, blockSize });
    say("map-about", `${grouped(blocks)} blocks of ${grouped(blockSize)} slots`);
    const worst = (list) => Math.max(...list, 0).toFixed(1);
    say("frames", `map: ${worst(map.times.apply)} ms to take in, ${worst(map.times.draw)} ms to draw, at the most`);
  }),
  sessions: loop(2000, async () => {
    if (holders.tab === "sessions" || !sessions.length) {
      const pool = poolName;
      const found = [];
      for (let cursor = ""; found.length < SESSIONS_MOST; ) {
        const page = await feed.json(of("v1/sessions", cursor && `&cursor=${cursor}`));
        found.push(...page.items);
        if (!(cursor = page.next)) break;
      }
      if (pool !== poolName) return;
      sessions = found;
      if (holders.tab === "sessions") drawHolders();
      draw();
    }
  }),
  holders: loop(5000, async () => {
    if (holders.tab !== "sessions") await askHolders();
  }),
  frag: loop(3000, async () => {
    const said = await feed.json(of("v1/frag"));
    drawFrag(said.items[0], said.definitions);
  }),
  gaps: loop(2000, async () => drawGap((await feed.json(of("v1/gaps"))).items[0])),
  latency: loop(4000, async () => drawSteps((await feed.json("v1/latency")).items)),
  health: loop(5000, async () => {
    healthy = await feed.json("healthz");
    drawHealth();
    draw();
  }),
};

function drawFrag(now, definitions) {
  if (!now) return;
  const lengths = Object.keys(now.usable_run_pct).map(Number).sort((one, other) => one - other);
  const list = byId("runs");
  if (list.children.length !== lengths.length) {
    list.replaceChildren(...lengths.map(() => make("li", {}, make("b"), make("i"), make("span"))));
  }
  lengths.forEach((length, at) => {
    const share = now.usable_run_pct[length];
    const [value, bar, label] = list.children[at].children;
    say(value, `${Math.round(share)}`);
    bar.style.setProperty("--share", String(share / 100));
    say(label, String(length));
    list.children[at].title = `${share.toFixed(1)} % of the free memory lies in runs of ${length} blocks or more`;
  });
  list.setAttribute("aria-label", lengths.map((each) => `${each} blocks: ${Math.round(now.usable_run_pct[each])} %`).join(", "));
  define(byId("frag"), [
    ["internal waste", percent(now.internal_waste_pct), definitions.internal_waste_pct],
    ["reserved to grow", percent(now.reserved_pct), definitions.reserved_pct],
    ["pinned waste", percent(now.pinned_waste_pct), definitions.pinned_waste_pct],
    ["scatter", percent(now.scatter_pct), definitions.scatter_pct],
    ["free runs", count(now.free_runs), definitions.free_runs],
    ["in holes", count(now.hole_tokens), definitions.hole_tokens],
    ["longest free run", count(now.largest_free_run), definitions.largest_free_run],
    ["extents / 1k tokens", now.extents_per_1k_tokens.toFixed(1), definitions.extents_per_1k_tokens],
    ["duplicates", count(now.duplicate_tokens), definitions.duplicate_tokens],
    ["peeled", count(now.peeled_tokens), definitions.peeled_tokens],
    ["lost hits", count(now.lost_hit_tokens), definitions.lost_hit_tokens],
  ]);
  if (!frag.size) {
    for (const [name, text] of Object.entries(definitions)) frag.set(name, text);
    define(byId("frag-words"), [...frag].map(([name, text]) => [name, text]));
  }
}

function drawGap(now) {
  if (!now) return;
  const reason = now.reason && now.reason !== now.state ? `, ${now.reason}` : "";
  say("gap-state", `${now.mode}: ${now.state}${reason}${now.purpose ? ` (for ${now.purpose.replace("_", " ")})` : ""}`);
  const lost = now.abandoned_leased + now.abandoned_freed;
  define(byId("gaps"), [
    ["gaps seen", count(now.gaps), now.watched ? "being looked at now" : "gaps are looked at while copies wait for one"],
    ["idle in all", span(now.idle_s)],
    ["given to copies", span(now.granted_s)],
    ["steps met by a copy", `${count(now.collisions)} of ${count(now.steps)}`],
    ["moves", `${count(now.published)} of ${count(now.planned)}`, "published, of those planned"],
    ["given up", count(lost), `${now.abandoned_leased} leased, ${now.abandoned_freed} freed meanwhile`],
    ["put off", count(now.deferred + now.over_budget), `${now.deferred} deferred, ${now.over_budget} over budget`],
    ["moved", `${count(now.moved_tokens)} tokens`, bytes(now.moved_bytes)],
    ["blocks won", count(now.blocks_given)],
    ["copies at", now.copy_bytes_per_second ? `${bytes(now.copy_bytes_per_second)}/s` : "–"],
    ["not in whole blocks", percent(now.unpacked_pct), "of the free memory"],
    ["not in long runs", percent(now.unusable_pct), "of the free memory"],
  ]);
}

const STEPS = ["received", "decoded", "applied", "encoded", "sent"];

function drawSteps(rows) {
  const mean = (row, name) => {
    const step = row.steps.find((each) => each.step === name);
    return step ? micros(step.mean_us) : "–";
  };
  const whole = (row, field) => micros(row.steps.find((each) => each.step === "all")?.[field] ?? NaN);
  fill(byId("steps"), [
    { head: "verb", cell: (row) => row.verb },
    { head: "answered", number: true, cell: (row) => count(row.count) },
    { head: "refused", number: true, cell: (row) => count(row.refused) },
    ...STEPS.map((name) => ({ head: name, number: true, title: "mean", cell: (row) => mean(row, name) })),
    { head: "p50", number: true, title: "known to a factor of two", cell: (row) => whole(row, "p50_us") },
    { head: "p99", number: true, title: "known to a factor of two", cell: (row) => whole(row, "p99_us") },
  ], rows.filter((row) => row.count).sort((one, other) => other.count - one.count).slice(0, 8));
}

function drawHealth() {
  const button = byId("health");
  const good = healthy.checks.filter((each) => each.ok).length;
  button.hidden = false;
  button.dataset.ok = String(healthy.ok);
  say(button, `${good} of ${healthy.checks.length} checks ok`);
  const rows = byId("checks");
  rows.replaceChildren(
    ...[...healthy.checks].sort((one, other) => one.ok - other.ok).map((each) =>
      make("tr", {}, make("td", {}, each.name), make("td", { className: each.ok ? "good" : "bad" }, each.ok ? "ok" : "fails"),
        make("td", {}, each.reason))),
  );
}

// -- who holds what ------------------------------------------------------------------------------------------------

const SESSION_COLUMNS = [
  { head: "session", key: "session", number: true, cell: (row) => String(row.session) },
  { head: "name", key: "name", cell: (row) => row.name || "–" },
  { head: "pid", key: "pid", number: true, cell: (row) => String(row.pid) },
  {
    head: "state", key: "state",
    cell: (row) => row.stalled ? { text: "stalled", kind: "warm" } : { text: row.state, kind: row.state === "live" ? "" : "bad" },
  },
  {
    head: "holds", key: "charged", number: true, title: "slots; the bar is against the one that holds most",
    cell: (row) => ({ text: count(row.charged), bar: row.charged / Math.max(1, ...sessions.map((each) => each.charged)) }),
  },
  { head: "of quota", number: true, cell: (row) => percent(row.quota ? (100 * row.charged) / row.quota : NaN) },
  { head: "sequences", key: "sequences", number: true, cell: (row) => count(row.sequences) },
  { head: "fenced", key: "fenced", number: true, title: "slots that wait for a step to complete", cell: (row) => count(row.fenced) },
  { head: "pins", key: "pins", number: true, cell: (row) => count(row.pins) },
  {
    head: "steps", key: "submitted", number: true, title: "completed, and those under way",
    cell: (row) => count(row.completed) + (row.submitted > row.completed ? ` +${row.submitted - row.completed}` : ""),
  },
  { head: "age", key: "age_s", number: true, cell: (row) => span(row.age_s) },
];

const PREFIX_ORDERS = { tokens: "size", hits: "hits", age: "age" };
const PREFIX_COLUMNS = [
  { head: "namespace", cell: (row) => row.label },
  { head: "ends at", number: true, title: "tokens from the root on", cell: (row) => count(row.depth + row.tokens) },
  { head: "tokens", key: "tokens", number: true, title: "of this stretch", cell: (row) => count(row.tokens) },
  { head: "hits", key: "hits", number: true, cell: (row) => count(row.hits) },
  { head: "age", key: "age", number: true, title: "verbs since it was last used", cell: (row) => count(row.age) },
  { head: "pieces", number: true, title: "extents it lies in", cell: (row) => count(row.extents) },
  { head: "holds", number: true, title: "leases, pins, and held stretches behind it", cell: (row) => count(row.holds) },
  { head: "behind it", cell: (row) => (row.leaf ? "nothing" : "more") },
];

const NAMESPACE_COLUMNS = [
  { head: "number", number: true, cell: (row) => String(row.namespace) },
  { head: "tenant", cell: (row) => row.tenant || "–" },
  { head: "model", cell: (row) => row.model || "–" },
  { head: "adapter", cell: (row) => row.adapter || "–" },
  { head: "salted", cell: (row) => (row.salted ? "yes" : "no") },
  { head: "in use", cell: (row) => (row.in_use ? "yes" : "no") },
  { head: "cached", cell: (row) => (row.empty ? "nothing" : "something") },
];

const PIN_COLUMNS = [
  { head: "pin", number: true, cell: (row) => String(row.pin) },
  { head: "namespace", number: true, cell: (row) => String(row.namespace) },
  { head: "tokens", number: true, cell: (row) => count(row.tokens) },
  { head: "age", number: true, cell: (row) => span(row.age_s) },
  { head: "by", cell: (row) => row.by },
];

const holders = { tab: "sessions", rows: [], more: false, key: "charged", down: true, order: "size" };
const table = document.querySelector("#table-holders table");

function drawHolders() {
  let more = "";
  if (holders.tab === "sessions") {
    const { key, down } = holders;
    const sign = down ? -1 : 1;
    const rows = sessions.toSorted((one, other) => {
      const [left, right] = [one[key], other[key]];
      return sign * (typeof left === "string" ? left.localeCompare(right) : left - right) || one.session - other.session;
    });
    fill(table, SESSION_COLUMNS, rows.slice(0, ROWS_MOST), { key, down, by: sortBy }, "no sessions");
    if (rows.length > ROWS_MOST) more = `${ROWS_MOST} of ${rows.length} are shown; sort to see others.`;
  } else {
    const columns = { prefixes: PREFIX_COLUMNS, namespaces: NAMESPACE_COLUMNS, pins: PIN_COLUMNS }[holders.tab];
    const sorted = Object.keys(PREFIX_ORDERS).find((key) => PREFIX_ORDERS[key] === holders.order);
    const sort = holders.tab === "prefixes" ? { key: sorted, down: true, by: sortBy } : null;
    fill(table, columns, holders.rows, sort, "none");
    if (holders.more) more = `The first ${holders.rows.length} are shown.`;
  }
  say("holders-more", more);
}

async function askHolders() {
  const tab = holders.tab;
  const query = tab === "prefixes" ? `&order=${holders.order}&limit=30` : "";
  const said = await feed.json(of(`v1/${tab}`, query));
  let rows = said.items;
  if (tab === "prefixes") {
    const spaces = new Map((await feed.json(of("v1/namespaces"))).items.map((each) => [each.namespace, each]));
    const label = (each) => (each ? [each.tenant, each.model, each.adapter].filter(Boolean).join(" / ") : "");
    rows = rows.map((row) => ({ ...row, label: label(spaces.get(row.namespace)) || String(row.namespace || "–") }));
  }
  if (tab !== holders.tab) return;
  holders.rows = rows.slice(0, ROWS_MOST);
  holders.more = said.next !== null && said.next !== undefined;
  drawHolders();
}

function sortBy(key) {
  if (holders.tab === "sessions") {
    holders.down = holders.key === key ? !holders.down : key !== "name" && key !== "state";
    holders.key = key;
    drawHolders();
  } else {
    holders.order = PREFIX_ORDERS[key];
    loops.holders.soon();
  }
}

const tabs = [...document.querySelectorAll("[role=tab]")];
for (const tab of tabs) {
  tab.addEventListener("click", () => open(tab));
  tab.addEventListener("keydown", (press) => {
    const at = tabs.indexOf(tab);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[press.key];
    if (to === undefined) return;
    press.preventDefault();
    const next = tabs[(to + tabs.length) % tabs.length];
    open(next);
    next.focus();
  });
}

function open(chosen) {
  for (const tab of tabs) {
    tab.setAttribute("aria-selected", String(tab === chosen));
    tab.tabIndex = tab === chosen ? 0 : -1;
  }
  byId("table-holders").setAttribute("aria-labelledby", chosen.id);
  holders.tab = chosen.id.slice("tab-".length);
  holders.rows = [];
  drawHolders();
  (holders.tab === "sessions" ? loops.sessions : loops.holders).soon();
}

// -- the map's words -----------------------------------------------------------------------------------------------

let counting = 0;

function look(block, asked) {
  const read = byId("map-read");
  // Said aloud where the keyboard leads; a pointer that passes over a thousand blocks says nothing.
  read.setAttribute("aria-live", document.activeElement === byId("map") ? "polite" : "off");
  if (block < 0) {
    say(read, "Point at a block, or use the arrow keys.");
    return;
  }
  say(read, map.words(block));
  clearTimeout(counting);
  if (!asked) return;
  counting = setTimeout(async () => {
    try {
      const [found] = (await feed.json(of("v1/blocks", `&cursor=${block}&limit=1`))).items;
      const parts = STATES.filter((name) => found[name]).map((name) => `${name} ${found[name]}`);
      say(read, `Block ${grouped(block)}: ${parts.join(", ")}`);
    } catch (error) {
      say(read, `Block ${grouped(block)}: ${error.message}`);
    }
  }, 50);
}

byId("map-in").addEventListener("click", () => map.zoom(2));
byId("map-out").addEventListener("click", () => map.zoom(0.5));
byId("map-fit").addEventListener("click", () => map.fit());

// -- theme, dialogs, keys ------------------------------------------------------------------------------------------

const THEMES = ["system", "light", "dark"];
const root = document.documentElement;

function themed() {
  say("theme", `Theme: ${root.dataset.theme ?? "system"}`);
  map.recolor();
  draw();
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(root.dataset.theme ?? "system") + 1) % THEMES.length];
  if (theme === "system") delete root.dataset.theme;
  else root.dataset.theme = theme;
  try {
    localStorage.setItem("kvslot-theme", theme);
  } catch {
    // It holds until the page is left.
  }
  themed();
}

byId("theme").addEventListener("click", nextTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", themed);
byId("help").addEventListener("click", () => byId("help-dialog").showModal());
byId("health").addEventListener("click", () => byId("health-dialog").showModal());

const keysOn = byId("keys-on");
try {
  keysOn.checked = localStorage.getItem("kvslot-keys") !== "off";
} catch {
  // They are on.
}
keysOn.addEventListener("change", () => {
  try {
    localStorage.setItem("kvslot-keys", keysOn.checked ? "on" : "off");
  } catch {
    // It holds until the page is left.
  }
});

const KEYS = {
  m: () => byId("map").focus(),
  "/": () => byId("filter").focus(),
  p: () => events.pause(),
  t: nextTheme,
  "?": () => byId("help-dialog").showModal(),
};

document.addEventListener("keydown", (press) => {
  if (!keysOn.checked || press.ctrlKey || press.metaKey || press.altKey || press.defaultPrevented) return;
  if (press.target.closest("input, select, textarea, dialog")) return;
  const act = KEYS[press.key];
  if (!act) return;
  press.preventDefault();
  act();
});

// A token, from who sits here. There is no way out of this question but an answer: nothing can be shown without one.
function ask(wrong) {
  const dialog = byId("token-dialog"), input = byId("token");
  say("token-wrong", wrong ? "This token is not known to the daemon." : "");
  input.toggleAttribute("aria-invalid", wrong);
  input.value = "";
  if (!dialog.open) dialog.showModal();
  input.focus();
  return new Promise((done) => {
    dialog.oncancel = (event) => event.preventDefault();
    byId("token-form").onsubmit = (event) => {
      event.preventDefault();
      const token = input.value.trim();
      if (!token) return;
      input.value = "";
      dialog.close();
      done({ token, keep: byId("token-keep").checked });
    };
  });
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  for (const each of Object.values(loops)) each.soon();
  draw();
});

themed();
feed.follow(KEPT);
byId("stuck").hidden = true;
globalThis.kvslot = Object.freeze({ map, feed, pools, daemon, charts }); // to be looked at from the console
