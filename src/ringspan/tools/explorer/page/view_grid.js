// On the grid: the curve and the shards of ranks on the left; the segments and the keys of a chosen cell on the right.
import { rankColour } from "./colours.js";
import { whole } from "./format.js";
import { ask } from "./planner.js";
import { change, state } from "./state.js";
import { drawing, element, round, rowPath, runs, show, text } from "./svg.js";

const SIDE = 430, GAP = 40;
const card = document.querySelector("#grid-card");
const box = document.querySelector("#grid");

export async function showGrid(facts) {
  card.hidden = facts.shape.length === 0;
  if (card.hidden) { box.replaceChildren(); return; }
  const query = state.selected.query >= 0 ? state.selected.query : Math.floor(facts.rows / 2);
  const found = await ask("grid", state.settings, { query, head: state.selected.head });
  if (!found) return;
  if (found.error) { box.replaceChildren(); document.querySelector("#grid-text").textContent = found.error; return; }
  draw(facts, found);
}

function draw(facts, { shape: [height, width], cells, ranks, segments, keys, query, rank }) {
  const unit = SIDE / Math.max(height, width);
  const narrow = box.clientWidth < 560;
  const [dx, dy] = narrow ? [0, height * unit + 40] : [SIDE + GAP, 0];
  const label = `${height} x ${width} cells in order ${state.settings.order}; the shard of rank ${rank} and the segments of place ${query}`;
  const made = drawing(narrow ? SIDE : 2 * SIDE + GAP, (narrow ? 2 : 1) * (height * unit + 40), label);
  const placeOf = new Array(cells.length);
  cells.forEach((cell, place) => { placeOf[cell] = place; });
  const panel = (x0, y0, title) => { made.append(text(x0, y0 + 14, title, { class: "strong" })); return y0 + 24; };

  const top = panel(0, 0, `The curve, and the shards of ${whole(facts.ranks)} ranks`);
  const paths = new Map();
  for (let line = 0; line < height; line += 1) {
    const owners = Array.from({ length: width }, (_, column) => ranks[placeOf[line * width + column]]);
    for (const [owner, first, stop] of runs(owners)) paths.set(owner, (paths.get(owner) ?? "") + rowPath([[first, stop]], top + line * unit, unit, unit));
  }
  for (const [owner, d] of paths) made.append(element("path", { d, fill: rankColour(owner, facts.ranks), "data-rank": owner, "fill-opacity": 0.78, "shape-rendering": "crispEdges", class: state.selected.rank >= 0 && state.selected.rank !== owner ? "dim" : undefined }, element("title", {}, `rank ${owner}`)));
  const middle = (cell) => `${round(((cell % width) + 0.5) * unit)} ${round(top + (Math.floor(cell / width) + 0.5) * unit)}`;
  if (cells.length <= 64 * 64) made.append(element("path", { d: `M${cells.map(middle).join("L")}`, class: "curve" }));

  const below = panel(dx, dy, `What place ${whole(query)} of the sequence sees`);
  made.append(element("rect", { x: dx, y: below, width: width * unit, height: height * unit, class: "s0" }));
  const widest = segments.map((rows, i) => [...rows, i]).sort((a, b) => b[1] - b[0] - (a[1] - a[0]));
  widest.forEach(([first, stop, i], depth) => {
    const inside = new Set(cells.slice(first, stop));
    let d = "";
    for (let line = 0; line < height; line += 1) {
      const line_runs = runs(Array.from({ length: width }, (_, column) => inside.has(line * width + column)));
      d += rowPath(line_runs.filter(([value]) => value).map(([, a, b]) => [a, b]), below + line * unit, unit, unit, dx);
    }
    made.append(element("path", { d, class: `s${Math.min(5, 1 + 2 * depth)}`, "shape-rendering": "crispEdges" }, element("title", {}, `segment or window of branch ${facts.branches[i]}`)));
  });
  let marks = "";
  const mark = (place, part) => { const cell = cells[place]; const gap = (unit * (1 - part)) / 2; return `M${round(dx + (cell % width) * unit + gap)} ${round(below + Math.floor(cell / width) * unit + gap)}h${round(unit * part)}v${round(unit * part)}h${round(-unit * part)}z`; };
  for (const [start, stop, step] of keys) for (let place = start; place < stop; place += step) marks += mark(place, 0.42);
  made.append(element("path", { d: marks, class: "mark" }), element("path", { d: mark(query, 1), class: "outline" }), element("rect", { x: dx, y: below, width: width * unit, height: height * unit, class: "frame" }));
  show(box, made);
  box.onclick = ({ clientX, clientY }) => {
    const frame = made.getBoundingClientRect(), by = made.viewBox.baseVal.width / frame.width;
    const [x, y] = [(clientX - frame.left) * by, (clientY - frame.top) * by];
    for (const [x0, y0] of [[0, top], [dx, below]]) {
      const [column, line] = [Math.floor((x - x0) / unit), Math.floor((y - y0) / unit)];
      if (column >= 0 && column < width && line >= 0 && line < height) change({ selected: { query: placeOf[line * width + column] } });
    }
  };
  document.querySelector("#grid-text").textContent = `Place ${whole(query)} is the cell in row ${Math.floor(cells[query] / width)}, column ${cells[query] % width}, on rank ${rank}. Blue: its segments or windows, the stronger the shorter; orange: the keys it sees. Click a cell to choose another.`;
}
