"""The hop loop of a rank: post the next hop's parcels, compute this hop's tiles, return gradients.

Knows the plan and the transport, but no kernel and no softmax."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringspan.geometry import Documents, Pattern
from ringspan.planning import Hop, Packing, Parcel, RankPlan, plan_rank
from ringspan.ring import Ring
from ringspan.ring.transport import Flight, Mail
from ringspan.views import Operands, comb_view

Walk = Generator[Flight, None, None]
_CLOSE_FIT = 1.1


class Buffers:
    """Contiguous memory for parcels, (2, batch, rows, dim): keys and values. Reused from hop to hop.

    The parcels of a branch differ by a row or two from hop to hop: a buffer serves every parcel that nearly fills it.
    """

    def __init__(self, mail: Mail, like: Tensor, dtype: torch.dtype) -> None:
        self._counters, self._like, self._dtype = mail.counters, like, dtype
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
            self._let_go(size)
            memory = self._like.new_empty(size, dtype=self._dtype)
            self._counters.hold_parcel(memory.nbytes)
        self._lent[memory.data_ptr()] = memory
        return memory[:size].view(shape)

    def give_back(self, buffers: Iterable[Tensor]) -> None:
        self._free += [self._lent.pop(buffer.data_ptr()) for buffer in buffers]

    def _let_go(self, size: int) -> None:
        """Make room for a new buffer: as much unused memory goes as will come."""
        while self._free and size > 0:
            memory = self._free.pop()
            self._counters.hold_parcel(-memory.nbytes)
            size -= memory.numel()

    def trim(self) -> None:
        """Let all unused memory go."""
        for memory in self._free:
            self._counters.hold_parcel(-memory.nbytes)
        self._free = []

    def release(self) -> None:
        """The walk is over: everything goes."""
        self._free += self._lent.values()
        self._lent = {}
        self.trim()


def parcel_rows(buffer: Tensor, kv_heads: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a parcel as (batch, rows, heads, dim): all heads begin at row 0, and combs tell them apart."""
    _, batch, rows, dim = buffer.shape
    keys, values = (x.as_strided((batch, rows, kv_heads, dim), (rows * dim, dim, 0, 1)) for x in buffer.unbind())
    return keys, values


def travel(
    plan: RankPlan, mail: Mail, k: Tensor, v: Tensor, compute: Callable[[int, Hop, dict[Parcel, Tensor]], Walk]
) -> Walk:
    """Walk the hops: wait for this one's parcels, post the next one's, compute. ``k`` and ``v`` are the rank's rows."""
    buffers = Buffers(mail, k, k.dtype)
    packings = {packing.parcel: packing for packing in plan.packings}
    last_hop = _last_hop_of_each(plan)
    here: dict[Parcel, Tensor] = {}
    packed: list[Tensor] = []

    def post(number: int) -> Flight:
        hop = plan.hops[number] if number < len(plan.hops) else Hop()
        sends = []
        for message in hop.sends:
            if message.parcel in packings:
                packed.append(_pack(packings[message.parcel], buffers.take(message.parcel), k, v))
                sends.append((message.peer, packed[-1]))
            else:
                sends.append((message.peer, here[message.parcel]))
        here.update({message.parcel: buffers.take(message.parcel) for message in hop.receives})
        return mail.post(sends, [(m.peer, here[m.parcel]) for m in hop.receives], f"parcels of hop {number}")

    try:
        flight = post(1)
        for number, hop in enumerate(plan.hops):
            if number:
                yield flight
                buffers.give_back(packed)
                packed.clear()
                buffers.give_back([here.pop(parcel) for parcel in [*here] if last_hop[parcel] <= number])
                flight = post(number + 1)
            buffers.trim()  # what this post did not need, the next will not need either
            yield from compute(number, hop, here)
    finally:
        buffers.release()


