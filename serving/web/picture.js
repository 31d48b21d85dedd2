// The live picture: queue -> prefill mesh -> transfer -> decode mesh, drawn from the readings of /live.
//
// Each mesh is a card: a row of devices (tensor-parallel) for each replica (data axis), its page pool as squares, and a
// dot for every sequence it has. A dot that changes its stage walks there once; nothing else moves by itself.

import { make } from "./net.js";

const MAX_CELLS = 192; // squares in one card; each stands for several pages where there are more
const MAX_CHIPS = 8;
const MAX_QUEUED = 18; // dots in the queue; the others are counted
const STAGE = { queued: "queue", prefilling: "prefill", offered: "transfer", decoding: "decode" };
const ORDER = ["queue", "prefill", "transfer", "decode"];
const TITLES = { prefill: "Prefill", decode: "Decode", mixed: "Prefill + decode" };
const STILL = matchMedia("(prefers-reduced-motion: reduce)");

/** `draw(reading)` shows a reading, `say(words)` says why there is none, `mine(name)` marks a request as one's own. */
export function makePicture(root, note, totals) {
  const own = new Set();
  const dots = new Map(); // sequence -> { element, stage }
  let built = ""; // what the cards were built for
  let parts = null;

  function say(words) {
    note.textContent = words;
    note.hidden = false;
    totals.textContent = "";
    root.classList.add("stale");
  }

  function draw(reading) {
    if (!reading.model || !reading.pools.length) {
      root.hidden = true;
      say(reading.state === "starting"
        ? "The server is starting: it loads weights and compiles programs. The meshes appear here when it is ready."
        : "The server is shutting down.");
      return;
    }
    note.hidden = reading.state !== "draining";
    if (!note.hidden) note.textContent = "The server is shutting down: running answers go on, new ones are refused.";
    root.hidden = false;
    root.classList.remove("stale");
    const shape = JSON.stringify(reading.pools.map((p) => [p.role, p.mesh, p.replicas.map((r) => r.total)]));
    if (shape !== built) {
      built = shape;
      dots.clear();
      parts = build(root, reading);
    }
    const { requests } = reading;
    for (const [state, stage] of Object.entries(STAGE)) {
      for (const element of parts.counts[stage] ?? []) setText(element, String(requests[state] ?? 0));
    }
    const running = Object.values(requests).reduce((sum, n) => sum + n, 0) - requests.queued;
    setText(totals, `${running} running · ${requests.queued} queued`);
    if (parts.staged) setText(parts.staged, reading.staging_bytes ? `${bytes(reading.staging_bytes)} staged` : "");
    drawPages(parts, reading, own);
    const crossing = reading.sequences.some((s) => s.holds.length > 1 && s.state !== "decoding");
    if (crossing || reading.staging_bytes) flash(parts.wire);
    drawDots(reading);
  }

  function drawDots(reading) {
    const moving = !STILL.matches && !document.hidden;
    const wanted = new Map();
    let queued = 0;
    for (const seq of reading.sequences) {
      if (seq.state === "queued" && ++queued > MAX_QUEUED) continue;
      wanted.set(nameOf(seq), seq);
    }
    const more = reading.requests.queued - Math.min(queued, MAX_QUEUED);
    parts.more.hidden = more <= 0;
    setText(parts.more, `+${more}`);

    const before = new Map();
    if (moving) for (const [name, dot] of dots) before.set(name, dot.element.getBoundingClientRect());
    for (const [name, dot] of dots) {
      if (wanted.has(name)) continue;
      dots.delete(name);
      leave(dot.element, moving);
    }
    const arrivals = [];
    for (const [name, seq] of wanted) {
      const stage = STAGE[seq.state];
      let dot = dots.get(name);
      const from = dot?.stage ?? null;
      if (!dot) {
        dot = { element: make("span", "dot"), stage };
        dot.element.setAttribute("role", "img");
        dots.set(name, dot);
      }
      paint(dot.element, seq, stage, own.has(seq.id));
      const lane = laneOf(parts, seq, stage);
      if (dot.element.parentNode !== lane) lane.append(dot.element);
      arrivals.push({ name, dot, from, stage });
      dot.stage = stage;
    }
    if (!moving) return;
    for (const { name, dot, from, stage } of arrivals) walk(dot.element, before.get(name), from, stage);
  }

  /** Moves a dot from where it was to where it is now, by way of the stages between. */
  function walk(element, start, from, to) {
    const end = element.getBoundingClientRect();
    const offset = (box) => [box.left + box.width / 2 - end.left - end.width / 2, box.top + box.height / 2 - end.top - end.height / 2];
    const first = from === null ? "queue" : from;
    const between = ORDER.slice(ORDER.indexOf(first) + 1, Math.max(ORDER.indexOf(to), 0)).filter((s) => parts.lanes[s]);
    const origin = start ?? parts.lanes.queue[0].getBoundingClientRect();
    const points = [offset(origin), ...between.map((s) => offset(parts.lanes[s][0].getBoundingClientRect())), [0, 0]];
    if (between.includes("transfer") || to === "transfer") flash(parts.wire);
    if (points.length === 2 && Math.hypot(...points[0]) < 1) {
      if (from === null) element.animate([{ opacity: 0 }, { opacity: 1 }], { duration: 250 });
      return;
    }
    const frames = points.map(([x, y], i) => ({
      transform: `translate(${x}px, ${y}px)`,
      opacity: from === null && i === 0 ? 0 : 1,
    }));
    element.animate(frames, { duration: 350 + 200 * between.length, easing: "cubic-bezier(0.3, 0.7, 0.3, 1)" });
  }

  return { draw, say, mine: (name) => own.add(name) };
}

