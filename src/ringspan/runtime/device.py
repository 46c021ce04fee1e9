"""Devices as measurements see them: how long a call takes and how much memory it needs.

All code that differs between the CPU and an accelerator is here.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

Result = TypeVar("Result")

_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024  # bytes per unit of ru_maxrss


class Device(Protocol):
    """The device of a rank."""

    @property
    def device(self) -> torch.device: ...

    @property
    def backend(self) -> str:
        """The process-group backend for its tensors."""

    def synchronize(self) -> None:
        """Return when the device has finished all calls."""

    def seconds(self, call: Callable[[], Any]) -> float:
        """How long a call takes, until the device has finished it."""

    def peak_growth(self, call: Callable[[], Result]) -> tuple[Result, int]:
        """The result of a call, and the peak growth of memory during it in bytes, its result included."""

    def peak_bytes(self) -> int:
        """The most memory that this process has held so far."""


@dataclass(frozen=True)
class Cpu:
    """The CPU: wall-clock time, and the resident memory of this process."""

    backend: str = "gloo"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def synchronize(self) -> None:
        pass  # calls return when they are finished

    def seconds(self, call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def peak_growth(self, call: Callable[[], Result]) -> tuple[Result, int]:
        """Exact on Linux. Elsewhere the high-water mark cannot be reset, so the growth is a lower bound: call it in a
        fresh process.
        """
        if sys.platform != "linux":
            before = self.peak_bytes()
            return call(), self.peak_bytes() - before
        Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
        before = _status_bytes("VmRSS")
        return call(), _status_bytes("VmHWM") - before

    def peak_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT


@dataclass(frozen=True)
class Accelerator:
    """A device with its own streams, events and allocator; ``api`` is torch's module for it, such as torch.cuda."""

    api: Any
    device: torch.device
    backend: str = "nccl"

    def synchronize(self) -> None:
        self.api.synchronize(self.device)

    def seconds(self, call: Callable[[], Any]) -> float:
        start, stop = (self.api.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        start.record()
        call()
        stop.record()
        self.synchronize()
        return float(start.elapsed_time(stop)) / 1000

    def peak_growth(self, call: Callable[[], Result]) -> tuple[Result, int]:
        self.synchronize()
        self.api.empty_cache()
        self.api.reset_peak_memory_stats(self.device)
        before = int(self.api.memory_allocated(self.device))
        result = call()
        self.synchronize()
        return result, self.peak_bytes() - before

    def peak_bytes(self) -> int:
        return int(self.api.max_memory_allocated(self.device))


def local_device() -> Device:
    """The CUDA device of this local rank, as torchrun numbers it; the CPU if CUDA is not available."""
    if not torch.cuda.is_available():
        return Cpu()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return Accelerator(torch.cuda, device)


def limit_growth(more_bytes: int) -> None:
    """Let the data of this process grow by ``more_bytes`` from now on: larger allocations fail.

    Another call replaces the limit, counted from the size at that time. Linux only; does nothing elsewhere.
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
    raise RuntimeError(f"/proc/self/status has no {field}")
