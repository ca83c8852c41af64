// Looks of blocks: they differ in lightness, size and marks, so that hue is never needed to distinguish them.

export const FREE = 0, CACHED = 1, LIVE = 2, SHARED = 3;
export const STATES = ["free", "cached", "live", "shared"];
const NAMES = ["one", "two", "three", "four", "five", "six"];
const WHOLE = 4; // levels of a cell that stands for several blocks

let colours = {};

export function readColours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  colours = { palette: NAMES.map(read), background: read("panel") };
  for (const name of [...STATES, "mark", "focus"]) colours[name] = read(name);
}

// The look of a cell as one number: state, owner, and the part that is in use.
export const pack = (state, owner, level = WHOLE) => state | (owner << 2) | (level << 8);
const stateOf = (look) => look & 3;
const ownerOf = (look) => (look >> 2) & 63;
const levelOf = (look) => look >> 8;

// `scheme`: {view, hueOf: owner -> number, parts: [{hue, share}] of a block}
// `strength`: less than 1 to draw over what was there
export function drawCell(context, x, y, size, look, scheme, strength = 1) {
  const state = stateOf(look);
  context.globalAlpha = strength;
  context.fillStyle = colours.free;
  context.fillRect(x, y, size, size);
  if (state !== FREE) drawUsed(context, x, y, size, look, scheme, strength);
  context.globalAlpha = 1;
}

function drawUsed(context, x, y, size, look, scheme, strength) {
  const state = stateOf(look);
  const inset = state === CACHED && size >= 6 ? Math.max(1, Math.round(size * 0.18)) : 0;
  const at = { x: x + inset, y: y + inset, size: size - 2 * inset };
  const dim = state === CACHED && scheme.view !== "state" ? 0.6 : 1;
  context.globalAlpha = (strength * dim * levelOf(look)) / WHOLE;
  if (scheme.view === "state") fill(context, at, colours[STATES[state]]);
  else if (scheme.view === "format") drawParts(context, at, scheme.parts);
  else drawOwner(context, at, ownerOf(look) ? scheme.hueOf(ownerOf(look)) : -1);
  context.globalAlpha = strength;
  if (state === SHARED && size >= 6) drawMark(context, x, y, size, scheme.view);
}

function drawMark(context, x, y, size, view) {
  const side = Math.max(2, Math.round(size * 0.34));
  const margin = Math.round((size - side) / 2);
  context.fillStyle = view === "state" ? colours.mark : colours.background;
  context.fillRect(x + margin, y + margin, side, side);
}

function drawParts(context, at, parts) {
  let left = at.x;
  parts.forEach((part, i) => {
    const right = i === parts.length - 1 ? at.x + at.size : Math.round(left + at.size * part.share);
    context.fillStyle = colours.palette[part.hue % NAMES.length];
    context.fillRect(left, at.y, right - left, at.size);
    left = right;
  });
}

// Every hue has distinct strokes, if there is room for them.
function drawOwner(context, at, hue) {
  fill(context, at, hue < 0 ? colours.cached : colours.palette[hue % NAMES.length]);
  const kind = hue % NAMES.length;
  if (at.size < 7 || kind < 1) return;
  const { x, y, size } = at;
  const line = Math.max(1, Math.round(size / 9));
  context.fillStyle = colours.free;
  const third = Math.round(size / 3);
  if (kind === 1 || kind === 3) context.fillRect(x, y + Math.round((size - line) / 2), size, line);
  if (kind === 2 || kind === 3) context.fillRect(x + Math.round((size - line) / 2), y, line, size);
  if (kind === 4) context.fillRect(x, y, third, third);
  if (kind === 5) context.fillRect(x + size - third, y + size - third, third, third);
}

function fill(context, at, colour) {
  context.fillStyle = colour;
  context.fillRect(at.x, at.y, at.size, at.size);
}

export function drawCursor(context, x, y, size) {
  context.strokeStyle = colours.focus;
  context.lineWidth = 2;
  context.strokeRect(x - 1, y - 1, size + 2, size + 2);
}

// Returns a swatch for the legend, drawn like the cells.
export function swatch(look, scheme) {
  const canvas = document.createElement("canvas");
  const ratio = Math.ceil(devicePixelRatio);
  canvas.width = canvas.height = 16 * ratio;
  canvas.setAttribute("aria-hidden", "true");
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  drawCell(context, 0, 0, 16, look, scheme);
  return canvas;
}
