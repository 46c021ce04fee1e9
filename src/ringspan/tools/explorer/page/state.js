// The state of the page, which is its link: settings that Python reads, and what is selected.

export const SETTINGS = {
  pattern: "8x1,32x4", tokens: "64", lengths: "", causal: true, ranks: "4", layout: "zigzag", routing: "relay", ranks_per_node: "2",
  head_ranks: "1", optimize: "auto", heads: "4", kv_heads: "4", head_dim: "64", dtype: "bfloat16", order: "", grid: "8x8",
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

// A link may select what the plan does not have: then the nearest that it has, or nothing.
export function legalize({ rows, ranks, kv_heads, branches }) {
  const within = (value, least, most) => (value >= least && value < most ? value : least);
  const { query, head, branch, hop, rank, cell, top, left } = state.selected;
  const selected = { query: within(query, -1, rows), head: within(head, 0, kv_heads), branch: within(branch, -1, branches.length), hop: Math.max(0, hop), rank: within(rank, -1, ranks) };
  const cells = cell > 0 ? Math.ceil(rows / cell) : 0;
  change({ selected: { ...selected, cell: cells ? cell : 0, top: within(top, 0, cells), left: within(left, 0, cells) } });
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
    if (Object.hasOwn(SETTINGS, name)) settings[name] = typeof SETTINGS[name] === "boolean" ? text === "true" : text;
    else if (Object.hasOwn(SELECTED, name) && /^-?\d{1,15}$/.test(text)) selected[name] = Number(text);
  }
  return { settings, selected };
}
