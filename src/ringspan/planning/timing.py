"""The time model: a simulation of the ranks of a ring, hop by hop, from their plans and rates. Nothing is measured.

Each rank runs the schedule of a forward and a backward pass (`ringspan.schedule`): it posts the next transfer, computes
the tiles of a hop, and waits. A message begins when both peers have posted it. Messages divide the links that they use
equally. docs/planning.md says what is left out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from ringspan.planning.cost import RingPlan
from ringspan.planning.nesting import CPU_COSTS, GPU_COSTS, TileCosts
from ringspan.planning.rank import Hop
from ringspan.planning.routes import node_of
from ringspan.planning.tiles import Message

FORWARD_FLOPS = 4  # per (query, key) pair and element of a head: two products, each a multiply and an add
BACKWARD_FLOPS = 10  # five products
# Per weight of a layer and row: a multiply and an add; in backward for the gradients of the rows and of the weights.
WEIGHT_FLOPS = {"forward": 2, "backward": 4}
_WHOLE_RING, _SAMPLED_RANKS, _SAMPLED_IN_NODES = 8, 4, 16


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
            threads of gloo take them from the cores; on GPUs 0.
    """

    flops: float
    bandwidth: float
    latency: float
    costs: TileCosts = CPU_COSTS
    node_bandwidth: float | None = None
    node_latency: float | None = None
    copying: float = 0.0

    def __post_init__(self) -> None:
        for name in ("flops", "bandwidth", "node_bandwidth"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value}: must be positive and finite")
        for name in ("latency", "node_latency", "copying"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"{name}={value}: must be at least 0 seconds and finite")


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


def slowest_rank_time(
    plan: RingPlan, rates: DeviceRates, devices_per_node: int | None = None, weights: int = 0
) -> RankTime:
    """The time of the slowest of the ranks that are modelled."""
    return max(rank_times(plan, rates, devices_per_node, weights).values(), key=lambda time: time.total)


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
    ranks = modelled_ranks(plan, devices_per_node if rates.node_bandwidth else None)
    programs = {rank: list(_program(plan, rank, rates, weights)) for rank in ranks}
    return _Simulation(programs, rates, devices_per_node or plan.layout.ring_size).run()


