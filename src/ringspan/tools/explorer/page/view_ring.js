// The ring, hop by hop: parcels of the next hop move while the current hop is computed.
import { rankColour, textOn } from "./colours.js";
import { bytes, pairs, rangeText, whole } from "./format.js";
import { ask } from "./planner.js";
import { change, onChange, state } from "./state.js";
import { drawing, element, round, show, table, text, unitOf } from "./svg.js";

const SIDE = 640, CENTRE = SIDE / 2, SECONDS = 2.6, NODES = 64;
const box = document.querySelector("#ring");
const follow = document.querySelector("#rank");
const slider = document.querySelector("#hop");
const still = window.matchMedia("(prefers-reduced-motion: reduce)");
let facts = null, shown = null, keys = null, ranks = [], playing = false, started = 0, packets = [], tell = () => {};

// `onHop` is told what is computed at the hop that is shown.
export function setUpRing(onHop) {
  tell = onHop;
  const button = (id, act) => document.getElementById(id).addEventListener("click", act);
  button("back", () => { stop(); go(state.selected.hop - 1); });
  button("forward", () => { stop(); go(state.selected.hop + 1); });
  button("play", () => (playing ? stop() : play()));
  follow.addEventListener("change", () => change({ selected: { rank: Number(follow.value) } }));
  slider.addEventListener("input", () => { stop(); go(Number(slider.value)); });
  onChange(({ settings, selected }) => {
    if (settings) stop();
    else if (selected.has("hop") || selected.has("head")) loadHop();
    else if (selected.has("rank") && shown) draw();
  });
}

export function showRing(overview) {
  facts = overview;
  follow.replaceChildren(new Option("all ranks", "-1"), ...facts.sample.map((rank) => new Option(`rank ${rank}`, rank)));
  ranks = facts.sample.length < facts.ranks ? facts.shown.slice(0, 1) : [];
  return loadHop();
}

// In a large ring, planning a rank takes a while: those that are planned are shown.
export function growRing(planned) {
  const now = ranks.length ? facts.shown.filter((rank) => planned.includes(rank)) : [];
  if (now.length > ranks.length) { ranks = now; loadHop(); }
}

const go = (hop) => change({ selected: { hop: shown ? Math.max(0, Math.min(shown.hops - 1, hop)) : 0 } });

async function loadHop() {
  const { hop: number, head } = state.selected;
  const found = await ask("hop", state.settings, { number, head, ranks });
  if (!found) return;
  const last = /has hops 0 to (\d+)$/.exec(found.error ?? "");
  if (last) { change({ selected: { hop: Number(last[1]) } }); return; }
  if (found.error) return;
  shown = found;
  draw();
}

function play() {
  playing = true;
  if (shown && state.selected.hop >= shown.hops - 1) go(0);
  started = performance.now();
  showButton();
  requestAnimationFrame(frame);
}

function stop() {
  playing = false;
  showButton();
  place(0.5);
}

function showButton() {
  const button = document.getElementById("play");
  button.textContent = playing ? "❚❚" : "▶";
  button.setAttribute("aria-label", playing ? "Pause" : "Play");
}

function frame(now) {
  if (!playing) return;
  const part = (now - started) / 1000 / SECONDS;
  if (part >= 1) {
    started = now;
    if (!shown || shown.hops <= 1) { stop(); return; }
    go(state.selected.hop + 1 < shown.hops ? state.selected.hop + 1 : 0);
  } else if (!still.matches) place(part);
  requestAnimationFrame(frame);
}

// In a ring of which few ranks are shown, a gap at the top keeps the first and the last apart.
const angle = (rank) => {
  const gap = shown.ranks.length < facts.ranks ? 0.06 : 0;
  return 2 * Math.PI * (gap + (rank / (facts.ranks - (gap ? 1 : 0) || 1)) * (1 - 2 * gap)) - Math.PI / 2;
};
const ring = () => (facts.ranks > 24 ? 226 : 194);
const at = (rank, radius = ring()) => [CENTRE + radius * Math.cos(angle(rank)), CENTRE + radius * Math.sin(angle(rank))];

