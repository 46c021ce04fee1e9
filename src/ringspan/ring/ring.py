"""A ring over a torch process group: gloo or NCCL, on one machine or on many."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringspan.layout import Layout, LayoutName, check_layout_name
from ringspan.planning import Passing, check_passing
from ringspan.ring.agreement import by_value, check_agreement, exchange_notes
from ringspan.ring.backend import Note, Result, drive, register_ring
from ringspan.ring.sharding import GatherRows, take_rows
from ringspan.ring.transport import Counters, Flight, Letters, Mail, RingError, Wait


class Ring:
    """One sequence over the ranks of a process group: each keeps its own rows, and parcels travel.

    Args:
        group: a ProcessGroup, a 1-D DeviceMesh, or None for the default group.
        layout: which rows each rank holds: ``"zigzag"`` (balanced under causality) or ``"contiguous"``.
        passing: who sends a parcel on: ``"relay"``, the rank that had it before (neighbours only), or ``"direct"``, its
            owner. The same bytes either way.
        min_size: a smaller group is an error, so that nothing runs alone by accident; code that should also run alone
            says ``min_size=1``.

    ``counters`` tells what really went over the wire; `reset_counters` starts anew.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        layout: LayoutName = "zigzag",
        passing: Passing = "relay",
        min_size: int = 2,
    ) -> None:
        check_layout_name(layout)
        check_passing(passing)
        self.group = _process_group(group)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.size < min_size:
            raise RingError(
                f"the group has {self.size} rank(s), but min_size={min_size}: start more processes "
                "(torchrun --nproc-per-node=N), or say min_size=1 if running alone is meant"
            )
        self.layout, self.passing = layout, passing
        self.reset_counters()
        self.name = register_ring(self)

    def __repr__(self) -> str:
        return f"Ring(rank {self.rank} of {self.size}, layout={self.layout!r}, passing={self.passing!r})"

    def __reduce__(self) -> str:
        raise TypeError("a Ring cannot be pickled: it belongs to this process's group; make it anew where it is needed")

    def __deepcopy__(self, memo: dict[int, Any]) -> Ring:
        return self  # a handle: copies of a module share its ring

    def reset_counters(self) -> None:
        """Start counting anew."""
        self.counters = Counters()

    def layout_of(self, seq_len: int) -> Layout:
        """Which rows each rank holds of a sequence of this length."""
        return Layout(self.layout, seq_len, self.size)

    def split_sequence(self, x: Tensor, dim: int = 1) -> Tensor:
        """My rows of a tensor that every rank holds whole. Differentiable: the other rows get a zero gradient."""
        return take_rows(x, self.layout_of(x.shape[dim]), self.rank, dim)

    def gather_sequence(self, x: Tensor, dim: int = 1, seq_len: int | None = None) -> Tensor:
        """All rows, in the order of the sequence, on every rank, from each rank's own rows ``x``.

        Backward is the true adjoint: each rank's gradient is the *sum* over ranks of the gradients with respect to its
        rows. So if every rank computes its share of the loss (sharded), gradients are those of the sum of all shares;
        if every rank computes the same whole loss (replicated), divide it by the number of ranks first.
        """
        dim = dim % x.dim()
        if seq_len is None:
            shape = [size for d, size in enumerate(x.shape) if d != dim]
            needs_grad = torch.is_grad_enabled() and x.requires_grad
            note = {"call": "gather_sequence", "dim": dim, "shape": shape, "dtype": str(x.dtype), "grad": needs_grad}
            layout = self._agree_on_rows(x.shape[dim], lambda: note, x)
        else:
            layout = self.layout_of(seq_len)
        self._check_rows(x.shape[dim], layout)
        return GatherRows.apply(x, layout, self.rank, dim, self.group)

    def positions(self, seq_len: int, device: torch.device | str | None = None) -> Tensor:
        """The positions in the sequence of my rows, as int64: for rotary embeddings, masks of the loss, and so on."""
        spans = [
            torch.arange(span.start, span.stop, device=device) for span in self.layout_of(seq_len).spans(self.rank)
        ]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64, device=device)

    # What the operator needs (see `ringspan.ring.backend`).

    def agree(self, rows: int, note: Note, seq_len: int | None, like: Tensor) -> Layout:
        if seq_len is None:
            return self._agree_on_rows(rows, note, like)
        layout = self.layout_of(seq_len)
        self._check_rows(rows, layout)
        return layout

    def deal(self, layout: Layout, tensors: Sequence[tuple[Tensor | None, int]]) -> list[tuple[int, Mail, list[Any]]]:
        return [(self.rank, _GroupMail(self), [x for x, _ in tensors])]

    def run(self, walks: list[Generator[Flight, None, Result]]) -> list[Result]:
        (walk,) = walks
        return [drive(walk)]

    def collect(self, layout: Layout, parts: list[Tensor], dim: int) -> Tensor:
        (part,) = parts
        return part

    def _agree_on_rows(self, rows: int, note: Note, like: Tensor) -> Layout:
        mine = {"rows": rows, "layout": self.layout, "passing": str(self.passing), **note()}
        notes = exchange_notes(mine, self.group, like.device)
        check_agreement(notes)
        held = [their["rows"] for their in notes]
        layout = self.layout_of(sum(held))
        wanted = [layout.rows_of(rank) for rank in range(self.size)]
        if held != wanted:
            raise RingError(
                f"rows per rank are {by_value(held)}, but {sum(held)} rows in layout {self.layout!r} over {self.size} "
                f"ranks are {by_value(wanted)}: split with ring.split_sequence"
            )
        return layout

    def _check_rows(self, rows: int, layout: Layout) -> None:
        wanted = layout.rows_of(self.rank)
        if rows != wanted:
            raise RingError(
                f"rank {self.rank} holds {rows} rows, but has {wanted} of {layout.rows} in layout {self.layout!r} over "
                f"{self.size} ranks: split with ring.split_sequence, or state another seq_len"
            )


