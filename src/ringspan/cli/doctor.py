"""`ringspan doctor`: what is here, what is missing for what, and whether attention works."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from ringspan.cli.console import make_console
from ringspan.cli.options import AsJson

if TYPE_CHECKING:
    from ringspan.tools.doctor import Health, SelfTest
    from ringspan.tools.pages import Table


def doctor(as_json: AsJson = False) -> None:
    """Look at this machine: devices, kernels, backends, packages; then try attention on every device and dtype.

    Ends with a verdict. Exit status 0 only if every self-test holds: output and gradients against a dense oracle in
    fp64. Under torchrun every process looks at its machine, and rank 0 speaks.

    **Examples**

    `ringspan doctor`

    `ringspan doctor --json`
    """

    from ringspan.tools.pages import rich_table  # noqa: PLC0415

    progress = make_console(stderr=True)
    with progress.status("looking around, and trying attention on every device and dtype ..."):
        from ringspan.tools.doctor import examine_machine  # noqa: PLC0415

        health = examine_machine()

    speaks = os.environ.get("RANK", "0") == "0"
    if speaks and as_json:
        typer.echo(json.dumps(_as_document(health)))
    elif speaks:
        console = make_console()
        for table in _tables(health):
            shown = rich_table(table)
            for column in shown.columns:
                column.overflow = "fold"  # names and pip lines are to be read whole
            console.print(shown)
        console.print(f"Processes: {health.launch}", highlight=False, soft_wrap=True)
        console.print(health.verdict, style="green" if health.is_well else "bold red", highlight=False, soft_wrap=True)
    raise typer.Exit(0 if health.is_well else 1)


def _as_document(health: Health) -> dict[str, Any]:
    return {
        **asdict(health),
        "self_tests": [{**asdict(test), "holds": test.holds} for test in health.self_tests],
        "missing": {package.name: package.install for package in health.missing},
        "is_well": health.is_well,
        "verdict": health.verdict,
    }


def _tables(health: Health) -> list[Table]:
    from ringspan.tools.pages import Table  # noqa: PLC0415

    devices = [["device", "what it is", "for training", "because"]]
    devices += [[d.name, d.description, d.suggested_dtype, d.reason] for d in health.devices]
    kernels = [["kernel", "usable", "dtypes", "because"]]
    kernels += [[k.name, _yes(k.usable), ", ".join(k.dtypes), k.reason] for k in health.kernels]
    choices = [["device", "dtype", "kernel", "because"]]
    choices += [[c.device, c.dtype, c.kernel, c.reason] for c in health.choices]
    backends = [["backend", "here", "carries"]]
    backends += [[b.name, _yes(b.available), b.carries] for b in health.backends]
    packages = [["package", "version", "for", "if missing"]]
    packages += [[p.name, p.version or "missing", p.purpose, "" if p.version else p.install] for p in health.packages]
    tests = [["device", "dtype", "kernel", "error", "verdict"]]
    tests += [[t.device, t.dtype, t.kernel, _error(t), "holds" if t.holds else "FAILS"] for t in health.self_tests]
    return [
        Table("Devices", devices),
        Table("Kernels", kernels),
        Table("Which kernel attention gets", choices),
        Table("Process-group backends", backends),
        Table("Packages", packages),
        Table("Self-test: attention forward and backward against a dense oracle in fp64", tests),
    ]


def _error(test: SelfTest) -> str:
    return test.failure or f"{test.error:.1e} in {test.result}, {test.allowed:.1e} allowed"


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"
