"""Rehearsal: run the plans of some ranks of a large ring on this machine, one rank at a time.

A rank computes its real tiles on random rows. Nothing is sent: a stand-in transport fills its parcels, and the waiting
time is computed from a network model. Work is measured, waiting is computed, and reports keep the two apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ringspan import kernels
from ringspan.engine import run_backward, run_forward
from ringspan.planning import RingPlan
from ringspan.planning.heads import refuse_head_ranks
from ringspan.planning.routes import node_of
from ringspan.planning.timing import DeviceRates
from ringspan.ring.recorder import Recorder, traced
from ringspan.ring.transport import Counters, Messages
from ringspan.runtime.device import Device, local_device
from ringspan.runtime.launch import run_local_ranks
from ringspan.runtime.trace_file import TraceLane
from ringspan.tools.measure import Stopwatch, is_disturbed

Link = tuple[bool, bool]  # whether it leaves the node, and whether the rank sends on it
Sized = Sequence[tuple[int, int]]  # peer, bytes


@dataclass(frozen=True, slots=True)
class Network:
    """The links of `DeviceRates`, which are on nodes of ``ranks_per_node``; None for a single node.

    The ranks of a node are assumed to post the messages of a hop at the same time. They divide its ``node_bandwidth``
    equally.
    """

    rates: DeviceRates
    ranks_per_node: int | None = None

    def is_across(self, rank: int, peer: int) -> bool:
        """Whether a message between two ranks leaves its node."""
        return self.ranks_per_node is not None and (
            node_of(rank, self.ranks_per_node) != node_of(peer, self.ranks_per_node)
        )

    def seconds(self, size: int, across: bool) -> float:
        """The time to transfer ``size`` bytes over one idle link."""
        latency, bandwidth = self.rates.link(across)
        return latency + size / bandwidth

    def links(self, rank: int, sends: Sized, receives: Sized) -> dict[Link, int]:
        """The bytes of some messages, each with its peer, on each of the rank's links."""
        found: dict[Link, int] = {}
        for is_sent, messages in ((True, sends), (False, receives)):
            for peer, size in messages:
                link = self.is_across(rank, peer), is_sent
                found[link] = found.get(link, 0) + size
        return found

    def ahead(self, plan: RingPlan, rank: int, *, backward: bool) -> dict[str, dict[Link, int]]:
        """For each batch of a rank, the bytes of other ranks that its node's links carry until its own are through.

        On a link that is divided equally, each of the others sends as many meanwhile, if it has as many.
        """
        if self.rates.node_bandwidth is None or self.ranks_per_node is None:
            return {}
        first = rank - rank % self.ranks_per_node
        by_rank = {
            each: {
                batch.label: self.links(
                    each, *([(m.peer, m.bytes) for m in way] for way in (batch.sends, batch.receives))
                )
                for batch in plan.batches(each, backward=backward)
            }
            for each in range(first, min(first + self.ranks_per_node, plan.layout.ring_size))
        }
        others = [batches for each, batches in by_rank.items() if each != rank]
        return {
            label: {
                link: sum(min(size, batches.get(label, {}).get(link, 0)) for batches in others)
                for link, size in links.items()
                if link[0]
            }
            for label, links in by_rank[rank].items()
        }


class RehearsalClock:
    """The time of the rehearsed rank: measured while it works, computed while it waits.

    Each link carries one transfer at a time in each direction.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._free_at: dict[Link, float] = {}
        self.working = self.waiting = 0.0
        self._since = time.perf_counter()

    @property
    def now(self) -> float:
        return self.working + self.waiting

    @property
    def running_now(self) -> float:
        """The time while the clock runs; `now` is that of the latest pause."""
        return self.now + time.perf_counter() - self._since

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock for work that a real ring does not do."""
        self.working += time.perf_counter() - self._since
        try:
            yield
        finally:
            self._since = time.perf_counter()

    def arrival(self, sizes: Mapping[Link, int]) -> float:
        """When a transfer that starts now ends; ``sizes``: bytes on each link."""
        end = self.now
        for link, size in sizes.items():
            if size:
                start = max(self.now, self._free_at.get(link, 0.0))
                self._free_at[link] = start + self._network.seconds(size, link[0])
                end = max(end, self._free_at[link])
        return end

    def wait_until(self, arrival: float) -> float:
        """Advance the clock to ``arrival``; returns the waiting time."""
        seconds = max(0.0, arrival - self.now)
        self.waiting += seconds
        return seconds


_NOISE_NUMBERS = 2**14  # few, since they count towards the memory of the rank


