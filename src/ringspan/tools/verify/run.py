"""Runs `ringspan verify`: starts the ranks of each ring, measures on every rank, and judges all checks."""

from __future__ import annotations

import dataclasses
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ringspan.runtime.collectives import all_gather_json
from ringspan.runtime.device import Cpu, Device, local_device
from ringspan.runtime.launch import run_local_ranks
from ringspan.tools.verify import check, exactness, memory, speed, traffic
from ringspan.tools.verify.check import ByRing, Check, Failed, Harness, Measured, Oracle, expect
from ringspan.tools.verify.workload import AttentionUnderTest, VerifySettings
from ringspan.tools.verify_training import compare

# Memory comes first, while the process is fresh; cases that an implementation may refuse come last.
MEASUREMENTS: dict[str, Callable[[Harness], Any]] = {
    "memory": memory.measure_memory,
    "exact": exactness.measure_exact,
    "visibility": exactness.measure_visibility,
    "traffic": traffic.measure_traffic,
    "flops": speed.measure_flops,
    "speed": speed.measure_speed,
    "overlap": speed.measure_overlap,
    "uneven": exactness.measure_uneven,
    "grouped": exactness.measure_grouped,
    "packed": exactness.measure_packed,
}

# In the order of the report.
CHECKS: tuple[Callable[[ByRing, VerifySettings], Check], ...] = (
    exactness.judge_sharding,
    exactness.judge_mixing,
    exactness.judge_heads,
    exactness.judge_masking,
    exactness.judge_output,
    exactness.judge_gradients,
    exactness.judge_uneven,
    exactness.judge_grouped,
    exactness.judge_packed,
    traffic.judge_traffic,
    memory.judge_memory,
    speed.judge_total,
    speed.judge_shares,
    speed.judge_speed,
    speed.judge_overlap,
)


def measure_rank(
    group: dist.ProcessGroup,
    device: Device,
    implementation: AttentionUnderTest,
    settings: VerifySettings,
    measurements: Sequence[str] = tuple(MEASUREMENTS),
    oracle: Oracle = expect,
) -> Measured:
    """All measurements of this rank, or some of them. After one has failed, the rest are skipped."""
    harness = Harness(implementation.bind(group), device, settings, oracle)
    measured: Measured = {}
    failed = ""
    for name in measurements:
        if failed:
            measured[name] = Failed(f"skipped, because {failed} failed")
            continue
        try:
            measured[name] = MEASUREMENTS[name](harness)
        except Exception as error:  # the implementation may raise anything
            measured[name] = Failed("".join(traceback.format_exception_only(error)).strip())
            failed = name
    return {**measured, "comparisons": list(harness.comparisons.values())}


def failed_ring(size: int, reason: str) -> list[Measured]:
    """The measurements of a ring that died or timed out: all failed."""
    return [{**{name: Failed(reason) for name in MEASUREMENTS}, "comparisons": []} for _ in range(size)]


def judge_all(measured: ByRing, settings: VerifySettings) -> list[Check]:
    return [judge(measured, settings) for judge in CHECKS]


Task = Callable[..., Any]


class Ranks(Protocol):
    """The ranks that can form rings."""

    @property
    def where(self) -> str:
        """What they run on, for the report."""

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes the report."""

    @property
    def parallel_ranks(self) -> int:
        """How many ranks have their own core or device; larger rings are not timed."""

    @property
    def max_ranks(self) -> int:
        """The size of the largest possible ring."""

    def sizes(self, wanted: list[int]) -> list[int]:
        """The ring sizes to verify."""

    def run(self, size: int, task: Task, *arguments: Any) -> list[Any]:
        """Run ``task(group, device, *arguments)`` on a ring of this size; the results in order of rank."""


@dataclass(frozen=True)
class LocalRanks:
    """New processes on this machine for each ring: gloo, one thread per rank."""

    timeout_seconds: float = 600.0
    where: str = "local processes, gloo, one thread per rank"
    is_main: bool = True
    max_ranks: int = sys.maxsize

    @property
    def parallel_ranks(self) -> int:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def sizes(self, wanted: list[int]) -> list[int]:
        return sorted({1, *wanted})

    def run(self, size: int, task: Task, *arguments: Any) -> list[Any]:
        return run_local_ranks(size, _run_on_cpu, task, arguments, timeout_seconds=self.timeout_seconds)


def _run_on_cpu(task: Task, arguments: tuple[Any, ...]) -> Any:
    return task(dist.group.WORLD, Cpu(), *arguments)


class TorchrunRanks:
    """The ranks that torchrun started. Smaller rings are sub-groups; every rank receives all results."""

    is_main: bool
    where: str

    def __init__(self) -> None:
        self.device: Device = local_device()
        is_cpu = self.device.device.type == "cpu"
        if is_cpu:
            torch.set_num_threads(1)
        dist.init_process_group(self.device.backend, device_id=None if is_cpu else self.device.device)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.is_main = self.rank == 0
        self.where = f"{self.world_size} ranks started by torchrun, {self.device.backend}, {self.device.device.type}"
        self.groups: dict[int, dist.ProcessGroup] = {}

    @property
    def parallel_ranks(self) -> int:
        on_cpu = self.device.device.type == "cpu"
        return min(self.world_size, LocalRanks().parallel_ranks) if on_cpu else self.world_size

    @property
    def max_ranks(self) -> int:
        return self.world_size

    def sizes(self, wanted: list[int]) -> list[int]:
        """Powers of two and the whole group; ``wanted`` is ignored, because torchrun fixes the number of ranks."""
        powers = (2**i for i in range(self.world_size.bit_length()))
        return sorted({*(size for size in powers if size <= self.world_size), self.world_size})

    def run(self, size: int, task: Task, *arguments: Any) -> list[Any]:
        if size not in self.groups:  # all ranks create it, also those outside
            self.groups[size] = dist.new_group(list(range(size)))
        mine = task(self.groups[size], self.device, *arguments) if self.rank < size else None
        return [decode(value) for value in all_gather_json(encode(mine), device=self.device.device)[:size]]


def find_ranks(timeout_seconds: float = 600.0) -> Ranks:
    """The ranks that torchrun started, if any; otherwise local processes."""
    if dist.is_torchelastic_launched():
        return TorchrunRanks()
    return LocalRanks(timeout_seconds)


_MODULES = (check, exactness, memory, speed, traffic, compare)
_KINDS = {
    name: kind
    for module in _MODULES
    for name, kind in vars(module).items()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}


def encode(value: Any) -> Any:
    """Measurements as JSON values; each dataclass is tagged with its name.

    >>> encode({"flops": speed.FlopsMeasurement(3, 0.5)})
    {'flops': {'kind': 'FlopsMeasurement', 'flops': 3, 'share': 0.5}}
    """
    if dataclasses.is_dataclass(value):
        return {"kind": type(value).__name__, **encode(vars(value))}
    if isinstance(value, dict):
        return {key: encode(inner) for key, inner in value.items()}
    return [encode(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def decode(value: Any) -> Any:
    """The inverse of `encode`.

    >>> decode({"flops": {"kind": "FlopsMeasurement", "flops": 3, "share": 0.5}})
    {'flops': FlopsMeasurement(flops=3, share=0.5)}
    """
    if isinstance(value, list):
        return [decode(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    decoded = {key: decode(inner) for key, inner in value.items()}
    if "kind" not in decoded:
        return decoded
    kind = _KINDS[decoded.pop("kind")]
    return kind(**{key: tuple(inner) if isinstance(inner, list) else inner for key, inner in decoded.items()})
