"""Collectives over JSON and floats: each rank contributes a value and receives the values of all ranks.

Nothing that a peer sends is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.runtime.settings import RunError

CPU = torch.device("cpu")


def all_gather_json(
    value: Any, *, group: dist.ProcessGroup | None = None, device: torch.device = CPU, max_bytes: int | None = None
) -> list[Any]:
    """The values of all ranks of ``group`` (default: the whole world), in order of rank; each must fit JSON.

    ``device`` must suit the backend of the group. With ``max_bytes`` the value is padded to that size and a single
    collective suffices; without it, ranks exchange the sizes first. Raises ValueError if the value is larger.
    """
    content = json.dumps(value).encode()
    size = max_bytes
    if size is None:
        size = max(int(x) for x in _all_gather(torch.tensor([len(content)], device=device), group))
    if len(content) > size:
        raise ValueError(f"{len(content)} bytes of JSON: at most max_bytes={size}; shorten the value")
    padded = torch.frombuffer(bytearray(content.ljust(size)), dtype=torch.uint8).to(device)
    return [json.loads(bytes(x.tolist())) for x in _all_gather(padded, group)]


def all_gather_floats(*values: float, device: torch.device = CPU) -> Tensor:
    """The values of all ranks, (ranks, values), in fp64 on the CPU."""
    return torch.stack(_all_gather(torch.tensor(values, dtype=torch.float64, device=device), None)).cpu()


def run_on_all_ranks(task: Callable[[], Any], device: torch.device = CPU) -> list[Any]:
    """Run ``task`` on every rank and return the results of all ranks, which must fit JSON.

    No rank returns before all tasks have ended. If a task raises OSError or RunError (a missing or invalid file), every
    rank raises the same RunError, which names the failed ranks.
    """
    try:
        outcome = {"result": task()}
    except (OSError, RunError) as error:
        outcome = {"error": str(error)}
    outcomes = all_gather_json(outcome, device=device)
    errors = {rank: each["error"] for rank, each in enumerate(outcomes) if "error" in each}
    if not errors:
        return [each["result"] for each in outcomes]
    if len(errors) == len(outcomes) and len(set(errors.values())) == 1:
        raise RunError(errors[0])
    raise RunError("; ".join(f"rank {rank}: {error}" for rank, error in errors.items()))


def _all_gather(mine: Tensor, group: dist.ProcessGroup | None) -> list[Tensor]:
    by_rank = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(by_rank, mine, group=group)
    return by_rank
