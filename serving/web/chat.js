// The chat: what was said, one answer at a time as it streams, and a record of each for the timeline.
//
//   idle -- send --> waiting -- first token --> streaming -- [DONE] | Stop | error --> idle

import { ServerError, ask, duration, events, getKey, make, newId, opaque, wordsOf } from "./net.js";
import { strip } from "./timeline.js";

const at = (id) => document.getElementById(id);
const REASONS = { length: "reached max tokens", abort: "ended by the server", content_filter: "filtered" };

/** What to tell a person about an error; most of it is the server's own message. */
function inWords(error) {
  if (error.status === 401) {
    return getKey()
      ? "The server does not know this API key. Enter another one above."
      : "This server asks for an API key. Enter it above.";
  }
  if (!error.retryAfter || /try again/i.test(error.message)) return error.message;
  return `${error.message}${/[.!?]$/.test(error.message) ? "" : "."} Try again in ${error.retryAfter} s.`;
}

/** What is known of an answer. Times of `tokens` and `stages` are seconds since it was sent. */
function newRecord() {
  return {
    sentAt: performance.now(),
    endedAt: null,
    ids: new Set(),
    names: new Set(),
    tokens: [],
    count: 0,
    stages: [],
    usage: null,
    timings: null,
    timeline: null,
    done: false,
    outcome: null,
  };
}

