// The form: shows the settings, changes them, and edits the text of the pattern branch by branch.
import { PRESETS } from "./presets.js";
import { SETTINGS, change, onChange, reset, state } from "./state.js";

const form = document.querySelector("#controls");
const field = (name) => form.elements.namedItem(name);
const byId = (id) => document.getElementById(id);

export function setUpControls() {
  for (const name of Object.keys(PRESETS)) byId("preset").append(new Option(name, name));
  byId("preset").append(new Option("your own", "", false, false));
  byId("preset").addEventListener("change", ({ target }) => {
    if (target.value) change({ settings: { ...SETTINGS, ...PRESETS[target.value] }, selected: { head: 0 } });
  });
  for (const name of Object.keys(SETTINGS)) {
    const input = field(name);
    const read = () => (typeof SETTINGS[name] === "boolean" ? input.checked : input.value);
    let timer = 0;
    input.addEventListener("input", () => {
      clearTimeout(timer);
      timer = setTimeout(() => change({ settings: { [name]: read() } }), input.matches("input:not([type=checkbox])") ? 250 : 0);
    });
  }
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("reset").addEventListener("click", reset);
  byId("kind").addEventListener("change", showBuilder);
  byId("add").addEventListener("click", addBranch);
  onChange((changed) => { if (changed.settings) show(); });
  if (window.matchMedia("(max-width: 46rem)").matches) byId("panel").open = false;
  show();
  showBuilder();
}

function show() {
  for (const [name, value] of Object.entries(state.settings)) {
    const input = field(name);
    if (typeof value === "boolean") input.checked = value;
    else if (document.activeElement !== input || input.value.trim() !== value.trim()) input.value = value;
  }
  field("node").disabled = state.settings.routing !== "node";
  field("grid").disabled = state.settings.order === "";
  field("tokens").disabled = state.settings.order !== "" || state.settings.lengths.trim() !== "";
  field("lengths").disabled = state.settings.order !== "";
  const preset = Object.entries(PRESETS).find(([, changes]) => Object.entries({ ...SETTINGS, ...changes }).every(([name, value]) => state.settings[name] === value));
  byId("preset").value = preset ? preset[0] : "";
  showTerms();
}

// The terms of the text: each pair of a segment length and a rate, each window, full. Options of pairs stay with the text.
function parts() {
  return state.settings.pattern.split("+").map((term) => {
    const [, pairs, options] = /^((?:\s*[^\s,x]+\s*x\s*[^\s,x]+[,\s]*)+)(.*)$/i.exec(term) ?? [null, null, null];
    return pairs === null ? { items: [term.trim()], options: "" } : { items: pairs.split(/[\s,]+/).filter(Boolean), options: options.trim() };
  });
}

const join = (terms) => terms.filter(({ items }) => items.length).map(({ items, options }) => `${items.join(",")}${options ? ` ${options}` : ""}`).join(" + ");

function showTerms() {
  const terms = parts();
  const list = byId("terms");
  list.replaceChildren();
  terms.forEach(({ items }, i) => items.forEach((item, j) => {
    const chip = document.createElement("li");
    const remove = Object.assign(document.createElement("button"), { type: "button", textContent: "×" });
    remove.setAttribute("aria-label", `Remove ${item}`);
    remove.disabled = terms.length === 1 && items.length === 1;
    remove.addEventListener("click", () => {
      terms[i].items.splice(j, 1);
      change({ settings: { pattern: join(terms) } });
    });
    chip.append(item, remove);
    list.append(chip);
  }));
}

function showBuilder() {
  const kind = byId("kind").value;
  for (const id of ["first", "between", "second"]) byId(id).style.visibility = kind === "full" ? "hidden" : "";
  byId("between").textContent = kind === "window" ? "," : "×";
  byId("first").setAttribute("aria-label", kind === "window" ? "Rows to the left" : "Segment length");
  byId("second").setAttribute("aria-label", kind === "window" ? "Rows to the right" : "Rate");
}

function addBranch() {
  const [kind, first, second] = ["kind", "first", "second"].map((id) => byId(id).value.trim());
  const text = state.settings.pattern.trim();
  if (kind === "segments") {
    const terms = parts();
    const dilated = terms.find(({ items }) => /x/i.test(items[0] ?? ""));
    if (dilated) dilated.items.push(`${first}x${second}`);
    else terms.push({ items: [`${first}x${second}`], options: "" });
    change({ settings: { pattern: join(terms) } });
  } else {
    const added = kind === "full" ? "full" : `window ${first}${second === "0" ? "" : ` right ${second}`}`;
    change({ settings: { pattern: text ? `${text} + ${added}` : added } });
  }
}
