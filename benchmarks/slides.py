"""Slides: which neighbours a tile sees in two orders, and a task that needs context across ranks.

The first part counts, in integers. The second runs examples/slide_learning.py.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.large_slide import large_slide
from benchmarks.slide_counts import ORDERS, cost, count_neighbours, pieces_of
from benchmarks.slides_report import VARIANTS, broken, report
from benchmarks.suite import Measuring, Suite, run_python
from ringspan.tools.synthetic_slide import tissue


def orders(run: Measuring) -> dict[str, Any]:
    sizes = run.sized((500, 2000), (5000, 20_000, 60_000), (5000, 20_000, 60_000))
    seeds = run.sized(2, 3, 10)
    found: dict[str, Any] = {}
    for tiles in sizes:
        slides = []
        for seed in range(seeds):
            run.announce(f"{tiles:,} tiles, seed {seed}")
            cells = tissue(tiles, pieces_of(tiles), seed)
            slides.append({name: count_neighbours(cells, name) for name in ORDERS})
        found[str(tiles)] = dict(cost=cost(tiles), slides=slides)
    return found


def learning(run: Measuring) -> None:
    """Run the example: each variant with each seed, one after another."""
    steps, every = run.sized((2, 1), (200, 20), (200, 20))
    seeds = run.sized(1, 4, 6)

    def train(item: str) -> list[dict[str, float]]:
        name, seed = item.split(", seed ")
        processes, flags = VARIANTS[name]
        launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={processes}"] if processes > 1 else []
        path = run.folder / "curve.jsonl"
        options = [f"--seed={seed}", f"--steps={steps}", f"--every={every}", f"--out={path}"]
        run_python(*launcher, "examples/slide_learning.py", *flags, *options)
        return [json.loads(line) for line in path.read_text().splitlines()]

    run.each((f"{name}, seed {seed}" for seed in range(seeds) for name in VARIANTS), train)


SUITE = Suite(
    "docs/slide_orders.md",
    {"orders": orders, "learning": learning, "large_slide": large_slide},
    report,
    broken=broken,
    long_parts=("large_slide",),
)
