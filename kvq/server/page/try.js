// A prompt to try: the answer is streamed, as to any other client.

import { count, element, seconds } from "/page/words.js";

const form = document.querySelector("#try");
const field = (id) => document.querySelector(`#${id}`);
const output = field("answer"), outcome = field("outcome"), send = field("send"), stop = field("stop");
let model = "", running = null;

export function setModel(name, needsKey) {
  model = name;
  field("key-row").hidden = !needsKey;
  field("key").required = needsKey;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (!running) ask();
});
form.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
stop.addEventListener("click", () => running?.abort());

async function ask() {
  running = new AbortController();
  busy(true);
  const began = performance.now();
  const seen = { first: null, usage: null, text: element("span") };
  start(seen.text);
  try {
    for await (const chunk of chunks(await request())) take(chunk, seen, began);
    tell(summary(seen, began), false);
  } catch (error) {
    if (error.name === "AbortError") tell("Stopped.", false);
    else tell(error instanceof TypeError ? "The server can't be reached." : error.message, true);
  }
  running = null;
  busy(false);
}

async function request() {
  const isChat = form.elements.kind.value === "chat";
  const prompt = field("try-prompt").value;
  const body = {
    model,
    max_tokens: Number(field("max-tokens").value),
    temperature: Number(field("temperature").value),
    stream: true,
    stream_options: { include_usage: true },
    ...(isChat ? { messages: [{ role: "user", content: prompt }] } : { prompt }),
  };
  const headers = { "Content-Type": "application/json" };
  if (field("key").value) headers.Authorization = `Bearer ${field("key").value}`;
  const answer = await fetch(isChat ? "/v1/chat/completions" : "/v1/completions", {
    method: "POST", headers, body: JSON.stringify(body), signal: running.signal, credentials: "omit",
  });
  if (!answer.ok) throw new Error((await answer.json().catch(() => null))?.error?.message ?? `The server answered ${answer.status}.`);
  return answer;
}

// Yields the objects of a stream of server-sent events.
async function* chunks(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The answer broke off.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

function take(chunk, seen, began) {
  if (chunk.error) throw new Error(chunk.error.message);
  seen.usage = chunk.usage ?? seen.usage;
  const choice = chunk.choices[0];
  const text = choice?.text ?? choice?.delta?.content ?? "";
  if (!text) return;
  seen.first ??= performance.now() - began;
  const follows = output.scrollHeight - output.scrollTop - output.clientHeight < 24;
  seen.text.append(text);
  if (follows) output.scrollTop = output.scrollHeight;
}

function start(text) {
  const isChat = form.elements.kind.value === "chat";
  const given = element("span", isChat ? "" : field("try-prompt").value);
  given.className = "given";
  text.id = "text";
  output.replaceChildren(given, text);
}

function summary({ first, usage }, began) {
  const took = (performance.now() - began) / 1000;
  if (!usage) return "";
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const begun = first === null ? "" : `, the first after ${seconds(first / 1000)}`;
  return `${count(usage.completion_tokens)} tokens in ${seconds(took)}${begun}. ${count(cached)} of ${count(usage.prompt_tokens)} prompt tokens were cached.`;
}

function tell(text, isBad) {
  outcome.textContent = text;
  outcome.classList.toggle("bad", isBad);
}

function busy(is) {
  output.setAttribute("aria-busy", String(is));
  stop.hidden = !is;
  send.hidden = is;
  if (is) {
    tell("", false);
    if (document.activeElement === document.body || document.activeElement === send) stop.focus();
  } else if (document.activeElement === document.body || document.activeElement === stop) send.focus();
}