class StandInTransport:
    """The transport of a rehearsed rank: received buffers are filled with noise, and nothing is sent."""

    def __init__(
        self,
        rank: int,
        network: Network,
        device: torch.device,
        synchronize: Callable[[], None],
        ahead: Mapping[str, Mapping[Link, int]],
    ) -> None:
        self.rank, self.network, self.counters, self.synchronize = rank, network, Counters(), synchronize
        self._ahead = ahead
        self._noise = torch.randn(_NOISE_NUMBERS, generator=torch.Generator().manual_seed(0)).to(device)
        self.clock = RehearsalClock(network)

    def send_receive(self, sends: Messages, receives: Messages, label: str) -> StandInWork:
        self.synchronize()
        with self.clock.paused():
            self.counters.count(sends, receives)
            sized = ([(peer, x.nbytes) for peer, x in messages] for messages in (sends, receives))
            ahead = self._ahead.get(label, {})
            sizes = {link: n + ahead.get(link, 0) for link, n in self.network.links(self.rank, *sized).items()}
            for _, buffer in receives:
                self._fill(buffer)
            self.synchronize()
            return StandInWork(self, self.clock.arrival(sizes))

    def _fill(self, buffer: Tensor) -> None:
        numbers = buffer.view(-1)
        for start in range(0, len(numbers), _NOISE_NUMBERS):
            some = numbers[start : start + _NOISE_NUMBERS]
            some.copy_(self._noise[: len(some)])


@dataclass(frozen=True)
class StandInWork:
    """A transfer that ends at a computed time."""

    transport: StandInTransport
    arrival: float

    def wait(self) -> None:
        self.transport.synchronize()
        with self.transport.clock.paused():
            self.transport.counters.waiting_seconds += self.transport.clock.wait_until(self.arrival)


@dataclass(frozen=True, slots=True)
class PassMetrics:
    """One pass of a rank: working seconds are measured, waiting seconds computed, bytes and messages counted."""

    working: float
    waiting: float
    bytes_sent: int
    bytes_received: int
    messages_sent: int
    peak_parcel_bytes: int

    @property
    def seconds(self) -> float:
        return self.working + self.waiting


@dataclass(frozen=True, slots=True)
class RehearsedRank:
    """Measurements of one rank. ``peak_growth`` is the peak growth of the process's memory, its rows included.

    ``foreign_cores`` is how many cores other programs used meanwhile; ``disturbed`` if that makes the working seconds
    unreliable. ``lane`` is what it did, on the rank's own clock, if it was traced.
    """

    rank: int
    rows: int
    tiles: int
    hops: int
    work: int
    forward: PassMetrics
    backward: PassMetrics | None
    peak_growth: int
    bytes_as_planned: bool
    foreign_cores: float
    disturbed: bool
    lane: TraceLane | None = None

    @property
    def seconds(self) -> float:
        """The duration of a step: measured work plus computed waiting."""
        return self.forward.seconds + (self.backward.seconds if self.backward else 0.0)

    @property
    def working(self) -> float:
        return self.forward.working + (self.backward.working if self.backward else 0.0)

    @property
    def waiting(self) -> float:
        return self.forward.waiting + (self.backward.waiting if self.backward else 0.0)


def rehearse_rank(
    plan: RingPlan, rank: int, network: Network, dtype: torch.dtype, *, backward: bool, trace: bool = False
) -> RehearsedRank:
    """Run the plan of one rank. Call it in a fresh process (`ringspan.runtime.launch`), so that its memory is its own.

    Raises only what a real rank would raise; a rank that does not fit in memory runs out of memory here, too.
    """
    refuse_head_ranks("rehearse_rank", plan.head_ranks)
    device = local_device()
    _warm_up(device, dtype, plan.sizes.head_dim)
    recorder = Recorder() if trace else None
    with Stopwatch() as watch:
        passes, growth = device.peak_growth(lambda: _run(plan, rank, network, dtype, backward, device, recorder))
    own = plan.rank(rank)
    wanted = [plan.bytes_sent(rank), plan.bytes_sent(rank, backward=True)]
    return RehearsedRank(
        rank=rank,
        rows=own.rows,
        tiles=len(own.tiles),
        hops=len(own.hops) - 1,
        work=plan.work(rank),
        forward=passes[0],
        backward=passes[1] if backward else None,
        peak_growth=growth,
        bytes_as_planned=[each.bytes_sent for each in passes] == wanted[: len(passes)],
        foreign_cores=watch.foreign_cores,
        disturbed=is_disturbed(watch.foreign_cores, watch.seconds),
        lane=None if recorder is None else recorder.lane(rank, plan.layout.ring_size, f"rank {rank} (rehearsed)"),
    )


def _run(
    plan: RingPlan,
    rank: int,
    network: Network,
    dtype: torch.dtype,
    backward: bool,
    device: Device,
    recorder: Recorder | None,
) -> list[PassMetrics]:
    own, sizes = plan.rank(rank), plan.sizes
    kernel = kernels.choose(device.device, dtype).kernel
    scores = kernels.ScoreOptions(sizes.head_dim**-0.5)

    def rows(heads: int) -> Tensor:
        shape = (sizes.batch, own.rows, heads, sizes.head_dim)
        return torch.empty(shape, dtype=dtype, device=device.device).normal_()

    def new_transport(begin: float, backward: bool) -> StandInTransport:
        ahead = network.ahead(plan, rank, backward=backward)
        transport = StandInTransport(rank, network, device.device, _synchronize_for(device), ahead)
        if recorder is not None:
            transport.counters.recorder = recorder
            recorder.now = lambda: round(1e9 * (begin + transport.clock.running_now))
        return transport

    q, k, v = rows(sizes.heads), rows(sizes.kv_heads), rows(sizes.kv_heads)
    with torch.no_grad():
        transport = new_transport(begin=0.0, backward=False)
        wide_out, lse = run_forward(own, traced(transport), q, k, v, scores=scores, kernel=kernel)
        out = wide_out.to(dtype)  # as the operator returns it
        del wide_out
        passes = [_metrics(transport)]
        if backward:
            grad_out = torch.ones_like(out)
            transport = new_transport(begin=passes[0].seconds, backward=True)
            needs = (True, True, True)
            tensors = (grad_out, None, q, k, v, out, lse)
            wide = run_backward(own, traced(transport), *tensors, scores=scores, kernel=kernel, needs=needs)
            _ = [x.to(dtype) for x in wide if x is not None]
            passes.append(_metrics(transport))
    return passes


