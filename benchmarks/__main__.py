"""Run the suites that write the result pages of docs/.

    python -m benchmarks                       # list the suites
    python -m benchmarks ring one_device       # measure these
    python -m benchmarks all                   # measure everything in about 100 minutes, as `make bench` does
    python -m benchmarks all --long            # more rounds and longer runs: more than five hours
    python -m benchmarks ring --only speed     # one part; the other parts keep their stored results
    python -m benchmarks scale --resume        # continue an interrupted run
    python -m benchmarks all --report          # measure nothing, write the pages again from stored results
    python -m benchmarks ring --quick          # small sizes, into ringspan-report/quick: does it run?

Results are stored in benchmarks/results/SUITE.jsonl as soon as they are measured.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from rich.console import Console

from benchmarks.suite import ROOT, Request, Size, run_suite
from ringspan.tools.pages import Table, rich_table


@dataclass(frozen=True)
class Entry:
    """A suite in the list: one sentence, minutes on two idle cores by default and with --long, and its page."""

    sentence: str
    minutes: int
    long_minutes: int
    page: str


SUITES = {
    "one_device": Entry("One device: speed and memory against the bare kernel and torch", 8, 40, "docs/benchmarks.md"),
    "tiles": Entry("What a tile costs: the price model of plans, fitted", 1, 3, "docs/derivation.md"),
    "ring": Entry("Rings: speed-up, other rings, memory, bytes, error", 9, 30, "docs/ring_results.md"),
    "documents": Entry("Packed documents: balance, bytes and time by layout", 1, 8, "docs/documents.md"),
    "plans": Entry("Plans for two processes: predicted and measured times", 8, 22, "docs/plans.md"),
    "results": Entry("Trials of ringspan and its alternatives over lengths and ring sizes", 7, 20, "docs/results.md"),
    "training": Entry("Training: long sequences, speed-up, context, resuming", 5, 40, "docs/training_results.md"),
    "decoding": Entry("Decoding: time and memory per token with a bounded cache", 3, 7, "docs/decoding.md"),
    "hilbert": Entry("Token orders of grids: locality, traffic, cost", 6, 15, "docs/hilbert.md"),
    "slides": Entry("Slides: orders of tiles, learning across ranks, a large slide", 7, 18, "docs/slide_orders.md"),
    "faults": Entry("Training runs killed at scripted and random points", 5, 20, "docs/faults.md"),
    "networks": Entry(
        "Rings over two hosts: links of several rates, predicted and measured", 7, 20, "docs/networks.md"
    ),
    "host_faults": Entry("Training over two hosts, one of which fails", 4, 14, "docs/faults.md"),
    "traces": Entry("Training steps over two hosts, traced and not traced", 1, 4, "docs/traces.md"),
    "fuzz": Entry("Damaged checkpoints, settings and models", 1, 5, "docs/faults.md"),
    "faulty_rings": Entry("`ringspan verify` on twelve faulty rings", 8, 25, "docs/verify.md"),
    "trainers": Entry("`ringspan verify --training` on own, other and faulty trainers", 5, 15, "docs/trainers.md"),
    "scale": Entry("Growth with length and ring size, and limits of real hardware", 5, 60, "docs/scale.md"),
    "transformers_models": Entry(
        "Transformers model types against eager attention", 4, 15, "docs/transformers_models.md"
    ),
    "explorer": Entry("The explorer in Chromium: size, loading, plans of large rings", 2, 5, "docs/explorer.md"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)}, or all")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="measure this part; repeatable")
    parser.add_argument("--resume", action="store_true", help="keep stored results, measure only what is missing")
    parser.add_argument("--report", action="store_true", help="measure nothing, write the pages from stored results")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    sizes.add_argument("--long", action="store_true", help="more rounds, longer runs, and parts that take very long")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="an option of a suite")
    parser.add_argument("--root", type=Path, help="write docs/ and benchmarks/results/ here (default: the project)")
    arguments = parser.parse_args()
    console = Console()
    if not arguments.suites:
        list_suites(console)
        return
    names = list(SUITES) if "all" in arguments.suites else arguments.suites
    if unknown := [name for name in names if name not in SUITES]:
        parser.error(f"unknown suites {', '.join(unknown)}: must be among {', '.join(SUITES)}, all")
    broken = {}
    for name in names:
        suite = import_module(f"benchmarks.{name}").SUITE
        options = dict(pair.split("=", 1) for pair in arguments.set)
        for kind, given, known in (("part", arguments.only, suite.parts), ("option", options, suite.options)):
            if unknown := [each for each in given if each not in known]:
                parser.error(f"{name}: unknown {kind} {', '.join(unknown)}: must be among {', '.join(known) or 'none'}")
        root = arguments.root or (Path("ringspan-report/quick") if arguments.quick else ROOT)
        size: Size = "quick" if arguments.quick else "long" if arguments.long else "default"
        request = Request(root, size, arguments.resume, arguments.report, tuple(arguments.only), options)
        console.rule(name)
        if sentence := run_suite(name, suite, request, console):
            broken[name] = sentence
    if broken:
        sys.exit("\n".join(f"{name}: {sentence}" for name, sentence in broken.items()))


def list_suites(console: Console) -> None:
    rows = [["suite", "measures", "minutes", "long", "page"]]
    rows += [
        [name, entry.sentence, str(entry.minutes), str(entry.long_minutes), entry.page.removeprefix("docs/")]
        for name, entry in SUITES.items()
    ]
    console.print(rich_table(Table("Suites, and the page of docs/ that each writes", rows)))
    total, total_long = sum(e.minutes for e in SUITES.values()), sum(e.long_minutes for e in SUITES.values())
    console.print(
        f"`make bench` runs all of them: {total} minutes on two idle cores, or {total_long} with --long.",
        highlight=False,
    )


if __name__ == "__main__":
    main()
