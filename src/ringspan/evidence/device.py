"""The device layer: how long a call takes and how much memory it needs. All that differs between CPU and CUDA is here.

An accelerator is measured by its own events and by the peaks of torch's allocator; the CPU by the clock and by the
resident memory that the system reports. `Accelerator` takes torch's module for the device (``torch.cuda``) as an
argument, so that a stand-in can be measured where there is no such device.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ringspan.measure import peak_growth


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
