// The page: live readings to the picture, answers to the timeline, the key, and the tooltip.

import { makeChat } from "./chat.js";
import { ask, events, getKey, setKey } from "./net.js";
import { makePicture } from "./picture.js";
import { makeTimeline } from "./timeline.js";

const at = (id) => document.getElementById(id);
const HIDDEN_S = 30; // a page that nobody sees stops watching after so long
const SILENT_S = 40; // the server says something every 15 s; after so long without a word it is gone
const RETRY_S = [1, 2, 4, 5];

const picture = makePicture(at("picture"), at("picture-note"), at("totals"));
const timeline = makeTimeline({
  chart: at("timeline"),
  note: at("timeline-note"),
  times: at("times"),
  legend: at("timeline-legend"),
  zoom: at("zoom"),
  empty: at("stages"),
  all: at("zoom-all"),
  start: at("zoom-start"),
});
const chat = makeChat({
  show: (record) => timeline.show(record),
  mine: (name) => picture.mine(name),
  needKey: () => openKey(true),
});

// -- the live readings

let watching = null; // the AbortController of the connection
let again = null; // the timer of the next try
let tries = 0;

async function watch() {
  clearTimeout(again);
  watching?.abort();
  const mine = new AbortController();
  watching = mine;
  let silence = null;
  const alive = () => {
    clearTimeout(silence);
    silence = setTimeout(() => {
      if (watching !== mine) return;
      lost("The server has gone silent.");
      mine.abort();
    }, SILENT_S * 1000);
  };
  try {
    alive();
    const response = await ask("live", { signal: mine.signal });
    for await (const data of events(response, alive)) {
      tries = 0;
      const reading = JSON.parse(data);
      shown(reading);
    }
    if (watching === mine) lost("The server has ended the connection.");
  } catch (error) {
    if (watching !== mine || error.name === "AbortError") return;
    if (error.status === 401) {
      state("locked", "key needed");
      picture.say("This server asks for an API key. Enter it above to see the meshes.");
      openKey(false);
      return;
    }
    lost(error.message, error.retryAfter);
  } finally {
    clearTimeout(silence);
  }
}

function lost(message, afterS = null) {
  state("lost", "no connection");
  picture.say(`${message} This page tries again by itself.`);
  again = setTimeout(watch, 1000 * (afterS ?? RETRY_S[Math.min(tries++, RETRY_S.length - 1)]));
}

function shown(reading) {
  state(reading.state, reading.state);
  const model = reading.model;
  at("model").textContent = model ? [model.name, model.mode].filter(Boolean).join(" · ") : "";
  document.title = model ? `${model.name} · jaxpd` : "jaxpd";
  if (model) chat.ready(model.name);
  chat.watch(reading);
  picture.draw(reading);
  const shared = reading.pools.some((pool) => pool.role === "mixed");
  timeline.mode(shared);
  document.body.classList.toggle("shared", shared);
  if (shared) at("what").textContent = "This server prefills and decodes on one mesh. Watch its pages fill.";
}

function state(name, words) {
  const pill = at("state");
  if (pill.dataset.state !== name) pill.dataset.state = name;
  if (pill.textContent !== words) pill.textContent = words; // a status is read aloud when it changes
}

let hiddenTimer = null;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiddenTimer);
  if (document.hidden) {
    hiddenTimer = setTimeout(() => {
      clearTimeout(again);
      watching?.abort();
      watching = null;
    }, HIDDEN_S * 1000);
  } else if (watching === null) {
    watch();
  }
});

// -- the key

function openKey(focus) {
  at("key-form").hidden = false;
  at("key-button").setAttribute("aria-expanded", "true");
  if (focus) at("key").focus();
}

function closeKey() {
  at("key-form").hidden = true;
  at("key-button").setAttribute("aria-expanded", "false");
}

at("key-button").addEventListener("click", () => (at("key-form").hidden ? openKey(true) : closeKey()));
at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(at("key").value.trim());
  at("key").value = "";
  closeKey();
  chat.forgetModel();
  at("prompt").focus();
  watch();
});
at("key-forget").addEventListener("click", () => {
  setKey("");
  at("key").value = "";
  chat.forgetModel();
  watch();
});
if (getKey()) at("key").placeholder = "a key is in use";

// -- one tooltip for everything with data-tip, by mouse and by keyboard

const tip = at("tip");
function showTip(event) {
  const owner = event.target.closest?.("[data-tip]");
  if (!owner) {
    tip.hidden = true;
    return;
  }
  tip.textContent = owner.dataset.tip;
  tip.hidden = false;
  const box = owner.getBoundingClientRect();
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.min(Math.max(box.left + box.width / 2 - width / 2, 8), document.documentElement.clientWidth - width - 8);
  const above = box.top - height - 8;
  tip.style.left = `${left}px`;
  tip.style.top = `${above < 8 ? box.bottom + 8 : above}px`;
}
for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, showTip);
for (const kind of ["scroll", "focusout", "pointerdown"]) {
  document.addEventListener(kind, () => (tip.hidden = true), { capture: true, passive: true });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") tip.hidden = true;
});

watch();
