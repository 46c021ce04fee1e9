"""The hop loop: post the next hop's parcels, compute this hop's tiles, wait, repeat. Gradients return to their owners.

Uses plans, transports and buffers, but no kernels and no softmax: the engine decides what a hop computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.geometry import Documents, Pattern
from ringspan.planning import Hop, Packing, Parcel, RankPlan, Tile, plan_rank
from ringspan.planning.heads import refuse_head_ranks
from ringspan.ring import Ring
from ringspan.ring.recorder import Recorder, recorded
from ringspan.ring.transport import PendingWork, Transport
from ringspan.views import Operands, comb_view

_CLOSE_FIT = 1.1  # a free buffer is reused for a parcel if it is at most this much larger


def run_schedule(runs: Sequence[RankRun]) -> None:
    """Run the hops of every rank in this process: one on a real ring, all of them on a simulated one.

    Ranks of one process run in lockstep, so a message is always posted before any of them waits for it. There is no
    barrier.
    """
    for run in runs:
        run.begin()
    try:
        for run in runs:
            run.post(1)
        for hop in range(max(len(run.plan.hops) for run in runs)):
            if hop:
                for run in runs:
                    run.wait(hop)
                for run in runs:
                    run.post(hop + 1)
            for run in runs:
                run.compute(hop)
            for run in runs:
                run.wait_for_gradients()
            for run in runs:
                run.return_gradients(hop)
        for run in runs:
            run.wait_for_gradients()
    finally:
        for run in runs:
            run.release()


class RankRun:
    """One rank's part of a call. `run_schedule` drives it; subclasses define what a hop computes.

    ``k`` and ``v`` are the rank's own rows; ``held`` are all tensors that live as long as the run, for the counters.
    """

    name = "communication"  # of the pass, in traces

    def __init__(
        self, plan: RankPlan, transport: Transport, k: Tensor, v: Tensor, held: Sequence[Tensor | None]
    ) -> None:
        self.plan, self.transport, self.k, self.v = plan, transport, k, v
        self.parcels: dict[Parcel, Tensor] = {}  # received, and still needed
        self._buffers = Buffers(transport, k, k.dtype)
        self._packings = {packing.parcel: packing for packing in plan.packings}
        self._last_hop = plan.last_hops()
        self._packed: list[Tensor] = []
        self._pending: PendingWork | None = None
        self._held_bytes = sum(x.nbytes for x in held if x is not None)

    def begin(self) -> None:
        """Count the tensors of the run as live until `release`."""
        self.transport.counters.hold_bytes(self._held_bytes)
        if self.recorder is not None:
            self.recorder.begin_pass(self.name)

    @property
    def recorder(self) -> Recorder | None:
        """What records the rank; None if it is not traced."""
        return self.transport.counters.recorder

    def timed(self, tiles: Iterable[Tile], number: int) -> Iterable[Tile]:
        """The tiles of a hop. A loop over them is recorded, if the rank is traced."""
        return tiles if self.recorder is None else self.recorder.timed(tiles, number)

    def post(self, number: int) -> None:
        """Start sending and receiving the parcels of a hop."""
        hop = self.plan.hop(number)
        sends = []
        with recorded(self.recorder if hop.sends else None, "pack"):
            for message in hop.sends:
                buffer = self.parcels.get(message.parcel)
                if buffer is None:  # an own parcel; others were received before they are forwarded
                    packing = self._packings[message.parcel]
                    buffer = _pack(packing, self._buffers.take(message.parcel), self.k, self.v)
                    self._packed.append(buffer)
                sends.append((message.peer, buffer))
        self.parcels |= {message.parcel: self._buffers.take(message.parcel) for message in hop.receives}
        receives = [(message.peer, self.parcels[message.parcel]) for message in hop.receives]
        self._pending = self.transport.send_receive(sends, receives, f"parcels of hop {number}")
        self._buffers.trim()  # a buffer that this hop did not reuse will not fit the next one either

    def wait(self, number: int) -> None:
        """Wait for the parcels of a hop, and return the buffers that are no longer needed."""
        assert self._pending is not None
        self._pending.wait()
        self._buffers.put_back(self._packed)
        self._packed.clear()
        done = [parcel for parcel in self.parcels if self._last_hop[parcel] <= number]
        self._buffers.put_back([self.parcels.pop(parcel) for parcel in done])

    def rows_of(self, parcel: Parcel | None) -> tuple[Tensor, Tensor]:
        """Keys and values of a received parcel or, for None, of the rank itself."""
        return (self.k, self.v) if parcel is None else parcel_rows(self.parcels[parcel], self.k.shape[2])

    def compute(self, number: int) -> None:
        """Compute the tiles of a hop. The base class computes nothing: it only communicates."""

    def wait_for_gradients(self) -> None:
        """Wait for the gradients that were posted after the previous hop. Only backward has any."""

    def return_gradients(self, number: int) -> None:
        """Start sending the gradients of a hop's parcels along their routes. Only backward has any."""

    def release(self) -> None:
        """Free the buffers, after success or failure."""
        self._buffers.release()
        self.transport.counters.hold_bytes(-self._held_bytes)
        if self.recorder is not None:
            self.recorder.end_pass()


