"""A ring over a torch process group: gloo or NCCL, on one machine or on many."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ringspan.geometry import as_positions
from ringspan.layout import AnyLayout, Layout, check_layout_name
from ringspan.planning import Routing, check_routing
from ringspan.planning.heads import ring_routing, with_head_ranks
from ringspan.ring.agreement import by_value, check_agreement, digest, exchange_metadata, fingerprint
from ringspan.ring.backend import GatherRows, Lengths, Metadata, as_lengths, find_ring, register_ring, take_rows
from ringspan.ring.recorder import recorded, traced
from ringspan.ring.trace import Trace, trace_group
from ringspan.ring.transport import Counters, GroupTransport, RingError, Transport


class Ring:
    """Context parallelism over the ranks of a process group: each rank holds some rows of every sequence.

    Args:
        group: a ProcessGroup, a 1-D or 2-D DeviceMesh, or None for the default group. The second dimension of a 2-D
            mesh must be named ``"heads"``. Its ranks, those of a node for example, hold one shard together and exchange
            heads during a call (``head_ranks``); the first dimension is a ring of these shards.
        layout: which rows each rank holds: ``"zigzag"`` (balances causal work), ``"contiguous"``, or ``"balanced"``
            (balances packed documents; `rs.Balanced` has options). With ``"balanced"``, pass the ``lengths`` of the
            documents to every call.
        routing: which rank sends a parcel: with ``"relay"`` the rank that used it before (neighbours only), with
            ``"direct"`` its owner; `ByNode` relays so that a parcel enters each node once. All send the same bytes.
        min_size: a smaller group is an error, so that nothing runs on one device by accident. Pass ``min_size=1`` to
            allow a single process.

    ``counters`` counts what was sent and received; `reset_counters` sets it to zero. ``hosts`` are the host names of
    the ranks, for errors. They are known after the first call without ``seq_len``; a program whose calls all pass
    ``seq_len`` may set them.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        layout: AnyLayout = "zigzag",
        routing: Routing = "relay",
        min_size: int = 2,
    ) -> None:
        check_layout_name(layout)
        check_routing(routing)
        self._made_of, self.head_ranks = _shared_group(group)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.size < min_size:
            raise RingError(
                f"the group has {self.size} rank(s), but min_size={min_size}: start more processes "
                "(torchrun --nproc-per-node=N), or pass min_size=1 to allow a single process"
            )
        ring_routing(routing, self.head_ranks)
        self.layout, self.routing = layout, routing
        self._used: WeakSet[dist.ProcessGroup] = WeakSet()  # the group, once all ranks have used it together
        self.hosts: tuple[str, ...] = ()
        self.counters = Counters()
        self.name = register_ring(self)

    def __repr__(self) -> str:
        heads = f", head_ranks={self.head_ranks}" if self.head_ranks > 1 else ""
        return f"Ring(rank {self.rank} of {self.size}, layout={self.layout!r}, routing={self.routing!r}{heads})"

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
        self.counters = Counters(recorder=self.counters.recorder)

    @contextmanager
    def trace(self, path: str | Path, group: dist.ProcessGroup | None = None) -> Iterator[Trace]:
        """Record what each rank does inside the block, and write it to ``path`` on rank 0, for ui.perfetto.dev.

        A collective on entry and on exit, of all ranks of ``group``: by default those of the ring; pass
        ``dist.group.WORLD`` to see several rings in one trace. Times are on the clock of rank 0. On CUDA, spans are
        what the host does: it launches kernels and transfers, and does not wait for them.
        """
        with trace_group(self, Path(path), group or self.group) as trace:
            yield trace

    # ``lengths`` are those of packed documents, in the whole sequence; they matter with layout "balanced" only.

    def layout_of(self, seq_len: int, lengths: Lengths | None = None) -> Layout:
        """The layout of a sequence of this length, and of its packed documents."""
        packed = as_lengths(lengths)
        if seq_len and not packed and self.layout not in ("contiguous", "zigzag"):
            raise RingError(
                f"layout={self.layout!r} depends on the documents: pass their lengths= in every call; one document of "
                f"{seq_len} rows is lengths=({seq_len},)"
            )
        shards = Layout(self.layout, seq_len, self.size // self.head_ranks, packed)
        return with_head_ranks(shards, self.head_ranks)

    def split_sequence(self, x: Tensor, dim: int = 1, lengths: Lengths | None = None) -> Tensor:
        """This rank's rows of a tensor that every rank holds. Differentiable: the other rows get a zero gradient."""
        return take_rows(x, self.layout_of(x.shape[dim], lengths), self.rank, dim)

    def gather_sequence(
        self, x: Tensor, dim: int = 1, seq_len: int | None = None, lengths: Lengths | None = None
    ) -> Tensor:
        """All rows, in sequence order, on every rank, from each rank's own rows ``x``.

        Backward *sums* over ranks the gradients with respect to a rank's rows. If every rank computes its share of the
        loss (sharded), gradients are those of the sum of all shares. If every rank computes the same whole loss
        (replicated), divide it by the number of ranks first.
        """
        dim = dim % x.dim()
        needs_grad = torch.is_grad_enabled() and x.requires_grad
        layout = self._agree_on_shards("gather_sequence", x, dim, seq_len, lengths, lambda: {"grad": needs_grad})
        return GatherRows.apply(x, layout, self.rank, dim, self.group)

    @torch.no_grad()
    def rows_at(
        self,
        x: Tensor,
        positions: Iterable[int] | Tensor,
        dim: int = 1,
        seq_len: int | None = None,
        lengths: Lengths | None = None,
    ) -> Tensor:
        """A few rows of the whole sequence, on every rank, from each rank's own rows ``x``: one small all-reduce.

        ``positions`` are those of the whole sequence, the same on all ranks, in any order. The result has no gradient.
        """
        dim, chosen = dim % x.dim(), as_positions("positions", positions)
        layout = self._agree_on_shards(
            "rows_at",
            x,
            dim,
            seq_len,
            lengths,
            lambda: {"positions": digest(str(chosen)), "fingerprint": fingerprint(x.movedim(dim, 0)[None])},
        )
        layout.check_positions("positions", chosen)
        shape = list(x.shape)
        shape[dim] = len(chosen)
        rows = x.new_zeros(shape)  # each row is added to the zeros of the other ranks
        for i, position in enumerate(chosen):
            local = layout.local_row(self.rank, position)
            if local is not None:
                rows.select(dim, i).copy_(x.select(dim, local))
        dist.all_reduce(rows, group=self.group)
        return rows

    def positions(
        self,
        seq_len: int,
        device: torch.device | str | None = None,
        lengths: Lengths | None = None,
        rows: int | None = None,
    ) -> Tensor:
        """The positions of this rank's rows in the whole sequence, int64: for rotary embeddings, loss masks and so on.

        Packed documents do not restart them: subtract the start of each row's document where that is needed. If
        ``lengths`` is a tensor, torch.compile needs ``rows``, the number of rows that this rank holds.
        """
        if isinstance(lengths, Tensor) and rows is not None and torch.compiler.is_compiling():
            return positions_op(lengths, self.name, seq_len, rows).to(device)
        spans = self.layout_of(seq_len, lengths).spans(self.rank)
        held = [torch.arange(span.start, span.stop, device=device) for span in spans]
        return torch.cat(held) if held else torch.empty(0, dtype=torch.int64, device=device)

    # The interface `ringspan.ring.backend.Backend`.

    def agree(
        self,
        rows: int,
        metadata: Metadata,
        seq_len: int | None,
        like: Tensor,
        lengths: Lengths | None = None,
    ) -> Layout:
        if seq_len is None:
            return self._agree_on_rows(rows, metadata, like, as_lengths(lengths))
        layout = self.layout_of(seq_len, lengths)
        self._check_rows(rows, layout)
        return layout

    def shard(
        self, layout: Layout, tensors: Sequence[tuple[Tensor | None, int | None]]
    ) -> list[tuple[int, Transport, list[Any]]]:
        device = next(x.device for x, _ in tensors if x is not None)
        transport = GroupTransport(self.group, self.rank, self.size, self.counters, device, self._used, self.hosts)
        return [(self.rank, traced(transport), [x for x, _ in tensors])]

    def unshard(self, layout: Layout, parts: list[Tensor], dim: int) -> Tensor:
        (part,) = parts
        return part

    def _agree_on_shards(
        self, call: str, x: Tensor, dim: int, seq_len: int | None, lengths: Lengths | None, others: Metadata
    ) -> Layout:
        """The layout of a sequence whose rows are dimension ``dim`` of each rank's ``x``."""
        shape = [size for d, size in enumerate(x.shape) if d != dim]
        metadata = {"call": call, "dim": dim, "shape": shape, "dtype": str(x.dtype)}
        return self.agree(x.shape[dim], lambda: {**metadata, **others()}, seq_len, x, lengths)

    def _agree_on_rows(self, rows: int, metadata: Metadata, like: Tensor, lengths: tuple[int, ...]) -> Layout:
        mine = {"rows": rows, "layout": digest(str(self.layout)), "routing": str(self.routing)}
        mine |= {"head_ranks": self.head_ranks, "host": socket.gethostname(), **metadata()}
        if lengths:
            mine.setdefault("lengths", digest(str(lengths)))
        group = self.group
        with recorded(self.counters.recorder, "agreement"):
            by_rank = exchange_metadata(mine, group, like.device)
        self._used.add(group)
        check_agreement(by_rank)
        self.hosts = tuple(each["host"] for each in by_rank)
        held = [each["rows"] for each in by_rank]
        layout = self.layout_of(sum(held), lengths)
        wanted = [layout.rows_of(rank) for rank in range(self.size)]
        if held != wanted:
            raise RingError(
                f"rows per rank are {by_value(held)}, but {sum(held)} rows in layout {str(self.layout)!r} over "
                f"{self.size} ranks are {by_value(wanted)}: split with ring.split_sequence{self._with_lengths}"
            )
        return layout

    def _check_rows(self, rows: int, layout: Layout) -> None:
        wanted = layout.rows_of(self.rank)
        if rows != wanted:
            raise RingError(
                f"rank {self.rank} holds {rows} rows, but has {wanted} of {layout.rows} in layout {str(self.layout)!r} "
                f"over {self.size} ranks: split with ring.split_sequence{self._with_lengths}, or pass another seq_len"
            )

    @property
    def _with_lengths(self) -> str:
        is_balanced = self.layout not in ("contiguous", "zigzag")
        return ", and pass the same lengths to it and to this call" if is_balanced else ""


@torch.library.custom_op("ringspan::positions", mutates_args=())
def positions_op(lengths: Tensor, ring: str, seq_len: int, rows: int) -> Tensor:
    """`Ring.positions` for a traced graph, in which the values of ``lengths`` are unknown."""
    found = find_ring(ring)
    assert isinstance(found, Ring)
    positions = found.positions(seq_len, lengths=lengths)
    if len(positions) != rows:
        raise ValueError(
            f"{rows} rows, but this rank holds {len(positions)} of {seq_len}: pass ring.split_sequence(x, "
            "lengths=lengths)"
        )
    return positions


@positions_op.register_fake
def _positions_fake(lengths: Tensor, ring: str, seq_len: int, rows: int) -> Tensor:
    return torch.empty(rows, dtype=torch.int64)


Group = dist.ProcessGroup | DeviceMesh | None
_NOT_A_MEMBER = "this process is not a member of the group: create the ring on its members only"


def _shared_group(group: Group) -> tuple[Group | ref[dist.ProcessGroup], int]:
    """A group of all ranks that share the sequence, and how many of them are head ranks.

    Creates a group for a 2-D mesh that is only a part of the world: a collective of the ranks of this mesh or, with
    NCCL and a bound device, of the world, whose communicator torch then splits. torch keeps the group until
    `destroy_process_group`, so the ring needs only a weak reference.
    """
    if not isinstance(group, DeviceMesh) or group.ndim == 1:
        return group, 1
    if group.ndim != 2:
        raise RingError(
            f"a mesh with {group.ndim} dimensions: pass one of them, such as mesh['ring'], or two, such as "
            "mesh['ring', 'heads']"
        )
    if (group.mesh_dim_names or ("", ""))[1] != "heads":  # else a mesh of data x ring would be one long sequence
        raise RingError(
            f"a mesh with 2 dimensions, named {group.mesh_dim_names}: pass one of them, such as mesh['ring'], or name "
            "the second one 'heads' if its ranks are to hold one shard together and exchange heads"
        )
    ranks, head_ranks = group.mesh.flatten().tolist(), group.size(1)
    if group.get_coordinate() is None:
        raise RingError(_NOT_A_MEMBER)
    if ranks != sorted(ranks):
        raise RingError(f"a mesh of ranks {group.mesh.tolist()}: ranks must ascend, row by row, as of init_device_mesh")
    if len(ranks) == dist.get_world_size():
        return None, head_ranks
    return ref(dist.new_group(ranks, use_local_synchronization=True)), head_ranks


def _process_group(group: Group | ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    if isinstance(group, ref):
        found = group()
        if found is None:
            raise RingError("the process group of the ring was destroyed: create the ring again")
        return found
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise RingError(_NOT_A_MEMBER)
    if isinstance(group, DeviceMesh):
        return group.get_group()
    if not dist.is_available() or not dist.is_initialized():
        raise RingError(
            "no process group is initialised: start with torchrun --nproc-per-node=N script.py and call "
            "torch.distributed.init_process_group() first; in a single process, use SimulatedRing(N)"
        )
    if group is None:
        return dist.group.WORLD  # type: ignore[return-value]
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is a {type(group).__name__}: must be a ProcessGroup, a 1-D or 2-D DeviceMesh or None")
    return group
