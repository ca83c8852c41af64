// The viewer's requests: running ones, then receipts of ended ones.

import { bytes, count, element, seconds } from "/page/words.js";

const MOST = 24;
const LABELS = ["", "", "", "output", "blocks", "peak", "queue", "first token", "between", "total", ""];
// Why a prompt left the cache; new text is no reason to tell
const MISSES = {
  changed_text: "text changed",
  template: "template's text changed",
  salt: "another salt",
  evicted: "cache evicted",
  too_old: "cache too old",
  no_snapshot: "no snapshot",
  format: "another format",
};
const body = document.querySelector("#requests tbody");
const rows = new Map(); // number -> row

export function showRequests(picture, you) {
  const live = [...picture.live].sort((a, b) => b.number - a.number).map((request) => [request, request.state, ofLive(request)]);
  const past = picture.past.map((request) => [request, request.finish_reason, ofPast(request)]);
  const shown = [...live, ...past].slice(0, MOST);
  const numbers = new Set(shown.map(([request]) => request.number));
  for (const [number, row] of rows) {
    if (numbers.has(number)) continue;
    row.remove();
    rows.delete(number);
  }
  let before = null;
  for (const [request, state, cells] of shown) {
    const row = rows.get(request.number) ?? newRow(request.number);
    fill(row, request, state, cells);
    const next = before ? before.nextSibling : body.firstChild;
    if (next !== row) body.insertBefore(row, next);
    before = row;
  }
  document.querySelector("#none").hidden = shown.length > 0;
  document.querySelector("#requests").hidden = !shown.length;
  document.querySelector("#others").textContent = others(picture, you);
}

function newRow(number) {
  const row = element("tr");
  row.setAttribute("role", "row");
  for (const label of LABELS) {
    const cell = element("td");
    cell.setAttribute("role", "cell");
    if (label) cell.dataset.label = label;
    row.append(cell);
  }
  const [first, state, prompt] = row.children;
  first.textContent = `#${number}`;
  const mark = element("span"), meter = element("span"), line = element("div");
  mark.className = "mark";
  meter.className = "meter";
  meter.setAttribute("aria-hidden", "true");
  meter.append(element("i"));
  line.className = "prompt";
  line.append(meter, element("span"));
  state.append(mark, element("span"));
  prompt.append(line);
  rows.set(number, row);
  return row;
}

function fill(row, request, state, cells) {
  const receipt = request.receipt ?? request;
  row.dataset.state = state;
  write(row.children[1].lastChild, state);
  const bar = row.children[2].firstChild;
  bar.firstChild.firstChild.style.width = `${(100 * receipt.cached_tokens) / receipt.prompt_tokens}%`;
  write(bar.lastChild, `${count(receipt.prompt_tokens)}, ${count(receipt.cached_tokens)} cached`);
  cells.forEach((text, i) => {
    const cell = row.children[3 + i];
    write(cell, text);
    cell.classList.toggle("nothing", text === "–");
  });
}

function write(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function ofLive(request) {
  const also = [];
  if (request.branches > 1) also.push(`${request.branches} results`);
  if (request.preemptions) also.push(`preempted ${times(request.preemptions)}`);
  const blocks = request.blocks ? `${count(request.blocks)} held` : "–";
  return [count(request.generated_tokens), blocks, "–", "–", seconds(request.ttft_s), "–", seconds(request.seconds), also.join(", ")];
}

function ofPast({ receipt, queue_s, ttft_s, itl_s, e2e_s }) {
  const also = [];
  if (receipt.copied_blocks) also.push(`${receipt.copied_blocks} copied`);
  if (receipt.drafted_tokens) also.push(`${count(receipt.accepted_tokens)} of ${count(receipt.drafted_tokens)} drafts`);
  if (receipt.recomputed_tokens) also.push(`${count(receipt.recomputed_tokens)} tokens again`);
  if (receipt.restored_tokens) also.push(`${count(receipt.restored_tokens)} tokens brought back`);
  if (receipt.preemptions) also.push(`preempted ${times(receipt.preemptions)}`);
  if (receipt.miss && receipt.miss.cause in MISSES) also.push(`${MISSES[receipt.miss.cause]} at token ${count(receipt.miss.token)}`);
  return [
    count(receipt.generated_tokens),
    `${count(receipt.blocks)} + ${count(receipt.shared_blocks)}`,
    bytes(receipt.peak_bytes),
    seconds(queue_s),
    seconds(ttft_s),
    seconds(itl_s),
    seconds(e2e_s),
    also.join(", "),
  ];
}

const times = (number) => (number === 1 ? "once" : `${number} times`);

function others(picture, you) {
  const counts = picture.tenants.filter((one) => one.name !== you && one.running + one.waiting);
  const words = counts.map((one) => `${one.name || "no key"}: ${one.running} running, ${one.waiting} waiting`);
  return [you ? `Yours, ${you}.` : "", ...words].filter(Boolean).join(" ");
}
