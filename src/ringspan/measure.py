"""Memory of this process, as the system reports it: its peak, and a limit to its growth."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")


def peak_growth(call: Callable[[], Result]) -> tuple[Result, int]:
    """The result of a call, and by how many bytes the process's resident memory grew at its peak (results included).

    Exact on Linux. Elsewhere the high-water mark cannot be reset, so that the figure is a lower bound: call it in a
    fresh process.
    """
    if sys.platform == "linux":
        Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
        before = _status_bytes("VmRSS")
        result = call()
        return result, _status_bytes("VmHWM") - before
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = call()
    return result, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit


def limit_growth(more_bytes: int) -> None:
    """From here on, let this process's data grow by so many bytes: allocations beyond that fail.

    Calling it again sets the limit anew, from where the process is then. Does nothing but on Linux.
    """
    if sys.platform != "linux":
        return
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    soft = _status_bytes("VmData") + more_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")
