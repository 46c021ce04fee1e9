// Runs the planner: Python in WebAssembly, with ringspan's own modules from ringspan.zip. Knows no page.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const here = new URL(".", self.location.href).href;
const started = start();

async function start() {
  const archive = fetch("ringspan.zip").then((reply) => reply.arrayBuffer());
  const python = await loadPyodide({ indexURL: `${here}pyodide/` });
  python.FS.writeFile("/ringspan.zip", new Uint8Array(await archive)); // imported from there: unpacking takes longer
  python.runPython("import sys; sys.path.insert(0, '/ringspan.zip')");
  return python.pyimport("ringspan.tools.explorer.views").answer;
}

started.then(
  () => self.postMessage({ ready: true }),
  (error) => self.postMessage({ failed: String(error) }),
);

self.onmessage = async ({ data }) => {
  const answer = await started;
  try {
    self.postMessage({ id: data.id, answer: JSON.parse(answer(JSON.stringify(data.question))) });
  } catch (error) { // of Python, which the library did not expect; after a fatal one, this worker is of no use
    self.postMessage({ id: data.id, answer: { error: String(error).trim().split("\n").at(-1) }, broken: true });
  }
};
