// Where the time of one answer went: a bar a stage, on one time axis.
//
// The server's own record of the request is drawn when it came with the answer. Until then, and where an answer was
// stopped, what the page saw itself is: when it asked, and when tokens came.

import { duration, make } from "./net.js";

const SVG = "http://www.w3.org/2000/svg";
const ROW = 30;
const BAR = 17;
const TOP = 26; // room for the names of the two lines
const AXIS = 26;
const ROWS = { queue: "Queue", prefill: "Prefill", transfer: "Transfer", decode: "Decode" };

/** `show(record)` draws an answer; `mode(shared)` says whether one mesh does both, so that nothing is transferred. */
export function makeTimeline({ chart, note, times, legend, zoom, empty, all, start }) {
  let record = null;
  let shared = false;
  let zoomed = false;

  function draw() {
    if (!record) return;
    if (!record.done && chart.contains(document.activeElement)) return; // leave what somebody reads by keyboard alone
    const unanswered = record.outcome === "failed" && !record.count;
    for (const element of [chart, times, legend, zoom]) element.hidden = unanswered;
    empty.hidden = !unanswered;
    if (unanswered) {
      note.textContent = "This request was not answered; the chat says why.";
      note.hidden = false;
      return;
    }
    const picture = spans(record, shared);
    note.textContent = picture.source;
    note.hidden = !picture.source;
    chart.replaceChildren(svg(picture, Math.max(chart.clientWidth, 260), zoomed, shared));
    times.replaceChildren(...numbers(picture, record));
  }

  function look(to) {
    zoomed = to;
    all.setAttribute("aria-pressed", String(!to));
    start.setAttribute("aria-pressed", String(to));
    draw();
  }
  all.addEventListener("click", () => look(false));
  start.addEventListener("click", () => look(true));
  let width = 0;
  new ResizeObserver(() => {
    if (chart.clientWidth === width) return;
    width = chart.clientWidth;
    draw();
  }).observe(chart);

  return {
    show(next) {
      record = next;
      draw();
    },
    mode(one) {
      if (one === shared) return;
      shared = one;
      draw();
    },
  };
}

