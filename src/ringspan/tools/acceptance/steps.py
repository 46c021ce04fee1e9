"""Steps in processes of their own: a crash or a hang of one is recorded with its output, and the next one runs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

Outcome = Literal["finished", "crashed", "timed out"]

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 5.0  # between the request to end and the kill
_ERROR = re.compile(r"^(?:\[rank\d+\]: *)?(\w+(?:\.\w+)*(?:Error|Exception|Fault)\b.*)")
_OF_LAUNCHER = ("ChildFailedError", "SignalException", "RendezvousError")


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


@dataclass(frozen=True)
class Step:
    """A command, and the file that it writes. ``name`` is the stem of its log.

    ``statuses`` are the exit statuses after which the file counts.
    """

    name: str
    title: str
    command: tuple[str, ...]
    result: Path
    read: Callable[[Path], Any] = read_json
    statuses: tuple[int, ...] = (0,)
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StepReport:
    """What became of a step. ``reason`` says why it did not finish; ``log`` is the file of its output."""

    name: str
    title: str
    outcome: Outcome
    seconds: float
    command: str
    log: str
    reason: str = ""
    result: Any = None

    @property
    def finished(self) -> bool:
        return self.outcome == "finished"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def run_step(step: Step, logs: Path, limit_seconds: float) -> StepReport:
    """Run a step; ends it, and every process that it started, after the limit or when this process is interrupted."""
    log = logs / f"{step.name}.log"
    start = time.monotonic()
    seen: dict[int, psutil.Process] = {}
    with log.open("wb") as output:
        process = subprocess.Popen(
            step.command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **step.variables},
            start_new_session=True,  # Ctrl-C reaches this process only, which ends the step
        )
        try:
            in_time = _wait(process, seen, start + limit_seconds)
        finally:
            _end(process, seen)
    seconds = time.monotonic() - start

    def report(outcome: Outcome, reason: str = "", result: Any = None) -> StepReport:
        command = " ".join(step.command)
        return StepReport(step.name, step.title, outcome, seconds, command, f"{logs.name}/{log.name}", reason, result)

    if not in_time:
        return report("timed out", f"no result within {limit_seconds:g} s; last output: {last_line(log)}")
    if process.returncode not in step.statuses:
        return report("crashed", f"exit status {process.returncode}: {cause(log)}")
    try:
        return report("finished", result=step.read(step.result))
    except (OSError, ValueError, KeyError) as error:
        return report("crashed", f"exit status {process.returncode}, but no result: {cause(log) or error}")


def _wait(process: subprocess.Popen[bytes], seen: dict[int, psutil.Process], deadline: float) -> bool:
    """Whether the process ended in time; collects the processes that it starts, which may outlive it."""
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            for child in psutil.Process(process.pid).children(recursive=True):
                seen.setdefault(child.pid, child)
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _end(process: subprocess.Popen[bytes], seen: Mapping[int, psutil.Process]) -> None:
    family = [child for child in seen.values() if child.is_running()]
    if process.poll() is None:
        family.append(psutil.Process(process.pid))
    for each in family:
        _signal(each.terminate)
    for each in psutil.wait_procs(family, timeout=_GRACE_SECONDS)[1]:
        _signal(each.kill)
    process.wait()


def _signal(send: Callable[[], None]) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
        send()


def last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "none"


def cause(log: Path) -> str:
    """The last error in the output that is not the launcher's, which only repeats it; otherwise the last line."""
    found = [_ERROR.match(line.strip()) for line in log.read_text(errors="replace").splitlines()]
    errors = [match[1] for match in found if match and not any(name in match[1] for name in _OF_LAUNCHER)]
    return errors[-1][:300] if errors else last_line(log)
