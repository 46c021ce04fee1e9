"""Growth: how time and memory grow with the length and with the ring, and where the walls stand.

    python -m benchmarks.scale                     # everything but the longest run, about half an hour on two cores
    python -m benchmarks.scale --quick --into /tmp/scale   # short lengths and small rings, minutes: does it run?
    python -m benchmarks.scale --only rings        # one part; the others keep their last results
    python -m benchmarks.scale --billion runs/b    # with the run of `ringspan stream --tokens 1G --out runs/b`
    python -m benchmarks.scale --report            # measure nothing, write the page again

Every length and every ring is measured by the command that a user would give, `ringspan stream` or `ringspan rehearse`,
in a process of its own (and short lengths once more in one that is warm, `benchmarks.warm`), and kept as soon as it is
measured: interrupted, the same command goes on; --again starts anew.
Writes benchmarks/results/scale.json, docs/figures/scale_*.png and docs/scale.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.reality import reality
from benchmarks.scale_report import write_report
from benchmarks.walls import communication, nodes, walls
from ringspan.runtime.files import write_atomic
from ringspan.tools.demonstration import steady_seconds_per_token, whole_sequence_pattern
from ringspan.tools.measure import describe_machine, one_line
ROOT = Path(__file__).parent.parent
RESULTS = Path("benchmarks/results/scale.json")
ROWS_PER_RANK = 2**16
REPEATED_BELOW, REPEATS = 2**26, 3  # a machine is slower for a while, now and then: lengths take turns


def growth(name: str) -> dict[str, Any]:
    """One streamed length; the name is the length, and which time it is."""
    with tempfile.TemporaryDirectory() as folder:
        return _ask("stream", "--tokens", name.split(maxsplit=1)[0], "--budget", "8G", "--out", folder)


def warm(_: str) -> dict[str, Any]:
    """Short lengths, in turns, in one process that has its memory already: seconds per token by length."""
    return _run("benchmarks.warm")


def rings(name: str) -> dict[str, Any]:
    """A ring, with as many rows on a rank as every other: what a rank does should not depend on its size."""
    tokens = int(name) * ROWS_PER_RANK
    pattern = whole_sequence_pattern(tokens).text
    sizes = ("--tokens", str(tokens), "--ranks", name, "--heads", "2", "--dim", "32")
    return _ask("rehearse", *sizes, "--pattern", pattern, "--layout", "contiguous", "--backward")


@dataclass(frozen=True)
class Part:
    """One table: what is measured for each name, and the names; fewer of them if it should be quick."""

    measure: Callable[[str], dict[str, Any]]
    names: tuple[str, ...]
    quick: tuple[str, ...]


def _of_devices(measure: Callable[[int], dict[str, Any]]) -> Part:
    return Part(lambda name: measure(int(name)), ("8", "64", "1024"), ("8", "64"))


def _lengths(stop: int) -> tuple[str, ...]:
    turns = {2**i: REPEATS if 2**i < REPEATED_BELOW else 1 for i in range(13, stop)}
    return tuple(f"{length} {turn}" for turn in range(REPEATS) for length in turns if turn < turns[length])


PARTS = {
    "growth": Part(growth, _lengths(29), _lengths(16)),
    "warm": Part(warm, ("all",), ()),
    "rings": Part(rings, ("1", "10", "100", "1000", "10000"), ("1", "10", "100")),
    "reality": Part(lambda name: reality(int(name)), ("2", "4", "8"), ("2",)),
    "communication": _of_devices(communication),
    # Every rank of these is planned, six times over: 1,024 of them take too long.
    "nodes": Part(lambda name: nodes(int(name)), ("8", "16", "64"), ("8",)),
    "walls": _of_devices(walls),
}


def _ask(*arguments: str) -> dict[str, Any]:
    return _run("ringspan", *arguments, "--json")


def _run(module: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", module, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        command = " ".join([module, *arguments])
        raise RuntimeError(f"python -m {command} ended with {done.returncode}:\n{done.stderr}{done.stdout}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="short lengths and small rings")
    parser.add_argument("--only", choices=PARTS, action="append", help="measure this part only; may be repeated")
    parser.add_argument("--again", action="store_true", help="measure what is known already too")
    parser.add_argument("--report", action="store_true", help="measure nothing, only write the page")
    parser.add_argument("--billion", type=Path, help="the folder of a run of `ringspan stream`")
    parser.add_argument("--into", type=Path, default=ROOT, help="where docs/ and benchmarks/results/ are written")
    arguments = parser.parse_args()
    console, path = Console(), arguments.into / RESULTS
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if not arguments.report or "machine" not in results:
        results["machine"] = one_line(describe_machine())

    def keep() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(results, indent=1) + "\n")

    if arguments.billion is not None:
        log = (arguments.billion / "log.jsonl").read_text().splitlines()
        results["billion"] = json.loads((arguments.billion / "result.json").read_text())
        results["billion_log"] = [json.loads(line) for line in log]
        results["billion"]["steady_seconds_per_token"] = steady_seconds_per_token(results["billion_log"])
        keep()
    if not arguments.report:
        with Progress(console=console) as progress:
            for which in arguments.only or PARTS:
                _measure(which, PARTS[which], results, progress, arguments.quick, arguments.again, keep)
    write_report(results, results["machine"], arguments.into, console)


def _measure(
    which: str,
    part: Part,
    results: dict[str, Any],
    progress: Progress,
    quick: bool,
    again: bool,
    keep: Callable[[], None],
) -> None:
    names = part.quick if quick else part.names
    if again:
        results[which] = {}
    known = results.setdefault(which, {})
    for name in progress.track(names, description=which):
        if name not in known:
            known[name] = part.measure(name)
            keep()


if __name__ == "__main__":
    main()
