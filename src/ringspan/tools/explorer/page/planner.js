// Asks the worker questions, one at a time. A newer question of the same kind replaces one that still waits.
// A worker that takes too long is ended, and another one started: no link can stop the page.

const PATIENCE = 15_000, IMPATIENCE = 2_000; // milliseconds for an answer; for one that nobody waits for any more
const waiting = new Map(); // kind -> question, in the order of arrival
const refused = new Map(); // settings, as text -> error
let worker = null, started = false, current = null, number = 0, watch = 0;
let resolveReady, rejectReady, tellLate = () => {};

export const ready = new Promise((resolve, reject) => { [resolveReady, rejectReady] = [resolve, reject]; });

export const onLate = (listener) => { tellLate = listener; };

start();

function start() {
  started = false;
  worker = new Worker("worker.js", { type: "module" });
  worker.addEventListener("message", ({ data }) => {
    if (data.ready) { started = true; resolveReady(); sendNext(); }
    if (data.failed) rejectReady(new Error(data.failed));
    if (data.broken) restart();
    if (current && data.id === current.id) settle(data.answer);
  });
  worker.addEventListener("error", (event) => rejectReady(new Error(event.message || "the worker did not start")));
}

function restart() {
  worker.terminate();
  start();
}

function settle(answer) {
  clearTimeout(watch);
  const { resolve } = current;
  current = null;
  resolve(answer);
  sendNext();
  setTimeout(showBusy); // after what follows from the answer
}

const showBusy = () => document.querySelector("main").setAttribute("aria-busy", String(current !== null || waiting.size > 0));

function sendNext() {
  if (!started || current || !waiting.size) return;
  const [kind, question] = waiting.entries().next().value;
  waiting.delete(kind);
  current = { ...question, since: performance.now() };
  worker.postMessage({ id: current.id, question: current.asked });
  watch = setTimeout(giveUp, PATIENCE);
}

function giveUp() {
  const error = `No answer within ${PATIENCE / 1000} seconds: these settings are too large for the page. Use rs.plan in Python, which has no such limit.`;
  refused.set(current.settings, error);
  restart();
  tellLate(error);
  settle({ error });
}

// The answer to a view's question; null if a newer question of this kind took its place.
export function ask(view, settings, args = {}, kind = view) {
  const text = JSON.stringify(settings);
  if (refused.has(text)) return Promise.resolve({ error: refused.get(text) });
  return new Promise((resolve) => {
    for (const [other, question] of waiting) {
      if (other === kind || question.settings !== text) { waiting.delete(other); question.resolve(null); }
    }
    number += 1;
    waiting.set(kind, { id: number, settings: text, asked: { view, settings, ...args }, resolve });
    if (current && current.settings !== text && performance.now() - current.since > IMPATIENCE) { restart(); settle(null); }
    sendNext();
    showBusy();
  });
}
