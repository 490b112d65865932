// What the daemon says: views by request, events as they come, and whether it is there at all.
//
//   stats ─► events from a number on ─► ... no byte for SILENCE: cut ─► wait, twice as long each time ─► stats
//
// A token is asked for when the daemon wants one; it goes into a header, never into an address. Requests carry nothing
// that the browser keeps (cookies, passwords), so that the browser's own question for a password never comes up.

const SILENCE = 6000; // ms: there is a tick every second
const PATIENCE = 15000; // ms for a view
const WAITS = [500, 1000, 2000, 4000, 8000]; // ms before trying again
const KEY = "kvslot-token";

export class Refused extends Error {
  constructor(status, said) {
    const { message = `it answered with ${status}`, remedy } = said ?? {};
    super(remedy ? `${message}: ${remedy}` : message);
    this.status = status;
  }
}

export class Unreachable extends Error {}

export const sleep = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

function stored() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}

function store(token) {
  try {
    if (token) sessionStorage.setItem(KEY, token);
    else sessionStorage.removeItem(KEY);
  } catch {
    // It is asked for again after a reload.
  }
}

export class Feed {
  #token = stored();
  #asking = null;
  #next = 0;
  #told;
  #lane = Promise.resolve();

  // `told`: { hello(stats), event(kind, data, number), state(name, reason) , ask(wrong) -> {token, keep} }.
  constructor(told) {
    this.#told = told;
  }

  async request(path, accept = "application/json", signal = null, patience = PATIENCE) {
    for (;;) {
      const token = this.#token;
      const headers = { Accept: accept };
      if (token) headers.Authorization = `Bearer ${token}`;
      const signals = [signal, patience ? AbortSignal.timeout(patience) : null].filter(Boolean);
      const response = await reached(
        fetch(path, {
          headers,
          cache: "no-store",
          credentials: "omit",
          redirect: "error",
          signal: signals.length ? AbortSignal.any(signals) : null,
        }),
      );
      if (response.status === 401) {
        await this.#unlock(token);
        continue;
      }
      if (!response.ok && response.status !== 503) throw await refusal(response);
      if (response.status === 503 && accept !== "application/json") throw await refusal(response);
      return response;
    }
  }

  // One after the other: a page takes two connections of the daemon's, and asks for nothing that is not waited for.
  #inTurn(ask) {
    const turn = this.#lane.then(ask);
    this.#lane = turn.catch(() => {});
    return turn;
  }

  // The bytes, and the headers they came with.
  bytes(path) {
    return this.#inTurn(async () => {
      const response = await this.request(path, "application/octet-stream");
      return { buffer: await reached(response.arrayBuffer()), headers: response.headers };
    });
  }

  json(path) {
    return this.#inTurn(async () => {
      const response = await this.request(path);
      const said = JSON.parse(await reached(response.text()));
      if (said?.error) throw new Refused(response.status, said.error);
      return said;
    });
  }

  async #unlock(refused) {
    if (this.#token !== refused) return; // another request has got one meanwhile
    this.#asking ??= (async () => {
      this.#told.state("locked", "a token is needed");
      store("");
      const { token, keep } = await this.#told.ask(Boolean(refused));
      this.#token = token;
      if (keep) store(token);
      this.#asking = null;
    })();
    await this.#asking;
  }

  // Follows events for good. `history`: so many of the latest ones are wanted to begin with.
  async follow(history) {
    for (let failures = 0; ; failures++) {
      try {
        await this.#stream(history, () => {
          failures = -1;
        });
      } catch (error) {
        this.#told.state(error instanceof Refused ? "refused" : "gone", error.message || String(error));
      }
      await sleep(WAITS[Math.min(Math.max(failures, 0), WAITS.length - 1)]);
    }
  }

  async #stream(history, works) {
    const stats = await this.json("v1/stats");
    this.#told.hello(stats);
    this.#next ||= Math.max(1, stats.events_last - history);
    const silence = new AbortController();
    let timer = 0;
    const heard = () => {
      clearTimeout(timer);
      timer = setTimeout(() => silence.abort(new Error("it has said nothing for six seconds")), SILENCE);
    };
    heard();
    try {
      const address = `v1/events?from=${this.#next}`;
      const response = await this.request(address, "text/event-stream", silence.signal, 0);
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let text = "";
      for (;;) {
        const { value, done } = await reached(reader.read());
        if (done) throw new Error("it has closed the connection");
        heard();
        text += value;
        const frames = text.split("\n\n");
        text = frames.pop();
        for (const frame of frames) this.#frame(frame, works);
      }
    } finally {
      clearTimeout(timer);
      silence.abort();
    }
  }

  #frame(frame, works) {
    const fields = {};
    for (const line of frame.split("\n")) {
      const colon = line.indexOf(": ");
      if (colon > 0) fields[line.slice(0, colon)] = line.slice(colon + 2);
    }
    if (!fields.data) return;
    works();
    const number = Number(fields.id);
    this.#next = number + 1;
    const data = JSON.parse(fields.data);
    if (fields.event === "end") throw new Error("it ends");
    if (fields.event === "dropped") throw new Error("this page was too slow for its events");
    this.#told.event(fields.event, data, number);
  }
}

// What the browser says of a connection that fails is not for people, and a fault of ours is not to look like one.
async function reached(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error?.name === "TypeError") throw new Unreachable("it does not answer");
    if (error?.name === "TimeoutError") throw new Unreachable("its answer does not come");
    if (error?.name === "AbortError") throw new Unreachable("it was not waited for");
    throw error;
  }
}

async function refusal(response) {
  let said = null;
  try {
    said = (await response.json()).error;
  } catch {
    // Something between us and the daemon spoke.
  }
  return new Refused(response.status, said);
}
