"""The explorer in Chromium: its size, how long it takes to load, and how long plans of large rings take in the page.

Needs Chromium, Playwright and npm. Writes a block of docs/explorer.md.
"""

from __future__ import annotations

import gzip
import shutil
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.suite import Measuring, Page, Results, Rows, Suite, Table, mebibytes
from ringspan.tools.explorer.server import address, make_server
from ringspan.tools.explorer.site import write_site
from tests.explorer.page import SHIFTS, Explorer, fragment, launch

ASKED_LOAD, ASKED_PLAN = 3.0, 1.0  # seconds
LARGE: dict[str, Any] = dict(tokens="1M", ranks="1024", heads="32", kv_heads="8", head_dim="128")
LONGNET = "2048x1,8192x4,32768x16,131072x64,1048576x512"
PLANS: dict[str, dict[str, Any]] = {
    "LongNet, contiguous": dict(pattern=LONGNET, layout="contiguous"),
    "LongNet, zigzag": dict(pattern=LONGNET, layout="zigzag"),
    "full, causal, zigzag": dict(pattern="full", layout="zigzag"),
    "full, not causal, contiguous": dict(pattern="full", layout="contiguous", causal=False),
    "window 4095 + 65536x16, zigzag": dict(pattern="window 4095 + 65536x16", layout="zigzag"),
    "full, 83 documents, balanced": dict(pattern="full", layout="balanced", lengths="128k,64k*4,8k*80"),
}
# In the page: from the change of the link to all views drawn, and from there to the costs of `ranks` ranks.
SHOWN = """async ([link, ranks]) => {
  const until = async (test) => {
    while (!test()) await new Promise((done) => setTimeout(done, 2));
    return performance.now();
  };
  const rows = () => document.querySelectorAll('#numbers tr[data-rank]').length;
  const begin = performance.now();
  window.location.hash = link;
  await until(() => document.body.dataset.done === '');
  const views = await until(() => document.body.dataset.done !== '');
  const sample = await until(() => rows() >= ranks);
  return [(views - begin) / 1000, (sample - begin) / 1000, rows()];
}"""
LOADED = "document.body.dataset.done === 'yes' && performance.now()"


@contextmanager
def _browser(run: Measuring) -> Iterator[tuple[Any, str]]:
    """Chromium, and the address of the explorer."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - only this suite needs it

    chromium = shutil.which("chromium")
    if chromium is None:
        raise SystemExit("Chromium is not installed: apt-get install chromium")
    write_site(run.folder)
    with make_server(run.folder) as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = launch(playwright, chromium)
        yield browser, address(server)
        browser.close()
        server.shutdown()


def bundle(run: Measuring) -> list[dict[str, Any]]:
    """The bytes of the page's parts, as they are and compressed."""
    write_site(run.folder)
    found: dict[str, list[int]] = {}
    for path in sorted(run.folder.rglob("*")):
        if path.is_file():
            part = "Pyodide" if path.parent.name == "pyodide" else "planner" if path.suffix == ".zip" else "page"
            content = path.read_bytes()
            sizes = found.setdefault(part, [0, 0, 0])
            found[part] = [a + b for a, b in zip(sizes, (1, len(content), len(gzip.compress(content))), strict=True)]
    return [dict(part=part, files=sizes[0], size=sizes[1], gzipped=sizes[2]) for part, sizes in found.items()]


def load(run: Measuring) -> dict[str, Any]:
    """Seconds from navigation to all views drawn, each time in a new browser context, and the shift of the layout."""
    found: dict[str, Any] = {"seconds": {}, "shifts": {}}
    with _browser(run) as (browser, home):
        for name, width in (("desktop", 1280), ("phone", 390)):
            seconds, shifts = [], []
            for _ in range(run.sized(1, 5, 21)):
                with Explorer(browser, home, viewport=dict(width=width, height=844)) as explorer:
                    explorer.context.add_init_script(SHIFTS)
                    explorer.page.goto(home)
                    seconds.append(explorer.page.wait_for_function(LOADED).json_value() / 1000)
                    explorer.wait()
                    shifts.append(explorer.page.evaluate("window.shifts"))
            found["seconds"][name], found["shifts"][name] = seconds, max(shifts)
    return found


def plans(run: Measuring) -> None:
    """Seconds to show plans of 1,024 ranks and a million tokens. Nothing of them is cached before."""
    with _browser(run) as (browser, home):

        def measure(name: str) -> list[list[float]]:
            rounds = []
            for _ in range(run.sized(1, 3, 9)):
                with Explorer(browser, home) as explorer:
                    explorer.open()
                    rounds.append(explorer.page.evaluate(SHOWN, [fragment(LARGE | PLANS[name]), 8]))
            return rounds

        run.each(PLANS, measure)


def broken(results: Results) -> str:
    slow = [name for name, seconds in results["load"]["seconds"].items() if statistics.median(seconds) > ASKED_LOAD]
    return f"Loading takes more than {ASKED_LOAD} s: {', '.join(slow)}" if slow else ""


def report(results: Results) -> Page:
    parts, loaded, planned = results["bundle"], results["load"], results["plans"]
    every = dict(part="all", **{name: sum(p[name] for p in parts) for name in ("files", "size", "gzipped")})
    sizes: Rows = [["part", "files", "size", "gzipped"]]
    for p in (*parts, every):
        sizes.append([p["part"], str(p["files"]), mebibytes(p["size"], 2), mebibytes(p["gzipped"], 2)])
    loads: Rows = [["window", "seconds to load, median", "slowest", "asked", "cumulative layout shift"]]
    for name, seconds in loaded["seconds"].items():
        shift = f"{loaded['shifts'][name]:.4f}"
        loads.append([name, f"{statistics.median(seconds):.2f}", f"{max(seconds):.2f}", f"{ASKED_LOAD:.0f}", shift])
    answers: Rows = [["1,048,576 tokens on 1,024 ranks", "seconds to all views", "to the costs of 8 ranks", "asked"]]
    for name, rounds in planned.items():
        views, costs = (statistics.median(one[i] for one in rounds) for i in (0, 1))
        answers.append([name, f"{views:.2f}", f"{costs:.2f}", f"{ASKED_PLAN:.0f}"])
    within = sum(statistics.median(one[0] for one in rounds) <= ASKED_PLAN for rounds in planned.values())
    slowest = max(statistics.median(seconds) for seconds in loaded["seconds"].values())
    sentence = (
        f"The page has {mebibytes(every['size'], 1)}, {mebibytes(every['gzipped'], 1)} if the server compresses. It "
        f"loads in {slowest:.1f} s, from navigation to all views, without a cache. {within} of {len(planned)} large "
        f"plans show all views within {ASKED_PLAN:.0f} s."
    )
    return Page(
        "Size and speed",
        sentence,
        "python -m benchmarks explorer",
        f"Machine: {results.machine}; a local server, and Chromium without a window",
        [Table("Files", sizes), Table("Loading", loads), Table("Large plans", answers, NOTE)],
    )


NOTE = (
    "All views are drawn with the first rank that is planned; the costs of other ranks follow as they are planned. "
    "Medians of three new pages each, in which nothing was planned before."
)

SUITE = Suite(
    "docs/explorer.md",
    {"bundle": bundle, "load": load, "plans": plans},
    report,
    marker="benchmarks.explorer",
    broken=broken,
)
