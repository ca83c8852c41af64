// Polls the server's state while the page is visible, and shows it.

import { showMap } from "/page/map.js";
import { query, showModels } from "/page/models.js";
import { showRequests } from "/page/requests.js";
import { setModel } from "/page/try.js";
import { count, secondsParts, seconds, element } from "/page/words.js";

const WINDOW_MS = 60_000, RATE_MS = 3_000, LONGEST_MS = 15_000, PATIENCE_MS = 10_000;
const show = (id, text) => {
  const node = document.querySelector(`#${id}`);
  if (node.textContent !== text) node.textContent = text;
};
let samples = []; // [ms, tokens since the engine's start]
let rates = []; // [ms, tokens per second]
let failures = 0, timer = 0, asking = false;
let drafts = ""; // share of accepted drafts, as text

async function poll() {
  if (asking || document.hidden) return;
  asking = true;
  clearTimeout(timer);
  let delay = LONGEST_MS;
  try {
    const answer = await fetch(`/pool${query()}`, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    if (!answer.ok) throw new Error(answer.status === 401 ? "key" : "status");
    const seen = await answer.json();
    failures = 0;
    delay = Math.max(250, 1000 * seen.interval_s);
    showAll(seen);
  } catch (error) {
    failures += 1;
    delay = Math.min(LONGEST_MS, 500 * 2 ** failures);
    showMap(null);
    setState("gone", error.message === "key" ? "needs an API key: reload the page" : "no answer, trying again");
  }
  asking = false;
  timer = setTimeout(poll, delay);
}

function setState(state, words) {
  document.querySelector("#state").dataset.state = state;
  show("state", words);
}

function showAll(seen) {
  const isReady = seen.problem === null;
  setState(isReady ? "ready" : seen.state === "ready" ? "gone" : seen.state, stateWords(seen, isReady));
  document.title = `${seen.model} · kvq`;
  show("model", seen.model);
  show("version", seen.version);
  const kv = document.querySelector("#kv");
  kv.hidden = !seen.kv;
  show("kv", `kv ${seen.kv}`);
  setModel(seen.model, seen.needs_key);
  showModels(seen);
  if (seen.totals) showTotals(seen.totals);
  showMap(seen.picture);
  showGuard(seen.picture?.guard, seen.totals);
  if (!seen.picture) return;
  showRequests(seen.picture, seen.you);
  showLatency(seen.picture.tenants.find((one) => one.name === seen.you)?.latency);
}

function stateWords(seen, isReady) {
  if (!isReady) return seen.problem;
  const times = seen.restarts === 1 ? "once" : `${seen.restarts} times`;
  return seen.restarts ? `ready, engine restarted ${times}` : "ready";
}

function showTotals(totals) {
  const now = performance.now();
  if (samples.length && totals.generated_tokens < samples.at(-1)[1]) samples = []; // the engine was restarted
  samples = [...samples.filter(([at]) => now - at < RATE_MS), [now, totals.generated_tokens]];
  const [then, before] = samples[0];
  const rate = now > then + 200 ? (1000 * (totals.generated_tokens - before)) / (now - then) : 0;
  rates = [...rates.filter(([at]) => now - at < WINDOW_MS), [now, rate]];
  show("rate", count(Math.round(rate)));
  drawRates(now);
  big("hits", totals.prompt_tokens ? [((100 * totals.cached_tokens) / totals.prompt_tokens).toFixed(0), "%"] : ["–", ""]);
  show("hits-more", totals.prompt_tokens ? `of ${count(totals.prompt_tokens)} prompt tokens` : "of prompt tokens");
  drafts = totals.drafted_tokens ? `, ${((100 * totals.accepted_tokens) / totals.drafted_tokens).toFixed(0)}% of drafts right` : "";
  show("running", count(totals.running));
  const parts = ["running"];
  if (totals.waiting) parts.push(`${count(totals.waiting)} waiting`);
  if (totals.preempted) parts.push(`${count(totals.preempted)} preempted`);
  show("waiting", parts.join(", "));
  const sum = (name) => totals.pools.reduce((all, pool) => all + pool[name], 0);
  big("live", [((100 * sum("live")) / sum("total")).toFixed(0), "%"]);
  show("live-more", `${((100 * sum("cached")) / sum("total")).toFixed(0)}% cached`);
}

function showGuard(found, totals) {
  const node = document.querySelector("#guard");
  node.hidden = !found;
  if (!found) return;
  node.dataset.alerts = found.alerts;
  const same = found.tokens ? `, ${((100 * found.same) / found.tokens).toFixed(1)}% of ${count(found.tokens)} tokens as without quantized KV` : "";
  const alert = found.alerts ? `${count(found.alerts)} ${found.alerts === 1 ? "alert" : "alerts"}: ${found.last_alert}` : "no alerts";
  const safer = totals?.guard_fallback ? "; new requests get the safer format" : "";
  node.textContent = `Guard: ${alert}${safer}; ${count(found.requests)} requests compared${same}`;
}

function showLatency(latency) {
  big("ttft", secondsParts(latency?.ttft_p50));
  big("itl", secondsParts(latency?.itl_p50));
  show("ttft-more", latency?.requests ? `p95 ${seconds(latency.ttft_p95)}` : "median");
  show("itl-more", (latency?.itl_p95 ? `p95 ${seconds(latency.itl_p95)}, p99 ${seconds(latency.itl_p99)}` : "median") + drafts);
}

function big(id, [number, unit]) {
  const node = document.querySelector(`#${id}`);
  if (node.textContent !== number + unit) node.replaceChildren(number, ...(unit ? [element("i", unit)] : []));
}

function drawRates(now) {
  const top = Math.max(1, ...rates.map(([, rate]) => rate));
  const points = rates.map(([at, rate]) => `${(100 - (100 * (now - at)) / WINDOW_MS).toFixed(2)} ${(23 - (21 * rate) / top).toFixed(2)}`);
  const line = `M${points.join("L")}`;
  document.querySelector("#spark .line").setAttribute("d", line);
  document.querySelector("#spark .area").setAttribute("d", `${line}L100 24L${points[0].split(" ")[0]} 24Z`);
}

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) poll();
});
poll();
