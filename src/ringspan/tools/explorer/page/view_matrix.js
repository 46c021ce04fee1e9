// Who sees what: queries down, keys across, in at most 96 x 96 cells. Zooms by cells; hovering shows the keys of a query.
import { rankColour } from "./colours.js";
import { rangeText, whole } from "./format.js";
import { ask } from "./planner.js";
import { change, onChange, state } from "./state.js";
import { drawing, element, rowPath, runs, show, text, unitOf } from "./svg.js";

const CELLS = 96, SIDE = 640, MARGIN = 26, SHADES = 8, LEGEND = 34;
const box = document.querySelector("#matrix");
const readout = document.querySelector("#readout");
let facts = null, holdings = null, shown = null, keysShown = null, hovered = -1, tell = () => {};

// `onKeys` is told the keys of the query that is pointed at or chosen; null for none.
export function setUpMatrix(onKeys) {
  tell = onKeys;
  const button = (id, act) => document.getElementById(id).addEventListener("click", act);
  button("in", () => zoom(0.5));
  button("out", () => zoom(2));
  button("all", () => change({ selected: { cell: 0, top: 0, left: 0 } }));
  box.addEventListener("pointermove", ({ clientX, clientY, buttons }) => (buttons ? null : hover(rowAt(clientX, clientY).query)));
  box.addEventListener("pointerleave", () => hover(-1));
  box.addEventListener("pointerdown", startDrag);
  box.addEventListener("dblclick", ({ clientX, clientY }) => zoom(0.5, rowAt(clientX, clientY)));
  box.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(event.deltaY < 0 ? 0.5 : 2, rowAt(event.clientX, event.clientY));
  }, { passive: false });
  box.addEventListener("keydown", onKey);
  document.querySelector("#head").addEventListener("change", ({ target }) => change({ selected: { head: Number(target.value) } }));
  document.querySelector("#branch").addEventListener("change", ({ target }) => change({ selected: { branch: Number(target.value) } }));
  onChange(({ settings, selected }) => {
    if (settings) return;
    if (["head", "branch", "cell", "top", "left"].some((name) => selected.has(name))) load();
    if (["head", "query"].some((name) => selected.has(name))) loadKeys();
    if (selected.has("rank")) veil();
  });
}

export function showMatrix(overview, held) {
  facts = overview;
  holdings = held;
  options("#head", Array.from({ length: Math.min(facts.kv_heads, 256) }, (_, head) => [head, String(head)]), state.selected.head);
  options("#branch", [[-1, "all"], ...facts.branches.map((name, number) => [number, name])], state.selected.branch);
  return Promise.all([load(), loadKeys()]);
}

function options(id, pairs, chosen) {
  const select = document.querySelector(id);
  select.replaceChildren(...pairs.map(([value, name]) => new Option(name, value)));
  select.value = String(chosen);
}

// Powers of two, so that cells fit segments.
const whole_cell = () => 2 ** Math.max(0, Math.ceil(Math.log2(facts.rows / CELLS)));
const view = () => {
  const { cell, top, left } = state.selected;
  return cell ? { cell, top, left } : { cell: whole_cell(), top: 0, left: 0 };
};

async function load() {
  if (!facts) return;
  const { cell, top, left } = view();
  const { head, branch } = state.selected;
  const found = await ask("matrix", state.settings, { top, left, cell, count: CELLS, head, branch });
  if (!found || found.error) return;
  shown = { ...found, cell, top, left, size: Math.min(CELLS, Math.ceil(facts.rows / cell)) };
  draw();
}

async function loadKeys() {
  const query = hovered >= 0 ? hovered : state.selected.query;
  if (!facts || query < 0) { keysShown = null; tell(null); mark(); return; }
  const found = await ask("keys", state.settings, { query, head: state.selected.head });
  if (!found || found.error) return;
  keysShown = found;
  tell(found);
  mark();
}

const scale = () => SIDE / shown.size;

