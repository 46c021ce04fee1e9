"""`ringspan verify` on a correct ring and on twelve faulty ones, on a quiet and on a busy machine.

Rings are examined one by one and, with --long, also two at a time, so that each disturbs another. The suite fails
unless every faulty ring is exposed and the correct one is not.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

from benchmarks.suite import ROOT, Measuring, Page, Results, Rows, Suite, Table

MODULE = "tests.tools.verify.faulty"
HONEST = "honest"
MACHINES = {"quiet": "quiet machine", "busy": "busy machine (two rings at a time)"}
VERDICTS = {0: "real", 1: "exposed", 3: "not proven"}


def rings(run: Measuring) -> list[str]:
    faulty = list(import_module(MODULE).TWELVE)
    return [HONEST, *(faulty[:1] if run.size == "quick" else faulty)]


def examine(ring: str) -> dict[str, Any]:
    """Run the documented command on one ring."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "ringspan", "verify", "--attention", f"{MODULE}:{ring}"]
        done = subprocess.run(
            [*command, "--json", "--out", folder], capture_output=True, text=True, check=False, cwd=ROOT
        )
    if done.returncode not in VERDICTS:
        raise RuntimeError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr}")
    checks: list[dict[str, Any]] = json.loads(done.stdout)["checks"]
    failing = [check["name"] for check in checks if check["verdict"] == "FAIL"]
    (speed,) = (check["verdict"] for check in checks if check["name"] == "more ranks are faster")
    return {"verdict": VERDICTS[done.returncode], "failing": failing, "speed": speed}


def quiet(run: Measuring) -> None:
    run.each(rings(run), examine)


def busy(run: Measuring) -> dict[str, Any]:
    """Two rings at a time."""
    names = rings(run)
    with ThreadPoolExecutor(2) as pool:
        return dict(zip(names, pool.map(examine, names), strict=True))


def measured_machines(results: Results) -> list[str]:
    return [machine for machine in MACHINES if results.get(machine)]


def broken(results: Results) -> str:
    wrong = [
        f"{ring} on a {machine} machine"
        for machine in measured_machines(results)
        for ring, found in results[machine].items()
        if (found["verdict"] == "exposed") == (ring == HONEST)
    ]
    return f"Wrong verdict: {', '.join(wrong)}." if wrong else ""


def _cell(found: dict[str, Any]) -> str:
    if found["failing"]:
        return f"{found['verdict']}: {', '.join(found['failing'])}"
    return f"{found['verdict']}; speed {found['speed']}"


def _summary(ring: str) -> str:
    """The first line of a ring's docstring."""
    return str(getattr(import_module(MODULE), ring).__doc__).splitlines()[0].rstrip(".")


def report(results: Results) -> Page:
    machines = measured_machines(results)
    rows: Rows = [["ring", "what it does", *(MACHINES[machine] for machine in machines)]]
    names = sorted(results["quiet"], key=lambda ring: ring != HONEST)
    for ring in names:
        rows.append([f"`{ring}`", _summary(ring), *(_cell(results[machine][ring]) for machine in machines)])
    exposed = sum(all(results[m][ring]["verdict"] == "exposed" for m in machines) for ring in names)
    return Page(
        "Faulty rings",
        f"{exposed} of {len(names) - 1} faulty rings are exposed{' in both' if len(machines) > 1 else ''}.",
        "python -m benchmarks faulty_rings",
        f"Machine: {results.machine}",
        [Table("Verdicts", rows)],
    )


SUITE = Suite(
    "docs/verify.md",
    {"quiet": quiet, "busy": busy},
    report,
    marker="faulty rings",
    broken=broken,
    long_parts=("busy",),
)
