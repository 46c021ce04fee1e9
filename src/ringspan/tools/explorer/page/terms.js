// The pattern as a form: its text is taken apart into terms and branches, and put together again after each change.

const OPTIONS = /^(.*?)(?: (interleaved|blocked))?(?: shift (\S+))?( heads .+)?$/;
const WINDOW = /^window (\S+)(?: right (\S+))?(?: dilation (\S+))?$/;
const ADDED = { segments: { kind: "segments", pairs: [["16", "2"]], offsets: "interleaved", shift: "0", heads: "" }, window: { kind: "window", left: "7", right: "0", dilation: "1" }, full: { kind: "full" } };

const list = document.querySelector("#terms");
let terms = [], tell = () => {};

export function setUpTerms(onText) {
  tell = onText;
  for (const kind of Object.keys(ADDED)) {
    document.querySelector(`#add-${kind}`).addEventListener("click", () => {
      terms.push(structuredClone(ADDED[kind]));
      changed(true);
      list.lastElementChild?.querySelector("input, button")?.focus();
    });
  }
}

export function showTerms(text) {
  if (written(terms) === text) return; // as it is typed here
  terms = text.toLowerCase().split("+").map((term) => read(term.trim().replace(/\s+/g, " ")));
  draw();
}

function read(term) {
  if (term === "full") return { kind: "full" };
  const window = WINDOW.exec(term);
  if (window) return { kind: "window", left: window[1], right: window[2] ?? "0", dilation: window[3] ?? "1" };
  const [, head, offsets = "interleaved", shift = "0", heads = ""] = OPTIONS.exec(term);
  const pairs = head.replace(/ ?x ?/g, "x").split(/[, ]+/).map((pair) => pair.split("x"));
  if (pairs.every((pair) => pair.length === 2 && pair[0] && pair[1])) return { kind: "segments", pairs, offsets, shift, heads };
  return { kind: "text", text: term };
}

function writtenTerm(term) {
  if (term.kind === "full") return "full";
  if (term.kind === "text") return term.text;
  const given = (name, usual) => (term[name] && term[name] !== usual ? ` ${name} ${term[name]}` : "");
  if (term.kind === "window") return `window ${term.left}${given("right", "0")}${given("dilation", "1")}`;
  return `${term.pairs.map((pair) => pair.join("x")).join(",")}${term.offsets === "blocked" ? " blocked" : ""}${given("shift", "0")}${term.heads}`;
}

const written = (all) => all.map(writtenTerm).join(" + ");

function changed(redraw) {
  if (redraw) draw();
  tell(written(terms), redraw);
}

function draw() {
  list.replaceChildren(...terms.map((term, i) => {
    const group = made("li", { className: "term" });
    const remove = () => button("×", `Remove ${writtenTerm(term)}`, () => { terms.splice(i, 1); changed(true); }, terms.length === 1);
    if (term.kind === "segments") {
      term.pairs.forEach((pair, j) => {
        const which = term.pairs.length > 1 || terms.length > 1 ? ` of branch ${j + 1}` : "";
        group.append(made("div", { className: "branch" },
          field("segment", pair[0], (value) => { pair[0] = value; }, `Segment length${which}`), field("rate", pair[1], (value) => { pair[1] = value; }, `Rate${which}`),
          button("×", `Remove ${pair.join("x")}`, () => { term.pairs.splice(j, 1); if (!term.pairs.length) terms.splice(i, 1); changed(true); }, terms.length === 1 && term.pairs.length === 1)));
      });
      const offsets = made("select", { ariaLabel: "Head offsets", title: "Which rows a head selects: offsets interleaved (LongNet) or blocked (torchscale)" }, ...["interleaved", "blocked"].map((name) => new Option(name, name, false, name === term.offsets)));
      offsets.addEventListener("change", () => { term.offsets = offsets.value; changed(false); });
      group.append(made("div", { className: "branch options" }, made("label", {}, offsets), field("shift", term.shift, (value) => { term.shift = value; }, "Shift"),
        button("+", "Add a segment length and rate", () => { const [w, r] = term.pairs.at(-1); term.pairs.push([`${4 * Number(w) || w}`, `${4 * Number(r) || r}`]); changed(true); })));
    } else if (term.kind === "window") {
      group.append(made("div", { className: "branch three" }, ...[["left", "Window: rows to the left"], ["right", "Window: rows to the right"], ["dilation", "Window: dilation"]].map(([name, label]) => field(name === "left" ? "window: left" : name, term[name], (value) => { term[name] = value; }, label)), remove()));
    } else group.append(made("div", { className: "branch plain" }, made("span", {}, term.kind === "full" ? "full" : term.text), remove()));
    return group;
  }));
}

function field(name, value, write, label) {
  const input = made("input", { value, spellcheck: false, inputMode: "text", ariaLabel: label });
  let timer = 0;
  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => { write(input.value.replace(/[\s+,x]/gi, "")); changed(false); }, 250);
  });
  return made("label", {}, name, input);
}

function button(sign, label, act, disabled = false) {
  const found = made("button", { type: "button", textContent: sign, ariaLabel: label, disabled });
  found.addEventListener("click", act);
  return found;
}

function made(name, properties, ...children) {
  const found = Object.assign(document.createElement(name), properties);
  found.append(...children);
  return found;
}
