"""Agreement: one small all-gather, from which ranks learn the sequence length and check that they make the same call.

Metadata is JSON in a fixed number of bytes: nothing is unpickled, and every rank reads the same values, so either every
rank raises the same error or none does. Ranks must agree on everything but ``OWN``: how many rows each holds, a
fingerprint of these rows, which must not be the same on all ranks, and the name of the host, for errors.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.ring.transport import RingError
from ringspan.runtime.collectives import all_gather_json

_METADATA_BYTES = 2048  # of a call with the longest texts of pattern, order, lengths and sinks
OWN = ("rows", "fingerprint", "host")


def exchange_metadata(metadata: dict[str, Any], group: dist.ProcessGroup, device: torch.device) -> list[dict[str, Any]]:
    """The metadata of all ranks, in order of rank."""
    try:
        return all_gather_json(metadata, group=group, device=device, max_bytes=_METADATA_BYTES)
    except RuntimeError as error:
        raise RingError(f"the all-gather before the call failed: a rank is gone or stuck: {error}") from error


def check_agreement(by_rank: list[dict[str, Any]]) -> None:
    """Raise the same error on every rank if ranks make different calls, or all hold the same rows."""
    for name in dict.fromkeys(name for each in by_rank for name in each if name not in OWN):
        values = [each.get(name, "nothing") for each in by_rank]
        if len(set(map(str, values))) > 1:
            raise RingError(f"ranks disagree on {name}: {by_value(values)}. All ranks must make the same call")
    fingerprints = {each.get("fingerprint") for each in by_rank}
    if len(by_rank) > 1 and len(fingerprints) == 1 and fingerprints != {None}:
        raise RingError(
            f"all {len(by_rank)} ranks hold the same {by_rank[0]['rows']} rows, but each must hold its own part of the "
            "sequence: split whole tensors with ring.split_sequence(x), and seed random rows by rank (all processes "
            "start with the same seed); if equal shards are intended, pass seq_len="
        )


def fingerprint(*tensors: Tensor) -> str | None:
    """Sums of a few rows of tensors (batch, rows, ..), from which ranks detect that they hold the same rows.

    None if these rows cannot tell ranks apart: there are fewer than two, all are equal, or some are not finite.
    """
    rows = tensors[0].shape[1]
    sampled = [x.detach()[:, [0, rows // 2, rows - 1]] for x in tensors] if rows > 1 else []
    sums = torch.stack([x.transpose(0, 1).flatten(1).sum(1, dtype=torch.float64) for x in sampled]) if sampled else None
    if sums is None or not sums.isfinite().all() or (sums == sums[:, :1]).all():
        return None
    return digest(str(sums.tolist()), at_most=100)


def by_value(values: list[Any]) -> str:
    """A text that lists which ranks have which value.

    >>> by_value(["a", "b", "a"])
    'a on ranks 0, 2; b on rank 1'
    """
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    return "; ".join(
        f"{value} on rank{'s' if len(held) > 1 else ''} {', '.join(map(str, held))}" for value, held in ranks.items()
    )


def digest(text: str, at_most: int = 200) -> str:
    """The text or, if it is long, its beginning and a hash of all of it."""
    return text if len(text) <= at_most else f"{text[: at_most - 20]}..{hashlib.sha256(text.encode()).hexdigest()[:16]}"
