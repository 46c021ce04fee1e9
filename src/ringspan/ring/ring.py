"""A ring over a torch process group: gloo or NCCL, on one machine or on many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringspan.geometry import as_positions
from ringspan.layout import Layout, LayoutName, check_layout_name
from ringspan.planning import Routing, check_routing
from ringspan.ring.agreement import by_value, check_agreement, digest, exchange_metadata, fingerprint
from ringspan.ring.backend import GatherRows, Metadata, register_ring, take_rows
from ringspan.ring.transport import Counters, GroupTransport, RingError, Transport


class Ring:
    """Context parallelism over the ranks of a process group: each rank holds some rows of every sequence.

    Args:
        group: a ProcessGroup, a 1-D DeviceMesh, or None for the default group.
        layout: which rows each rank holds: ``"zigzag"`` (balances causal work) or ``"contiguous"``.
        routing: which rank sends a parcel: with ``"relay"`` the rank that used it before (neighbours only), with
            ``"direct"`` its owner; `ByNode` relays so that a parcel enters each node once. All send the same bytes.
        min_size: a smaller group is an error, so that nothing runs on one device by accident. Pass ``min_size=1`` to
            allow a single process.

    ``counters`` counts what was sent and received; `reset_counters` sets it to zero.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        layout: LayoutName = "zigzag",
        routing: Routing = "relay",
        min_size: int = 2,
    ) -> None:
        check_layout_name(layout)
        check_routing(routing)
        self._made_of = group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.size < min_size:
            raise RingError(
                f"the group has {self.size} rank(s), but min_size={min_size}: start more processes "
                "(torchrun --nproc-per-node=N), or pass min_size=1 to allow a single process"
            )
        self.layout, self.routing = layout, routing
        self.reset_counters()
        self.name = register_ring(self)

    def __repr__(self) -> str:
        return f"Ring(rank {self.rank} of {self.size}, layout={self.layout!r}, routing={self.routing!r})"

    def __reduce__(self) -> str:
        raise TypeError("a Ring cannot be pickled: it belongs to a process group; create one in the other process")

    def __deepcopy__(self, memo: dict[int, Any]) -> Ring:
        return self  # a handle: copies of a module share its ring

    @property
    def group(self) -> dist.ProcessGroup:
        """The process group. Resolved at each use: a ring that kept the default group alive past
        `destroy_process_group` would leave its threads to the interpreter's exit, where gloo can abort.
        """
        return _process_group(self._made_of)

    def reset_counters(self) -> None:
        """Set all counters to zero."""
        self.counters = Counters()

    def layout_of(self, seq_len: int) -> Layout:
        """The layout of a sequence of this length."""
        return Layout(self.layout, seq_len, self.size)

    def split_sequence(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's rows of a tensor that every rank holds. Differentiable: the other rows get a zero gradient."""
        return take_rows(x, self.layout_of(x.shape[dim]), self.rank, dim)

    def gather_sequence(self, x: Tensor, dim: int = 1, seq_len: int | None = None) -> Tensor:
        """All rows, in sequence order, on every rank, from each rank's own rows ``x``.

        Backward *sums* over ranks the gradients with respect to a rank's rows. If every rank computes its share of the
        loss (sharded), gradients are those of the sum of all shares. If every rank computes the same whole loss
        (replicated), divide it by the number of ranks first.
        """
        dim = dim % x.dim()
        needs_grad = torch.is_grad_enabled() and x.requires_grad
        layout = self._agree_on_shards("gather_sequence", x, dim, seq_len, lambda: {"grad": needs_grad})
        return GatherRows.apply(x, layout, self.rank, dim, self.group)

    @torch.no_grad()
    def rows_at(self, x: Tensor, positions: Iterable[int] | Tensor, dim: int = 1, seq_len: int | None = None) -> Tensor:
        """A few rows of the whole sequence, on every rank, from each rank's own rows ``x``: one small all-reduce.

        ``positions`` are those of the whole sequence, the same on all ranks, in any order. The result has no gradient.
        """
        dim, chosen = dim % x.dim(), as_positions("positions", positions)
        layout = self._agree_on_shards(
            "rows_at",
            x,
            dim,
            seq_len,
            lambda: {"positions": digest(str(chosen)), "fingerprint": fingerprint(x.movedim(dim, 0)[None])},
        )
        layout.check_positions("positions", chosen)
        shape = list(x.shape)
        shape[dim] = len(chosen)
        rows = x.new_zeros(shape)  # each row is added to the zeros of the other ranks
        for span in layout.spans(self.rank):
            for i, position in enumerate(chosen):
                if span.start <= position < span.stop:
                    rows.select(dim, i).copy_(x.select(dim, span.local + position - span.start))
        dist.all_reduce(rows, group=self.group)
        return rows

    def positions(self, seq_len: int, device: torch.device | str | None = None) -> Tensor:
        """The positions of this rank's rows in the sequence, int64: for rotary embeddings, loss masks and so on."""
        spans = [
            torch.arange(span.start, span.stop, device=device) for span in self.layout_of(seq_len).spans(self.rank)
        ]
        return torch.cat(spans) if spans else torch.empty(0, dtype=torch.int64, device=device)

    # The interface `ringspan.ring.backend.Backend`.

    def agree(self, rows: int, metadata: Metadata, seq_len: int | None, like: Tensor) -> Layout:
        if seq_len is None:
            return self._agree_on_rows(rows, metadata, like)
        layout = self.layout_of(seq_len)
        self._check_rows(rows, layout)
        return layout

    def shard(
        self, layout: Layout, tensors: Sequence[tuple[Tensor | None, int]]
    ) -> list[tuple[int, Transport, list[Any]]]:
        transport = GroupTransport(self.group, self.rank, self.size, self.counters)
        return [(self.rank, transport, [x for x, _ in tensors])]

    def unshard(self, layout: Layout, parts: list[Tensor], dim: int) -> Tensor:
        (part,) = parts
        return part

    def _agree_on_shards(self, call: str, x: Tensor, dim: int, seq_len: int | None, others: Metadata) -> Layout:
        """The layout of a sequence whose rows are dimension ``dim`` of each rank's ``x``."""
        shape = [size for d, size in enumerate(x.shape) if d != dim]
        metadata = {"call": call, "dim": dim, "shape": shape, "dtype": str(x.dtype)}
        return self.agree(x.shape[dim], lambda: {**metadata, **others()}, seq_len, x)

    def _agree_on_rows(self, rows: int, metadata: Metadata, like: Tensor) -> Layout:
        mine = {"rows": rows, "layout": self.layout, "routing": str(self.routing), **metadata()}
        by_rank = exchange_metadata(mine, self.group, like.device)
        check_agreement(by_rank)
        held = [each["rows"] for each in by_rank]
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
                f"{self.size} ranks: split with ring.split_sequence, or pass another seq_len"
            )


def _process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise RingError("this process is not a member of the group: create the ring on its members only")
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise RingError(f"a mesh with {group.ndim} dimensions: pass one of them, such as mesh['ring']")
        return group.get_group()
    if not dist.is_available() or not dist.is_initialized():
        raise RingError(
            "no process group is initialised: start with torchrun --nproc-per-node=N script.py and call "
            "torch.distributed.init_process_group() first; in a single process, use SimulatedRing(N)"
        )
    if group is None:
        return dist.group.WORLD  # type: ignore[return-value]
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is a {type(group).__name__}: must be a ProcessGroup, a 1-D DeviceMesh or None")
    return group