def _metrics(transport: StandInTransport) -> PassMetrics:
    transport.synchronize()
    with transport.clock.paused():
        counted = transport.counters
    return PassMetrics(
        transport.clock.working,
        transport.clock.waiting,
        counted.bytes_sent,
        counted.bytes_received,
        counted.messages_sent,
        counted.peak_parcel_bytes,
    )


def _warm_up(device: Device, dtype: torch.dtype, head_dim: int) -> None:
    """Call the kernel once: the first call includes set-up, which is not part of the rank's work."""
    kernel = kernels.choose(device.device, dtype).kernel
    x = torch.ones(1, 1, 64, head_dim, dtype=dtype, device=device.device)
    out, lse = kernel.forward(x, x, x, "full", kernels.ScoreOptions(1.0))
    kernel.backward(torch.ones_like(out), x, x, x, out, lse, "full", kernels.ScoreOptions(1.0), (True, True, True))
    torch.empty(2**20).normal_()


def _synchronize_for(device: Device) -> Callable[[], None]:
    if device.device.type == "cpu":
        return lambda: None
    return lambda: torch.cuda.synchronize(device.device)


@dataclass(frozen=True)
class RehearsedRing:
    """Rehearsed ranks by the reason they were chosen, and the largest work of any rank in the plan."""

    ranks: dict[str, RehearsedRank]
    most_work: int

    @property
    def slowest(self) -> RehearsedRank:
        return max(self.ranks.values(), key=lambda rank: rank.seconds)

    @property
    def step_seconds(self) -> float:
        """Extrapolated step time: the slowest rehearsed rank, or the plan's busiest rank at the slowest pace.

        Waiting covers links only. In a real ring, ranks also wait for peers that happen to be late.
        """
        pace = max((rank.working / rank.work for rank in self.ranks.values() if rank.work), default=0.0)
        waiting = max(rank.waiting for rank in self.ranks.values())
        return max(self.slowest.seconds, pace * self.most_work + waiting)

    @property
    def peak_growth(self) -> int:
        return max(rank.peak_growth for rank in self.ranks.values())

    @property
    def bytes_as_planned(self) -> bool:
        return all(rank.bytes_as_planned for rank in self.ranks.values())


def ranks_worth_rehearsing(plan: RingPlan) -> dict[str, int]:
    """The first, middle and last rank, and the worst by the plan, which has the most work; each rank once.

    >>> from ringspan.geometry import Documents, Full
    >>> from ringspan.layout import Layout
    >>> from ringspan.planning import TensorSizes
    >>> ring = RingPlan(Full(), Documents((4096,)), Layout("contiguous", 4096, 8), True, "relay", TensorSizes())
    >>> ranks_worth_rehearsing(ring)
    {'first': 0, 'middle': 4, 'last, worst': 7}
    """
    size = plan.layout.ring_size
    worst = max(plan.sample, key=plan.work)
    reasons: dict[int, list[str]] = {}
    for reason, rank in (("first", 0), ("middle", size // 2), ("last", size - 1), ("worst", worst)):
        reasons.setdefault(rank, []).append(reason)
    return {", ".join(names): rank for rank, names in reasons.items()}


def rehearse_ring(
    plan: RingPlan,
    ranks: dict[str, int],
    network: Network,
    dtype: torch.dtype,
    *,
    backward: bool,
    threads: int,
    timeout_seconds: float,
    trace: bool = False,
    on_rank: Callable[[str, RehearsedRank], None] | None = None,
) -> RehearsedRing:
    """Rehearse some ranks, one after the other, each in a fresh process with ``threads`` threads."""
    found: dict[str, RehearsedRank] = {}
    for reason, rank in ranks.items():
        (found[reason],) = run_local_ranks(
            1, _task, plan, rank, network, dtype, backward, trace, threads=threads, timeout_seconds=timeout_seconds
        )
        if on_rank is not None:
            on_rank(reason, found[reason])
    return RehearsedRing(found, max(plan.work(rank) for rank in plan.sample))


def _task(
    plan: RingPlan, rank: int, network: Network, dtype: torch.dtype, backward: bool, trace: bool
) -> RehearsedRank:
    return rehearse_rank(plan, rank, network, dtype, backward=backward, trace=trace)
