// Figures over time: a ring of rows, one a tick, in typed columns that come up as they are first named.

export class History {
  #columns = new Map();
  #time;
  #next = 0;

  constructor(capacity) {
    this.capacity = capacity;
    this.length = 0;
    this.#time = new Float64Array(capacity);
  }

  // `time` in ms; what `row` lacks is unknown (NaN).
  push(time, row) {
    const at = this.#next;
    for (const [name, column] of this.#columns) column[at] = row[name] ?? NaN;
    for (const name in row) {
      if (!this.#columns.has(name)) {
        const column = new Float32Array(this.capacity).fill(NaN);
        column[at] = row[name];
        this.#columns.set(name, column);
      }
    }
    this.#time[at] = time;
    this.#next = (at + 1) % this.capacity;
    this.length = Math.min(this.length + 1, this.capacity);
  }

  get first() {
    return this.#time[(this.#next - this.length + this.capacity) % this.capacity];
  }

  get last() {
    return this.length ? this.#time[(this.#next + this.capacity - 1) % this.capacity] : 0;
  }

  // Times from `since` on, and the named columns beside them.
  since(since, names) {
    const first = (this.#next - this.length + this.capacity) % this.capacity;
    let skip = 0;
    while (skip < this.length && this.#time[(first + skip) % this.capacity] < since) skip++;
    const cut = (column) => {
      const found = column.constructor === Float64Array ? new Float64Array(this.length - skip)
        : new Float32Array(this.length - skip);
      for (let i = 0; i < found.length; i++) found[i] = column[(first + skip + i) % this.capacity];
      return found;
    };
    const empty = new Float32Array(this.length - skip).fill(NaN);
    return {
      time: cut(this.#time),
      columns: names.map((name) => (this.#columns.has(name) ? cut(this.#columns.get(name)) : empty)),
    };
  }
}