// -- building the cards

function build(root, reading) {
  root.replaceChildren();
  const parts = { lanes: {}, counts: {}, pools: [], wire: null, staged: null, more: make("span", "more") };
  const shared = reading.pools.some((pool) => pool.role === "mixed");
  root.classList.toggle("shared", shared);
  const queue = stage("queue", "Queue", parts);
  queue.lane.append(parts.more);
  root.append(queue.element);
  const column = (role) => {
    const element = make("div", `column ${role}`);
    reading.pools.forEach((pool, i) => {
      if (pool.role === role) element.append(card(pool, i, parts, reading));
    });
    return element;
  };
  if (shared) {
    root.append(make("div", "arrow"), column("mixed"));
    return parts;
  }
  const transfer = stage("transfer", "Transfer", parts);
  parts.wire = make("div", "wire");
  parts.staged = make("p", "hint staged");
  transfer.element.append(parts.wire, parts.staged);
  root.append(make("div", "arrow"), column("prefill"), transfer.element, column("decode"));
  return parts;
}

function stage(name, title, parts) {
  const element = make("section", `stage ${name}`);
  const lane = make("div", "lane");
  element.append(heading(name, title, parts), lane);
  parts.lanes[name] = [lane];
  return { element, lane };
}

function heading(name, title, parts) {
  const element = make("h3", "", title);
  const count = make("b", "count", "0");
  element.append(" ", count);
  (parts.counts[name] ??= []).push(count);
  return element;
}

function card(pool, index, parts, reading) {
  const element = make("section", `mesh ${pool.role}`);
  const several = reading.pools.filter((other) => other.role === pool.role).length > 1;
  const title = TITLES[pool.role] + (several ? ` ${pool.pool}` : "");
  let head;
  let count = null;
  if (pool.role === "mixed") {
    head = make("h3", "", "Prefill ");
    const [prefill, decode] = [make("b", "count prefill", "0"), make("b", "count decode", "0")];
    head.append(prefill, " + decode ", decode);
    (parts.counts.prefill ??= []).push(prefill);
    (parts.counts.decode ??= []).push(decode);
  } else if (several) {
    head = make("h3", "", title);
    count = make("b", "count", "0"); // how many are in each pool, the readings say by its slots
    head.append(" ", count);
  } else {
    head = heading(pool.role, title, parts);
  }
  const badge = make("span", "badge", pool.mesh.replace("x", "×"));
  badge.dataset.tip = `${pool.tp} tensor-parallel × ${pool.dp} data`;
  const top = make("div", "mesh-head");
  top.append(head, badge);
  element.append(top);
  const cells = Math.max(Math.floor(MAX_CELLS / pool.dp), 24);
  const replicas = pool.replicas.map((replica, r) => {
    const made = replicaRow(pool, replica, r, cells);
    element.append(made.element);
    for (const name of pool.role === "mixed" ? ["prefill", "decode"] : [pool.role]) {
      (parts.lanes[name] ??= []).push(made.lane);
    }
    return made;
  });
  if (replicas[0]?.each > 1) element.append(make("p", "hint", `a square is ${replicas[0].each} pages`));
  parts.pools[index] = { pool, replicas, count };
  return element;
}

