// The form: shows the settings, and changes them.
import { PRESETS } from "./presets.js";
import { SETTINGS, change, onChange, reset, state } from "./state.js";
import { setUpTerms, showTerms } from "./terms.js";

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
  setUpTerms((pattern) => change({ settings: { pattern } }));
  onChange((changed) => { if (changed.settings) show(); });
  const stick = () => { form.style.top = `${Math.min(0, window.innerHeight - form.offsetHeight)}px`; }; // stays in sight, down to its end
  new ResizeObserver(stick).observe(form);
  window.addEventListener("resize", stick);
  show();
}

function show() {
  for (const [name, value] of Object.entries(state.settings)) {
    const input = field(name);
    if (typeof value === "boolean") input.checked = value;
    else if (document.activeElement !== input || input.value.trim() !== value.trim()) input.value = value;
  }
  field("ranks_per_node").disabled = state.settings.routing !== "by-node";
  field("grid").disabled = state.settings.order === "";
  field("tokens").disabled = state.settings.order !== "" || state.settings.lengths.trim() !== "";
  field("lengths").disabled = state.settings.order !== "";
  const preset = Object.entries(PRESETS).find(([, changes]) => Object.entries({ ...SETTINGS, ...changes }).every(([name, value]) => state.settings[name] === value));
  byId("preset").value = preset ? preset[0] : "";
  showTerms(state.settings.pattern);
}