function draw() {
  const { hops, number, moves, heads, computed } = shown;
  follow.value = String(state.selected.rank);
  slider.max = hops - 1;
  slider.value = number;
  document.querySelector("#hop-text").textContent = `${whole(number)} of ${whole(hops - 1)}`;
  const last = number >= hops - 1;
  const total = moves.reduce((sum, move) => sum + move.bytes, 0);
  const sampled = shown.ranks.length < facts.ranks;
  const doing = number === 0 ? "own rows are computed" : `rows received at hop ${whole(number)} are computed`;
  const made = drawing(SIDE, SIDE, `Hop ${number}: ${doing}; ${moves.length} messages, ${bytes(total)}`);
  made.append(defs());
  if (facts.ranks_per_node) made.append(...nodes());
  made.append(element("circle", { cx: CENTRE, cy: CENTRE, r: ring(), class: "thin" }));
  if (sampled) for (let i = 0; i < NODES; i += 1) {
    const [x, y] = at(Math.round((i * facts.ranks) / NODES));
    made.append(element("circle", { cx: round(x), cy: round(y), r: 2, class: "idle" }));
  }
  packets = [];
  const most = Math.max(1, ...moves.map((move) => move.bytes));
  for (const move of moves) made.append(arrow(move, most, radius()));
  const widest = Math.max(1, ...heads.map((move) => move.bytes));
  if (facts.ranks <= 24) for (const move of heads) made.append(arrow(move, widest, radius()));
  const unit = unitOf(box, SIDE);
  const busiest = Math.max(1, ...Object.values(computed).map((one) => one.pairs));
  for (const rank of shown.ranks) made.append(node(rank, computed[rank], busiest, radius()));
  made.append(
    text(CENTRE, CENTRE - 13 * unit, number === 0 ? "hop 0: own rows" : `hop ${whole(number)}`, { "text-anchor": "middle", class: "strong big halo" }),
    text(CENTRE, CENTRE + 4 * unit, last ? "the last: nothing moves" : total ? `meanwhile ${bytes(total)} move` : "nothing moves", { "text-anchor": "middle", class: "halo" }),
    text(CENTRE, CENTRE + 19 * unit, sampled ? `${shown.ranks.length} of ${whole(facts.ranks)} ranks are shown` : last || !total ? "" : `in ${moves.length} ${moves.length === 1 ? "message" : "messages"}, for hop ${whole(number + 1)}`, { "text-anchor": "middle", class: "halo" }),
  );
  made.append(element("g", { id: "holders" }), ...packets.map((packet) => packet.shape));
  show(box, made);
  markRing(keys);
  showReadout();
  tell(computed, number);
  place(playing && !still.matches ? Math.min(1, (performance.now() - started) / 1000 / SECONDS) : 0.5);
  list();
}

function defs() {
  return element("defs", {}, element("marker", { id: "tip", viewBox: "0 0 8 8", refX: 6, refY: 4, markerWidth: 6, markerHeight: 6, orient: "auto-start-reverse" }, element("path", { d: "M0 1L7 4L0 7z", class: "tip" })));
}

// Ranks of one node are framed together.
function nodes() {
  const per = facts.ranks_per_node;
  const found = [];
  for (let first = 0; first < facts.ranks && facts.ranks / per <= 32; first += per) {
    const [from, to] = [angle(first - 0.42), angle(Math.min(first + per, facts.ranks) - 0.58)];
    const radius = ring() + 52;
    const [x1, y1, x2, y2] = [Math.cos(from), Math.sin(from), Math.cos(to), Math.sin(to)].map((part) => CENTRE + radius * part);
    found.push(element("path", { d: `M${round(x1)} ${round(y1)}A${radius} ${radius} 0 ${to - from > Math.PI ? 1 : 0} 1 ${round(x2)} ${round(y2)}`, class: "frame", "stroke-width": 5, "stroke-linecap": "round" }));
  }
  return found;
}