function replicaRow(pool, replica, r, most) {
  const element = make("div", "replica");
  element.tabIndex = 0;
  element.setAttribute("role", "group");
  const chips = make("div", "chips");
  chips.setAttribute("aria-hidden", "true");
  for (let i = 0; i < Math.min(pool.tp, MAX_CHIPS); i++) chips.append(make("i", "chip"));
  if (pool.tp > 4) chips.classList.add("small");
  if (pool.tp > MAX_CHIPS) chips.append(make("span", "hint", `… ${pool.tp}`));
  const lane = make("div", "lane");
  const line = make("div", "line");
  line.append(chips, lane);
  const each = Math.max(Math.ceil(replica.total / most), 1);
  const cells = Array.from({ length: Math.ceil(replica.total / each) }, () => make("i", "cell free"));
  const grid = make("div", "pages");
  const all = cells.length * pool.dp;
  grid.style.setProperty("--cell", `${all > 128 ? 8 : all > 48 ? 10 : 13}px`);
  grid.setAttribute("aria-hidden", "true");
  grid.append(...cells);
  const caption = make("p", "hint caption");
  element.append(line, grid, caption);
  return { element, chips, lane, cells, caption, each, owner: new Array(cells.length).fill(null) };
}

// -- pages

/** Gives every sequence squares of its own in each replica, the same ones for as long as it has pages there. */
function drawPages(parts, reading, own) {
  const held = new Map(); // replica -> Map(sequence -> {pages, filled, ...})
  for (const seq of reading.sequences) {
    for (const [pool, replica, pages, filled] of seq.holds) {
      const there = parts.pools[pool].replicas[replica];
      if (!held.has(there)) held.set(there, new Map());
      held.get(there).set(nameOf(seq), { pages, filled, mine: own.has(seq.id), stage: STAGE[seq.state] });
    }
  }
  reading.pools.forEach((pool, p) => {
    const { count } = parts.pools[p];
    if (count) setText(count, String(pool.replicas.reduce((sum, replica) => sum + replica.slots_used, 0)));
    pool.replicas.forEach((replica, r) => {
      const made = parts.pools[p].replicas[r];
      const there = held.get(made) ?? new Map();
      const used = replica.total - replica.free;
      const known = [...there.values()].reduce((sum, hold) => sum + hold.pages, 0);
      if (used > known) there.set("others", { pages: used - known, filled: used - known, mine: false, stage: pool.role });
      drawReplica(made, pool, replica, there);
      const busy = there.size > 0;
      made.chips.classList.toggle("busy", busy);
      const which = pool.dp > 1 ? `replica ${r} · ` : "";
      setText(made.caption, `${which}${used}/${replica.total} pages · ${replica.slots_used}/${replica.slots} slots`);
      const words =
        `Replica ${r}, ${pool.tp} device${pool.tp > 1 ? "s" : ""}: ${used} of ${replica.total} pages in use, ` +
        `${replica.cached} kept for later prompts; ${replica.slots_used} of ${replica.slots} slots`;
      if (made.element.dataset.tip !== words) {
        made.element.dataset.tip = words;
        made.element.setAttribute("aria-label", words);
      }
    });
  });
}

