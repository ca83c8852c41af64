// One pool on a canvas: one cell per block, or several blocks per cell if there are too many.

import { STATES, drawCell, drawCursor, pack } from "/page/paint.js";

const LARGEST = 34, SMALLEST = 5, FADE_MS = 400, MAX_FADES = 1500;
const still = matchMedia("(prefers-reduced-motion: reduce)");

export class Grid {
  constructor(onPoint) {
    this.canvas = document.createElement("canvas");
    this.canvas.className = "cells";
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-roledescription", "block map");
    this.context = this.canvas.getContext("2d");
    this.onPoint = onPoint; // (text, x, y, whether by key); a null text: nothing
    this.blocks = new Uint8Array(0);
    this.looks = new Uint16Array(0);
    this.fades = new Map(); // cell -> [its previous look, time of the change]
    this.cursor = -1;
    this.frame = 0;
    this.width = 0;
    this.listen();
    new ResizeObserver(() => this.resize()).observe(this.canvas);
  }

  // `blocks`: one byte for every `stride`-th block of `total`
  show(blocks, stride, total, scheme, room) {
    const fresh = this.blocks.length !== blocks.length || this.room !== room || scheme.view !== this.scheme?.view;
    Object.assign(this, { blocks, stride, total, scheme, room });
    if (fresh) this.resize(true);
    else this.update();
  }

  resize(force = false) {
    const width = this.canvas.clientWidth;
    if (!width || !this.blocks.length || (width === this.width && !force)) return;
    this.width = width;
    this.fit();
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(this.rows * this.size * ratio);
    this.canvas.style.height = `${this.rows * this.size}px`;
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.redraw();
  }

  fit() {
    const count = this.blocks.length;
    let size = LARGEST;
    const rowsAt = (side) => Math.ceil(count / Math.floor(this.width / side));
    while (size > SMALLEST && rowsAt(size) * size > this.room) size -= 1;
    this.columns = Math.min(count, Math.floor(this.width / size));
    this.size = Math.min(LARGEST, this.width / this.columns); // not an integer: the last cell ends at the edge
    this.side = Math.floor(this.size) - (size >= 14 ? 3 : size >= 9 ? 2 : 1);
    const most = this.columns * Math.max(1, Math.floor(this.room / size));
    this.each = Math.max(1, Math.ceil(count / most)); // blocks per cell
    this.cells = Math.ceil(count / this.each);
    this.rows = Math.ceil(this.cells / this.columns);
  }

  redraw() {
    this.looks = this.compute();
    this.fades.clear();
    this.context.clearRect(0, 0, this.width, this.rows * this.size);
    for (let i = 0; i < this.cells; i++) this.draw(i);
    if (this.cursor >= 0) this.point(Math.min(this.cursor, this.cells - 1), false);
  }

  update() {
    const before = this.looks;
    this.looks = this.compute();
    const now = performance.now();
    const changed = [];
    for (let i = 0; i < this.cells; i++) if (before[i] !== this.looks[i]) changed.push(i);
    const fades = changed.length <= MAX_FADES && !still.matches;
    for (const i of changed) {
      if (fades) this.fades.set(i, [before[i], now]);
      else this.draw(i);
    }
    if (this.fades.size && !this.frame) this.frame = requestAnimationFrame((time) => this.fade(time));
  }

  fade(now) {
    this.frame = 0;
    for (const [i, [before, began]] of this.fades) {
      const share = Math.max(0, (now - began) / FADE_MS);
      if (share >= 1) this.fades.delete(i);
      this.draw(i, before, Math.min(1, share));
    }
    if (this.fades.size) this.frame = requestAnimationFrame((time) => this.fade(time));
  }

  compute() {
    const { blocks, each, cells } = this;
    const looks = new Uint16Array(cells);
    if (each === 1) {
      for (let i = 0; i < cells; i++) looks[i] = pack(blocks[i] & 3, blocks[i] >> 2);
      return looks;
    }
    const counts = new Uint32Array(256);
    for (let i = 0; i < cells; i++) {
      const end = Math.min(blocks.length, (i + 1) * each);
      let used = 0, best = 0;
      counts.fill(0);
      for (let j = i * each; j < end; j++) {
        const block = blocks[j];
        if (!(block & 3)) continue;
        used += 1;
        if (++counts[block] > counts[best] || !best) best = block;
      }
      looks[i] = used ? pack(best & 3, best >> 2, Math.max(1, Math.round((4 * used) / (end - i * each)))) : 0;
    }
    return looks;
  }

  // Draws a cell; with `share` below 1, as a blend of its previous look and the new one.
  draw(i, before = 0, share = 1) {
    const x = Math.round((i % this.columns) * this.size), y = Math.round(Math.floor(i / this.columns) * this.size);
    const { context, side, scheme } = this;
    context.clearRect(x - 1, y - 1, side + 2, side + 2);
    if (share < 1) drawCell(context, x, y, side, before, scheme);
    drawCell(context, x, y, side, this.looks[i], scheme, share);
    if (i === this.cursor) drawCursor(context, x + 1, y + 1, side - 2);
  }

  // Describes a cell's blocks in words.
  describe(i) {
    const first = i * this.each, end = Math.min(this.blocks.length, first + this.each);
    const last = Math.min(this.total, end * this.stride) - 1;
    const counts = [0, 0, 0, 0];
    for (let j = first; j < end; j++) counts[this.blocks[j] & 3] += 1;
    if (first * this.stride === last) {
      const owner = this.scheme.nameOf(this.blocks[first] >> 2);
      return `Block ${last}: ${STATES[this.blocks[first] & 3]}${owner ? `, ${owner}` : ""}`;
    }
    const parts = STATES.map((name, state) => [counts[state], name]).filter(([count]) => count);
    const about = this.stride > 1 ? ` (every ${this.stride}th looked at)` : "";
    return `Blocks ${first * this.stride} to ${last}: ${parts.map((part) => part.join(" ")).join(", ")}${about}`;
  }

  point(i, byKey) {
    const before = this.cursor;
    this.cursor = i;
    if (before >= 0 && before < this.cells) this.draw(before);
    if (i < 0) {
      this.onPoint(null);
      return;
    }
    this.draw(i);
    this.onPoint(this.describe(i), (i % this.columns) * this.size, Math.floor(i / this.columns) * this.size + this.size, byKey);
  }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointermove", (event) => {
      const column = Math.floor(event.offsetX / this.size), row = Math.floor(event.offsetY / this.size);
      const i = row * this.columns + column;
      if (column < this.columns && i < this.cells && i !== this.cursor) this.point(i, false);
    });
    canvas.addEventListener("pointerleave", () => this.point(-1, false));
    canvas.addEventListener("blur", () => this.point(-1, false));
    canvas.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -this.columns, ArrowDown: this.columns, Home: -this.cells, End: this.cells };
      if (!(event.key in steps) || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      const next = this.cursor < 0 ? 0 : this.cursor + steps[event.key];
      this.point(Math.max(0, Math.min(this.cells - 1, next)), true);
    });
  }
}
