// The tail of events: the latest are kept, those that pass the filter are shown, and it stands still when asked to.

import { byId, make, say } from "./table.js";
import { clock, grouped } from "./format.js";

const KEPT = 4000;
const SHOWN = 300;
const PAUSE = 150; // ms between two pictures of it: a thousand lines a second are no more to read than ten
const LEVELS = { debug: 0, info: 1, warning: 2, error: 3, critical: 4 };
const HEAD = new Set(["time", "level", "event"]);

export class Events {
  #kept = []; // { number, data, level, text }
  #paused = false;
  #fresh = 0; // while paused
  #wanted = false;
  #late = false; // while nobody looked
  #list = byId("events");

  constructor() {
    byId("filter").addEventListener("input", () => this.#draw());
    byId("level").addEventListener("change", () => this.#draw());
    byId("pause").addEventListener("click", () => this.pause());
    document.addEventListener("visibilitychange", () => {
      if (document.hidden || !this.#late) return;
      this.#late = false;
      if (this.#paused) this.#count();
      else this.#draw();
    });
  }

  add(number, data) {
    const text = JSON.stringify(data).toLowerCase();
    this.#kept.push({ number, data, level: LEVELS[data.level] ?? 1, text });
    if (this.#kept.length > KEPT) this.#kept.splice(0, KEPT / 8);
    if (this.#paused) this.#fresh++;
    if (this.#wanted) return;
    this.#wanted = true;
    setTimeout(() => {
      this.#wanted = false;
      if (document.hidden) this.#late = true;
      else if (this.#paused) this.#count();
      else this.#draw();
    }, PAUSE);
  }

  pause() {
    this.#paused = !this.#paused;
    this.#fresh = 0;
    const button = byId("pause");
    button.setAttribute("aria-pressed", String(this.#paused));
    say(button, this.#paused ? "Go on" : "Pause");
    this.#draw();
  }

  #count(found = null) {
    if (found !== null) this.found = found;
    const words = `${grouped(this.found ?? 0)} of ${grouped(this.#kept.length)}`;
    say("events-count", this.#paused ? `${words}, paused; ${grouped(this.#fresh)} since` : words);
  }

  #draw() {
    const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const least = Number(byId("level").value);
    const found = this.#kept.filter((each) => each.level >= least && words.every((word) => each.text.includes(word)));
    this.#count(found.length);
    const list = this.#list;
    const wanted = found.slice(-SHOWN).reverse();
    // Rows that stay are left where they are: somebody may have scrolled to one, or marked its text.
    const numbers = new Set(wanted.map((each) => String(each.number)));
    for (const item of [...list.children]) if (!numbers.has(item.dataset.number)) item.remove();
    let next = list.firstChild;
    for (const each of wanted) {
      if (next?.dataset.number === String(each.number)) next = next.nextSibling;
      else list.insertBefore(row(each), next);
    }
    if (!wanted.length) list.append(make("li", { className: "nothing" }, "no such events"));
  }
}

function row({ number, data, level }) {
  const item = make("li", { className: `level-${level}` });
  item.dataset.number = String(number);
  const time = String(data.time ?? "");
  item.append(
    make("time", { dateTime: time, title: time }, time ? clock(Date.parse(time)) : "–"),
    make("span", { className: "level" }, String(data.level ?? "")),
    make("b", {}, String(data.event ?? "")),
  );
  const fields = make("span", { className: "fields" });
  for (const [name, value] of Object.entries(data)) {
    if (HEAD.has(name)) continue;
    const text = typeof value === "string" ? value : JSON.stringify(value);
    fields.append(make("span", {}, make("i", {}, `${name} `), text.length > 300 ? `${text.slice(0, 299)}…` : text), " ");
  }
  item.append(fields);
  return item;
}
