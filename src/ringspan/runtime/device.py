"""How long a call takes and how much memory it needs. Everything that differs between CPU and CUDA is here."""

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


class Device(Protocol):
    """What a measurement asks of a device."""

    @property
    def device(self) -> torch.device: ...

    @property
    def backend(self) -> str:
        """The process-group backend that moves its tensors."""

    def seconds(self, call: Callable[[], Any]) -> float:
        """How long a call takes, until the device has finished it."""

    def peak_growth(self, call: Callable[[], Any]) -> int:
        """By how many bytes memory grew at its peak during a call, its results included."""

    def peak_bytes(self) -> int:
        """The most memory that this process has held so far."""


@dataclass(frozen=True)
class Cpu:
    backend: str = "gloo"

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def seconds(self, call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def peak_growth(self, call: Callable[[], Any]) -> int:
        return peak_growth(call)[1]

    def peak_bytes(self) -> int:
        unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True)
class Accelerator:
    """A device with streams, events and an allocator of its own; ``api`` is torch's module for it."""

    api: Any
    device: torch.device
    backend: str = "nccl"

    def seconds(self, call: Callable[[], Any]) -> float:
        start, stop = (self.api.Event(enable_timing=True) for _ in range(2))
        self.api.synchronize(self.device)
        start.record()
        call()
        stop.record()
        self.api.synchronize(self.device)
        return float(start.elapsed_time(stop)) / 1000

    def peak_growth(self, call: Callable[[], Any]) -> int:
        self.api.synchronize(self.device)
        self.api.empty_cache()
        self.api.reset_peak_memory_stats(self.device)
        before = self.api.memory_allocated(self.device)
        call()
        self.api.synchronize(self.device)
        return self.peak_bytes() - int(before)

    def peak_bytes(self) -> int:
        return int(self.api.max_memory_allocated(self.device))


def this_ranks_device() -> Device:
    """CUDA if there is any: the device of this local rank, as torchrun numbers it; otherwise the CPU."""
    if not torch.cuda.is_available():
        return Cpu()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return Accelerator(torch.cuda, device)
