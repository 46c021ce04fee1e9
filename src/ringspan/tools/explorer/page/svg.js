// SVG elements, and shapes of many cells as one path.

const SPACE = "http://www.w3.org/2000/svg";

export function element(name, attributes = {}, ...children) {
  const made = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) if (value !== undefined && value !== null) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function drawing(width, height, label) {
  const made = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  made.append(element("title", {}, label));
  return made;
}

// How many units of a drawing of this width are a pixel in its box: texts keep their size (style.css).
export const unitOf = (box, width) => Math.max(0.6, Math.min(2, width / (box.clientWidth || width)));

const resized = new ResizeObserver((entries) => entries.forEach(({ target }) => fit(target)));

function fit(box) {
  const width = box.querySelector("svg")?.viewBox.baseVal.width;
  if (width) box.style.setProperty("--unit", unitOf(box, width));
}

export function show(box, drawn) {
  box.replaceChildren(drawn);
  resized.observe(box);
  fit(box);
}

export const text = (x, y, words, attributes = {}) => element("text", { x, y, ...attributes }, String(words));

// The path of a row of equal cells: `runs` are [first, stop) in cells.
export function rowPath(runs, y, width, height, x0 = 0) {
  return runs.map(([first, stop]) => `M${round(x0 + first * width)} ${round(y)}h${round((stop - first) * width)}v${round(height)}h${round((first - stop) * width)}z`).join("");
}

// Runs of equal values in a list: [value, first, stop].
export function runs(values) {
  const found = [];
  let first = 0;
  for (let i = 1; i <= values.length; i += 1) {
    if (i === values.length || values[i] !== values[first]) { found.push([values[first], first, i]); first = i; }
  }
  return found;
}

export const round = (x) => Math.round(x * 100) / 100;

export function table(head, lines) {
  const made = document.createElement("table");
  const row = (cells, kind) => {
    const line = document.createElement("tr");
    for (const cell of cells) { const one = document.createElement(kind); one.textContent = cell; line.append(one); }
    return line;
  };
  made.append(row(head, "th"), ...lines.map((line) => row(line, "td")));
  return made;
}
