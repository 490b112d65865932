// The pool as a picture: a texel a block, of the colour of what most of its slots are, as strong as it is full.
//
//   cells (2 bytes a block, as sent) ─► texture, only where stretches have changed ─► one drawImage onto the base canvas
//                                        marks of moves and the cursor ─────────────► the other canvas over it
//
// A million blocks are 4 MiB of texture; what comes once a second changes some rows of it. Large cells are drawn one by
// one, with their fill as a level; small ones are scaled by the canvas.

import { grouped } from "./format.js";

export const STATES = ["free", "private", "cached", "fenced", "moving", "reserved", "quarantined", "padding"];

const LARGE = 12; // px of a cell from which it is drawn by itself
const GRID = 6; // px from which cells are apart
const CELL_MOST = 48; // px of a cell where there are few
const ZOOM_MOST = 64;
const MARK_MS = 1600; // that a move is shown
const MARKS_MOST = 128;
const ARCS_MOST = 32;
const FADE_MS = 50; // between two pictures of marks: they fade, which needs no more

export class PoolMap {
  blocks = 0;
  blockSize = 1;
  cursor = -1;
  only = -1; // a state that is shown alone
  times = { apply: [], draw: [] }; // ms, the latest ones

  #place;
  #base;
  #over;
  #told;
  #cells = new Uint16Array(0);
  #texture = document.createElement("canvas");
  #image = null;
  #pixels = new Uint32Array(0);
  #table = new Uint32Array(1 << 11);
  #colors = {};
  #columns = 1;
  #rows = 1;
  #scale = 1; // device pixels of a cell when all are shown
  #zoom = 1;
  #x = 0; // of the left upper corner, in cells
  #y = 0;
  #marks = [];
  #wanted = false;
  #fading = 0;
  #drag = null;
  #still = matchMedia("(prefers-reduced-motion: reduce)");