function draw() {
  const { counts, lines, columns, cell, size } = shown;
  const step = scale();
  const label = `${facts.pattern}: ${whole(facts.rows)} queries (down) and keys (across)${facts.causal ? ", causal" : ""}`;
  const made = drawing(SIDE + MARGIN, SIDE + MARGIN + LEGEND, label);
  made.append(element("rect", { x: MARGIN, y: MARGIN, width: lastX(columns), height: lastX(lines), class: "s0" }));
  const paths = Array.from({ length: SHADES }, () => "");
  const most = Math.max(1, ...counts.flat());
  const area = cell * cell;
  counts.forEach((line, i) => {
    const shades = line.map((count, j) => shade(count, cell, (lines[i][1] - lines[i][0]) * (columns[j][1] - columns[j][0]) || area, most));
    for (const [value, first, stop] of runs(shades)) if (value) paths[value] += rowPath([[first, stop]], MARGIN + i * step, step, step, MARGIN);
  });
  paths.forEach((path, i) => path && made.append(element("path", { d: path, class: `s${i}`, "shape-rendering": "crispEdges" })));
  made.append(element("g", { id: "veil" }), element("g", { id: "blocks" }), bands(lines, columns), element("g", { id: "marks" }), legend(cell, most), element("rect", { x: MARGIN, y: MARGIN, width: lastX(columns), height: lastX(lines), class: "frame" }));
  show(box, made);
  veil();
  markBlocks();
  mark();
  function lastX(cells) { return Math.min(size, cells.length) * step; }
}

// Multiplicities as they are; shares of a cell by powers of two, so that thin patterns stay visible.
function shade(count, cell, area, most) {
  if (!count) return 0;
  if (cell === 1) return Math.min(SHADES - 1, most === 1 ? 4 : 2 + Math.round(((count - 1) / Math.max(1, most - 1)) * 4));
  return Math.max(1, Math.min(SHADES - 1, SHADES - 1 + Math.floor(Math.log2(count / area + 1e-12) / 1.5)));
}

// Which rank holds the rows: a coloured band at the top and on the left.
function bands(lines, columns) {
  const made = element("g", { "aria-hidden": "true" });
  if (!holdings || !lines.length) return made;
  for (const [rank, start, end] of holdings.spans) {
    const fill = rankColour(rank, facts.ranks), [down, across] = [clipped(start, end, lines), clipped(start, end, columns)];
    if (down) made.append(element("rect", { x: MARGIN - 12, y: down[0], width: 8, height: down[1], fill }));
    if (across) made.append(element("rect", { x: across[0], y: MARGIN - 12, width: across[1], height: 8, fill }));
  }
  return made;
}

// With a rank chosen, the queries of all others are pale.
function veil() {
  const layer = box.querySelector("#veil");
  if (!layer || !shown?.lines.length) return;
  layer.replaceChildren();
  if (state.selected.rank < 0) return;
  for (const [rank, start, end] of holdings.spans) {
    const inside = clipped(start, end, shown.lines);
    if (rank !== state.selected.rank && inside) layer.append(element("rect", { x: MARGIN, y: inside[0], width: shown.columns.length * scale(), height: inside[1], class: "veil" }));
  }
}

// Where rows start .. end are along an axis with these cells: [place, length]; null if outside.
function clipped(start, end, cells) {
  const [a, b] = [Math.max(start, cells[0][0]), Math.min(end, cells.at(-1)[1])];
  const unit = scale() / shown.cell;
  return a < b ? [MARGIN + (a - cells[0][0]) * unit, (b - a) * unit] : null;
}

// What is computed at a hop, as blocks of queries and keys: the ring view tells. No blocks for the own rows of all ranks.
let hopShown = null;
export function showBlocks(computed, number) {
  hopShown = number > 0 || state.selected.rank >= 0 ? computed : null;
  markBlocks();
}

