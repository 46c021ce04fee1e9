// The state of the page, which is its link: settings that Python reads, and what is selected.

export const SETTINGS = {
  pattern: "8x1,32x4", tokens: "64", lengths: "", causal: true, ranks: "4", layout: "zigzag", routing: "relay", node: "2",
  heads: "4", kv_heads: "4", head_dim: "64", dtype: "bfloat16", order: "", grid: "8x8",
};
const SELECTED = { query: -1, head: 0, branch: -1, hop: 0, rank: -1, cell: 0, top: 0, left: 0 }; // cell 0: everything

export const state = { settings: { ...SETTINGS }, selected: { ...SELECTED } };
const listeners = [];

export const onChange = (listener) => listeners.push(listener);

// Changes are told together: whether settings changed, and which selections.
export function change({ settings = {}, selected = {} }, { history = true } = {}) {
  const changed = { settings: false, selected: new Set() };
  for (const [name, value] of Object.entries(settings)) {
    if (state.settings[name] !== value) { state.settings[name] = value; changed.settings = true; }
  }
  if (changed.settings) selected = { query: -1, branch: -1, cell: 0, top: 0, left: 0, ...selected };
  for (const [name, value] of Object.entries(selected)) {
    if (state.selected[name] !== value) { state.selected[name] = value; changed.selected.add(name); }
  }
  if (!changed.settings && !changed.selected.size) return;
  if (history) window.history.replaceState(null, "", `#${fragment()}`);
  for (const listener of listeners) listener(changed);
}

export function reset() {
  change({ settings: { ...SETTINGS }, selected: { ...SELECTED } });
}

export function fragment() {
  const link = new URLSearchParams();
  for (const [kind, defaults] of [["settings", SETTINGS], ["selected", SELECTED]]) {
    for (const [name, value] of Object.entries(defaults)) {
      if (state[kind][name] !== value) link.set(name, String(state[kind][name]));
    }
  }
  return link.toString().replaceAll("%2C", ",");
}

export function readFragment() {
  const link = new URLSearchParams(window.location.hash.slice(1));
  const settings = { ...SETTINGS };
  const selected = { ...SELECTED };
  for (const [name, text] of link) {
    if (name in SETTINGS) settings[name] = typeof SETTINGS[name] === "boolean" ? text === "true" : text;
    else if (name in SELECTED && /^-?\d+$/.test(text)) selected[name] = Number(text);
  }
  return { settings, selected };
}
