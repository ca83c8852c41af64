// The block pools: one grid for each, a legend with counts, and the same counts as a table.

import { Grid } from "/page/grid.js";
import { CACHED, FREE, LIVE, SHARED, STATES, pack, readColours, swatch } from "/page/paint.js";
import { bytes, count, element } from "/page/words.js";

const OTHERS = 63;
const section = document.querySelector(".map");
const room = matchMedia("(max-width: 560px)");
const grids = [];
let last = null; // {picture, view}

export function showMap(picture) {
  if (picture) {
    last = picture;
    draw();
  }
  section.classList.toggle("old", !picture);
}

function draw() {
  const view = document.querySelector('input[name="view"]:checked').value;
  const formats = [...new Set(last.pools.flatMap((pool) => pool.parts.map((part) => part.kv)))];
  const pools = last.pools.map((pool) => ({ ...pool, blocks: decode(pool.cells) }));
  const tallies = pools.map(tally);
  pools.forEach((pool, i) => drawPool(i, pool, tallies[i], schemeOf(view, pool, formats)));
  drawLegend(view, pools, tallies, formats);
  drawCounts(pools, tallies);
}

function drawPool(i, pool, tallied, scheme) {
  if (!grids[i]) addGrid(i);
  const { grid, caption } = grids[i];
  const height = Math.max(60, Math.floor((room.matches ? 330 : 430) / last.pools.length));
  grid.show(pool.blocks, pool.stride, pool.usage.total, scheme, height);
  const layers = Math.max(...pool.parts.map((part) => part.layers));
  const cells = grid.each * pool.stride > 1 ? `, ${grid.each * pool.stride} a cell` : "";
  const name = last.pools.length > 1 ? `Layer group ${i}: ` : "";
  const strong = element("strong", `${count(pool.usage.total)} blocks${cells}`);
  const reach = pool.window === null ? "" : ` · window of ${count(pool.window)} tokens`;
  const rest = ` of ${last.block_size} tokens · ${bytes(pool.block_bytes)} each, ${layers} ${layers === 1 ? "layer" : "layers"}${reach}`;
  if (caption.textContent !== name + strong.textContent + rest) caption.replaceChildren(name, strong, rest);
  if (document.activeElement !== grid.canvas) {
    const sums = STATES.map((state, code) => `${count(tallied.states[code])} ${state}`).join(", ");
    grid.canvas.setAttribute("aria-label", `${name}${count(pool.usage.total)} blocks: ${sums}. Arrow keys read single blocks.`);
  }
}

function addGrid(i) {
  const caption = element("figcaption");
  const grid = new Grid((what, x, y, byKey) => point(grid.canvas, what, x, y, byKey));
  const figure = element("figure");
  figure.append(caption, grid.canvas);
  document.querySelector("#pools").append(figure);
  grids[i] = { grid, caption };
}