function markBlocks() {
  const layer = box.querySelector("#blocks");
  if (!layer || !shown?.lines.length) return;
  layer.replaceChildren();
  if (!hopShown || holdings.spans.length > 64) return;
  const spansOf = (rank) => holdings.spans.filter(([owner]) => owner === Number(rank));
  for (const [rank, { keys_of }] of Object.entries(hopShown)) {
    if (state.selected.rank >= 0 && Number(rank) !== state.selected.rank) continue;
    for (const [owner] of keys_of) for (const [, a, b] of spansOf(rank)) for (const [, c, d] of spansOf(owner)) {
      const [down, across] = [clipped(a, b, shown.lines), clipped(c, d, shown.columns)];
      if (down && across && !(facts.causal && c >= b)) layer.append(element("rect", { x: across[0] + 1, y: down[0] + 1, width: Math.max(across[1] - 2, 1), height: Math.max(down[1] - 2, 1), class: "block", stroke: rankColour(owner, facts.ranks) }));
    }
  }
}

function legend(cell, most) {
  const made = element("g", {});
  const unit = unitOf(box, SIDE + MARGIN), side = 11 * unit;
  const y = SIDE + MARGIN + 8;
  let entries;
  if (cell === 1) entries = Array.from({ length: Math.min(most, 5) }, (_, i) => [shade(i + 1, 1, 1, most), i === 0 ? "seen once" : `${i + 1} times`]);
  else entries = Array.from({ length: SHADES - 1 }, (_, i) => [i + 1, ""]);
  let x = MARGIN;
  for (const [value, name] of entries) {
    made.append(element("rect", { x, y, width: side, height: side, class: `s${value}` }), text(x + side + 5 * unit, y + side - unit, name));
    x += cell === 1 ? 5 * unit + side + name.length * 7.2 * unit : side + 1;
  }
  if (cell > 1) made.append(text(x + 6 * unit, y + side - unit, `pairs in ${whole(cell)} x ${whole(cell)} rows: few to all`));
  return made;
}

function mark() {
  const layer = box.querySelector("#marks");
  if (!layer || !shown) return;
  layer.replaceChildren();
  if (!keysShown) { readout.textContent = "Point at a row, or choose one with the arrow keys, to see the keys of a query."; return; }
  const { query, rank, keys, held } = keysShown;
  const step = scale(), first = shown.lines[0]?.[0] ?? 0, left = shown.columns[0]?.[0] ?? 0;
  const line = Math.floor((query - first) / shown.cell);
  if (query >= first && line < shown.lines.length) {
    const columns = new Set();
    for (const [start, stop, by] of keys) {
      for (let column = Math.max(0, Math.floor((start - left) / shown.cell)); column < shown.columns.length; column += 1) {
        const [from, to] = shown.columns[column];
        const next = start + Math.max(0, Math.ceil((from - start) / by)) * by;
        if (next < Math.min(to, stop)) columns.add(column);
        if (to >= stop) break;
      }
    }
    const cells = [...columns].sort((a, b) => a - b);
    const spans = [];
    for (const column of cells) { if (spans.at(-1)?.[1] === column) spans.at(-1)[1] += 1; else spans.push([column, column + 1]); }
    const y = MARGIN + line * step;
    layer.append(
      element("rect", { x: MARGIN, y, width: shown.columns.length * step, height: step, class: "outline", "stroke-opacity": 0.55 }),
      element("path", { d: rowPath(spans, y + step * 0.15, step, step * 0.7, MARGIN), class: "mark" }),
    );
  }
  const count = keys.reduce((sum, [start, stop, by]) => sum + Math.ceil((stop - start) / by), 0);
  const ranges = keys.slice(0, 4).map(rangeText).join("; ") + (keys.length > 4 ? "; …" : "");
  const elsewhere = held.filter(([owner]) => owner !== rank).reduce((sum, [, some]) => sum + some, 0);
  const where = facts.ranks === 1 ? "" : elsewhere ? ` ${whole(elsewhere)} of them on other ranks (${held.filter(([owner]) => owner !== rank).slice(0, 6).map(([owner, some]) => `${owner}: ${whole(some)}`).join(", ")}${held.length > 7 ? ", …" : ""}).` : " All on its own rank.";
  readout.textContent = `Query ${whole(query)} on rank ${rank}, KV head ${state.selected.head}, sees ${count ? `${whole(count)} keys: ${ranges}.` : "nothing: no branch selects it."}${count ? where : ""}`;
}

