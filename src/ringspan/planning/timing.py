"""The time model: a simulation of the ranks of a ring, hop by hop, from their plans and rates. Nothing is measured.

Each rank runs the schedule of a forward and a backward pass (`ringspan.schedule`): it posts the next transfer, computes
the tiles of a hop, and waits. A message begins when both peers have posted it. Messages divide the links that they use
equally. docs/planning.md says what is left out.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Literal, NamedTuple

from ringspan.planning.cost import RingPlan
from ringspan.planning.nesting import CPU_COSTS, GPU_COSTS, TileCosts
from ringspan.planning.rank import Hop
from ringspan.planning.routes import node_of
from ringspan.planning.tiles import Message

FORWARD_FLOPS = 4  # per (query, key) pair and element of a head: two products, each a multiply and an add
BACKWARD_FLOPS = 10  # five products
# Per weight of a layer and row: a multiply and an add; in backward for the gradients of the rows and of the weights.
WEIGHT_FLOPS = {"forward": 2, "backward": 4}
_WHOLE_RING, _LARGE_RING = 8, 128  # see `modelled_ranks`
_SAMPLED_RANKS, _SAMPLED_IN_NODES = 4, 16


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What devices and links can do. ``costs`` prices what tiles take beyond their FLOPs.

    Args:
        flops: FLOP/s of a device in attention.
        bandwidth: bytes/s that a device sends while it receives as many.
        latency: seconds from when both peers have posted a message until its first byte arrives.
        node_bandwidth: bytes/s that all devices of a node together send to other nodes, while they receive as many. By
            default, links between nodes are not shared: each device has its ``bandwidth``.
        node_latency: the latency between nodes; by default ``latency``.
        copying: seconds of compute that a device loses for each byte that it sends or receives meanwhile. On CPUs, the
            threads of gloo take them from the cores; on GPUs 0. Head ranks, whose messages overlap nothing, take as
            long to pack and unpack them.
        devices_per_core: so many consecutive devices, ranks on CPUs, share a core with ``flops``: those that compute at
            the same time divide it equally.
    """

    flops: float
    bandwidth: float
    latency: float
    costs: TileCosts = CPU_COSTS
    node_bandwidth: float | None = None
    node_latency: float | None = None
    copying: float = 0.0
    devices_per_core: int = 1

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "node_bandwidth"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value}: must be positive and finite")
        for name in ("latency", "node_latency", "copying"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name}={value}: must be at least 0 seconds and finite")
        if self.devices_per_core < 1:
            raise ValueError(f"devices_per_core={self.devices_per_core}: must be at least 1")

    def link(self, between_nodes: bool) -> tuple[float, float]:
        """The latency and the bandwidth of a link inside a node, or of that between nodes."""
        if not between_nodes:
            return self.latency, self.bandwidth
        latency = self.latency if self.node_latency is None else self.node_latency
        return latency, self.bandwidth if self.node_bandwidth is None else self.node_bandwidth


ASSUMED_RATES = DeviceRates(1e14, bandwidth=25e9, latency=20e-6, costs=GPU_COSTS)  # a GPU and a 200 Gbit/s link


@dataclass(frozen=True, slots=True)
class RankTime:
    """Seconds that one rank spends in a forward and a backward pass: computing, waiting, and in latency.

    It waits for transfers that take longer than the work that overlaps them, and for slower ranks.
    """

    work: float
    waiting: float
    latency: float

    @property
    def total(self) -> float:
        return self.work + self.waiting + self.latency

    def __add__(self, other: RankTime) -> RankTime:
        return RankTime(self.work + other.work, self.waiting + other.waiting, self.latency + other.latency)

    def __rmul__(self, layers: int) -> RankTime:
        return RankTime(layers * self.work, layers * self.waiting, layers * self.latency)


def ring_time(plan: RingPlan, rates: DeviceRates, devices_per_node: int | None = None, weights: int = 0) -> RankTime:
    """How long a ring takes, until the last of the modelled ranks ends. ``work`` is that of the rank with the most.

    So a rank that waits for slower ranks does not count as waiting for transfers.
    """
    times = rank_times(plan, rates, devices_per_node, weights).values()
    last, work = max(times, key=lambda time: time.total), max(time.work for time in times)
    latency = min(last.latency, last.total - work)
    return RankTime(work, last.total - work - latency, latency)


