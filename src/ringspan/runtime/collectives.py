"""Collectives over JSON: every rank sends a value, every rank gets all of them. Nothing from a peer is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from ringspan.runtime.settings import RunError


def exchange_texts(mine: str, device: torch.device) -> list[str]:
    """The texts of all ranks of the whole group, in order of rank; lengths travel first."""
    content = torch.tensor(list(mine.encode()), dtype=torch.uint8, device=device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(content)], device=device))
    counts = [int(length) for length in lengths]
    padded = F.pad(content, (0, max(counts) - len(content)))
    every = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(every, padded)
    return [bytes(x[:count].tolist()).decode() for x, count in zip(every, counts, strict=True)]


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
