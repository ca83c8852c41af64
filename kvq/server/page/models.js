// Several models of one server: their states, the versions of roll-outs, and how answers compare.

import { bytes, count, element } from "/page/words.js";

const section = document.querySelector("#fleet");
const choice = document.querySelector("#chosen");

export const query = () => (choice.value ? `?model=${encodeURIComponent(choice.value)}` : "");

export function showModels({ models, adapters, rollouts }) {
  section.hidden = !models;
  if (!models) return;
  const names = models.map((one) => one.name);
  if (choice.options.length !== names.length) choice.replaceChildren(...names.map((name) => element("option", name)));
  fill("#models", models.map((one) => [one.name, one.state, count(one.requests), count(one.tokens), one.bytes === null ? "–" : bytes(one.bytes)]));
  fill("#versions", rollouts.flatMap((one) => one.versions.map((version) => [one.name, version.name, String(version.weight), count(version.requests), shadowWords(one.shadow, version.name)])));
  document.querySelector("#adapters").textContent = adapters.length ? `Adapters of ${choice.value || names[0]}: ${adapters.join(", ")}` : "";
}

function shadowWords(shadow, version) {
  const all = shadow?.version === version ? shadow.equal + shadow.different : 0;
  if (!all) return "–";
  const apart = shadow.different ? `, others differ after ${shadow.same.toFixed(1)} tokens` : "";
  return `${((100 * shadow.equal) / all).toFixed(1)}% of ${count(all)} equal${apart}, KL ${shadow.kl.toPrecision(2)} nats`;
}

function fill(id, rows) {
  const body = document.querySelector(`${id} tbody`);
  body.parentNode.hidden = !rows.length;
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((cells, i) => {
    const row = body.rows[i] ?? body.insertRow();
    cells.forEach((text, j) => {
      const cell = row.cells[j] ?? row.insertCell();
      if (cell.textContent !== text) cell.textContent = text;
    });
  });
}