@dataclass(frozen=True)
class _GroupMail:
    ring: Ring

    @property
    def counters(self) -> Counters:
        return self.ring.counters

    def post(self, sends: Letters, receives: Letters, label: str) -> _GroupFlight:
        group = self.ring.group
        self.counters.count(sends, receives)
        self.counters.posted = label
        operations = [
            dist.P2POp(operation, buffer, dist.get_global_rank(group, peer), group)
            for operation, letters in ((dist.isend, sends), (dist.irecv, receives))
            for peer, buffer in letters
        ]
        waits = [("sending to", peer) for peer, _ in sends] + [("receiving from", peer) for peer, _ in receives]
        try:
            works = dist.batch_isend_irecv(operations) if operations else []
        except RuntimeError as error:  # a connection that is already closed
            raise _peer_error(self.ring, label, waits, error) from error
        return _GroupFlight(self.ring, works, waits, label)


@dataclass(frozen=True)
class _GroupFlight:
    ring: Ring
    works: list[dist.Work]
    waits: list[tuple[str, int]]
    label: str

    def wait(self) -> None:
        start = time.perf_counter()
        self.ring.counters.wait = Wait(self.label, tuple(dict.fromkeys(peer for _, peer in self.waits)), start)
        for i, work in enumerate(self.works):
            self._wait_for(work, i)
        self.ring.counters.wait = None
        self.ring.counters.waiting_seconds += time.perf_counter() - start

    def _wait_for(self, work: dist.Work, i: int) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            # NCCL gives one work for a whole batch: then any of these peers may be the one.
            waits = self.waits if len(self.works) < len(self.waits) else [self.waits[i]]
            raise _peer_error(self.ring, self.label, waits, error) from error


def _peer_error(ring: Ring, label: str, waits: list[tuple[str, int]], error: RuntimeError) -> RingError:
    peers = ", ".join(f"{what} rank {peer}" for what, peer in waits)
    return RingError(
        f"rank {ring.rank} of {ring.size}: {label}: {peers} failed: that rank is gone, did not answer within the "
        f"group's timeout, or waits itself for one that did not ({error})"
    )


def _process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise RingError("this process is not a member of the group: make the ring on its members only")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise RingError(f"a mesh with {group.ndim} dimensions: a ring is one of them, such as mesh['ring']")
        return group.get_group()
    if not dist.is_available() or not dist.is_initialized():
        raise RingError(
            "no process group is initialised: start with torchrun --nproc-per-node=N script.py and call "
            "torch.distributed.init_process_group() first; to try it in one process, use SimulatedRing(N)"
        )
    if group is None:
        return dist.group.WORLD  # type: ignore[return-value]
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is a {type(group).__name__}: must be a ProcessGroup, a 1-D DeviceMesh or None")
    return group