def rank_times(
    plan: RingPlan, rates: DeviceRates, devices_per_node: int | None = None, weights: int = 0
) -> dict[int, RankTime]:
    """The time of each modelled rank.

    Args:
        devices_per_node: ranks 0 .. devices_per_node - 1 are on the first node, and so on; None for a single node.
        weights: elements of the weight matrices that each row is multiplied with, besides attention.

    >>> from ringspan.geometry import Documents, Full
    >>> from ringspan.layout import Layout
    >>> from ringspan.planning import TensorSizes
    >>> ring = RingPlan(Full(), Documents((4096,)), Layout("contiguous", 4096, 2), False, "relay", TensorSizes())
    >>> rates = DeviceRates(flops=1e11, bandwidth=1e9, latency=1e-4)
    >>> times = rank_times(ring, rates)
    >>> times[0] == times[1] and times[0].work > times[0].waiting > 0  # the gradients that return at the end
    True
    """
    together = max(devices_per_node or 1 if rates.node_bandwidth else 1, rates.devices_per_core)
    ranks = modelled_ranks(plan, together)
    return _simulation(plan, ranks, rates, devices_per_node, weights).run()


@dataclass(frozen=True, slots=True)
class ModelledSpan:
    """What a rank does, in seconds from the beginning: ``work`` or ``wait``; or a transfer from ``rank`` to ``peer``.

    ``name`` says in which pass and hop. ``amount`` is the number of pairs computed, or of bytes sent.
    """

    kind: Literal["work", "wait", "transfer"]
    rank: int
    name: str
    start: float
    end: float
    amount: int = 0
    peer: int = -1


def timeline(
    plan: RingPlan, ranks: Sequence[int], rates: DeviceRates, devices_per_node: int | None = None
) -> list[ModelledSpan]:
    """What some ranks of a ring do when, in the model; their other peers are always ready."""
    simulation = _simulation(plan, ranks, rates, devices_per_node, 0)
    simulation.spans = []
    simulation.run()
    return simulation.spans


def _simulation(
    plan: RingPlan, ranks: Sequence[int], rates: DeviceRates, devices_per_node: int | None, weights: int
) -> _Simulation:
    programs = {rank: list(_program(plan, rank, rates, weights)) for rank in ranks}
    return _Simulation(programs, rates, devices_per_node or plan.layout.ring_size)


