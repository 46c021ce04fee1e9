"""All ranks do something, or none goes on: a failure of one rank becomes the same error on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ringspan.evidence.texts import exchange_texts
from ringspan.train.errors import RunError


def together(task: Callable[[], Any], device: torch.device) -> list[Any]:
    """Run a task on every rank; what each rank's task returned, which must fit JSON.

    If a task fails for want of a file or because of what is in one (OSError, RunError), every rank raises the same
    RunError, which names the ranks. Nobody returns before everybody's task is over.
    """
    try:
        note = {"found": task()}
    except (OSError, RunError) as error:
        note = {"failure": str(error)}
    notes = [json.loads(text) for text in exchange_texts(json.dumps(note), device)]
    failures = {rank: their["failure"] for rank, their in enumerate(notes) if "failure" in their}
    if not failures:
        return [their["found"] for their in notes]
    if len(failures) == len(notes) and len(set(failures.values())) == 1:
        raise RunError(failures[0])
    raise RunError("; ".join(f"rank {rank}: {failure}" for rank, failure in failures.items()))


def figures_of_all(device: torch.device, *mine: float) -> torch.Tensor:
    """A few figures of every rank, (ranks, figures), in fp64 on the CPU."""
    row = torch.tensor(mine, dtype=torch.float64, device=device)
    every = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(every, row)
    return torch.stack(every).cpu()
