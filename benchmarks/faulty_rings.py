"""`ringspan verify` on an honest ring and on twelve faulty ones: the documented command, on a quiet and a busy machine.

    python -m benchmarks.faulty_rings

writes the table in docs/verify.md (about 25 minutes). Rings are first examined one by one, then two at a time, so that
each disturbs another. Results are kept in benchmarks/results/faulty_rings.json: an interrupted run continues; delete
the file to start over.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ringspan.tools.measure import describe_machine, one_line
from ringspan.tools.pages import markdown_table, write_into

COMMAND = ("verify", "--attention", "{target}")
HONEST = ("tests.tools.verify.faulty:honest",)
PAGE = Path(__file__).parent.parent / "docs/verify.md"
TWELVE: tuple[str, ...] = import_module("tests.tools.verify.faulty").TWELVE
RESULTS = Path(__file__).parent / "results/faulty_rings.json"
VERDICTS = {0: "real", 1: "exposed", 3: "not proven"}


@dataclass(frozen=True)
class Found:
    """What the command said about one ring."""

    verdict: str
    failing: tuple[str, ...]
    speed: str

    def __str__(self) -> str:
        if self.failing:
            return f"{self.verdict}: {', '.join(self.failing)}"
        return f"{self.verdict}; speed {self.speed}"


def examine(target: str) -> Found:
    """Run the documented command on one ring."""
    with tempfile.TemporaryDirectory() as folder:
        words = [word.format(target=target) for word in COMMAND]
        command = [sys.executable, "-m", "ringspan", *words, "--json", "--out", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PAGE.parent.parent)
    if done.returncode not in VERDICTS:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    checks: list[dict[str, Any]] = json.loads(done.stdout)["checks"]
    failing = tuple(check["name"] for check in checks if check["verdict"] == "FAIL")
    (speed,) = (check["verdict"] for check in checks if check["name"] == "more ranks are faster")
    return Found(VERDICTS[done.returncode], failing, speed)


def what(target: str) -> str:
    """The first line of a function's own description."""
    module, _, name = target.partition(":")
    return str(getattr(import_module(module), name).__doc__).splitlines()[0].rstrip(".")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    targets = [*HONEST, *(f"tests.tools.verify.faulty:{name}" for name in TWELVE)]
    results: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for machine, at_a_time in (("quiet", 1), ("busy", 2)):
        found = results.setdefault(machine, {})
        missing = [target for target in targets if target not in found]
        if at_a_time > 1 and missing:
            missing = targets  # all again: a ring that is examined alone is not disturbed
        with ThreadPoolExecutor(at_a_time) as pool:
            for target, result in zip(missing, pool.map(examine, missing), strict=True):
                found[target] = asdict(result)
                RESULTS.write_text(json.dumps(results, indent=1) + "\n")
                print(f"{machine}: {target}: {result}", flush=True)
    rows = [["ring", "what it does", "quiet machine", "busy machine (two rings at a time)"]]
    for target in targets:
        cells = [str(Found(**results[machine][target])) for machine in ("quiet", "busy")]
        rows.append([f"`{target.partition(':')[2]}`", what(target), *cells])
    exposed = [row for row in rows[1:] if all(cell.startswith("exposed") for cell in row[2:])]
    text = f"{len(exposed)} of {len(TWELVE)} faulty rings are exposed in both."
    made = f"Written by `python -m benchmarks.faulty_rings`; do not edit. {one_line(describe_machine())}."
    write_into(PAGE, "faulty rings", ["", text, "", *markdown_table(rows), "", made, ""])


if __name__ == "__main__":
    main()
