"""What launched ranks tell one another: answers as JSON. Nothing that comes from a peer is unpickled."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ringspan.runtime.collectives import all_gather_json
from ringspan.runtime.device import Cpu, Device, this_ranks_device
from ringspan.runtime.launch import run_local_ranks
from ringspan.tools.verify import check, exactness, examination, memory, reach, speed, wire, work
from ringspan.tools.verify.check import Answers, ByRing, Check, Failed
from ringspan.tools.verify.examination import Examination
from ringspan.tools.verify.expected import Oracle, expect
from ringspan.tools.verify.settings import Settings, Subject

_KINDS = {
    name: kind
    for module in (check, examination, exactness, memory, reach, speed, wire, work)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}


def tell_all(mine: Any, device: torch.device) -> list[Any]:
    """What each rank of the whole group has to tell, in order of rank."""
    return [read(text) for text in all_gather_json(write(mine), device=device)]


def write(told: Any) -> str:
    """Answers as JSON; a kind of answer is known by its name.

    >>> write({"work": work.WorkAnswer(3, 0.5)})
    '{"work": {"kind": "WorkAnswer", "flops": 3, "share": 0.5}}'
    """
    return json.dumps(told, default=lambda answer: {"kind": type(answer).__name__, **vars(answer)})


def read(text: str) -> Any:
    """What `write` has written.

    >>> read('{"work": {"kind": "WorkAnswer", "flops": 3, "share": 0.5}}')
    {'work': WorkAnswer(flops=3, share=0.5)}
    """
    return json.loads(text, object_hook=_answer)


def _answer(values: dict[str, Any]) -> Any:
    if "kind" not in values:
        return values
    figures = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items() if name != "kind"}
    return _KINDS[values["kind"]](**figures)


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


# Memory comes first, while the process is fresh; what a subject may refuse comes last.
QUESTIONS: dict[str, Callable[[Examination], Any]] = {
    "memory": memory.ask_memory,
    "exact": exactness.ask_exact,
    "reach": reach.ask_reach,
    "bytes": wire.ask_bytes,
    "work": work.ask_work,
    "speed": speed.ask_speed,
    "overlap": speed.ask_overlap,
    "uneven": exactness.ask_uneven,
    "grouped": exactness.ask_grouped,
}

CHECKS: tuple[Callable[[ByRing, Settings], Check], ...] = (
    exactness.check_split,
    reach.check_mixing,
    reach.check_heads,
    reach.check_causality,
    exactness.check_output,
    exactness.check_gradients,
    exactness.check_uneven,
    exactness.check_grouped,
    wire.check_bytes,
    memory.check_memory,
    work.check_work,
    work.check_shares,
    speed.check_speed,
    speed.check_overlap,
)


def examine(
    group: dist.ProcessGroup,
    device: Device,
    subject: Subject,
    settings: Settings,
    questions: Sequence[str] = tuple(QUESTIONS),
    oracle: Oracle = expect,
) -> Answers:
    """Ask this rank everything, or only some questions."""
    examination = Examination(subject.on(group), device, settings, oracle)
    answers: Answers = {}
    broken = ""
    for name in questions:
        if broken:
            answers[name] = Failed(f"not asked, since {broken} failed")
            continue
        try:
            answers[name] = QUESTIONS[name](examination)
        except Exception as error:  # the subject may be anybody's code: whatever it raises is an answer
            answers[name] = Failed("".join(traceback.format_exception_only(error)).strip())
            broken = name
    return {**answers, "comparisons": list(examination.comparisons.values())}


def no_answers(size: int, reason: str) -> list[Answers]:
    """What stands for the answers of a ring that died or did not answer in time."""
    return [{**{name: Failed(reason) for name in QUESTIONS}, "comparisons": []} for _ in range(size)]


def judge(answers: ByRing, settings: Settings) -> list[Check]:
    """All checks, in the order in which one would ask."""
    return [check(answers, settings) for check in CHECKS]
