// Asks the worker questions, one at a time. A newer question of the same kind replaces one that still waits.

const worker = new Worker("worker.js", { type: "module" });
const waiting = new Map(); // kind -> question, in the order of arrival
let current = null;
let number = 0;

export const ready = new Promise((resolve, reject) => {
  worker.addEventListener("message", ({ data }) => {
    if (data.ready) resolve();
    if (data.failed) reject(new Error(data.failed));
  });
  worker.addEventListener("error", (event) => reject(new Error(event.message || "the worker did not start")));
});

worker.addEventListener("message", ({ data }) => {
  if (!current || data.id !== current.id) return;
  const { resolve } = current;
  current = null;
  resolve(data.answer);
  sendNext();
  setTimeout(showBusy); // after what follows from the answer
});

const showBusy = () => document.querySelector("main").setAttribute("aria-busy", String(current !== null || waiting.size > 0));

function sendNext() {
  if (current || !waiting.size) return;
  const [kind, question] = waiting.entries().next().value;
  waiting.delete(kind);
  current = question;
  worker.postMessage({ id: question.id, question: question.asked });
}

// The answer to a view's question; null if a newer question of this kind took its place.
export function ask(view, settings, args = {}, kind = view) {
  return new Promise((resolve) => {
    waiting.get(kind)?.resolve(null);
    waiting.delete(kind);
    number += 1;
    waiting.set(kind, { id: number, asked: { view, settings, ...args }, resolve });
    sendNext();
    showBusy();
  });
}