function point(canvas, what, x, y, byKey) {
  const tip = document.querySelector("#tip");
  tip.hidden = what === null;
  if (what === null) return;
  tip.textContent = what;
  const left = canvas.offsetLeft + x, most = section.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(8, Math.min(left, most))}px`;
  tip.style.top = `${canvas.offsetTop + y + 4}px`;
  if (byKey) document.querySelector("#spoken").textContent = what;
}

function schemeOf(view, pool, formats) {
  const total = pool.parts.reduce((sum, part) => sum + part.block_bytes, 0);
  return {
    view,
    hueOf,
    nameOf: (owner) => (owner ? nameOf(owner) : ""),
    parts: pool.parts.map((part) => ({ hue: formats.indexOf(part.kv), share: part.block_bytes / total })),
  };
}

// A key keeps its colour, independent of the order of tenants.
function hueOf(owner) {
  const number = /^key (\d+)$/.exec(nameOf(owner));
  return number ? number[1] - 1 : owner - 1;
}

function nameOf(owner) {
  if (owner === OTHERS) return "other tenants";
  return last.tenants[owner - 1]?.name || (owner ? "everybody" : "no single tenant");
}

// Counts blocks by state and owner; the counts are estimates if only a sample was sent.
function tally(pool) {
  const raw = new Uint32Array(256);
  for (const block of pool.blocks) raw[block] += 1;
  const owners = new Map();
  for (let byte = 1; byte < 256; byte++) {
    if (!raw[byte] || !(byte & 3)) continue;
    const row = owners.get(byte >> 2) ?? [0, 0, 0, 0];
    row[byte & 3] += raw[byte] * pool.stride;
    owners.set(byte >> 2, row);
  }
  const shared = Math.min(pool.usage.live, [...owners.values()].reduce((sum, row) => sum + row[SHARED], 0));
  const states = [pool.usage.free, pool.usage.cached, pool.usage.live - shared, shared];
  return { owners, states };
}

function drawLegend(view, pools, tallies, formats) {
  const items = { state: stateItems, tenant: tenantItems, format: formatItems }[view](pools, tallies, formats);
  const list = document.querySelector("#legend");
  const text = JSON.stringify(items.map((item) => item.slice(2))) + view;
  if (list.dataset.text === text) return;
  list.dataset.text = text;
  list.replaceChildren(
    ...items.map(([look, scheme, name, number, more]) => {
      const item = element("li");
      item.append(swatch(look, scheme), element("span", name), element("b", number), ...(more ? [element("span", more)] : []));
      return item;
    }),
  );
}

const about = (pools) => (pools.some((pool) => pool.stride > 1) ? "about " : "");

function stateItems(pools, tallies) {
  const notes = ["", "kept for the next hit", "", "seen by several"];
  return [FREE, CACHED, LIVE, SHARED].map((state) => {
    const sum = tallies.reduce((total, one) => total + one.states[state], 0);
    return [pack(state, 0), { view: "state" }, STATES[state], count(sum), notes[state]];
  });
}

function tenantItems(pools, tallies) {
  const owners = [...new Set(tallies.flatMap((one) => [...one.owners.keys()]))].sort((a, b) => hueOf(a) - hueOf(b));
  const items = owners.map((owner) => {
    const sums = [CACHED, LIVE, SHARED].map((state) => tallies.reduce((sum, one) => sum + (one.owners.get(owner)?.[state] ?? 0), 0));
    const more = `live, ${count(sums[0])} cached`;
    return [pack(LIVE, owner), { view: "tenant", hueOf }, nameOf(owner), about(pools) + count(sums[1] + sums[2]), more];
  });
  return [...items, ...stateItems(pools, tallies).slice(0, 1)];
}

function formatItems(pools, tallies, formats) {
  const items = formats.map((kv, hue) => {
    const parts = pools.flatMap((pool) => pool.parts.filter((part) => part.kv === kv));
    const layers = parts.reduce((sum, part) => sum + part.layers, 0);
    const sides = new Set(parts.map((part) => part.side));
    const side = sides.size === 1 ? [...sides][0] : "K and V";
    const size = bytes(parts.reduce((sum, part) => sum + part.block_bytes, 0));
    return [pack(LIVE, 0), { view: "format", parts: [{ hue, share: 1 }] }, kv, side, `of ${layers} layers, ${size} of a block`];
  });
  return [...items, ...stateItems(pools, tallies).slice(0, 1)];
}

function drawCounts(pools, tallies) {
  if (!document.querySelector(".map details").open) return;
  const rows = pools.flatMap((pool, i) => {
    const group = pools.length > 1 ? `group ${i}, ` : "";
    const owners = [...tallies[i].owners].sort(([a], [b]) => hueOf(a) - hueOf(b));
    return [
      [`${group}all, ${pool.parts.map((part) => part.kv).join(" + ")}`, ...tallies[i].states],
      ...owners.map(([owner, row]) => [group + nameOf(owner), "", row[CACHED], row[LIVE], row[SHARED]]),
    ];
  });
  document.querySelector("#counts tbody").replaceChildren(
    ...rows.map(([name, ...numbers]) => {
      const row = element("tr"), head = element("th", name);
      head.scope = "row";
      row.append(head, ...numbers.map((number) => element("td", number === "" ? "–" : count(number))));
      return row;
    }),
  );
}

function decode(text) {
  const raw = atob(text), blocks = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) blocks[i] = raw.charCodeAt(i);
  return blocks;
}

function again() {
  readColours();
  document.querySelector("#legend").dataset.text = "";
  for (const { grid } of grids) grid.room = 0; // drawn again
  if (last) draw();
}

readColours();
matchMedia("(prefers-color-scheme: light)").addEventListener("change", again);
room.addEventListener("change", again);
document.querySelector(".map details").addEventListener("toggle", () => last && draw());
for (const input of document.querySelectorAll('input[name="view"]')) input.addEventListener("change", () => last && draw());
