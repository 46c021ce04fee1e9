// Starts the page: form, views and the worker; asks for all views when settings change.
import { setUpControls } from "./controls.js";
import { setUpExports } from "./export.js";
import { bytes, whole } from "./format.js";
import { ask, onLate, ready } from "./planner.js";
import { change, legalize, onChange, readFragment, state } from "./state.js";
import { table } from "./svg.js";
import { setUpTheme } from "./theme.js";
import { redrawCosts, showCosts } from "./view_costs.js";
import { showGrid } from "./view_grid.js";
import { markHoldings, showHoldings } from "./view_holdings.js";
import { setUpMatrix, showBlocks, showMatrix } from "./view_matrix.js";
import { growRing, markRing, setUpRing, showRing } from "./view_ring.js";

const byId = (id) => document.getElementById(id);
const LINES = 1000; // of a loaded result
let facts = null, held = null, seen = null, round = 0, resultError = "";

setUpTheme(byId("theme"));
Object.assign(state, readFragment());
setUpControls();
setUpExports();
setUpMatrix((keys) => { seen = keys; if (facts) { markHoldings(facts, seen); markRing(seen); } });
setUpRing(showBlocks);
onLate(showError);
byId("link").addEventListener("click", () => copy(window.location.href, byId("link")));
byId("python").addEventListener("click", () => copy(byId("code").textContent, byId("python")));
window.matchMedia("(max-width: 46rem)").addEventListener("change", update);
window.addEventListener("hashchange", () => change(readFragment(), { history: false }));
document.querySelector("[data-skip]").addEventListener("click", (event) => { event.preventDefault(); byId("main").focus(); });

onChange(({ settings, selected }) => {
  if (settings) update();
  else {
    if (!facts) return;
    if (["query", "head", "rank"].some((name) => selected.has(name))) showGrid(facts);
    if (selected.has("rank")) { showHoldings(facts, held); markHoldings(facts, seen); redrawCosts(); }
  }
});

update();
ready.then(
  () => { byId("status").textContent = "Ready"; },
  (error) => { byId("status").textContent = "Python did not start"; showError(`The planner did not start: ${error.message}`); },
);
loadResult();

async function update() {
  round += 1;
  const mine = round;
  document.body.classList.add("busy");
  document.body.dataset.done = "";
  const begin = performance.now();
  const found = await ask("overview", state.settings);
  if (!found || mine !== round) return;
  showError(found.error);
  if (found.error) { document.body.dataset.done = "error"; return; }
  const spans = await ask("holdings", state.settings);
  if (!spans || mine !== round) return;
  [facts, held] = [found, spans];
  byId("code").textContent = facts.python;
  legalize(facts);
  showHoldings(facts, held);
  await Promise.all([showMatrix(facts, held), showRing(facts), showGrid(facts), showCosts(facts, (ranks) => { showSummary(ranks.length); growRing(ranks); })]);
  if (mine !== round) return;
  document.body.classList.remove("busy");
  document.body.dataset.done = "yes";
  await ready;
  byId("status").dataset.seconds = ((performance.now() - begin) / 1000).toFixed(2);
}

function showError(error) {
  byId("error").hidden = !error && !resultError;
  byId("error").textContent = error || resultError;
  if (error) document.body.classList.add("busy");
}

function showSummary(planned) {
  byId("status").textContent = planned < facts.sample.length ? `Planned ${planned} of ${facts.sample.length} ranks …` : "Ready";
  const costs = [...document.querySelectorAll("#numbers tr[data-rank]")].map((row) => row.dataset);
  if (!costs.length) return;
  const most = (name) => Math.max(...costs.map((one) => Number(one[name])));
  const mean = costs.reduce((sum, one) => sum + Number(one.work), 0) / costs.length;
  const list = [
    ["tokens", whole(facts.rows)], ["ranks", whole(facts.ranks)], ["documents", facts.documents > 1 ? whole(facts.documents) : null],
    ["busiest rank over the mean", mean ? (most("work") / mean).toFixed(2) : "1.00"],
    ["sent by a rank, forward", bytes(most("sent"))], ["backward", bytes(most("sentBackward"))], ["memory of a rank", bytes(most("memory"))],
  ].filter(([, value]) => value !== null);
  byId("summary").replaceChildren(...list.map(([name, value]) => {
    const made = document.createElement("dl");
    made.append(Object.assign(document.createElement("dt"), { textContent: name }), Object.assign(document.createElement("dd"), { textContent: value }));
    return made;
  }), Object.assign(document.createElement("p"), { textContent: facts.reach }));
  if (facts.warning) byId("summary").append(Object.assign(document.createElement("p"), { textContent: facts.warning, className: "warning" }));
}

async function copy(words, button) {
  const name = button.textContent;
  try { await navigator.clipboard.writeText(words); button.textContent = "Copied"; } catch { byId("code").parentElement.open = true; button.textContent = "See below"; }
  setTimeout(() => { button.textContent = name; }, 1500);
}

// `ringspan explore RESULT` serves the numbers of a result next to the page.
async function loadResult() {
  if (!new URLSearchParams(window.location.search).has("result")) return;
  let title, head, lines;
  try {
    const reply = await fetch("result.json");
    if (!reply.ok) throw new Error(reply.statusText);
    ({ title, rows: [head, ...lines] } = await reply.json());
    if (![head, ...lines].every(Array.isArray)) throw new Error("its rows are not lists");
  } catch (error) { resultError = `result.json cannot be shown: ${error.message}`; showError(""); return; }
  const scroll = Object.assign(document.createElement("div"), { className: "scroll", tabIndex: 0 });
  scroll.append(table(head, lines.slice(0, LINES)));
  if (lines.length > LINES) scroll.append(`The first ${whole(LINES)} of ${whole(lines.length)} lines.`);
  byId("measured").append(Object.assign(document.createElement("h2"), { textContent: title }), scroll);
  byId("measured").hidden = false;
}