class ParcelGradients:
    """Gradients of parcels: each follows its parcel, one step behind, grows on the way, and is added at home.

    ``own`` holds the gradients "dk" and "dv" of the rank's own rows, in the accumulation dtype; if it is empty, nobody
    wants any, and nothing is sent.
    """

    def __init__(self, plan: RankPlan, mail: Mail, like: Tensor, own: Operands) -> None:
        self._rank, self._mail, self._own = plan.rank, mail, own
        self._packings = {packing.parcel: packing for packing in plan.packings}
        self._buffers = Buffers(mail, like, next((x.dtype for x in own.values()), like.dtype))
        self._flying: list[tuple[Flight, list[Tensor], list[tuple[Parcel, Tensor]]]] = []
        self._waiting: dict[Parcel, Tensor] = {}  # of parcels that are still to be used here, from ranks before

    def zeros(self, hop: Hop) -> dict[Parcel, Tensor]:
        """For the shares of this rank in the gradients of a hop's parcels."""
        return {m.parcel: self._buffers.take(m.parcel).zero_() for m in hop.receives if self._own}

    def send(self, number: int, hop: Hop, shares: dict[Parcel, Tensor]) -> None:
        """Add what came from ranks before, and send the sums on: to the next rank on the route, or home."""
        if not self._own:
            return
        for parcel in [*self._waiting]:
            if parcel in shares:
                shares[parcel].add_(self._waiting[parcel])
                self._buffers.give_back([self._waiting.pop(parcel)])
        coming = [(message, self._buffers.take(message.parcel)) for message in hop.gradients_in]
        going = [(message.peer, shares[message.parcel]) for message in hop.gradients_out]
        flight = self._mail.post(going, [(m.peer, buffer) for m, buffer in coming], f"gradients of hop {number}")
        self._flying.append((flight, [*shares.values()], [(m.parcel, buffer) for m, buffer in coming]))

    def land(self) -> Walk:
        """Wait for what was sent after the hop before: what comes home is added, the rest waits for its parcel."""
        while self._flying:
            flight, gone, come = self._flying.pop()
            yield flight
            self._buffers.give_back(gone)
            for parcel, buffer in come:
                if parcel.owner == self._rank:
                    self._add_home(self._packings[parcel], buffer)
                    self._buffers.give_back([buffer])
                else:
                    self._waiting[parcel] = buffer

    def _add_home(self, packing: Packing, buffer: Tensor) -> None:
        for mine, there in packing.combs:
            for name, rows in zip(("dk", "dv"), parcel_rows(buffer, 1), strict=True):
                if name in self._own:
                    comb_view(self._own[name], mine).add_(comb_view(rows, there))

    def release(self) -> None:
        """The walk is over: all memory goes."""
        self._buffers.release()


def _pack(packing: Packing, buffer: Tensor, k: Tensor, v: Tensor) -> Tensor:
    for mine, there in packing.combs:
        for x, rows in zip((k, v), parcel_rows(buffer, 1), strict=True):
            comb_view(rows, there).copy_(comb_view(x, mine))
    return buffer


def _last_hop_of_each(plan: RankPlan) -> dict[Parcel, int]:
    """The hop at whose beginning a received parcel is no longer needed: it is computed, and passed on if need be."""
    last: dict[Parcel, int] = {}
    for number, hop in enumerate(plan.hops):
        for message in hop.sends:
            if message.parcel in last:
                last[message.parcel] = max(last[message.parcel], number)
        last |= {message.parcel: number + 1 for message in hop.receives}
    return last


def travel_seconds(ring: Ring, pattern: Pattern, seq_len: int, k: Tensor, v: Tensor, *, causal: bool) -> float:
    """Seconds that this rank waits in a forward walk of the real plan, with real parcels, that computes nothing.

    ``k`` and ``v`` are the rank's rows. All ranks call this together; counters start anew.
    """
    layout = ring.layout_of(seq_len)
    plan = plan_rank(pattern, Documents((seq_len,)), layout, ring.rank, k.shape[2], causal, ring.passing)

    def compute_nothing(number: int, hop: Hop, here: dict[Any, Tensor]) -> Walk:
        yield from ()

    ((_, mail, (keys, values)),) = ring.deal(layout, [(k, 1), (v, 1)])
    dist.barrier(ring.group)
    ring.reset_counters()
    ring.run([travel(plan, mail, keys, values, compute_nothing)])
    return ring.counters.waiting_seconds