function arrow(move, most, radius) {
  const [a, b] = [at(move.from), at(move.to)];
  const [dx, dy] = [b[0] - a[0], b[1] - a[1]];
  const length = Math.hypot(dx, dy) || 1;
  const bend = Math.min(70, length * 0.18); // towards the middle, so that two directions differ
  const middle = [(a[0] + b[0]) / 2 - (dy / length) * bend * 0.4 + (CENTRE - (a[0] + b[0]) / 2) * 0.22, (a[1] + b[1]) / 2 + (dx / length) * bend * 0.4 + (CENTRE - (a[1] + b[1]) / 2) * 0.22];
  const cut = (from, to, by) => { const far = Math.hypot(to[0] - from[0], to[1] - from[1]) || 1; return [from[0] + ((to[0] - from[0]) / far) * by, from[1] + ((to[1] - from[1]) / far) * by]; };
  const [first, last] = [cut(a, middle, radius + 3), cut(b, middle, radius + 7)];
  const path = element("path", { d: `M${round(first[0])} ${round(first[1])}Q${round(middle[0])} ${round(middle[1])} ${round(last[0])} ${round(last[1])}`, class: "arrow", "stroke-width": move.across ? 2.5 : 1.2, "stroke-dasharray": move.across ? "6 4" : move.what ? "1 5" : undefined, "marker-end": "url(#tip)" });
  const size = 4 + 7 * Math.sqrt(move.bytes / most);
  const dot = element("rect", { x: -size, y: -size * 0.62, width: 2 * size, height: 1.24 * size, rx: 2, fill: rankColour(move.owner ?? move.from, facts.ranks), class: "packet" },
    element("title", {}, `${move.from} to ${move.to}: ${what(move)}, ${bytes(move.bytes)}`));
  const chosen = state.selected.rank;
  if (chosen >= 0 && chosen !== move.from && chosen !== move.to) { path.classList.add("dim"); dot.classList.add("dim"); }
  packets.push({ shape: dot, points: [first, middle, last], offset: packets.filter((packet) => packet.key === `${move.from} ${move.to}`).length, key: `${move.from} ${move.to}` });
  return path;
}

// Rows in a message count once for each KV head.
const what = (move) => (move.what ? `${move.what} of ${whole(move.rows)} rows, for other heads` : `K and V of ${whole(move.rows)} rows of rank ${move.owner}`);

function place(part) {
  for (const { shape, points, offset } of packets) {
    const t = Math.max(0, Math.min(1, part - 0.09 * offset));
    const [x, y] = [0, 1].map((i) => (1 - t) ** 2 * points[0][i] + 2 * t * (1 - t) * points[1][i] + t * t * points[2][i]);
    shape.setAttribute("transform", `translate(${round(x)} ${round(y)})`);
  }
}

// A rank: its number, and around it whose keys it computes, as parts of the most work at this hop.
function node(rank, one, busiest, radius) {
  const [x, y] = at(rank);
  const made = element("g", { "data-rank": rank, style: "cursor:pointer" }, element("title", {}, `rank ${rank}: ${one.pairs ? `${pairs(one.pairs)} pairs, keys of rank ${one.keys_of.map(([owner]) => owner).join(", ")}` : "computes nothing at this hop"}`));
  made.append(element("circle", { cx: round(x), cy: round(y), r: radius, fill: rankColour(rank, facts.ranks), class: state.selected.rank === rank ? "chosen" : undefined }));
  const around = radius + 5, circle = 2 * Math.PI * around, sum = one.keys_of.reduce((all, [, some]) => all + some, 0);
  made.append(element("circle", { cx: round(x), cy: round(y), r: around, class: "frame", "stroke-width": radius > 12 ? 5 : 3 }));
  let from = 0;
  for (const [owner, some] of one.keys_of) {
    const length = (some / sum) * (one.pairs / busiest) * circle;
    made.append(element("circle", { cx: round(x), cy: round(y), r: around, fill: "none", stroke: rankColour(owner, facts.ranks), "stroke-width": radius > 12 ? 5 : 3, "stroke-dasharray": `${round(length)} ${round(circle - length)}`, "stroke-dashoffset": round(-from), transform: `rotate(-90 ${round(x)} ${round(y)})` }));
    from += length;
  }
  if (radius > 12) made.append(text(round(x), round(y + 4.5), rank, { "text-anchor": "middle", class: textOn(rank, facts.ranks) }));
  const [lx, ly] = at(rank, ring() + radius + 22);
  if (facts.ranks <= 12) made.append(text(round(lx), round(ly + 4), one.pairs ? pairs(one.pairs) : "idle", { "text-anchor": Math.abs(lx - CENTRE) < 20 ? "middle" : lx < CENTRE ? "end" : "start" }));
  else if (shown.ranks.length <= 8) made.append(text(round(lx), round(ly + 4), `rank ${rank}`, { "text-anchor": Math.abs(lx - CENTRE) < 20 ? "middle" : lx < CENTRE ? "end" : "start" }));
  made.addEventListener("click", () => change({ selected: { rank: state.selected.rank === rank ? -1 : rank } }));
  return made;
}

