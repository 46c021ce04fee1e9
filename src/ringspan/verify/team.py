"""Who is examined: local processes started for it, or the group that torchrun has started already."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ringspan.evidence.device import Cpu, Device, this_ranks_device
from ringspan.processes import run_local_ranks
from ringspan.verify.letters import tell_all

Task = Callable[..., Any]


class Team(Protocol):
    """Runs ``task(group, device, *arguments)`` on rings of a given size; what each rank returned, in order."""

    @property
    def where(self) -> str: ...

    @property
    def is_speaker(self) -> bool:
        """Whether this process is the one that prints and writes."""

    @property
    def parallel_ranks(self) -> int:
        """How many ranks have a device of their own: beyond that, speed means nothing."""

    @property
    def most_ranks(self) -> int:
        """The largest ring that can be had."""

    def sizes(self, wanted: list[int]) -> list[int]: ...

    def run(self, size: int, task: Task, *arguments: Any) -> list[Any]: ...


@dataclass(frozen=True)
class LocalTeam:
    """Fresh processes on this machine for each ring, gloo, one thread a rank."""

    timeout_seconds: float = 600.0
    where: str = "local processes, gloo, one thread a rank"
    is_speaker: bool = True
    most_ranks: int = sys.maxsize

    @property
    def parallel_ranks(self) -> int:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def sizes(self, wanted: list[int]) -> list[int]:
        return sorted({1, *wanted})

    def run(self, size: int, task: Task, *arguments: Any) -> list[Any]:
        return run_local_ranks(size, _locally, task, arguments, timeout_seconds=self.timeout_seconds)


def _locally(task: Task, arguments: tuple[Any, ...]) -> Any:
    return task(dist.group.WORLD, Cpu(), *arguments)


class LaunchedTeam:
    """The ranks that torchrun started: smaller rings are sub-groups of them, and every rank learns all answers."""

    is_speaker: bool
    where: str

    def __init__(self) -> None:
        self.device: Device = this_ranks_device()
        is_cpu = self.device.device.type == "cpu"
        if is_cpu:
            torch.set_num_threads(1)
        dist.init_process_group(self.device.backend, device_id=None if is_cpu else self.device.device)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.is_speaker = self.rank == 0
        self.where = f"{self.world} ranks started by torchrun, {self.device.backend}, {self.device.device.type}"
        self.groups: dict[int, dist.ProcessGroup] = {}

    @property
    def parallel_ranks(self) -> int:
        local = LocalTeam().parallel_ranks
        return self.world if self.device.device.type != "cpu" else min(self.world, local)

    @property
    def most_ranks(self) -> int:
        return self.world

    def sizes(self, wanted: list[int]) -> list[int]:
        """Powers of two up to the whole group, whatever was wished for: the group is what it is."""
        return sorted({*(2**i for i in range(self.world.bit_length()) if 2**i <= self.world), self.world})

    def run(self, size: int, task: Task, *arguments: Any) -> list[Any]:
        if size not in self.groups:
            self.groups[size] = dist.new_group(list(range(size)))
        mine = task(self.groups[size], self.device, *arguments) if self.rank < size else None
        return tell_all(mine, self.device.device)[:size]


def find_team(timeout_seconds: float = 600.0) -> Team:
    """The group that torchrun has started, if we are in one; otherwise local processes."""
    if dist.is_torchelastic_launched():
        return LaunchedTeam()
    return LocalTeam(timeout_seconds)
