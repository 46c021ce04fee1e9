"""What a figure was measured on, and whether something else was using the machine meanwhile."""

from __future__ import annotations

import datetime
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

_DISTURBED_CORES = 0.10
_CLOCK_TICKS_SECONDS = 0.05  # the system counts busy time in ticks: less foreign time than this says nothing


def is_disturbed(foreign_cores: float, seconds: float) -> bool:
    """Whether other programs kept so many cores busy that a time says little: more than a tenth of one.

    >>> is_disturbed(0.2, seconds=10.0), is_disturbed(0.05, seconds=10.0), is_disturbed(0.2, seconds=0.1)
    (True, False, False)
    """
    return foreign_cores > _DISTURBED_CORES and foreign_cores * seconds > _CLOCK_TICKS_SECONDS


def describe_machine() -> dict[str, str | int | float]:
    """What stands beside every table: processor, cores, memory, versions and the date."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def one_line(machine: dict[str, str | int | float]) -> str:
    return (
        f"{machine['processor']}, {machine['cores']} cores ({machine['cpu_capability']}), {machine['memory_gib']} GiB, "
        f"torch {machine['torch']}, {machine['date']}"
    )


@dataclass
class Stopwatch:
    """Wall time of a block, and how many cores other processes kept busy meanwhile."""

    seconds: float = 0.0
    foreign_cores: float = 0.0

    def __enter__(self) -> Stopwatch:
        self._busy, self._own = busy_seconds(), _own_seconds()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
        foreign = (busy_seconds() - self._busy) - (_own_seconds() - self._own)
        self.foreign_cores = max(0.0, foreign / self.seconds)


def busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _own_seconds() -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)