/** The same answer as a thin strip, for the chat. */
export function strip(record) {
  const picture = spans(record, false);
  const element = svgNode("svg", { class: "strip", viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" });
  const end = picture.end || 1;
  for (const bar of picture.bars) {
    if (bar.row === "transfer") continue;
    const x = (100 * bar.from) / end;
    element.append(svgNode("rect", { class: `bar ${bar.stage}`, x, y: 0, width: Math.max((100 * (bar.to - bar.from)) / end, 0.6), height: 6 }));
  }
  for (const [from, to] of picture.exposed) {
    element.append(svgNode("rect", { class: "exposed", x: (100 * from) / end, y: 0, width: Math.max((100 * (to - from)) / end, 0.6), height: 6 }));
  }
  return element;
}

// -- what happened

/** Bars, marks and lines in seconds since the request arrived. */
export function spans(record, shared) {
  const timings = record.timings;
  const first = record.tokens[0] ?? null;
  const shift = clockShift(record);
  const tokens = record.tokens.map((t) => t - shift);
  const now = ((record.done ? record.endedAt : performance.now()) - record.sentAt) / 1000;
  const seen = { bars: [], chunks: [], exposed: [], marks: [], tokens, ttft: tokens[0] ?? null, ttst: tokens[1] ?? null, source: "" };
  if (record.timeline?.length) return { ...seen, ...fromMoments(record.timeline, timings, tokens) };
  if (timings) return { ...seen, ...fromTimings(timings, tokens, shared) };
  const end = record.done ? (tokens.at(-1) ?? now) : now;
  seen.bars = asSeen(record.stages, first, end);
  seen.end = end;
  seen.source = record.done
    ? "As the page saw it: the server's own record comes with the end of a whole answer."
    : "As the page sees it; the server's own record comes with the end of the answer.";
  return seen;
}

/** How much later than the server the page began to count. No token arrives before it was made, neither the first nor
 * the last, so the smaller of the two differences is as near as the page can know. */
function clockShift({ tokens, timings, timeline }) {
  if (timings?.ttft_s == null || !tokens.length) return 0;
  const made = timeline?.at(-1)?.at_s ?? null;
  const shift = tokens[0] - timings.ttft_s;
  return made === null ? shift : Math.min(shift, tokens.at(-1) - made);
}

/** Bars of what the live readings said, as exact as those are. */
function asSeen(stages, first, end) {
  const names = { queued: "queue", prefilling: "prefill", offered: "transfer", decoding: "decode" };
  const steps = stages.map(({ state, at }) => ({ stage: names[state], at }));
  if (steps[0]?.stage !== "queue") steps.unshift({ stage: "queue", at: 0 });
  steps[0].at = 0;
  if (first !== null && !steps.some((step) => step.stage === "transfer" || step.stage === "decode")) {
    steps.push({ stage: "decode", at: first });
  }
  return steps.map(({ stage, at }, i) => {
    const to = Math.max(i + 1 < steps.length ? steps[i + 1].at : end, at);
    return { stage: `${stage} rough`, row: stage, from: at, to, label: `${ROWS[stage]}, about` };
  });
}

function fromMoments(moments, timings, tokens) {
  const bars = [];
  const chunks = [];
  const exposed = [];
  const marks = [];
  const open = {};
  const begin = (stage, at) => (open[stage] = at);
  const close = (stage, at) => {
    if (open[stage] === undefined) return;
    bars.push({ stage, row: stage, from: open[stage], to: at, label: ROWS[stage] });
    delete open[stage];
  };
  let prefillEnd = null;
  let handedOff = false;
  let last = 0;
  for (const { stage, at_s: at, tokens: count } of moments) {
    last = Math.max(last, at);
    if (stage === "arrived") begin("queue", at);
    else if (stage === "admitted") {
      close("queue", at);
      begin("prefill", at);
    } else if (stage === "prefill_start") marks.push({ row: "prefill", at, label: "first step begins" });
    else if (stage === "chunk") chunks.push({ at, count });
    else if (stage === "prefill_end") {
      close("prefill", at);
      prefillEnd = at;
    } else if (stage === "offered") begin("transfer", at);
    else if (stage === "transferred") marks.push({ row: "transfer", at, label: "last pages have arrived" });
    else if (stage === "accepted") {
      close("transfer", at);
      handedOff = true;
    } else if (stage === "decode_start") {
      if (handedOff && prefillEnd !== null && at > prefillEnd) exposed.push([prefillEnd, at]);
      handedOff = false;
      begin("decode", at);
    } else if (stage === "preempted") {
      for (const name of Object.keys(open)) close(name, at);
      begin("queue", at);
      marks.push({ row: "decode", at, label: `gave way to others: ${count} tokens to compute again` });
    } else if (stage === "finished" || stage === "failed") {
      for (const name of Object.keys(open)) close(name, at);
    }
  }
  for (const name of Object.keys(open)) close(name, last);
  return {
    bars,
    chunks,
    exposed,
    marks,
    ttft: timings?.ttft_s ?? tokens[0] ?? null,
    ttst: timings?.ttst_s ?? tokens[1] ?? null,
    end: Math.max(last, tokens.at(-1) ?? 0),
  };
}

function fromTimings(timings, tokens, shared) {
  const bars = [];
  const exposed = [];
  const queue = timings.queue_s ?? 0;
  const ttft = timings.ttft_s ?? queue + (timings.prefill_s ?? 0);
  bars.push({ stage: "queue", row: "queue", from: 0, to: queue, label: ROWS.queue });
  bars.push({ stage: "prefill", row: "prefill", from: queue, to: Math.max(ttft, queue), label: ROWS.prefill });
  const ready = ttft + (timings.transfer_exposed_s ?? 0);
  if (timings.transfer_s != null && !shared) {
    bars.push({ stage: "transfer", row: "transfer", from: Math.max(ready - timings.transfer_s, 0), to: ready, label: ROWS.transfer });
    if (ready > ttft) exposed.push([ttft, ready]);
  }
  const end = Math.max(ready + (timings.decode_s ?? 0), tokens.at(-1) ?? 0, ttft);
  if (end > ready) bars.push({ stage: "decode", row: "decode", from: ready, to: end, label: ROWS.decode });
  return { bars, exposed, end, ttft, ttst: timings.ttst_s ?? tokens[1] ?? null };
}

// -- drawing

function svg(picture, width, zoomed, shared) {
  const names = Object.keys(ROWS).filter((row) => !(row === "transfer" && shared));
  const left = width < 420 ? 66 : 78;
  const right = 12;
  const height = TOP + ROW * names.length + AXIS;
  const whole = Math.max(picture.end, 1e-4);
  const shown = zoomed ? Math.min(Math.max((picture.ttst ?? picture.ttft ?? whole) * 1.15, 1e-4), whole) : whole;
  const x = (t) => left + (Math.min(Math.max(t, 0), shown) / shown) * (width - left - right);
  const y = (row) => TOP + names.indexOf(row) * ROW + (ROW - BAR) / 2;
  const root = svgNode("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "Timeline of the answer" });
  const add = (kind, attributes, text) => {
    const node = svgNode(kind, attributes);
    if (text !== undefined) node.textContent = text;
    root.append(node);
    return node;
  };

  root.append(stripes());
  const step = tickStep(shown, (width - left - right) / 70);
  const unit = shown < 1.5 ? 1000 : 1;
  for (let t = 0; t <= shown * 1.0001; t += step) {
    add("line", { class: "grid", x1: x(t), x2: x(t), y1: TOP - 4, y2: height - AXIS + 4 });
    const digits = Math.max(0, -Math.floor(Math.log10(step * unit) + 1e-9));
    const last = t + step > shown * 1.0001;
    const label = (t * unit).toFixed(Math.min(digits, 3)) + (last ? (unit === 1 ? " s" : " ms") : "");
    add("text", { class: "tick", x: x(t), y: height - 8, "text-anchor": last && x(t) > width - 40 ? "end" : "middle" }, label);
  }
  for (const row of names) {
    add("text", { class: `row ${row}`, x: 0, y: y(row) + BAR - 4 }, ROWS[row]);
    add("line", { class: "base", x1: left, x2: width - right, y1: y(row) + BAR / 2, y2: y(row) + BAR / 2 });
  }
  for (const bar of picture.bars) {
    if (!names.includes(bar.row) || bar.from > shown) continue;
    const node = add("rect", {
      class: `bar ${bar.stage}`,
      x: x(bar.from),
      y: y(bar.row),
      width: Math.max(x(bar.to) - x(bar.from), 2),
      height: BAR,
      rx: 3,
      tabindex: 0,
      role: "img",
    });
    tip(node, `${bar.label}: ${duration(bar.to - bar.from)}, from ${duration(bar.from)} to ${duration(bar.to)}`);
  }
  if (names.includes("transfer")) {
    for (const [from, to] of picture.exposed) {
      if (from > shown) continue;
      const node = add("rect", { class: "exposed", x: x(from), y: y("transfer"), width: Math.max(x(to) - x(from), 2), height: BAR, tabindex: 0, role: "img" });
      tip(node, `Exposed: the answer waits ${duration(to - from)} for its pages after the first token`);
    }
  }
  for (const { at, count } of picture.chunks) {
    if (at > shown) continue;
    const node = add("rect", { class: "chunk", x: x(at) - 1, y: y("prefill") - 3, width: 2, height: BAR + 6 });
    tip(node, `Chunk of ${count} prompt tokens dispatched at ${duration(at)}`);
  }
  for (const { row, at, label } of picture.marks) {
    if (at > shown || !names.includes(row)) continue;
    const node = add("circle", { class: "mark", cx: x(at), cy: y(row) + BAR / 2, r: 3.5 });
    tip(node, `${label}: ${duration(at)}`);
  }
  const ticks = picture.tokens.filter((t) => t <= shown);
  if (ticks.length) {
    const top = y("decode");
    const path = ticks.map((t) => `M${x(t).toFixed(1)} ${top - 1}v${BAR + 2}`).join("");
    add("path", { class: `tokens${ticks.length > (width - left) / 4 ? " dense" : ""}`, d: path });
  }
  lines(picture, shown, x, width, height, add);
  return root;
}

/** The lines of first and second token; close together, their names stand on either side. */
function lines(picture, shown, x, width, height, add) {
  const { ttft, ttst } = picture;
  const line = (t, name, anchor) => {
    add("line", { class: "moment", x1: x(t), x2: x(t), y1: 16, y2: height - AXIS });
    const side = x(t) + 18 > width ? "end" : anchor;
    add("text", { class: "moment-name", x: x(t), y: 11, "text-anchor": side }, name);
  };
  const fits = (t) => t !== null && t !== undefined && t <= shown;
  const close = fits(ttst) && x(ttst) - x(ttft) < 44;
  if (fits(ttft)) line(ttft, "TTFT", close ? "end" : "middle");
  if (fits(ttst)) line(ttst, "TTST", close ? "start" : "middle");
}

function numbers(picture, record) {
  const timings = record.timings ?? {};
  const count = record.usage?.completion_tokens ?? record.count;
  const { tokens } = picture;
  // By the server's clock where it is known: several tokens may arrive in one message.
  const span = timings.decode_s != null ? (timings.transfer_exposed_s ?? 0) + timings.decode_s : tokens.at(-1) - tokens[0];
  const pace = count > 1 && Number.isFinite(span) ? span / (count - 1) : null;
  const exposed = timings.transfer_exposed_s != null ? `${duration(timings.transfer_exposed_s)} exposed` : "";
  const entries = [
    ["Queue", "Arrival to reservation", duration(timings.queue_s), "queue"],
    ["Prefill", "Reservation to first token", duration(timings.prefill_s), "prefill"],
    ["Transfer", "First pages offered to all accepted; exposed is what the answer waits for", duration(timings.transfer_s), "transfer", exposed],
    ["Decode", "Ready to decode to last token", duration(timings.decode_s), "decode"],
    ["TTFT", "Time to first token, from arrival", duration(picture.ttft), ""],
    ["TTST", "Time to second token: with the hand-off and the first decode step", duration(picture.ttst), ""],
    ["TPOT", "Time per output token after the first", duration(pace), ""],
    ["Tokens", "Of the prompt and of the answer", record.usage ? `${record.usage.prompt_tokens} in, ${count} out` : `${count} out`, ""],
  ];
  return entries.map(([name, meaning, value, stage, more]) => {
    const box = make("div", stage);
    const term = make("dt", "", name);
    term.title = meaning;
    const number = make("dd", "", value);
    if (more) number.append(" ", make("small", "", more));
    box.append(term, number);
    return box;
  });
}

function stripes() {
  const defs = svgNode("defs", {});
  const pattern = svgNode("pattern", { id: "stripes", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" });
  pattern.append(svgNode("rect", { class: "stripe-ground", width: 6, height: 6 }), svgNode("rect", { class: "stripe", width: 3, height: 6 }));
  defs.append(pattern);
  return defs;
}

function tip(node, words) {
  node.dataset.tip = words;
  node.setAttribute("aria-label", words);
}

/** The roundest step of 1, 2 or 5 times a power of ten that makes at most `most` ticks. */
function tickStep(span, most) {
  const rough = span / Math.max(most, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  return [1, 2, 5, 10].map((n) => n * power).find((step) => step >= rough) ?? 10 * power;
}

function svgNode(kind, attributes) {
  const node = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}