def modelled_ranks(plan: RingPlan, devices_per_node: int | None = None) -> Sequence[int]:
    """All ranks of a small ring.

    In a ring of more than 8, only both ends and two ranks between are modelled; with packed documents, whose ranks
    differ more, up to 64 ranks. If the devices of a node share a link, whole nodes are modelled.
    """
    size = plan.layout.ring_size
    if size <= _WHOLE_RING:
        return range(size)
    if devices_per_node is None or devices_per_node == 1 or size <= devices_per_node:
        return _spread(size, _SAMPLED_RANKS) if len(plan.documents.lengths) == 1 else plan.sample
    nodes = max(2, min(_SAMPLED_RANKS, _SAMPLED_IN_NODES // devices_per_node))
    sampled = _spread(-(-size // devices_per_node), nodes)
    return [rank for rank in range(size) if node_of(rank, devices_per_node) in sampled]


def _spread(size: int, wanted: int) -> list[int]:
    """So many of the numbers below ``size``, at even distances, with both ends; fewer if there are fewer."""
    return sorted({round(i * (size - 1) / (wanted - 1)) for i in range(wanted)})


class _Flow(NamedTuple):
    """All messages of a batch from one rank to another: they begin together, and are waited for together."""

    batch: str
    sender: int
    receiver: int


@dataclass(frozen=True, slots=True)
class _Work:
    seconds: float


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
        yield from (_Post(before), _Wait(before))
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
            yield _Work(seconds + rates.copying * min(moved, 2 * seconds * rates.bandwidth))
            yield from (_Wait(returning), _Post(gradients[i]))
        yield from (_Wait(gradients[-1]), _Post(after), _Wait(after))


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


_Links = tuple[tuple[str, int], tuple[str, int]]  # out of the sender, and into the receiver


@dataclass(slots=True)
class _Transfer:
    """A flow whose bytes move: how many are left, its links, and their bandwidth."""

    left: float
    links: _Links
    bandwidth: float


@dataclass(slots=True)
class _Rank:
    """The state of a rank: what it does next, what it waits for and since when, and the time spent so far."""

    actions: Iterator[_Action]
    missing: set[_Flow] = field(default_factory=set)
    since: float = 0.0
    work: float = 0.0
    waiting: float = 0.0
    latency: float = 0.0


class _Simulation:
    """Runs programs of ranks from event to event. A peer that is not modelled is always ready."""

    def __init__(self, programs: Mapping[int, Sequence[_Action]], rates: DeviceRates, devices_per_node: int) -> None:
        self.rates, self.per_node = rates, devices_per_node
        self.ranks = {rank: _Rank(iter(actions)) for rank, actions in programs.items()}
        self.now = 0.0
        self.events: list[tuple[float, int, int | _Flow]] = []  # a rank continues, or a flow starts to move bytes
        self.order = count()
        self.posted, self.done = set[_Flow](), set[_Flow]()
        self.size: dict[_Flow, int] = {}
        self.moving: dict[_Flow, _Transfer] = {}
        self.users = Counter[tuple[str, int]]()  # of each link

    def run(self) -> dict[int, RankTime]:
        for rank in self.ranks:
            self._continue(rank)
        while self.events or self.moving:
            # A flow gets its share of the link that more flows use.
            speeds = [one.bandwidth / max(self.users[link] for link in one.links) for one in self.moving.values()]
            moving = [*zip(self.moving.items(), speeds, strict=True)]
            least = min((one.left / speed for (_, one), speed in moving), default=math.inf)
            until = self.events[0][0] - self.now if self.events else math.inf
            step = min(least, until)
            self.now += step
            finished = [flow for (flow, one), speed in moving if one.left <= speed * step * (1 + 1e-9)]
            for (_, one), speed in moving:
                one.left -= speed * step
            for flow in finished:
                self._finish(flow)
            if until <= least:
                _, _, what = heappop(self.events)
                if isinstance(what, _Flow):
                    self._start(what)
                else:
                    self._continue(what)
        assert not any(rank.missing for rank in self.ranks.values()), "a rank waits for a message that is not sent"
        return {i: RankTime(rank.work, rank.waiting, rank.latency) for i, rank in self.ranks.items()}

    def _continue(self, number: int) -> None:
        """Let a rank act until it computes, waits or ends."""
        rank = self.ranks[number]
        for action in rank.actions:
            if isinstance(action, _Work):
                if action.seconds:
                    rank.work += action.seconds
                    self._later(action.seconds, number)
                    return
            elif isinstance(action, _Post):
                for flow, size in action.flows.items():
                    self._post(flow, size)
            elif missing := set(action.flows) - self.done:
                rank.missing, rank.since = missing, self.now
                return

    def _later(self, seconds: float, what: int | _Flow) -> None:
        heappush(self.events, (self.now + seconds, next(self.order), what))

    def _post(self, flow: _Flow, size: int) -> None:
        both = flow.sender in self.ranks and flow.receiver in self.ranks
        if flow in self.posted or not both:
            self.size[flow] = size
            self._later(self._latency(flow), flow)
        self.posted.add(flow)

    def _start(self, flow: _Flow) -> None:
        self.moving[flow] = _Transfer(self.size.pop(flow), *self._links(flow))
        self.users.update(self.moving[flow].links)

    def _finish(self, flow: _Flow) -> None:
        self.users.subtract(self.moving.pop(flow).links)
        self.done.add(flow)
        for number in (flow.sender, flow.receiver):
            rank = self.ranks.get(number)
            if rank is not None and flow in rank.missing:
                rank.missing.remove(flow)
                if not rank.missing:
                    waited = self.now - rank.since
                    latency = min(waited, self._latency(flow))
                    rank.latency += latency
                    rank.waiting += waited - latency
                    self._continue(number)

    def _between_nodes(self, flow: _Flow) -> bool:
        return node_of(flow.sender, self.per_node) != node_of(flow.receiver, self.per_node)

    def _latency(self, flow: _Flow) -> float:
        between = self.rates.node_latency
        return between if between is not None and self._between_nodes(flow) else self.rates.latency

    def _links(self, flow: _Flow) -> tuple[_Links, float]:
        """The links that a flow uses, of the two ranks or of all ranks of their nodes, and their bandwidth."""
        between = self.rates.node_bandwidth
        if between is not None and self._between_nodes(flow):
            nodes = [node_of(rank, self.per_node) for rank in (flow.sender, flow.receiver)]
            return (("from node", nodes[0]), ("to node", nodes[1])), between
        return (("from rank", flow.sender), ("to rank", flow.receiver)), self.rates.bandwidth
