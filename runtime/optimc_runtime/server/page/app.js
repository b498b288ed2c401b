"use strict";
// Chat with the served model, and what the server is doing. What a server says becomes text of the page, never markup.
// The API key lives in its field alone: it is gone with the page.

const POLL_MS = 1000;
const HISTORY = 60; // polls shown in the line

const byId = (id) => document.getElementById(id);
const show = (id, text) => { byId(id).textContent = text; };
const count = (number) => number.toLocaleString("en");
const percent = (share) => `${(100 * share).toFixed(1)} %`;

const turns = []; // {role, content}: the conversation so far
let answering = null; // AbortController of the answer that is being written
let hasChat = true; // whether the model has a chat template

function notify(message) {
  show("notice", message);
  byId("notice").hidden = !message;
}

function headers() {
  const key = byId("key").value;
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Return what a response that is no success says about itself. */
async function reason(response) {
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? response.statusText;
  const wait = response.headers.get("Retry-After");
  return `${response.status}: ${message}${wait ? ` (try again in ${wait} s)` : ""}`;
}

/** Yield the object of each server-sent event; throw if the stream ends before it says so. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("the answer was cut off");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      if (event === "data: [DONE]") return;
      yield JSON.parse(event.slice("data: ".length));
    }
  }
}

/** How fast one answer comes. Times are milliseconds of performance.now(). */
class Pace {
  constructor() {
    this.sent = performance.now();
    this.first = this.last = null;
    this.tokens = 0;
    this.usage = null;
  }

  /** Take one chunk; return its text. */
  take(chunk) {
    let text = "";
    for (const choice of chunk.choices) {
      const piece = choice.delta?.content ?? choice.text ?? "";
      const tokens = choice.token_ids?.length ?? 0;
      if (piece || tokens) {
        this.last = performance.now();
        this.first ??= this.last;
      }
      this.tokens += tokens;
      text += piece;
    }
    if (chunk.usage) {
      this.usage = chunk.usage;
      this.tokens = chunk.usage.completion_tokens;
    }
    this.show();
    return text;
  }

  show() {
    show("tokens", this.first === null ? "–" : count(this.tokens));
    show("ttft", this.first === null ? "–" : `${(this.first - this.sent).toFixed(0)} ms`);
    const spent = this.last - this.first;
    const timed = this.tokens > 1 && spent > 0;
    show("tpot", timed ? `${(spent / (this.tokens - 1)).toFixed(1)} ms` : "–");
    show("rate", timed ? ((1000 * (this.tokens - 1)) / spent).toFixed(1) : "–");
    const cached = this.usage?.prompt_tokens_details.cached_tokens;
    show("hits", this.usage ? `${count(cached)} of ${count(this.usage.prompt_tokens)}` : "–");
  }
}

function addTurn(role, text) {
  const turn = document.createElement("li");
  turn.className = role;
  turn.textContent = text;
  byId("turns").append(turn);
  turn.scrollIntoView({ block: "end" });
  return turn;
}

async function ask(question) {
  addTurn("user", question);
  const shown = addTurn("assistant", "");
  // Without a chat template there is no conversation: the model goes on with the text it is given.
  if (!hasChat) turns.length = 0;
  turns.push({ role: "user", content: question });
  const body = {
    stream: true,
    stream_options: { include_usage: true },
    return_token_ids: true,
    temperature: Number(byId("temperature").value),
    max_tokens: Number(byId("max-tokens").value),
    ...(hasChat ? { messages: turns } : { prompt: question }),
  };
  answering = new AbortController();
  const pace = new Pace();
  pace.show();
  try {
    const response = await fetch(hasChat ? "/v1/chat/completions" : "/v1/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify(body),
      signal: answering.signal,
    });
    if (!response.ok) throw new Error(await reason(response));
    for await (const chunk of eventsOf(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      shown.append(pace.take(chunk)); // a string: append makes it text
      shown.scrollIntoView({ block: "end" });
    }
  } catch (error) {
    shown.classList.add("cut");
    if (error.name !== "AbortError") notify(error.message);
  } finally {
    answering = null;
    if (shown.textContent) turns.push({ role: "assistant", content: shown.textContent });
    else turns.pop(); // a question without an answer would stand before the next one
  }
}

async function submit(event) {
  event.preventDefault();
  const question = byId("prompt").value;
  if (answering || !question.trim()) return;
  notify("");
  byId("prompt").value = "";
  byId("send").disabled = byId("clear").disabled = true;
  byId("stop").disabled = false;
  try {
    await ask(question);
  } finally {
    byId("send").disabled = byId("clear").disabled = false;
    byId("stop").disabled = true;
  }
}

const rates = []; // output tokens per second between polls
let before = null; // the last poll's answer

function drawRates() {
  const top = Math.max(1, ...rates);
  const points = rates.map((rate, at) => `${HISTORY - rates.length + at},${(20 - (19 * rate) / top).toFixed(2)}`);
  byId("rate-line").setAttribute("points", points.join(" "));
}

function showTenants(tenants) {
  const names = Object.keys(tenants).filter((name) => name);
  byId("tenants").hidden = names.length === 0;
  byId("tenants").tBodies[0].replaceChildren(...names.map((name) => {
    const { running, waiting, prompt_tokens: prompts, output_tokens: outputs } = tenants[name];
    const row = document.createElement("tr");
    for (const cell of [name, ...[running, waiting, prompts, outputs].map(count)]) {
      row.insertCell().textContent = cell;
    }
    return row;
  }));
}

function showServer(now) {
  hasChat = now.has_chat;
  const how = hasChat ? "" : " · no chat template: it goes on with your text, without what came before";
  show("model", `${now.model} · ${count(now.max_model_len)} tokens at most${how}`);
  for (const name of ["running", "waiting", "refused", "preemptions"]) show(name, count(now[name]));
  show("waiting-tokens", count(now.waiting_tokens));
  show("kv", `${percent(now.kv_usage)} of ${count(now.blocks_total)} blocks`);
  byId("kv-meter").value = now.kv_usage;
  show("blocks", `${count(now.cached_blocks)}, ${count(now.pinned_blocks)} pinned`);
  show("hit-rate", percent(now.prefix_hit_rate));
  showTenants(now.tenants);
  // Figures that fall are those of a server that was started again.
  if (before && now.time_s > before.time_s && now.output_tokens >= before.output_tokens) {
    const rate = (now.output_tokens - before.output_tokens) / (now.time_s - before.time_s);
    rates.push(rate);
    if (rates.length > HISTORY) rates.shift();
    show("server-rate", rate.toFixed(1));
    drawRates();
  }
  before = now;
}

async function poll() {
  try {
    if (!document.hidden) {
      const response = await fetch("/dashboard.json", { headers: headers() });
      if (response.ok) showServer(await response.json());
      else show("model", response.status === 401 ? "this server wants an API key" : await reason(response));
    }
  } catch {
    show("model", "the server does not answer");
  }
  setTimeout(poll, POLL_MS);
}

byId("ask").addEventListener("submit", submit);
byId("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  byId("ask").requestSubmit();
});
byId("stop").addEventListener("click", () => answering?.abort());
byId("clear").addEventListener("click", () => {
  turns.length = 0;
  byId("turns").replaceChildren();
});
poll();
