"""`rs.best_plan`: how to use some devices for the attention of a model, by the time model and the memory of plans.

Candidates are rings of every size that divides the devices, in every layout, with head ranks and routings. Rings of the
same size work at the same time, each on its own part of the batch or on its own documents.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from heapq import heapreplace
from operator import itemgetter

import torch

from ringspan.balance import work_before
from ringspan.geometry import Documents, Pattern, SegmentBranch, as_int
from ringspan.layout import AnyLayout, Layout, layouts_to_compare
from ringspan.planning import ByNode, RingPlan, Routing
from ringspan.planning.api import plan
from ringspan.planning.breakeven import (
    FEWEST_ROWS,
    SAME,
    WORTH_IT,
    BreakEven,
    plan_at,
    search_break_even,
    short_time,
    time_alone,
)
from ringspan.planning.cost import traffic
from ringspan.planning.heads import with_head_ranks
from ringspan.planning.routes import node_of
from ringspan.planning.timing import (
    ASSUMED_RATES,
    BACKWARD_FLOPS,
    FORWARD_FLOPS,
    WEIGHT_FLOPS,
    DeviceRates,
    RankTime,
    modelled_ranks,
    ring_time,
)
from ringspan.validation import Lengths, document_lengths

_REFINED = 3  # for so many of the fastest candidates, all layouts and routings are modelled
_MUCH_SLOWER = 1.5  # layouts that are slower by this factor are not refined
_MOST_SHOWN = 12


@dataclass(frozen=True)
class Layers:
    """The layers of a model: its patterns, each with the number of its layers, and the weights of one layer.

    ``weights`` are the elements of the matrices that each row is multiplied with, for projections and MLP.
    """

    counts: tuple[tuple[Pattern, int], ...]
    weights: int = 0

    @property
    def number(self) -> int:
        return sum(number for _, number in self.counts)

    def plans(self, plan: RingPlan) -> Iterator[tuple[RingPlan, int]]:
        """The plan for each pattern, with the number of its layers."""
        for pattern, number in self.counts:
            yield replace(plan, pattern=pattern), number

    def time(self, plan: RingPlan, time: Callable[[RingPlan], RankTime]) -> RankTime:
        """The time of all layers, from the time of one."""
        return sum((number * time(one) for one, number in self.plans(plan)), start=RankTime(0, 0, 0))


@dataclass(frozen=True)
class PlanChoice:
    """One way to use the devices: ``rings`` rings of ``ring_size`` ranks each, and what the model predicts for it.

    ``time`` is that of the slowest ring, ``memory`` and ``sent`` are the bytes of the ranks that hold and send most, in
    a forward and a backward pass of all layers; of ``sent_by_node``, a node sends so many to other nodes. ``plan`` is
    the plan of the slowest ring; with several patterns, that for the first. ``idle`` devices have no part of the
    sequence. If rings divide packed documents, ``documents`` has the numbers of those of each ring: document i of
    batch element b has the number b * documents + i. ``problem`` says why it does not fit; empty if it does.
    """

    rings: int
    ring_size: int
    idle: int
    time: RankTime
    memory: int
    sent: int
    sent_by_node: int
    plan: RingPlan
    documents: tuple[tuple[int, ...], ...] = ()
    problem: str = ""

    @property
    def layout(self) -> AnyLayout:
        return self.plan.layout.name

    @property
    def routing(self) -> Routing:
        return self.plan.routing

    @property
    def head_ranks(self) -> int:
        return self.plan.head_ranks

    def __str__(self) -> str:
        if self.ring_size == 1:
            return "one device, no split" if self.rings == 1 else f"{self.rings} devices, no split"
        rings = f"a ring of {self.ring_size}" if self.rings == 1 else f"{self.rings} rings of {self.ring_size}"
        laid_out = [_first_word(self.layout), str(self.routing)] if self.ring_size > self.head_ranks else []
        heads = [f"{self.head_ranks} head ranks"] if self.head_ranks > 1 else []
        return ", ".join([rings, *laid_out, *heads])

    @property
    def simplicity(self) -> tuple[int, int, int, int]:
        """Smaller is simpler: small rings, then no head ranks, then simple layouts and routings."""
        layouts: tuple[AnyLayout, ...] = ("contiguous", "zigzag")
        layout = layouts.index(self.layout) if self.layout in layouts else len(layouts)
        routing = ("relay", "direct").index(self.routing) if isinstance(self.routing, str) else 2
        return self.ring_size, self.head_ranks, layout, routing


@dataclass(frozen=True)
class PlanChoices:
    """Ways to use the devices, the best first; printing it gives a table, the reason, and when a ring pays.

    ``ranked`` begins with ``best``: the simplest choice that is less than 2 % slower than the fastest. Then come the
    others that fit, by time, and then those that do not, by memory.
    """

    devices: int
    batch: int
    rates: DeviceRates
    ranked: tuple[PlanChoice, ...]
    layers: Layers
    devices_per_node: int | None = None

    @property
    def best(self) -> PlanChoice:
        return self.ranked[0]

    @cached_property
    def break_even(self) -> BreakEven | None:
        """From which length on the best ring is faster than no split on these devices; None for packed documents.

        Also None if no ring of several ranks is possible. Searched on first use.
        """
        ring = next((choice for choice in self.ranked if choice.ring_size > 1), None)
        if ring is None or len(ring.plan.documents.lengths) > 1 or ring.documents:
            return None
        plan, per_node, rates = ring.plan, self.devices_per_node, self.rates
        sizes = replace(plan.sizes, batch=-(-self.batch // self.devices))
        weights = self.layers.weights

        def in_ring(length: int) -> RankTime:
            return self.layers.time(plan_at(plan, length), lambda one: ring_time(one, rates, per_node, weights))

        def alone(length: int) -> RankTime:
            one_device = replace(plan_at(plan, length), sizes=sizes)
            return self.layers.time(one_device, lambda one: time_alone(one, rates, weights))

        return search_break_even(in_ring, alone, shortest=FEWEST_ROWS * ring.ring_size + 1)

    @property
    def reason(self) -> str:
        """Why the best choice is the best, in one sentence."""
        best, fitting = self.best, [choice for choice in self.ranked if not choice.problem]
        parts = [f"{best}: {short_time(best.time.total)} a step ({_spent(best.time)})"]
        unsplit = next(choice for choice in self.ranked if choice.ring_size == 1)
        others = [choice for choice in fitting if choice.ring_size not in (1, best.ring_size)][:1]
        if unsplit.problem:
            parts.append(f"without a split, a device {unsplit.problem}")
        for other in [unsplit, *others]:
            if other.ring_size != best.ring_size and not other.problem:
                ratio = other.time.total / best.time.total
                parts.append(f"{ratio:.3g} x as fast as {other} ({_spent(other.time)})")
        fastest = min((choice for choice in fitting if choice is not best), key=_total, default=best)
        if fastest is not best and fastest.time.total <= best.time.total * SAME:
            much = "as fast as" if best.time.total <= fastest.time.total * SAME else "less than 2 % slower than"
            parts.append(f"{much} {fastest}, and simpler")
        parts += self._why_across_nodes
        if best.idle:
            parts.append(f"{best.idle} of {self.devices} devices are idle")
        return "; ".join(parts) + "."

    @property
    def _why_across_nodes(self) -> list[str]:
        """What a node sends to other nodes, and what the slower ways to route it in the same ring send."""
        best, per_node = self.best, self.devices_per_node
        if per_node is None or per_node >= self.devices or best.ring_size == 1:
            return []
        if not best.sent_by_node:
            return ["nothing is sent between nodes"]
        found = [f"each node sends up to {_size(best.sent_by_node)} to other nodes"]
        alike = (best.ring_size, best.layout, best.head_ranks)
        others = (one for one in self.ranked[1:] if (one.ring_size, one.layout, one.head_ranks) == alike)
        other = next((one for one in others if one.time.total > best.time.total * WORTH_IT), None)
        if other is not None:
            ratio = other.time.total / best.time.total
            sent = _size(other.sent_by_node)
            found.append(f"{ratio:.3g} x as fast as with routing {other.routing}, which sends {sent}")
        return found

    @property
    def _when_a_ring_pays(self) -> str:
        found = self.break_even
        if found is None:
            return ""
        ring = next(choice for choice in self.ranked if choice.ring_size > 1)
        verb = "is" if ring.rings == 1 else "are"
        if found.pays:
            return f"From about {found.length:,} tokens on, {ring} {verb} faster than no split in the model."
        return f"Up to {found.longest:,} tokens, {ring} {verb} not faster than no split in the model: {found.reason}."

    def __str__(self) -> str:
        head = ("", "rings x ranks", "layout", "routing", "heads", "step", "work", "waiting", "memory", "sent", "")
        lines = [head, *(_cells(number, choice) for number, choice in enumerate(self.ranked[:_MOST_SHOWN], start=1))]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        table = ["  ".join(map(str.rjust, line, widths)).rstrip() for line in lines]
        if len(self.ranked) > _MOST_SHOWN:
            table.append(f"and {len(self.ranked) - _MOST_SHOWN} more")
        return "\n".join([*table, *filter(None, [self.reason, self._when_a_ring_pays])])


def best_plan(
    pattern: Pattern | Sequence[Pattern],
    seq_len: int | None = None,
    *,
    devices: int,
    lengths: Lengths | None = None,
    cu_seqlens: Lengths | None = None,
    causal: bool = False,
    batch: int = 1,
    heads: int = 8,
    kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    layer_weights: int = 0,
    rates: DeviceRates = ASSUMED_RATES,
    memory: float | None = None,
    devices_per_node: int | None = None,
) -> PlanChoices:
    """Rank the ways to compute attention on some devices by the modelled time of a forward and a backward pass.

    Compares rings of every size that divides ``devices``, also several of them at the same time, and no split at all;
    layouts, head ranks and routings. Several rings divide the batch or, where it does not divide evenly, the packed
    documents, balanced by work. Devices without a part are idle. The model is that of `rs.best_layout`.

    Args:
        pattern: the pattern of one attention call, or those of a model's layers, one for each layer.
        seq_len: rows of the sequence; may be left out if ``lengths`` or ``cu_seqlens`` is given.
        layer_weights: elements of a layer's matrices that each row is multiplied with (projections, MLP). Their
            products then count for the time, at the FLOP/s of attention.
        memory: bytes of a device for the tensors of attention: those that each layer saves for backward, and those of
            the call that needs most. Choices that need more are ranked last.
        devices_per_node: of which devices 0 .. devices_per_node - 1 are the first node, and so on. Rings fill nodes or
            fit into one, head ranks stay inside a node, and ``ByNode`` is considered for rings of several nodes.
            Between nodes, ``rates.node_bandwidth`` counts.

    >>> import ringspan as rs
    >>> choices = rs.best_plan(rs.Full(), 2**18, devices=8, causal=True)
    >>> print(choices.best)
    a ring of 8, zigzag, relay
    >>> choices.break_even.pays
    True
    >>> print(rs.best_plan(rs.Full(), 2**12, devices=8, batch=8, causal=True).best)  # a sequence for each device
    8 devices, no split
    >>> layers = [*[rs.Window(1023)] * 5, rs.Full()] * 4  # five layers with a window, one with full attention, ..
    >>> slow_between = rs.DeviceRates(1e14, bandwidth=200e9, latency=1e-5, node_bandwidth=5e9)
    >>> model = rs.best_plan(layers, 2**19, devices=16, causal=True, rates=slow_between, devices_per_node=8)
    >>> print(model.best)
    a ring of 16, zigzag, relay by nodes of 8
    """
    if as_int("devices", devices) < 1:
        raise ValueError(f"devices={devices}: must be at least 1")
    packed = document_lengths(lengths, cu_seqlens, seq_len)
    if seq_len is None and packed is None:
        raise ValueError(
            "neither seq_len nor lengths nor cu_seqlens: give the rows of the sequence or of its documents"
        )
    rows = sum(packed or ()) if seq_len is None else as_int("seq_len", seq_len)
    if rows < 1:
        raise ValueError(f"seq_len={rows}: must be at least 1; there is nothing to compute")
    if memory is not None and not memory > 0:
        raise ValueError(f"memory={memory}: must be a positive number of bytes, or None for no limit")
    per_node = devices if devices_per_node is None else as_int("devices_per_node", devices_per_node)
    if as_int("layer_weights", layer_weights) < 0:
        raise ValueError(f"layer_weights={layer_weights}: must be at least 0")
    if rates.node_bandwidth is not None and devices_per_node is None:
        raise ValueError("rates.node_bandwidth without devices_per_node: say how many devices a node has")
    if rates.devices_per_core > 1:
        raise ValueError(
            f"rates.devices_per_core={rates.devices_per_core}: rings that run at once would share cores, which "
            "is not modelled; give a core to each device, with flops / devices_per_core"
        )
    layers = _layers_of(pattern, layer_weights)
    if per_node < 1 or (devices > per_node and devices % per_node):
        raise ValueError(f"devices_per_node={per_node}, devices={devices}: must be at least 1 and divide the devices")
    options: dict[str, object] = dict(layout="contiguous", causal=causal, lengths=packed, optimize=rates.costs)
    options |= dict(batch=batch, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    every = [plan(each, rows, **options) for each, _ in layers.counts]  # type: ignore[arg-type]
    ranked = tuple(_Search(every[0], layers, devices, min(per_node, devices), rates, memory).ranked())
    if ranked[0].problem:
        least = min(ranked, key=lambda choice: choice.memory)
        raise ValueError(
            f"memory={memory}: no plan fits on {devices} devices; the smallest, {least}, {least.problem}; use more "
            "devices, a smaller batch, or a shorter sequence"
        )
    return PlanChoices(devices, batch, rates, ranked, layers, devices_per_node)


def _layers_of(pattern: Pattern | Sequence[Pattern], weights: int) -> Layers:
    """Patterns in order of their first layer."""
    patterns = [*pattern] if isinstance(pattern, Sequence) else [pattern]
    if not patterns:
        raise ValueError("pattern=(): give at least one, the pattern of a layer")
    return Layers(tuple(Counter(patterns).items()), weights)


@dataclass(frozen=True)
class _Part:
    """What one ring gets: a number of batch elements, and the documents of each."""

    batch: int
    lengths: tuple[int, ...]


class _Search:
    """The candidates, starting from the plan of one device that computes everything."""

    def __init__(
        self,
        alone: RingPlan,
        layers: Layers,
        devices: int,
        per_node: int,
        rates: DeviceRates,
        memory: float | None,
    ) -> None:
        self.alone, self.layers, self.devices, self.per_node = alone, layers, devices, per_node
        self.rates, self.memory = rates, memory
        self.lengths = tuple(rows for rows in alone.documents.lengths if rows)
        self.price: Callable[[int], float] = cache(self._price)
        self.parts = cache(self._parts)
        self.found: dict[tuple[int, AnyLayout, Routing, int], PlanChoice] = {}

    def ranked(self) -> list[PlanChoice]:
        for size in _divisors(self.devices):
            if size % self.per_node and self.per_node % size:
                continue  # two rings would share a node
            first = self._first_routing(size)
            plain = [self.try_out(size, layout, first, 1) for layout in self._layouts(size)]
            layout = _in_order(plain)[0].layout
            for count in self._head_ranks(size):
                self.try_out(size, layout if count < size else "contiguous", first, count)
        for one in _in_order(self.found.values())[:_REFINED]:
            for layout in self._fast_layouts(one):
                for routing in self._routings(one):
                    self.try_out(one.ring_size, layout, routing, one.head_ranks)
        return _in_order(self.found.values())

    def _layouts(self, shards: int) -> tuple[AnyLayout, ...]:
        """The layouts of a ring, the simplest first. With one shard, all are the same."""
        patterns = (pattern for pattern, _ in self.layers.counts)
        each = (layouts_to_compare(pattern, self.alone.causal, self.lengths) for pattern in patterns)
        layouts = tuple(dict.fromkeys(layout for layouts in each for layout in layouts))
        return layouts if shards > 1 else layouts[:1]

    def _first_routing(self, size: int) -> Routing:
        """The routing with which rings of this size are compared: links between nodes may be much slower."""
        across = self.rates.node_bandwidth is not None and size > self.per_node > 1
        return ByNode(self.per_node) if across else "relay"

    def _fast_layouts(self, choice: PlanChoice) -> list[AnyLayout]:
        """The layouts that are not much slower than the fastest without head ranks."""
        layouts = self._layouts(choice.ring_size // choice.head_ranks)
        first = self._first_routing(choice.ring_size)
        times = [self.try_out(choice.ring_size, layout, first, 1).time.total for layout in layouts]
        return [layout for layout, time in zip(layouts, times, strict=True) if time <= _MUCH_SLOWER * min(times)]

    def _head_ranks(self, size: int) -> Iterator[int]:
        """The numbers of head ranks that a ring can have inside a node, without 1."""
        kv_heads = self.alone.sizes.kv_heads
        for count in _divisors(math.gcd(size, self.alone.sizes.heads, self.per_node))[1:]:
            if kv_heads % count == 0 or count % kv_heads == 0:
                yield count

    def _routings(self, choice: PlanChoice) -> Iterator[Routing]:
        """The routings that differ. Between two shards, and where nothing is sent, all are the same."""
        yield "relay"
        if choice.sent and choice.ring_size > 2 * choice.head_ranks:
            yield "direct"
            if choice.ring_size > self.per_node > 1 and choice.ring_size % self.per_node == 0:
                yield ByNode(self.per_node)

    def try_out(self, size: int, layout: AnyLayout, routing: Routing, head_ranks: int) -> PlanChoice:
        key = size, layout, routing, head_ranks
        if key not in self.found:
            self.found[key] = self._model(*key)
        return self.found[key]

    def _model(self, size: int, layout: AnyLayout, routing: Routing, head_ranks: int) -> PlanChoice:
        rings, parts, documents = self.parts(self.devices // size)
        plans = [self._plan(part, size, layout, routing, head_ranks) for part in parts]
        times = [self.layers.time(plan, self._time) for plan in plans]
        time, slowest = max(zip(times, plans, strict=True), key=lambda each: each[0].total)
        ranks = [(plan, rank) for plan in plans for rank in {*modelled_ranks(plan), _fullest(plan.layout)}]
        memory = max(self._memory(plan, rank) for plan, rank in ranks)
        sent = max(self._sent(plan, rank) for plan, rank in ranks)
        between = max((self._sent_by_node(plan) for plan in plans), default=0)
        problem = ""
        if self.memory is not None and memory > self.memory:
            problem = f"needs {_size(memory)} of {_size(self.memory)}"
        return PlanChoice(
            rings, size, self.devices - rings * size, time, memory, sent, between, slowest, documents, problem
        )

    def _time(self, plan: RingPlan) -> RankTime:
        return ring_time(plan, self.rates, self.per_node, self.layers.weights)

    def _memory(self, plan: RingPlan, rank: int) -> int:
        """Bytes of the call that needs most, and of q, k, v, out and lse, which the other layers save for backward."""
        sizes, rows = plan.sizes, plan.layout.rows_of(rank) * plan.sizes.batch
        saved = rows * (2 * (sizes.heads + sizes.kv_heads) * sizes.head_dim * sizes.number_bytes)
        saved += rows * sizes.heads * sizes.wide_bytes
        call = max(one.memory(rank, backward=True).total for one, _ in self.layers.plans(plan))
        return call + (self.layers.number - 1) * saved

    def _sent(self, plan: RingPlan, rank: int) -> int:
        return sum(
            number * (one.bytes_sent(rank) + one.bytes_sent(rank, backward=True))
            for one, number in self.layers.plans(plan)
        )

    def _sent_by_node(self, plan: RingPlan) -> int:
        """The most bytes that one of the modelled nodes sends to others."""
        if plan.layout.ring_size <= self.per_node:
            return 0
        nodes: dict[int, list[int]] = {}
        for rank in modelled_ranks(plan, self.per_node):
            nodes.setdefault(node_of(rank, self.per_node), []).append(rank)
        return max(
            sum(
                number * traffic(one, self.per_node, backward=backward, ranks=ranks).across
                for one, number in self.layers.plans(plan)
                for backward in (False, True)
            )
            for ranks in nodes.values()
        )

    def _plan(self, part: _Part, size: int, layout: AnyLayout, routing: Routing, head_ranks: int) -> RingPlan:
        shards = Layout(layout, sum(part.lengths), size // head_ranks, part.lengths)
        return replace(
            self.alone,
            documents=Documents(part.lengths),
            layout=with_head_ranks(shards, head_ranks),
            routing=routing,
            sizes=replace(self.alone.sizes, batch=part.batch),
        )

    def _parts(self, rings: int) -> tuple[int, tuple[_Part, ...], tuple[tuple[int, ...], ...]]:
        """(rings with any work, parts of the ring with most work and of that with most rows, documents of each ring).

        Documents go to the ring with the least work so far, those with the most work first. They are divided only if
        rings cannot have the same number of batch elements.
        """
        batch = self.alone.sizes.batch
        if len(self.lengths) == 1 or batch % rings == 0:
            return min(rings, batch), (_Part(-(-batch // rings), self.lengths),), ()
        every = self.alone.documents.lengths * batch
        loads, held = [(0.0, 0, ring) for ring in range(rings)], [list[int]() for _ in range(rings)]
        for number in sorted((i for i, rows in enumerate(every) if rows), key=lambda i: -self.price(every[i])):
            price, rows, ring = loads[0]
            held[ring].append(number)
            heapreplace(loads, (price + self.price(every[number]), rows + every[number], ring))
        largest = dict.fromkeys(max(loads, key=itemgetter(i))[2] for i in (0, 1))
        parts = tuple(_Part(1, tuple(every[number] for number in sorted(held[ring]))) for ring in largest)
        documents = tuple(tuple(sorted(numbers)) for numbers in held if numbers)
        return len(documents), parts, documents

    def _price(self, rows: int) -> float:
        """About what a document costs one device, in pairs, as `TileCosts.price` counts them."""
        sizes, costs, price = self.alone.sizes, self.rates.costs, 0.0
        for pattern, number in self.layers.counts:
            branches = pattern.branches(rows)
            rates = [branch.rate if isinstance(branch, SegmentBranch) else 1 for branch in branches]
            pairs = work_before(pattern, self.alone.causal, rows, rows) / math.lcm(*rates)
            merged = 2 * costs.row * sum(rows / rate for rate in rates)
            price += number * (sizes.heads * (pairs + merged) + costs.call * len(branches))
        pair_flops = (FORWARD_FLOPS + BACKWARD_FLOPS) * sizes.head_dim
        return price + self.layers.number * rows * self.layers.weights * sum(WEIGHT_FLOPS.values()) / pair_flops


def _in_order(choices: Iterable[PlanChoice]) -> list[PlanChoice]:
    """As `PlanChoices.ranked`."""

    def rank(choice: PlanChoice) -> tuple[object, ...]:
        return bool(choice.problem), choice.memory if choice.problem else choice.time.total, choice.simplicity

    order = sorted(choices, key=rank)
    fast = [one for one in order if not one.problem and one.time.total <= order[0].time.total * WORTH_IT]
    best = min(fast, key=lambda one: one.simplicity, default=order[0])
    return [best, *(one for one in order if one is not best)]


def _divisors(number: int) -> list[int]:
    """The numbers that divide it, in order.

    >>> _divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [i for i in range(1, number + 1) if number % i == 0]