function rowAt(clientX, clientY) {
  const { left, top, width } = box.querySelector("svg")?.getBoundingClientRect() ?? { left: 0, top: 0, width: 1 };
  const unit = (SIDE + MARGIN) / width;
  const [x, y] = [(clientX - left) * unit - MARGIN, (clientY - top) * unit - MARGIN];
  if (!shown || y < 0 || x < 0) return { query: -1, key: -1 };
  const [line, column] = [Math.floor(y / scale()), Math.floor(x / scale())];
  const within = (cells, number, place) => (number < cells.length ? Math.min(cells[number][1] - 1, cells[number][0] + Math.floor((place / scale() - number) * shown.cell)) : -1);
  return { query: within(shown.lines, line, y), key: within(shown.columns, column, x) };
}

function hover(query) {
  if (query === hovered) return;
  hovered = query;
  loadKeys();
}

function zoom(factor, at = null) {
  if (!shown) return;
  const { cell, top, left } = view();
  const next = Math.max(1, Math.min(whole_cell(), cell * factor));
  if (next >= whole_cell()) { change({ selected: { cell: 0, top: 0, left: 0 } }); return; }
  const query = at?.query >= 0 ? at.query : state.selected.query >= 0 ? state.selected.query : (top + shown.size / 2) * cell;
  const key = at?.key >= 0 ? at.key : state.selected.query >= 0 ? state.selected.query : (left + shown.size / 2) * cell;
  const part = (row, first) => (at ? (row / cell - first) / shown.size : 0.5);
  change({ selected: { cell: next, top: clamp(query / next - part(query, top) * CELLS, next), left: clamp(key / next - part(key, left) * CELLS, next) } });
}

const clamp = (first, cell) => Math.max(0, Math.min(Math.round(first), Math.ceil(facts.rows / cell) - CELLS));

function startDrag({ clientX, clientY, pointerId }) {
  const from = view(), start = rowAt(clientX, clientY);
  let moved = false;
  const width = box.getBoundingClientRect().width;
  const move = (event) => {
    const by = (CELLS * (SIDE + MARGIN)) / SIDE / width;
    const [dx, dy] = [(clientX - event.clientX) * by, (clientY - event.clientY) * by];
    if (!moved && Math.hypot(event.clientX - clientX, event.clientY - clientY) < 5) return;
    moved = true;
    if (state.selected.cell) change({ selected: { top: clamp(from.top + dy, from.cell), left: clamp(from.left + dx, from.cell) } });
  };
  const stop = () => {
    box.removeEventListener("pointermove", move);
    if (!moved && start.query >= 0) change({ selected: { query: start.query } });
  };
  box.setPointerCapture?.(pointerId);
  box.addEventListener("pointermove", move);
  box.addEventListener("pointerup", stop, { once: true });
}

function onKey(event) {
  if (!facts || !shown) return;
  const { query } = state.selected;
  const by = (event.shiftKey ? 10 : 1) * (query >= 0 && shown.cell > 1 && !event.altKey ? shown.cell : 1);
  const moves = { ArrowDown: by, ArrowUp: -by, PageDown: 10 * by, PageUp: -10 * by };
  if (event.key in moves) change({ selected: { query: Math.max(0, Math.min(facts.rows - 1, query < 0 ? 0 : query + moves[event.key])) } });
  else if (event.key === "Home") change({ selected: { query: 0 } });
  else if (event.key === "End") change({ selected: { query: facts.rows - 1 } });
  else if (event.key === "Escape") change({ selected: { query: -1 } });
  else if (event.key === "+" || event.key === "=") zoom(0.5);
  else if (event.key === "-") zoom(2);
  else if (event.key === "ArrowRight" || event.key === "ArrowLeft") {
    if (state.selected.cell) change({ selected: { left: clamp(view().left + (event.key === "ArrowRight" ? 8 : -8), view().cell) } });
  } else return;
  event.preventDefault();
}