  // `told`: { look(block, asked) } when a block is pointed at, or asked for by click or Enter.
  constructor(place, base, over, told) {
    this.#place = place;
    this.#base = base;
    this.#over = over;
    this.#told = told;
    new ResizeObserver(() => this.#resize()).observe(place);
    place.addEventListener("keydown", (event) => this.#key(event));
    place.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    place.addEventListener("pointerdown", (event) => this.#down(event));
    place.addEventListener("pointermove", (event) => this.#move(event));
    place.addEventListener("pointerup", (event) => this.#up(event));
    place.addEventListener("pointercancel", () => (this.#drag = null));
    this.recolor();
  }

  // -- what comes ------------------------------------------------------------------------------------------------

  // A map as the daemon sends it: all blocks, or stretches of them: first, length (u32 each), and two bytes a block.
  apply(buffer, { whole, blocks, blockSize }) {
    const began = performance.now();
    this.blockSize = blockSize;
    if (blocks !== this.blocks) {
      this.blocks = blocks;
      this.#cells = new Uint16Array(blocks);
      this.cursor = -1;
      this.#layout();
    }
    if (whole) {
      this.#cells.set(new Uint16Array(buffer, 0, Math.min(blocks, buffer.byteLength >> 1)));
      this.#paint(0, blocks);
    } else {
      const view = new DataView(buffer);
      for (let at = 0; at + 8 <= buffer.byteLength; ) {
        const start = view.getUint32(at, true);
        const length = view.getUint32(at + 4, true);
        this.#cells.set(new Uint16Array(buffer, at + 8, length), start);
        this.#paint(start, length);
        at += 8 + 2 * length;
      }
    }
    note(this.times.apply, performance.now() - began);
    if (buffer.byteLength) this.#want();
  }

  // Moves as ticks tell them: [block before, block after, tokens].
  moved(moves) {
    const now = performance.now();
    for (const [source, target] of moves) this.#marks.push({ source, target, began: now });
    this.#marks = this.#marks.slice(-MARKS_MOST);
    if (this.#marks.length) this.#fade();
  }

  cell(block) {
    const cell = this.#cells[block];
    return { state: STATES[cell & 255] ?? "free", used: Math.floor(((cell >> 8) * this.blockSize) / 255 + 1e-6) };
  }

  // -- colours -----------------------------------------------------------------------------------------------------

  // Takes the colours of the style sheet again: the theme has changed, or which states are to be shown.
  recolor() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => rgb(style.getPropertyValue(name));
    const free = read("--s-free");
    this.#colors = { free: css(free), text: style.getPropertyValue("--text").trim(), states: [] };
    this.#colors.moving = css(read("--s-moving"));
    this.#colors.ground = style.getPropertyValue("--panel").trim();
    STATES.forEach((name, state) => {
      let full = read(`--s-${name}`);
      if (this.only >= 0 && state !== this.only && state) full = mix(free, full, 0.16);
      this.#colors.states.push(css(full));
      for (let fill = 0; fill < 256; fill++) {
        // Never so weak that a block with one slot in use looks free.
        const color = state ? mix(free, full, 0.3 + (0.7 * fill) / 255) : free;
        this.#table[(fill << 3) | state] = (255 << 24) | (color[2] << 16) | (color[1] << 8) | color[0];
      }
    });
    if (this.blocks) {
      this.#paint(0, this.blocks);
      this.#want();
    }
  }

  // -- where cells lie ---------------------------------------------------------------------------------------------

  #resize() {
    const ratio = devicePixelRatio || 1;
    const width = Math.round(this.#place.clientWidth * ratio), height = Math.round(this.#place.clientHeight * ratio);
    if (!width || !height || (width === this.#base.width && height === this.#base.height)) return;
    for (const canvas of [this.#base, this.#over]) {
      canvas.width = width;
      canvas.height = height;
    }
    if (this.blocks) {
      this.#layout();
      this.#paint(0, this.blocks);
    }
    this.#draw();
  }

  #layout() {
    const { width, height } = this.#base;
    const blocks = this.blocks;
    if (!width || !blocks) return;
    let columns = Math.ceil(Math.sqrt((blocks * width) / height));
    // Rows that begin at round numbers are easier to read, where that costs little.
    const round = [64, 16, 8].find((each) => Math.ceil(columns / each) * each < columns * 1.015);
    if (round) columns = Math.ceil(columns / round) * round;
    this.#columns = Math.min(columns, blocks);
    this.#rows = Math.ceil(blocks / this.#columns);
    const most = CELL_MOST * (devicePixelRatio || 1);
    this.#scale = Math.min(width / this.#columns, height / this.#rows, most);
    this.#texture.width = this.#columns;
    this.#texture.height = this.#rows;
    this.#image = new ImageData(this.#columns, this.#rows);
    this.#pixels = new Uint32Array(this.#image.data.buffer);
    this.fit();
  }

  #paint(start, length) {
    if (!this.#image) return;
    const cells = this.#cells, pixels = this.#pixels, table = this.#table;
    for (let i = start, stop = start + length; i < stop; i++) {
      const cell = cells[i];
      pixels[i] = table[((cell >> 8) << 3) | (cell & 7)];
    }
    const first = Math.floor(start / this.#columns);
    const rows = Math.floor((start + length - 1) / this.#columns) - first + 1;
    this.#texture.getContext("2d").putImageData(this.#image, 0, 0, 0, first, this.#columns, rows);
  }

  // -- drawing -----------------------------------------------------------------------------------------------------

  #want() {
    if (this.#wanted) return;
    this.#wanted = true;
    requestAnimationFrame(() => {
      this.#wanted = false;
      this.#draw();
    });
  }

  #draw() {
    const { width, height } = this.#base;
    if (!width || !this.#image) return;
    const began = performance.now();
    const ctx = this.#base.getContext("2d", { alpha: false });
    const ratio = devicePixelRatio || 1;
    const size = this.#scale * this.#zoom;
    const x = this.#x, y = this.#y;
    ctx.fillStyle = this.#colors.ground;
    ctx.fillRect(0, 0, width, height);
    const wide = Math.min(this.#columns - x, width / size), high = Math.min(this.#rows - y, height / size);
    if (size >= LARGE * ratio) {
      this.#levels(ctx, size, Math.round(ratio));
    } else {
      ctx.imageSmoothingEnabled = size < 2; // each block is to be seen, or the mean of some
      ctx.imageSmoothingQuality = "medium";
      ctx.drawImage(this.#texture, x, y, wide, high, 0, 0, wide * size, high * size);
      if (size >= GRID * ratio) {
        const gap = Math.max(1, Math.round(ratio));
        for (let i = Math.ceil(x); i <= x + wide; i++) ctx.fillRect(Math.round((i - x) * size) - gap, 0, gap, height);
        for (let i = Math.ceil(y); i <= y + high; i++) ctx.fillRect(0, Math.round((i - y) * size) - gap, width, gap);
      }
    }
    this.#drawOver();
    note(this.times.draw, performance.now() - began);
  }

  #levels(ctx, size, gap) {
    const { width, height } = this.#base;
    const { free, states } = this.#colors;
    const last = Math.min(this.#columns, Math.ceil(this.#x + width / size));
    for (let row = Math.floor(this.#y); row < Math.min(this.#rows, this.#y + height / size); row++) {
      const top = Math.round((row - this.#y) * size);
      const side = Math.round((row + 1 - this.#y) * size) - gap - top;
      for (let column = Math.floor(this.#x); column < last; column++) {
        const block = row * this.#columns + column;
        if (block >= this.blocks) break;
        const cell = this.#cells[block];
        const level = cell & 7 ? Math.max(Math.round(((cell >> 8) * side) / 255), 2 * gap) : 0;
        const left = Math.round((column - this.#x) * size);
        const wide = Math.round((column + 1 - this.#x) * size) - gap - left;
        ctx.fillStyle = free;
        ctx.fillRect(left, top, wide, side - level);
        if (level) {
          ctx.fillStyle = states[cell & 7];
          ctx.fillRect(left, top + side - level, wide, level);
        }
      }
    }
  }

  #fade() {
    if (this.#fading) return;
    const step = () => {
      const now = performance.now();
      this.#marks = this.#marks.filter((each) => now - each.began < MARK_MS);
      this.#drawOver();
      // Where motion is not wanted marks stand still until they go.
      const wait = this.#still.matches ? MARK_MS : FADE_MS;
      this.#fading = this.#marks.length ? setTimeout(() => requestAnimationFrame(step), wait) : 0;
    };
    this.#fading = requestAnimationFrame(step);
  }

  #middle(block) {
    const size = this.#scale * this.#zoom;
    const column = block % this.#columns, row = Math.floor(block / this.#columns);
    return [(column - this.#x + 0.5) * size, (row - this.#y + 0.5) * size];
  }

  #drawOver() {
    const { width, height } = this.#over;
    const ctx = this.#over.getContext("2d");
    const ratio = devicePixelRatio || 1;
    const size = this.#scale * this.#zoom;
    const now = performance.now();
    ctx.clearRect(0, 0, width, height);
    const side = Math.max(size, 5 * ratio);
    ctx.lineWidth = Math.max(1, 1.5 * ratio);
    ctx.strokeStyle = ctx.fillStyle = this.#colors.moving;
    this.#marks.forEach((mark, index) => {
      const strength = this.#still.matches ? 0.8 : 1 - (now - mark.began) / MARK_MS;
      if (strength <= 0) return;
      const [fromX, fromY] = this.#middle(mark.source);
      const [toX, toY] = this.#middle(mark.target);
      ctx.globalAlpha = strength;
      ctx.strokeRect(fromX - side / 2, fromY - side / 2, side, side);
      if (this.#marks.length - index <= ARCS_MOST) {
        ctx.globalAlpha = strength * 0.5;
        ctx.beginPath();
        ctx.moveTo(fromX, fromY);
        const bend = Math.min(Math.hypot(toX - fromX, toY - fromY) * 0.2, 60 * ratio);
        ctx.quadraticCurveTo((fromX + toX) / 2, Math.min(fromY, toY) - bend, toX, toY);
        ctx.stroke();
      }
      ctx.globalAlpha = strength;
      ctx.fillRect(toX - side / 2, toY - side / 2, side, side);
    });
    ctx.globalAlpha = 1;
    if (this.cursor >= 0) {
      const [x, y] = this.#middle(this.cursor);
      const around = Math.max(size, 7 * ratio) + 2 * ratio;
      ctx.lineWidth = 4 * ratio;
      ctx.strokeStyle = this.#colors.ground;
      ctx.strokeRect(x - around / 2, y - around / 2, around, around);
      ctx.lineWidth = 2 * ratio;
      ctx.strokeStyle = this.#colors.text;
      ctx.strokeRect(x - around / 2, y - around / 2, around, around);
    }
  }

  // -- looking closer ----------------------------------------------------------------------------------------------

  fit() {
    this.#zoom = 1;
    this.#look(0, 0);
  }

  // Around a place in device pixels, or the cursor, or the middle.
  zoom(factor, at = null) {
    const { width, height } = this.#base;
    const around = at ?? (this.cursor >= 0 ? this.#middle(this.cursor) : [width / 2, height / 2]);
    const size = this.#scale * this.#zoom;
    const [x, y] = [this.#x + around[0] / size, this.#y + around[1] / size];
    this.#zoom = Math.min(Math.max(this.#zoom * factor, 1), ZOOM_MOST);
    const after = this.#scale * this.#zoom;
    this.#look(x - around[0] / after, y - around[1] / after);
  }

  #look(x, y) {
    const size = this.#scale * this.#zoom;
    const { width, height } = this.#base;
    this.#x = Math.min(Math.max(x, 0), Math.max(0, this.#columns - width / size));
    this.#y = Math.min(Math.max(y, 0), Math.max(0, this.#rows - height / size));
    this.#place.style.touchAction = this.#zoom > 1 ? "none" : ""; // a finger scrolls the page, or what is zoomed into
    this.#want();
  }

  select(block, asked = false) {
    if (!this.blocks) return;
    this.cursor = Math.min(Math.max(block, 0), this.blocks - 1);
    const size = this.#scale * this.#zoom;
    const { width, height } = this.#base;
    const [x, y] = this.#middle(this.cursor);
    if (x < 0 || y < 0 || x > width || y > height) {
      this.#look(this.#x + (x - width / 2) / size, this.#y + (y - height / 2) / size);
    }
    this.#drawOver();
    this.#told.look(this.cursor, asked);
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const at = Math.max(this.cursor, 0);
    const page = this.#columns * Math.max(1, Math.round(this.#rows / 10));
    const to = {
      ArrowLeft: at - 1, ArrowRight: at + 1, ArrowUp: at - this.#columns, ArrowDown: at + this.#columns,
      PageUp: at - page, PageDown: at + page, Home: 0, End: this.blocks - 1,
    }[event.key];
    if (to !== undefined) {
      if (this.cursor < 0) this.select(0);
      else if (to >= 0 && to < this.blocks) this.select(to);
    } else if (event.key === "Enter" || event.key === " ") this.select(at, true);
    else if (event.key === "+" || event.key === "=") this.zoom(2);
    else if (event.key === "-") this.zoom(0.5);
    else if (event.key === "0") this.fit();
    else if (event.key === "Escape" && this.cursor >= 0) {
      this.cursor = -1;
      this.#drawOver();
      this.#told.look(-1, false);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  #spot(event) {
    const box = this.#base.getBoundingClientRect();
    const ratio = this.#base.width / box.width;
    return [(event.clientX - box.left) * ratio, (event.clientY - box.top) * ratio];
  }

  #under([x, y]) {
    const size = this.#scale * this.#zoom;
    const column = Math.floor(this.#x + x / size), row = Math.floor(this.#y + y / size);
    const block = row * this.#columns + column;
    return column >= 0 && column < this.#columns && block >= 0 && block < this.blocks ? block : -1;
  }

  #wheel(event) {
    // The page scrolls, unless the map has been gone into or the key for zooming is held.
    if (!event.ctrlKey && document.activeElement !== this.#place) return;
    event.preventDefault();
    this.zoom(event.deltaY < 0 ? 1.25 : 0.8, this.#spot(event));
  }

  #down(event) {
    if (event.button !== 0) return;
    this.#drag = { at: this.#spot(event), x: this.#x, y: this.#y, far: false };
    this.#place.setPointerCapture(event.pointerId);
  }

  #move(event) {
    const at = this.#spot(event);
    const drag = this.#drag;
    if (!drag) {
      if (this.cursor < 0) this.#told.look(this.#under(at), false);
      return;
    }
    const [x, y] = [at[0] - drag.at[0], at[1] - drag.at[1]];
    drag.far ||= Math.hypot(x, y) > 4;
    const size = this.#scale * this.#zoom;
    if (drag.far) this.#look(drag.x - x / size, drag.y - y / size);
  }

  #up(event) {
    const drag = this.#drag;
    this.#drag = null;
    if (!drag || drag.far) return;
    const block = this.#under(this.#spot(event));
    if (block >= 0) this.select(block, true);
  }

  // What is to be said of a block, in words.
  words(block) {
    const { state, used } = this.cell(block);
    const first = block * this.blockSize;
    const what = state === "free" ? "free" : `${used} of ${this.blockSize} slots in use, most of them ${state}`;
    return `Block ${grouped(block)}, slots ${grouped(first)} to ${grouped(first + this.blockSize - 1)}: ${what}`;
  }
}

function note(list, value) {
  list.push(value);
  if (list.length > 240) list.shift();
}

function rgb(text) {
  const hex = text.trim().replace("#", "");
  return [0, 2, 4].map((at) => Number.parseInt(hex.slice(at, at + 2), 16));
}

function mix(one, other, share) {
  return one.map((value, index) => Math.round(value + (other[index] - value) * share));
}

function css([red, green, blue]) {
  return `rgb(${red} ${green} ${blue})`;
}
