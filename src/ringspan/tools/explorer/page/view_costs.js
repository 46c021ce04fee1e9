// Work, bytes and memory of each rank, next to a plain ring and an all-gather of K and V. Drawn as the numbers arrive.
import { rankColour } from "./colours.js";
import { bytes, pairs, times, whole } from "./format.js";
import { ask } from "./planner.js";
import { change, state } from "./state.js";
import { drawing, element, round, show as place, table, text } from "./svg.js";

const WIDTH = 1000, HEIGHT = 250, PATIENCE = 400; // milliseconds for a few ranks
const MEASURES = [["work", "Pairs to compute, forward", pairs], ["sent", "Bytes sent, forward", bytes], ["memory", "Peak memory, forward", bytes]];
const box = document.querySelector("#costs");
let asked = 0, batch = 1;

// Asks for a few ranks at a time, those of the ring view first. Done when the first are shown; `onNumbers` is told
// all ranks so far, for each few.
export async function showCosts(facts, onNumbers) {
  asked += 1;
  const mine = asked;
  const found = new Map();
  const rest = [...facts.shown, ...facts.sample.filter((rank) => !facts.shown.includes(rank))];
  const next = async () => {
    const begin = performance.now();
    const more = await ask("costs", state.settings, { ranks: rest.splice(0, batch) });
    if (!more || more.error || mine !== asked) return false;
    batch = Math.max(1, Math.min(64, Math.round((batch * PATIENCE) / (performance.now() - begin + 1))));
    for (const one of more.ranks) found.set(one.rank, one);
    draw(facts, found, facts.sample);
    onNumbers([...found.keys()]);
    return rest.length > 0;
  };
  batch = facts.ranks > 64 ? 1 : 64;
  if (await next()) (async () => { while (await next()); })();
}

export const redrawCosts = () => box.querySelectorAll("[data-rank]").forEach((bar) => bar.classList.toggle("dim", state.selected.rank >= 0 && Number(bar.dataset.rank) !== state.selected.rank));

function draw(facts, found, sample) {
  const ranks = [...found.values()].sort((a, b) => a.rank - b.rank);
  const largest = (one) => Math.max(...ranks.map(one));
  const parts = MEASURES.map(([name, , show]) => `${name} at most ${show(largest((rank) => rank[name]))}, plain ring ${show(largest((rank) => rank.plain[name]))}`);
  const narrow = box.clientWidth < 560;
  const made = narrow ? drawing(340, 3 * HEIGHT, parts.join("; ")) : drawing(WIDTH, HEIGHT, parts.join("; "));
  MEASURES.forEach(([name, title, show], i) => {
    const [x0, y0, width] = narrow ? [0, i * HEIGHT, 340] : [i * 340, 0, 320];
    const groups = [["ringspan", (one) => one[name]], ["plain ring", (one) => one.plain[name]], ["all-gather", (one) => one.gather[name]]];
    const most = Math.max(1, ...groups.map(([, value]) => largest(value)));
    const base = y0 + HEIGHT - 44, tall = HEIGHT - 96, room = width / groups.length;
    made.append(text(x0, y0 + 16, title, { class: "strong" }), element("line", { x1: x0, x2: x0 + width, y1: base, y2: base, class: "thin" }));
    groups.forEach(([group, value], j) => {
      const left = x0 + j * room + 6, across = room - 22, bar = across / ranks.length;
      ranks.forEach((one, k) => {
        const height = Math.max((value(one) / most) * tall, value(one) ? 1 : 0);
        const drawn = element("rect", { x: round(left + k * bar), y: round(base - height), width: round(Math.max(bar - (bar > 4 ? 1.5 : 0), 0.8)), height: round(height), fill: j ? "" : rankColour(one.rank, facts.ranks), class: j ? "idle" : undefined, "data-rank": one.rank },
          element("title", {}, `${group}, rank ${one.rank}: ${show(value(one))}`));
        if (j) drawn.removeAttribute("fill");
        drawn.addEventListener("click", () => change({ selected: { rank: state.selected.rank === one.rank ? -1 : one.rank } }));
        made.append(drawn);
      });
      const top = largest(value);
      made.append(text(left, base + 17, group, { class: j ? undefined : "strong" }), text(left, base + 34, j ? (top ? `ours: ${largest((one) => one[name]) ? times(largest((one) => one[name]) / top) : "nothing"}` : "") : "each rank"));
      made.append(text(left, base - (top / most) * tall - 6, show(top), { class: "strong" }));
    });
  });
  place(box, made);
  redrawCosts();
  const head = ["rank", "rows", "tiles", "hops", "pairs", "sent", "received", "sent backward", "memory", "  rows", "  parcels", "memory backward"];
  const lines = ranks.map((one) => [whole(one.rank), whole(one.rows), whole(one.tiles), whole(one.hops), whole(one.work), bytes(one.sent), bytes(one.received), bytes(one.sent_backward), bytes(one.memory), bytes(one.memory_rows), bytes(one.memory_parcels), bytes(one.memory_backward)]);
  const made_table = table(head, lines);
  ranks.forEach((one, i) => { Object.assign(made_table.rows[i + 1].dataset, { rank: one.rank, work: one.work, sent: one.sent, received: one.received, sentBackward: one.sent_backward, memory: one.memory, memoryBackward: one.memory_backward }); });
  const note = document.createElement("p");
  note.className = "readout";
  note.textContent = sample.length < facts.ranks ? `${ranks.length} of ${whole(facts.ranks)} ranks: an even sample, with both ends.` : "Memory is that of the tensors of one call. A plain ring and an all-gather ignore the pattern: both send all K and V, and compute every pair that causality allows.";
  document.querySelector("#numbers").replaceChildren(made_table, note);
}