/** `show(record)` at every change of an answer, `mine(name)` with what /live calls it, `needKey()` on a 401. */
export function makeChat({ show, mine, needKey }) {
  const log = at("log");
  const prompt = at("prompt");
  const welcome = at("welcome");
  let model = null; // the entry of /v1/models
  let turns = []; // what the model is told again each time
  let running = null; // the AbortController of the answer under way
  let current = null; // its record
  let shown = null; // the record that the timeline shows

  async function getModel(signal) {
    if (model === null) {
      const listed = await (await ask("v1/models", { signal })).json();
      if (!listed.data?.length) throw new ServerError("The server lists no model.");
      model = listed.data[0];
      const hint = at("mode-hint");
      hint.hidden = model.has_chat_template !== false;
      hint.textContent = hint.hidden
        ? ""
        : "This model has no chat template: it goes on with your text, and each message stands alone.";
    }
    return model;
  }

  // -- one answer

  async function send() {
    const text = prompt.value;
    if (running || !text.trim()) return;
    welcome.hidden = true;
    prompt.value = "";
    fit();
    const question = addTurn("user", "You");
    question.body.textContent = text;
    const answer = addTurn("assistant", "Model");
    const record = newRecord();
    const control = new AbortController();
    begin(control, answer, record);
    select(answer, record);
    const told = turns; // a new conversation begins another list
    const growing = setInterval(() => refresh(record), 100);
    try {
      const known = await getModel(control.signal);
      const chatting = known.has_chat_template !== false;
      const body = { ...request(known, chatting, text), ...options() };
      const id = newId();
      claim(id, record);
      record.sentAt = performance.now();
      const response = await ask(chatting ? "v1/chat/completions" : "v1/completions", {
        body,
        signal: control.signal,
        headers: { "x-request-id": id },
      });
      record.outcome = await read(response, answer, record);
      if (chatting) told.push({ role: "user", content: text }, { role: "assistant", content: answer.text.data });
      note(answer, answer.text.data || answer.thought ? REASONS[record.outcome] : "no text");
      say(`The answer is complete: ${record.count} tokens.`);
    } catch (error) {
      if (error.name === "AbortError") {
        record.outcome = "stopped";
        if (answer.text.data) told.push({ role: "user", content: text }, { role: "assistant", content: answer.text.data });
        note(answer, "stopped by you");
        say("Stopped.");
      } else {
        record.outcome = "failed";
        fail(answer, error, text);
      }
    } finally {
      clearInterval(growing);
      record.done = true;
      record.endedAt = performance.now();
      end(answer, record);
    }
  }

  function request(known, chatting, text) {
    const common = {
      model: known.id,
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      timings: true,
    };
    if (!chatting) return { ...common, prompt: text };
    const system = at("system").value.trim();
    const first = system ? [{ role: "system", content: system }] : [];
    return { ...common, messages: [...first, ...turns, { role: "user", content: text }] };
  }

  function options() {
    const chosen = {};
    for (const [field, id] of [["temperature", "temperature"], ["max_tokens", "max-tokens"], ["seed", "seed"]]) {
      const value = at(id).value.trim();
      if (value !== "") chosen[field] = Number(value);
    }
    return chosen;
  }

  /** Reads the stream to its end. Returns the finish reason. */
  async function read(response, answer, record) {
    claim(response.headers.get("x-request-id"), record);
    let reason = null;
    let complete = false;
    for await (const data of events(response)) {
      if (data === "[DONE]") {
        complete = true;
        continue;
      }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(wordsOf(chunk.error) ?? "The answer failed.", { status: 500 });
      claim(chunk.id?.slice(chunk.id.indexOf("-") + 1), record);
      record.usage = chunk.usage ?? record.usage;
      const choice = chunk.choices?.[0];
      if (!choice) continue;
      record.timings = choice.timings ?? record.timings;
      record.timeline = choice.timeline ?? record.timeline;
      const thought = choice.delta?.reasoning_content;
      const text = choice.delta?.content ?? choice.text;
      if (thought) addThought(answer, thought);
      if (text) addText(answer, text);
      count(record, chunk.usage?.completion_tokens, Boolean(thought || text));
      reason = choice.finish_reason ?? reason;
    }
    if (!complete && reason === null) throw new ServerError("The connection to the server was lost.");
    return reason ?? "stop";
  }

  /** Whatever the server calls a request of this page: its dot and its pages are marked in the picture. */
  function claim(id, record) {
    if (!id || record.ids.has(id)) return;
    record.ids.add(id);
    opaque(id).then((name) => {
      if (name === null) return;
      record.names.add(name);
      mine(name);
    });
  }

  /** Notes when tokens came. Where the server counts along, a message may hold several or none. */
  function count(record, total, hasText) {
    const upTo = Number.isInteger(total) ? total : record.count + (hasText ? 1 : 0);
    const now = (performance.now() - record.sentAt) / 1000;
    for (; record.count < upTo; record.count++) record.tokens.push(now);
  }

  // -- what stands in the log

  function addTurn(role, name) {
    const article = make("article", `turn ${role}`);
    article.append(make("h3", "unseen", name));
    const body = make("div", "body");
    article.append(body);
    log.append(article);
    log.scrollTop = log.scrollHeight;
    return { article, body, text: null, thought: null };
  }

  function begin(control, answer, record) {
    running = control;
    current = record;
    answer.text = document.createTextNode("");
    answer.body.append(answer.text);
    answer.article.setAttribute("aria-busy", "true"); // read aloud when it is whole, not word by word
    answer.article.classList.add("running");
    at("send").hidden = true;
    at("stop").hidden = false;
    say("The model is answering.");
  }

  function end(answer, record) {
    running = null;
    answer.article.removeAttribute("aria-busy");
    answer.article.classList.remove("running");
    const stopHadFocus = document.activeElement === at("stop");
    at("send").hidden = false;
    at("stop").hidden = true;
    if (stopHadFocus) prompt.focus();
    if (record.outcome !== "failed" || record.count) addSummary(answer, record);
    refresh(record);
  }

  function addText(answer, text) {
    const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    answer.text.appendData(text);
    if (follow) log.scrollTop = log.scrollHeight;
  }

  function addThought(answer, text) {
    if (!answer.thought) {
      const details = make("details", "thought");
      const inner = make("div", "thought-text");
      answer.thought = document.createTextNode("");
      inner.append(answer.thought);
      details.append(make("summary", "", "Reasoning"), inner);
      answer.article.insertBefore(details, answer.body);
    }
    answer.thought.appendData(text);
  }

  function note(answer, words) {
    if (words) answer.article.append(make("p", "outcome", words));
  }

  function fail(answer, error, text) {
    const box = make("p", "error", inWords(error));
    box.setAttribute("role", "alert");
    answer.article.append(box);
    answer.article.classList.add("failed");
    if (!answer.text.data) answer.body.remove();
    if (!prompt.value) prompt.value = text; // nobody should have to type it again
    fit();
    log.scrollTop = log.scrollHeight;
    if (error.status === 401) needKey();
  }

  function addSummary(answer, record) {
    const button = make("button", "summary");
    button.type = "button";
    const first = record.timings?.ttft_s ?? record.tokens[0] ?? null;
    const rate = record.count > 1 ? (record.count - 1) / (record.tokens.at(-1) - record.tokens[0]) : null;
    const words = [`first token ${duration(first)}`, `${record.count} ${record.count === 1 ? "token" : "tokens"}`];
    if (rate !== null && Number.isFinite(rate)) words.push(`${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`);
    button.append(strip(record), make("span", "", words.join(" · ")));
    button.dataset.tip = "Show the timeline of this answer";
    button.addEventListener("click", () => select(answer, record));
    answer.article.append(button);
    answer.summary = button;
    if (answer.article.classList.contains("selected")) button.setAttribute("aria-pressed", "true");
    log.scrollTop = log.scrollHeight;
  }

  function select(answer, record) {
    for (const other of log.querySelectorAll(".selected")) {
      other.classList.remove("selected");
      other.querySelector(".summary")?.setAttribute("aria-pressed", "false");
    }
    answer.article.classList.add("selected");
    answer.summary?.setAttribute("aria-pressed", "true");
    shown = record;
    show(record);
  }

  /** Shows what is new of an answer, unless somebody looks at another one. */
  function refresh(record) {
    if (record === shown) show(record);
  }

  function say(words) {
    at("status").textContent = words;
  }

  function fit() {
    prompt.style.height = "auto";
    prompt.style.height = `${Math.min(prompt.scrollHeight + 2, 180)}px`;
  }

  // -- keys and buttons

  at("form").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  prompt.addEventListener("input", fit);
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running) running.abort();
  });
  at("stop").addEventListener("click", () => running?.abort());
  at("new").addEventListener("click", () => {
    running?.abort();
    turns = [];
    for (const article of log.querySelectorAll(".turn")) article.remove();
    welcome.hidden = false;
    say("A new conversation.");
    prompt.focus();
  });
  for (const example of log.querySelectorAll(".example")) {
    example.addEventListener("click", () => {
      prompt.value = example.textContent;
      prompt.focus();
      fit();
    });
  }

  return {
    /** A server with this model is there: learn what it can do, before the first question. */
    ready(name) {
      if (model !== null && model.id !== name) model = null;
      if (model === null && !this.asked) {
        this.asked = true;
        getModel().catch(() => {}); // the first question asks again, and says what is wrong
      }
    },
    /** What a reading says of the answer under way, until the server's own record is there. */
    watch(reading) {
      if (!running) return;
      const own = reading.sequences.find((seq) => current.names.has(seq.id));
      if (!own || current.stages.at(-1)?.state === own.state) return;
      current.stages.push({ state: own.state, at: (performance.now() - current.sentAt) / 1000 });
    },
    forgetModel() {
      model = null;
      this.asked = false;
    },
    asked: false,
  };
}