function drawReplica(made, pool, replica, there) {
  const { cells, owner, each } = made;
  const count = new Map();
  owner.forEach((name, i) => {
    if (name !== null && !there.has(name)) owner[i] = null;
    else if (name !== null) count.set(name, (count.get(name) ?? 0) + 1);
  });
  const classes = new Array(cells.length).fill("cell free");
  let kept = Math.round(replica.cached / each);
  for (const [name, hold] of there) {
    let missing = Math.max(Math.round(hold.pages / each), 1) - (count.get(name) ?? 0);
    for (let i = 0; i < owner.length && missing > 0; i++) {
      if (owner[i] === null) {
        owner[i] = name;
        missing--;
      }
    }
    for (let i = owner.length - 1; i >= 0 && missing < 0; i--) {
      if (owner[i] === name) {
        owner[i] = null;
        missing++;
      }
    }
    let filled = Math.ceil(hold.filled / each);
    const colour = pool.role === "mixed" ? hold.stage : pool.role;
    const shade = `shade${hash(name) % 3}`;
    owner.forEach((who, i) => {
      if (who !== name) return;
      classes[i] = `cell ${filled-- > 0 ? "filled" : "reserved"} ${colour} ${shade}${hold.mine ? " mine" : ""}`;
    });
  }
  for (let i = cells.length - 1; i >= 0 && kept > 0; i--) {
    if (owner[i] !== null) continue;
    classes[i] = "cell cached";
    kept--;
  }
  classes.forEach((name, i) => {
    if (cells[i].className !== name) cells[i].className = name;
  });
}

// -- dots

function nameOf(seq) {
  return `${seq.id}/${seq.sample}`;
}

function laneOf(parts, seq, stage) {
  if (stage === "queue" || (stage === "transfer" && parts.lanes.transfer)) return parts.lanes[stage][0];
  const roles = stage === "decode" ? ["decode", "mixed"] : ["prefill", "mixed"];
  const hold = seq.holds.find(([pool]) => roles.includes(parts.pools[pool].pool.role)) ?? seq.holds[0];
  if (hold) return parts.pools[hold[0]].replicas[hold[1]].lane;
  return (parts.lanes[stage] ?? parts.lanes.prefill ?? parts.lanes.decode)[0];
}

function paint(element, seq, stage, mine) {
  const name = `dot ${stage}${mine ? " mine" : ""}`;
  if (element.className !== name) element.className = name;
  const done = seq.prompt_tokens ? seq.computed / seq.prompt_tokens : 0;
  element.style.setProperty("--done", stage === "prefill" ? done.toFixed(2) : "1");
  setText(element, stage === "decode" ? String(seq.tokens) : "");
  const words = {
    queue: `waits, ${seq.prompt_tokens} prompt tokens`,
    prefill: `prefill: ${seq.computed} of ${seq.prompt_tokens} prompt tokens`,
    transfer: "its last pages cross to the decode mesh",
    decode: `decode: ${seq.tokens} tokens so far`,
  }[stage];
  const label = `${mine ? "Your request" : `Request ${seq.id}`}, ${words}`;
  if (element.dataset.tip !== label) {
    element.dataset.tip = label;
    element.setAttribute("aria-label", label);
  }
}

function leave(element, moving) {
  if (!moving) {
    element.remove();
    return;
  }
  const away = element.animate([{ opacity: 1 }, { opacity: 0, transform: "scale(0.4)" }], { duration: 250 });
  away.onfinish = away.oncancel = () => element.remove();
}

const flashing = new WeakMap();
function flash(wire) {
  if (!wire) return;
  wire.classList.add("active");
  clearTimeout(flashing.get(wire));
  flashing.set(wire, setTimeout(() => wire.classList.remove("active"), 700));
}

// -- small things

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function hash(text) {
  let sum = 0;
  for (const char of text) sum = (sum * 31 + char.charCodeAt(0)) >>> 0;
  return sum;
}

function bytes(count) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (count >= size) return `${(count / size).toFixed(1)} ${unit}`;
  }
  return `${count} B`;
}