def modelled_ranks(plan: RingPlan, devices_per_node: int | None = None) -> Sequence[int]:
    """All ranks of a small ring.

    In a ring of more than 8, only both ends and two ranks between are modelled; with packed documents, whose ranks
    differ more, up to 64 ranks. If the devices of a node share a link, whole nodes are modelled. Planning a rank takes
    time for each hop, so only both ends are modelled of more than 128 ranks, or the last node.
    """
    size = plan.layout.ring_size
    if size <= _WHOLE_RING:
        return range(size)
    if devices_per_node is None or devices_per_node == 1 or size <= devices_per_node:
        wanted = 2 if size > _LARGE_RING else _SAMPLED_RANKS
        return _spread(size, wanted) if len(plan.documents.lengths) == 1 else plan.sample
    nodes = 1 if size > _LARGE_RING else max(2, min(_SAMPLED_RANKS, _SAMPLED_IN_NODES // devices_per_node))
    sampled = _spread(-(-size // devices_per_node), nodes)
    return [rank for rank in range(size) if node_of(rank, devices_per_node) in sampled]


def _spread(size: int, wanted: int) -> list[int]:
    """So many of the numbers below ``size``, from the last one down, at even distances; fewer if there are fewer."""
    return sorted({size - 1 - round(i * (size - 1) / max(1, wanted - 1)) for i in range(wanted)})


_COMPUTE = "compute"


class _Flow(NamedTuple):
    """All messages of a batch from one rank to another: they begin together, and are waited for together.

    With the batch `_COMPUTE`, from a rank to itself: what the rank computes.
    """

    batch: str
    sender: int
    receiver: int


@dataclass(frozen=True, slots=True)
class _Work:
    seconds: float
    name: str = ""
    pairs: int = 0


@dataclass(frozen=True, slots=True)
class _Post:
    flows: Mapping[_Flow, int]  # bytes


@dataclass(frozen=True, slots=True)
class _Wait:
    flows: Mapping[_Flow, int]


_Action = _Work | _Post | _Wait


def _program(plan: RingPlan, rank: int, rates: DeviceRates, weights: int) -> Iterator[_Action]:
    """What a rank does in a forward and a backward pass, as `ringspan.schedule.run_schedule` does it."""
    sizes, hops, nothing = plan.sizes, plan.rank(rank).hops, Hop()
    copies = sizes.batch * plan.queries_per_kv_head
    parts, part = plan.head_ranks, rank % plan.head_ranks

    def flows(batch: str, sends: Sequence[Message], receives: Sequence[Message], row_bytes: int) -> dict[_Flow, int]:
        found = Counter[_Flow]()
        for message in sends:
            found[_Flow(batch, rank, message.peer * parts + part)] += message.parcel.rows * row_bytes
        for message in receives:
            found[_Flow(batch, message.peer * parts + part, rank)] += message.parcel.rows * row_bytes
        return found

    for way, pair_flops in (("forward", FORWARD_FLOPS), ("backward", BACKWARD_FLOPS)):
        before, after = _exchanges(plan, rank, way)
        # Products with weights are split between before and after attention; where does not matter for the sum.
        yield _Work(WEIGHT_FLOPS[way] * weights * sizes.batch * plan.layout.rows_of(rank) / rates.flops)
        yield from (_Work(rates.copying * sum(before.values())), _Post(before), _Wait(before))
        parcels = [
            flows(f"{way} parcels {i}", hop.sends, hop.receives, sizes.parcel_row_bytes)
            for i, hop in enumerate((*hops, nothing))
        ]
        gradients = [
            flows(f"gradients {i}", hop.gradients_out, hop.gradients_in, sizes.gradient_row_bytes)
            if way == "backward"
            else {}
            for i, hop in enumerate(hops)
        ]
        yield _Post(parcels[1])
        for i, hop in enumerate(hops):
            returning = gradients[i - 1] if i else {}
            if i:
                yield from (_Wait(parcels[i]), _Post(parcels[i + 1]))
            seconds = pair_flops * sizes.head_dim * _price(hop, rates.costs, copies) / rates.flops
            moved = sum(parcels[i + 1].values()) + sum(returning.values())
            seconds += rates.copying * min(moved, 2 * seconds * rates.bandwidth)
            yield _Work(seconds, f"{way}, tiles of hop {i}", sum(tile.pairs for tile in hop.tiles) * copies)
            yield from (_Wait(returning), _Post(gradients[i]))
        yield from (_Wait(gradients[-1]), _Work(rates.copying * sum(after.values())), _Post(after), _Wait(after))


def _exchanges(plan: RingPlan, rank: int, way: str) -> list[dict[_Flow, int]]:
    """What a rank exchanges with the other head ranks of its shard, before a pass and after it."""
    first = rank - rank % plan.head_ranks
    peers = [peer for peer in range(first, first + plan.head_ranks) if peer != rank]
    both_ways = [pair for peer in peers for pair in ((rank, peer), (peer, rank))]
    sent = {i: plan.exchanges(i, backward=way == "backward") for i in (rank, *peers)}
    return [
        {_Flow(f"{way} exchange {when}", *pair): sent[pair[0]][when].sent // len(peers) for pair in both_ways}
        for when in (0, 1)
    ]


def _price(hop: Hop, costs: TileCosts, copies: int) -> float:
    """The work of a hop in pairs: those of its tiles, and what tiles cost besides."""
    return sum(
        costs.price(q.rows, tile.keys.rows, tile.mask, copies * q.segments * q.heads)
        for tile, q in ((tile, tile.queries) for tile in hop.tiles)
    )


_Link = tuple[str, int]  # out of a rank or into it, out of a node or into it; or a core, whose "bytes" are seconds


@dataclass(slots=True)
class _Transfer:
    """A flow whose bytes move: at ``since``, so many were ``left``, and with ``speed`` they end at ``end``."""

    links: tuple[_Link, ...]  # out of the sender, and into the receiver; or a core
    bandwidth: float
    left: float
    since: float
    speed: float = 0.0
    end: float = 0.0


@dataclass(slots=True)
class _Rank:
    """The state of a rank: what it does next, what it waits for and since when, and the time spent so far."""

    actions: Iterator[_Action]
    missing: set[_Flow] = field(default_factory=set)
    since: float = 0.0
    task: _Work = _Work(0.0)  # what it computes
    work: float = 0.0
    waiting: float = 0.0
    latency: float = 0.0


class _Simulation:
    """Runs programs of ranks from event to event. A peer that is not modelled is always ready."""

    def __init__(self, programs: Mapping[int, Iterable[_Action]], rates: DeviceRates, devices_per_node: int) -> None:
        self.rates, self.per_node = rates, devices_per_node
        self.ranks = {rank: _Rank(iter(actions)) for rank, actions in programs.items()}
        self.now = 0.0
        self.events: list[tuple[float, int, _Flow]] = []  # a flow starts to move bytes, or ends
        self.order = count()
        self.posted: dict[_Flow, int] = {}  # bytes
        self.done = set[_Flow]()
        self.moving: dict[_Flow, _Transfer] = {}
        self.users = defaultdict[_Link, dict[_Flow, _Transfer]](dict)  # of each link
        self.spans: list[ModelledSpan] | None = None
        self.begun: dict[_Flow, float] = {}  # when both peers had posted it

    def run(self) -> dict[int, RankTime]:
        for rank in self.ranks:
            self._continue(rank)
        while self.events:
            self.now, _, what = heappop(self.events)
            if what in self.moving:
                if self.moving[what].end == self.now:  # otherwise it ends at another time by now
                    self._finish(what)
            elif what not in self.done:
                self._start(what)
        assert not any(rank.missing for rank in self.ranks.values()), "a rank waits for a message that is not sent"
        return {i: RankTime(rank.work, rank.waiting, rank.latency) for i, rank in self.ranks.items()}

    def _continue(self, number: int) -> None:
        """Let a rank act until it computes, waits or ends."""
        rank = self.ranks[number]
        for action in rank.actions:
            if isinstance(action, _Work):
                rank.task, rank.since = action, self.now
                core = (("core", number // self.rates.devices_per_core),)
                self._move(_Flow(_COMPUTE, number, number), _Transfer(core, 1.0, action.seconds, self.now))
                return
            if isinstance(action, _Post):
                for flow, size in action.flows.items():
                    self._post(flow, size)
            elif missing := {flow for flow in action.flows if flow not in self.done}:
                rank.missing, rank.since = missing, self.now
                return

    def _later(self, seconds: float, what: _Flow) -> None:
        heappush(self.events, (self.now + seconds, next(self.order), what))

    def _post(self, flow: _Flow, size: int) -> None:
        both = flow.sender in self.ranks and flow.receiver in self.ranks
        if flow in self.posted or not both:
            self.begun[flow] = self.now
            self._later(self._latency(flow), flow)
        self.posted[flow] = size

    def _start(self, flow: _Flow) -> None:
        links, bandwidth = self._links(flow)
        self._move(flow, _Transfer(links, bandwidth, self.posted[flow], self.now))

    def _move(self, flow: _Flow, one: _Transfer) -> None:
        self.moving[flow] = one
        for link in one.links:
            self.users[link][flow] = one
        self._share(one.links)

    def _share(self, links: tuple[_Link, ...]) -> None:
        """Divide links equally among their flows; a flow gets its share of the link that more flows use."""
        for flow, one in {flow: one for link in links for flow, one in self.users[link].items()}.items():
            speed = one.bandwidth / max(len(self.users[link]) for link in one.links)
            if speed != one.speed:
                one.left -= one.speed * (self.now - one.since)
                one.since, one.speed, one.end = self.now, speed, self.now + max(0.0, one.left) / speed
                heappush(self.events, (one.end, next(self.order), flow))

    def _finish(self, flow: _Flow) -> None:
        links = self.moving.pop(flow).links
        for link in links:
            del self.users[link][flow]
        self._share(links)
        self.done.add(flow)
        if flow.batch == _COMPUTE:
            self._finish_work(flow.sender)
            return
        if self.spans is not None:
            ends = self.begun[flow], self.now
            self.spans.append(
                ModelledSpan("transfer", flow.sender, flow.batch, *ends, self.posted[flow], flow.receiver)
            )
        for number in (flow.sender, flow.receiver):
            rank = self.ranks.get(number)
            if rank is not None and flow in rank.missing:
                rank.missing.remove(flow)
                if not rank.missing:
                    waited = self.now - rank.since
                    latency = min(waited, self._latency(flow))
                    rank.latency += latency
                    rank.waiting += waited - latency
                    if self.spans is not None and waited:
                        self.spans.append(ModelledSpan("wait", number, flow.batch, rank.since, self.now))
                    self._continue(number)

    def _finish_work(self, number: int) -> None:
        rank = self.ranks[number]
        rank.work += self.now - rank.since
        if self.spans is not None and rank.task.name:
            task = rank.task
            self.spans.append(ModelledSpan("work", number, task.name, rank.since, self.now, task.pairs))
        self._continue(number)

    def _between_nodes(self, flow: _Flow) -> bool:
        return node_of(flow.sender, self.per_node) != node_of(flow.receiver, self.per_node)

    def _latency(self, flow: _Flow) -> float:
        return self.rates.link(self._between_nodes(flow))[0]

    def _links(self, flow: _Flow) -> tuple[tuple[_Link, _Link], float]:
        """The links that a flow uses, of the two ranks or of all ranks of their nodes, and their bandwidth."""
        between = self._between_nodes(flow)
        bandwidth = self.rates.link(between)[1]
        if between and self.rates.node_bandwidth is not None:
            nodes = [node_of(rank, self.per_node) for rank in (flow.sender, flow.receiver)]
            return (("from node", nodes[0]), ("to node", nodes[1])), bandwidth
        return (("from rank", flow.sender), ("to rank", flow.receiver)), bandwidth
