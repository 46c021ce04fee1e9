"""What all suites share: parts that are measured and stored one by one, the journal of results, and the page writer.

A suite measures with `ringspan.tools.bench` (timing in turns, trials in fresh processes) and builds a
`ringspan.tools.pages.Page` from its stored results alone, so that a page can be written again without measuring.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from matplotlib.figure import Figure
from rich.console import Console

from ringspan.runtime.files import Journal, read_journal, write_atomic
from ringspan.tools.bench.share import HEAD_DIM, HEADS, PASSES
from ringspan.tools.measure import describe_machine, one_line
from ringspan.tools.pages import Page, Picture, Rows, Table, markdown, print_page, write_into

ROOT = Path(__file__).parent.parent
MIB = 2**20
Size = Literal["quick", "default", "long"]  # of the runs: to see that a suite works, for `make bench`, or for accuracy
Value = TypeVar("Value")


class Results:
    """The results of a suite in a journal: one line for each measured part, or for each item of a part.

    A later line replaces an earlier one. With ``keep``, all lines of other parts are deleted first.
    """

    def __init__(self, path: Path, *, size: Size = "default", keep: Collection[str] | None = None) -> None:
        if keep is not None:
            _delete_other_parts(path, keep)
        self.path, self.size, self.parts = path, size, dict[str, Any]()
        self.machines: dict[str, str] = {}  # of each part
        self.itemized: set[str] = set()
        for line in read_journal(path):
            if "part" in line:
                self._add(line)

    def __getitem__(self, part: str) -> Any:
        if part not in self.parts:
            raise SystemExit(f"{self.path} has no part {part!r}: measure it with --only {part}, or leave out --only")
        return self.parts[part]

    def get(self, part: str, default: Any = None) -> Any:
        return self.parts.get(part, default)

    def add(self, part: str, value: Any, item: str = "") -> Any:
        """Store a value on disk, and return it as it would be read back."""
        line = {"part": part, "item": item, "value": value, "size": self.size, "machine": describe_machine()}
        Journal(self.path).append(line)
        self._add(json.loads(json.dumps(line)))
        return self.parts[part][item] if item else self.parts[part]

    def _add(self, line: dict[str, Any]) -> None:
        if line["item"]:
            self.itemized.add(line["part"])
            self.parts.setdefault(line["part"], {})[line["item"]] = line["value"]
        else:
            self.parts[line["part"]] = line["value"]
        how = ", with --long" if line.get("size") == "long" else ""
        self.machines[line["part"]] = one_line(line["machine"]) + how

    @property
    def machine(self) -> str:
        """The machine and date of the measurements, part by part if they differ."""
        parts_by_machine: dict[str, list[str]] = {}
        for part, machine in self.machines.items():
            parts_by_machine.setdefault(machine, []).append(part)
        if len(parts_by_machine) == 1:
            return next(iter(parts_by_machine))
        return "; ".join(f"{', '.join(parts)}: {machine}" for machine, parts in parts_by_machine.items())


def _delete_other_parts(path: Path, keep: Collection[str]) -> None:
    lines = [line for line in read_journal(path) if line.get("part") in keep]
    path.unlink(missing_ok=True)
    if lines:
        write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines))


@dataclass(frozen=True)
class Measuring:
    """What a part gets to measure with. ``folder`` is temporary."""

    part: str
    results: Results
    size: Size
    resume: bool
    folder: Path
    options: Mapping[str, str]
    console: Console

    def sized(self, quick: Value, default: Value, long: Value) -> Value:
        """The value for the size of this run."""
        return {"quick": quick, "default": default, "long": long}[self.size]

    def announce(self, text: str) -> None:
        self.console.print(f"{self.part}: {text}", style="dim", highlight=False, markup=False, soft_wrap=True)

    def each(self, names: Iterable[str], measure: Callable[[str], Any]) -> None:
        """Measure items one by one and store each at once; with ``resume``, stored items are kept."""
        if not self.resume:
            self.results.add(self.part, {})
        for name in names:
            if name not in self.results.get(self.part, {}):
                self.announce(name)
                self.results.add(self.part, measure(name), name)


@dataclass(frozen=True)
class Suite:
    """Parts to measure, and the page that shows them.

    A part returns its result, or None if it stored items with `Measuring.each`. ``broken(results)`` returns a sentence
    if a promise does not hold. ``marker`` names the block of a hand-written page; without it the page is written whole.
    ``long_parts`` take so long that a default run does not measure them, and keeps their stored results.
    ``long_options`` are the defaults of options with ``--long``.
    """

    page: str
    parts: Mapping[str, Callable[[Measuring], Any]]
    report: Callable[[Results], Page]
    marker: str = ""
    broken: Callable[[Results], str] = field(default=lambda results: "")
    options: Mapping[str, str] = field(default_factory=dict)
    long_options: Mapping[str, str] = field(default_factory=dict)
    long_parts: Collection[str] = ()

    def parts_of(self, size: Size) -> list[str]:
        """The parts that a run of this size measures."""
        return [part for part in self.parts if size != "default" or part not in self.long_parts]


@dataclass(frozen=True)
class Request:
    """How to run a suite. ``root`` is the folder whose docs/ and benchmarks/results/ are written."""

    root: Path = ROOT
    size: Size = "default"
    resume: bool = False
    report_only: bool = False
    only: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)


def run_suite(name: str, suite: Suite, request: Request, console: Console) -> str:
    """Measure, store and write the page. Returns a sentence if a promise does not hold, otherwise an empty string."""
    path = request.root / "benchmarks/results" / f"{name}.jsonl"
    parts = () if request.report_only else request.only or suite.parts_of(request.size)
    fresh = not (request.only or request.resume or request.report_only)
    results = Results(path, size=request.size, keep=set(suite.parts) - set(parts) if fresh else None)
    options = {**suite.options, **(suite.long_options if request.size == "long" else {}), **request.options}
    for part in parts:
        if request.resume and results.get(part) and part not in results.itemized:
            continue
        with tempfile.TemporaryDirectory() as folder:
            measuring = Measuring(part, results, request.size, request.resume, Path(folder), options, console)
            measuring.announce("measuring")
            value = suite.parts[part](measuring)
        if value is not None:
            results.add(part, value)
    page = suite.report(results)
    print_page(page, console)
    console.print(page.sentence, highlight=False, markup=False, soft_wrap=True)
    write_docs(page, request.root, suite.page, suite.marker)
    console.print(f"Written: {suite.page}", highlight=False)
    return suite.broken(results)


def write_docs(page: Page, root: Path, target: str, marker: str = "") -> None:
    """Write a page and its pictures under ``root``: the whole file, or the block between its markers."""
    path = root / target
    (path.parent / "figures").mkdir(parents=True, exist_ok=True)
    for part in page.parts:
        if isinstance(part, Picture):
            part.figure.savefig(path.parent / "figures" / f"{part.name}.png", dpi=130)
    text = markdown(page, "figures")
    if not marker:
        path.write_text(text)
        return
    if not path.exists():  # a quick run into another folder
        shutil.copy(ROOT / target, path)
    lines = text.replace("\n## ", "\n### ").splitlines()
    write_into(path, marker, [*lines[1:], ""])  # without the title: the page has a heading of its own


def run_python(*arguments: str, threads: int | None = 1) -> str:
    """Run ``python *arguments`` in the project's folder and return its stdout."""
    environment = {**os.environ, **({} if threads is None else {"OMP_NUM_THREADS": str(threads)})}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, cwd=ROOT
    )
    if done.returncode:
        raise RuntimeError(f"python {' '.join(arguments)} exited with {done.returncode}:\n{done.stderr[-4000:]}")
    return done.stdout


def both_ratios(over: list[float], under: list[float], digits: int = 3) -> list[str]:
    """The median of the ratios of single rounds, the ratio of the medians, and the spread of the ratios."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    of_medians = statistics.median(over) / statistics.median(under)
    return [
        f"{statistics.median(ratios):.{digits}f}",
        f"{of_medians:.{digits}f}",
        f"{min(ratios):.2f} - {max(ratios):.2f}",
    ]


def yes(flag: bool) -> str:
    return "yes" if flag else "no"


def mebibytes(size: float, digits: int = 0) -> str:
    return f"{size / MIB:,.{digits}f} MiB"


def empty_figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Any]]:
    """A figure with plain axes, row by row."""
    figure = Figure(figsize=size, layout="constrained")
    axes = [axis for row in figure.subplots(rows, columns, squeeze=False) for axis in row]
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes


__all__ = [
    "HEADS",
    "HEAD_DIM",
    "MIB",
    "PASSES",
    "ROOT",
    "Measuring",
    "Page",
    "Picture",
    "Request",
    "Results",
    "Rows",
    "Size",
    "Suite",
    "Table",
    "both_ratios",
    "empty_figure",
    "mebibytes",
    "run_python",
    "run_suite",
    "write_docs",
    "yes",
]
