// Who holds what: one lane per rank, or one strip for many ranks; the chosen query and its keys below.
import { rankColour, textOn } from "./colours.js";
import { whole } from "./format.js";
import { change, state } from "./state.js";
import { drawing, element, show, text, unitOf } from "./svg.js";

const LANES = 16;
const box = document.querySelector("#holdings");

let wide = 1000, left = 62, right = 76; // of the drawing

export function showHoldings(facts, held) {
  wide = box.clientWidth < 560 ? 440 : 1000;
  [left, right] = [58, 70].map((pixels) => pixels * unitOf(box, wide));
  const few = facts.ranks <= LANES;
  const lane = few ? Math.max(14, Math.min(26, 180 / facts.ranks)) : 44;
  const height = few ? lane * facts.ranks : lane;
  const unit = (wide - left - right) / facts.rows;
  const label = `${whole(facts.rows)} rows over ${whole(facts.ranks)} ranks, ${facts.layout}: ${few ? Object.entries(held.rows).map(([rank, rows]) => `rank ${rank} holds ${whole(rows)}`).join(", ") : "colours go from the first rank to the last"}`;
  const made = drawing(wide, height + 52, label);
  made.append(element("rect", { x: left, y: 16, width: wide - left - right, height, class: "s0" }));
  for (const [rank, start, stop] of held.spans) {
    const [x, width] = [left + start * unit, Math.max((stop - start) * unit, 0.4)];
    const y = 16 + (few ? rank * lane : 0);
    const one = element("rect", { x, y, width, height: few ? lane - 2 : lane, fill: rankColour(rank, facts.ranks), "data-rank": rank, class: state.selected.rank === rank ? "chosen" : undefined },
      element("title", {}, `rank ${rank}: rows ${whole(start)} to ${whole(stop - 1)}`));
    one.addEventListener("click", () => change({ selected: { rank: state.selected.rank === rank ? -1 : rank } }));
    made.append(one);
    if (few && width > 90) made.append(text(x + width / 2, y + lane / 2 + 3, `${whole(start)} – ${whole(stop - 1)}`, { "text-anchor": "middle", class: textOn(rank, facts.ranks), "pointer-events": "none" }));
  }
  if (few) {
    for (const [rank, rows] of Object.entries(held.rows)) {
      const y = 16 + rank * lane + lane / 2 + 3;
      made.append(text(left - 8, y, `rank ${rank}`, { "text-anchor": "end", class: "strong" }), text(wide - right + 8, y, `${whole(rows)} rows`));
    }
  } else made.append(text(left - 8, 16 + lane / 2 + 4, "all", { "text-anchor": "end", class: "strong" }));
  let at = 0;
  if (held.documents.length > 1) for (const rows of held.documents) {
    made.append(element("line", { x1: left + at * unit, x2: left + at * unit, y1: 8, y2: 18 + height, class: "thin", "stroke-dasharray": "3 3" }));
    at += rows;
  }
  made.append(element("g", { class: "keys" }));
  for (const i of [0, 0.25, 0.5, 0.75, 1]) {
    made.append(text(left + i * (wide - left - right), height + 46, whole(Math.round(i * facts.rows)), { "text-anchor": i === 0 ? "start" : i === 1 ? "end" : "middle" }));
  }
  show(box, made);
}

// The keys of the chosen query, as marks under the lanes.
export function markHoldings(facts, keys) {
  const layer = box.querySelector(".keys");
  if (!layer) return;
  layer.replaceChildren();
  if (!keys) return;
  const height = box.querySelector("svg").viewBox.baseVal.height;
  const unit = (wide - left - right) / facts.rows, y = height - 33;
  let path = "";
  for (const [start, stop, step] of keys.keys) {
    if (step * unit < 1.5) { path += `M${left + start * unit} ${y}h${Math.max((stop - start) * unit, 1)}v8h${-Math.max((stop - start) * unit, 1)}z`; continue; }
    for (let key = start; key < stop; key += step) path += `M${left + key * unit} ${y}h${Math.max(unit, 1)}v8h${-Math.max(unit, 1)}z`;
  }
  layer.append(element("path", { d: path, class: "mark" }), text(left - 8, y + 9, "keys", { "text-anchor": "end" }));
}