function list() {
  const chosen = state.selected.rank;
  const lines = [...shown.heads, ...shown.moves].filter(({ from, to }) => chosen < 0 || chosen === from || chosen === to);
  const shownLines = lines.slice(0, 500).map((move) => {
    const places = (move.places ?? []).slice(0, 4).map(rangeText).join("; ") + (move.places?.length > 4 ? "; …" : "");
    const across = move.across === undefined ? "" : move.across ? "to another node" : "inside a node";
    return [move.from, move.to, move.what ?? move.owner, whole(move.rows), bytes(move.bytes), places, across];
  });
  const head = ["from rank", "to rank", "K and V of rank", "rows x KV heads", "size", `rows of KV head ${state.selected.head}`, ""];
  document.querySelector("#moves").replaceChildren(shownLines.length ? table(head, shownLines) : "No messages.");
}

// The hop in words: of the chosen rank, or of all that are shown.
function showReadout() {
  const { number, hops, moves, heads, computed } = shown;
  const rank = state.selected.rank;
  const words = [];
  const total = (some) => bytes(some.reduce((sum, move) => sum + move.bytes, 0));
  const count = (some) => `${some.length} ${some.length === 1 ? "message" : "messages"} of ${total(some)}`;
  if (rank >= 0 && computed[rank]) {
    const one = computed[rank];
    const from = one.keys_of.map(([owner, some]) => `${owner === rank ? "itself" : `rank ${owner}`}: ${pairs(some)}`).join(", ");
    words.push(`Rank ${rank} computes ${one.pairs ? `${pairs(one.pairs)} pairs at hop ${number}, with keys of ${from}.` : `nothing at hop ${number}.`}`);
    const sent = moves.filter((move) => move.from === rank);
    if (number < hops - 1) words.push(sent.length ? `Meanwhile it sends ${sent.map((move) => `${what(move)} to rank ${move.to} (${bytes(move.bytes)})`).join("; ")}.` : "Meanwhile it sends nothing.");
  } else {
    const busy = Object.values(computed).filter((one) => one.pairs);
    const most = Math.max(0, ...busy.map((one) => one.pairs));
    words.push(`At hop ${whole(number)}, ${busy.length} of ${shown.ranks.length} ${shown.ranks.length < facts.ranks ? "shown " : ""}ranks compute, at most ${pairs(most)} pairs each.`);
    if (moves.length) words.push(`Meanwhile ${count(moves)} ${moves.length === 1 ? "brings" : "bring"} the rows of hop ${whole(number + 1)}.`);
  }
  const exchanged = heads.filter((move) => rank < 0 || move.from === rank);
  if (exchanged.length) words.push(`Head ranks exchange ${count(exchanged)}: ${[...new Set(exchanged.map((move) => (move.what.startsWith("q") ? "q, k and v before the first hop" : "out and lse after the last")))].join("; ")}.`);
  document.querySelector("#ring-text").textContent = words.join(" ");
}

// The rank of the chosen query, and the ranks that hold its keys.
export function markRing(found) {
  keys = found;
  const layer = box.querySelector("#holders");
  if (!layer || !shown) return;
  layer.replaceChildren();
  if (!keys) return;
  const marks = [[keys.rank, "outline"], ...keys.held.map(([owner]) => [owner, "mark"])].filter(([rank]) => shown.ranks.includes(rank));
  for (const [rank, kind] of marks) {
    const [x, y] = at(rank, ring() - (kind === "mark" ? radius() + 16 : 0));
    layer.append(element("circle", { cx: round(x), cy: round(y), r: kind === "mark" ? 5 : radius() + 11, class: kind }, element("title", {}, kind === "mark" ? `rank ${rank} holds keys of query ${keys.query}` : `rank ${rank} holds query ${keys.query}`)));
  }
}

const radius = () => (facts.ranks > 24 ? 9 : facts.ranks > 12 ? 17 : 24);
