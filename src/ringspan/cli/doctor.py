"""`ringspan doctor`: what works on this machine, what is missing, and a short self-test of attention."""

from __future__ import annotations

import json
import os

import typer

from ringspan.cli.options import AsJson, make_console
from ringspan.tools.doctor import HealthReport, SelfTest, inspect_machine
from ringspan.tools.pages import Table, rich_table


def doctor(as_json: AsJson = False) -> None:
    """Inspect this machine (devices, kernels, backends, packages) and test attention on every device and dtype.

    The self-test compares output and gradients with the dense definition in fp64. Exit status: 0 if every test passes,
    otherwise 1. Under torchrun every process inspects its machine, and rank 0 prints.

    **Examples**

    `ringspan doctor`

    `ringspan doctor --json`
    """

    with make_console(stderr=True).status("inspecting this machine and testing attention ..."):
        report = inspect_machine()
    if os.environ.get("RANK", "0") == "0":
        if as_json:
            typer.echo(json.dumps(report.as_json()))
        else:
            _print_report(report)
    raise typer.Exit(0 if report.is_healthy else 1)


def _print_report(report: HealthReport) -> None:
    console = make_console()
    for table in _tables(report):
        console.print(rich_table(table))
    if report.missing:
        console.print("Missing packages", style="italic")
    for package in report.missing:
        console.print(f" {package.name}, for {package.purpose}: {package.install}", soft_wrap=True)
    console.print(f"Processes: {report.launch}", soft_wrap=True)
    console.print(report.verdict, style="green" if report.is_healthy else "bold red", soft_wrap=True)


def _tables(report: HealthReport) -> list[Table]:
    devices = [["device", "description", "dtype for training", "reason"]]
    devices += [[d.name, d.description, d.suggested_dtype, d.reason] for d in report.devices]
    kernels = [["kernel", "usable", "dtypes", "reason"]]
    kernels += [[k.name, _yes(k.usable), ", ".join(k.dtypes), k.reason] for k in report.kernels]
    choices = [["device", "dtype", "kernel", "reason"]]
    choices += [[c.device, c.dtype, c.kernel, c.reason] for c in report.choices]
    backends = [["backend", "available", "for"]]
    backends += [[b.name, _yes(b.available), b.tensors] for b in report.backends]
    packages = [["package", "version", "for"]]
    packages += [[p.name, p.version, p.purpose] for p in report.packages if p.version]
    tests = [["device", "dtype", "kernel", "error", "verdict"]]
    tests += [[t.device, t.dtype, t.kernel, _error(t), "pass" if t.passed else "FAIL"] for t in report.self_tests]
    return [
        Table("Devices", devices),
        Table("Kernels", kernels),
        Table("Kernel that attention uses", choices),
        Table("Process-group backends", backends),
        Table("Packages", packages),
        Table("Self-test: attention forward and backward against the dense definition", tests),
    ]


def _error(test: SelfTest) -> str:
    return test.failure or f"{test.error:.1e} in {test.result}, allowed {test.allowed:.1e}"


def _yes(answer: bool) -> str:
    return "yes" if answer else "no"