class ParcelGradients:
    """Gradients of parcels: each follows the route of its parcel one hop later, and every rank on it adds its share.

    ``own`` holds the gradients "dk" and "dv" of the rank's own rows, in the accumulation dtype. If it is empty, no rank
    needs these gradients, and nothing is sent.
    """

    def __init__(self, plan: RankPlan, transport: Transport, like: Tensor, own: Operands) -> None:
        self._rank, self._transport, self._own = plan.rank, transport, own
        self._packings = {packing.parcel: packing for packing in plan.packings}
        self._buffers = Buffers(transport, like, next((x.dtype for x in own.values()), like.dtype))
        self._pending: list[tuple[PendingWork, list[Tensor], list[tuple[Parcel, Tensor]]]] = []
        self._partial: dict[Parcel, Tensor] = {}  # sums of earlier ranks, for parcels that this rank uses next

    def zeros(self, hop: Hop) -> dict[Parcel, Tensor]:
        """Zeroed buffers for this rank's share of the gradients of a hop's parcels."""
        return {m.parcel: self._buffers.take(m.parcel).zero_() for m in hop.receives if self._own}

    def send(self, number: int, hop: Hop, shares: dict[Parcel, Tensor]) -> None:
        """Add the sums of earlier ranks to this rank's shares; start sending them along the route or to the owner."""
        if not self._own:
            return
        for parcel in [*self._partial]:
            if parcel in shares:
                shares[parcel].add_(self._partial[parcel])
                self._buffers.put_back([self._partial.pop(parcel)])
        incoming = [(message, self._buffers.take(message.parcel)) for message in hop.gradients_in]
        sends = [(message.peer, shares[message.parcel]) for message in hop.gradients_out]
        receives = [(message.peer, buffer) for message, buffer in incoming]
        pending = self._transport.send_receive(sends, receives, f"gradients of hop {number}")
        self._pending.append((pending, [*shares.values()], [(message.parcel, buffer) for message, buffer in incoming]))

    def wait(self) -> None:
        """Wait for the pending gradients: add those of own parcels, keep the others until their parcel is used."""
        while self._pending:
            pending, sent, received = self._pending.pop()
            pending.wait()
            self._buffers.put_back(sent)
            with recorded(self._transport.counters.recorder if received else None, "add gradients"):
                for parcel, buffer in received:
                    if parcel.owner == self._rank:
                        self._add_to_own(self._packings[parcel], buffer)
                        self._buffers.put_back([buffer])
                    else:
                        self._partial[parcel] = buffer

    def _add_to_own(self, packing: Packing, buffer: Tensor) -> None:
        for own_rows, parcel_rows_ in packing.combs:
            for name, rows in zip(("dk", "dv"), parcel_rows(buffer, 1), strict=True):
                if name in self._own:
                    comb_view(self._own[name], own_rows).add_(comb_view(rows, parcel_rows_))

    def release(self) -> None:
        self._buffers.release()


class Buffers:
    """Contiguous memory for parcels, (2, batch, rows, dim) for keys and values, reused from hop to hop.

    The parcels of a branch differ by a row or two between hops, so a buffer serves any parcel that nearly fills it.
    """

    def __init__(self, transport: Transport, like: Tensor, dtype: torch.dtype) -> None:
        self._counters, self._like, self._dtype = transport.counters, like, dtype
        self._free: list[Tensor] = []
        self._lent: dict[int, Tensor] = {}

    def take(self, parcel: Parcel) -> Tensor:
        batch, _, _, dim = self._like.shape
        shape = (2, batch, parcel.rows, dim)
        size = math.prod(shape)
        fitting = [i for i, memory in enumerate(self._free) if size <= memory.numel() <= _CLOSE_FIT * size]
        if fitting:
            memory = self._free.pop(fitting[0])
        else:
            self._make_room(size)
            memory = self._like.new_empty(size, dtype=self._dtype)
            self._counters.hold_parcel(memory.nbytes)
        self._lent[memory.data_ptr()] = memory
        return memory[:size].view(shape)

    def put_back(self, buffers: Iterable[Tensor]) -> None:
        self._free += [self._lent.pop(buffer.data_ptr()) for buffer in buffers]

    def _make_room(self, size: int) -> None:
        """Free unused buffers, at least as many bytes as a new buffer takes if there are as many."""
        while self._free and size > 0:
            memory = self._free.pop()
            self._counters.hold_parcel(-memory.nbytes)
            size -= memory.numel()

    def trim(self) -> None:
        """Free all unused memory."""
        for memory in self._free:
            self._counters.hold_parcel(-memory.nbytes)
        self._free = []

    def release(self) -> None:
        """Free everything."""
        self._free += self._lent.values()
        self._lent = {}
        self.trim()


def parcel_rows(buffer: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a parcel as (batch, rows, heads, dim). All heads start at row 0; combs select their rows."""
    _, batch, rows, dim = buffer.shape
    keys, values = (x.as_strided((batch, rows, kv_heads, dim), (rows * dim, dim, 0, 1)) for x in buffer.unbind())
    return keys, values


def _pack(packing: Packing, buffer: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for own_rows, parcel_rows_ in packing.combs:
        for x, rows in zip((k, v), parcel_rows(buffer, 1), strict=True):
            comb_view(rows, parcel_rows_).copy_(comb_view(x, own_rows))
    return buffer


def communication_seconds(ring: Ring, pattern: Pattern, seq_len: int, k: Tensor, v: Tensor, *, causal: bool) -> float:
    """Seconds that this rank's host waits in a forward pass that sends all its parcels but computes nothing.

    ``k`` and ``v`` are the rank's rows. A collective: all ranks call it together. Resets the ring's counters.
    """
    refuse_head_ranks("communication_seconds", ring.head_ranks)
    layout = ring.layout_of(seq_len)
    plan = plan_rank(pattern, Documents((seq_len,)), layout, ring.rank, k.shape[2], causal, ring.routing)
    ring.reset_counters()
    ((_, transport, (keys, values)),) = ring.shard(layout, [(k, 1), (v, 1)])
    dist.barrier(ring.group)
    run_schedule([RankRun(plan, transport, keys, values, ())])
    return ring.counters.waiting_seconds