def _fullest(layout: Layout) -> int:
    """The first of the ranks with the most rows."""
    return max(range(layout.ring_size), key=layout.rows_of)


def _size(count: float) -> str:
    """Bytes with three significant digits.

    >>> _size(5 * 2**20), _size(3 * 2**29)
    ('5 MiB', '1.5 GiB')
    """
    return f"{count / 2**30:.3g} GiB" if count >= 2**30 else f"{count / 2**20:.3g} MiB"


def _first_word(layout: AnyLayout) -> str:
    """The layout without the options of `Balanced`."""
    return str(layout).split(" ")[0]


def _total(choice: PlanChoice) -> float:
    return choice.time.total


def _spent(time: RankTime) -> str:
    return f"{short_time(time.work)} of work, {short_time(time.waiting + time.latency)} of waiting"


def _cells(number: int, choice: PlanChoice) -> tuple[str, ...]:
    """The row of a choice in the table."""
    time, idle = choice.time, f"{choice.idle} idle" if choice.idle else ""
    return (
        str(number),
        f"{choice.rings} x {choice.ring_size}",
        _first_word(choice.layout) if choice.ring_size > choice.head_ranks else "-",
        str(choice.routing) if choice.ring_size > choice.head_ranks else "-",
        str(choice.head_ranks),
        short_time(time.total),
        short_time(time.work),
        short_time(time.waiting + time.latency),
        _size(choice.memory),
        _size(choice.sent) if choice.sent else "nothing",
        choice.problem or idle,
    )
