"""What `ringspan plan` reports: the plan of a ring in each layout, its costs per rank, and the rates of its time model.

Rates are given by the user, measured on this machine, or assumed. Measuring takes a few seconds: attention on one CPU
thread, and messages between two local processes. torch is imported only for that.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ringspan.geometry import Pattern, WindowBranch
from ringspan.layout import AnyLayout, Layout
from ringspan.planning import CPU_COSTS, ByNode, RankMemory, RingPlan, Routing
from ringspan.planning.api import plan
from ringspan.planning.breakeven import BreakEven, LayoutAdvice, short_time
from ringspan.planning.proof import Proof
from ringspan.planning.timing import ASSUMED_RATES, FORWARD_FLOPS, DeviceRates, RankTime, ring_time
from ringspan.tools.pages import Rows, Table

MOST_RANKS_LISTED = 16
_LARGE_BYTES, _LARGE_ROUNDS = 16 * 2**20, 10
_SMALL_BYTES, _SMALL_ROUNDS = 8, 300
_PRODUCTS, _PRODUCT_ROWS = 4, 1024  # 9 GFLOPs, so longer than an exchange of large messages
_TILES, _TILE_ROWS = 4, 512
_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class RankCosts:
    """What one rank computes, sends and holds. ``share`` is its work divided by an even share: 1 is perfect balance.

    ``halo_rows`` is the number of K/V rows, per KV head, that it receives for its windows.
    """

    rank: int
    rows: int
    tiles: int
    hops: int
    parcels_received: int
    halo_rows: int
    sent_forward: int
    sent_backward: int
    work: int
    share: float
    memory_forward: RankMemory
    memory_backward: RankMemory


@dataclass(frozen=True, slots=True)
class LayoutCosts:
    """The costs of some ranks in one layout: one rank, all ranks, or a sample of a large ring."""

    plan: RingPlan
    ranks: tuple[RankCosts, ...]

    @property
    def is_whole(self) -> bool:
        return len(self.ranks) == self.plan.layout.ring_size

    @property
    def proof(self) -> Proof | None:
        """The check of the messages of all ranks; None if only some ranks were planned."""
        return self.plan.check() if self.is_whole else None

    @property
    def busiest(self) -> RankCosts:
        return max(self.ranks, key=lambda cost: cost.work)

    def listed(self) -> dict[str, RankCosts]:
        """The ranks that a table shows, by name: all, or the first, middle, last and busiest of a large ring."""
        if len(self.ranks) <= MOST_RANKS_LISTED:
            return {str(cost.rank): cost for cost in self.ranks}
        shown = {"first": self.ranks[0], "middle": self.ranks[len(self.ranks) // 2], "last": self.ranks[-1]}
        shown["busiest"] = self.busiest
        names: dict[int, list[str]] = {}
        for name, cost in shown.items():
            names.setdefault(cost.rank, []).append(name)
        by_rank = {cost.rank: cost for cost in shown.values()}
        return {f"{rank:,} {'/'.join(names[rank])}": cost for rank, cost in by_rank.items()}


def make_plans(
    pattern: Pattern,
    tokens: int,
    ring_size: int,
    layouts: tuple[AnyLayout, ...],
    *,
    causal: bool,
    routing: Routing,
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    lengths: tuple[int, ...] | None = None,
) -> dict[AnyLayout, RingPlan]:
    """`rs.plan` for each layout.

    >>> from ringspan.geometry import Full
    >>> plans = make_plans(
    ...     Full(), 4096, 4, ("contiguous",), causal=True, routing="relay",
    ...     batch=1, heads=8, kv_heads=8, head_dim=64, dtype="float32",
    ... )
    >>> plans["contiguous"].bytes_sent(0)
    4194304
    """
    return {
        name: plan(
            pattern,
            tokens,
            ring_size=ring_size,
            layout=name,
            causal=causal,
            routing=routing,
            lengths=lengths,
            batch=batch,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=dtype,
        )
        for name in layouts
    }


def layout_costs(plan: RingPlan, rank: int | None = None) -> LayoutCosts:
    """The costs of ``rank``, if given; otherwise of all ranks, or of an even sample of a large ring with both ends."""
    even_share = all_work(plan) / plan.layout.ring_size
    ranks = plan.sample if rank is None else (rank,)
    return LayoutCosts(plan, tuple(_rank_costs(plan, i, even_share) for i in ranks))


def all_work(plan: RingPlan) -> int:
    """(query, key) pairs of the whole ring, from the plan of a single device, which is cheap to make."""
    return replace(plan, layout=Layout("contiguous", plan.layout.rows, 1)).work(0)


def _rank_costs(plan: RingPlan, rank: int, even_share: float) -> RankCosts:
    own = plan.rank(rank)
    return RankCosts(
        rank=rank,
        rows=own.rows,
        tiles=len(own.tiles),
        hops=len(own.hops) - 1,
        parcels_received=sum(len(hop.receives) for hop in own.hops),
        halo_rows=_halo_rows(plan, rank),
        sent_forward=plan.bytes_sent(rank),
        sent_backward=plan.bytes_sent(rank, backward=True),
        work=plan.work(rank),
        share=plan.work(rank) / even_share if even_share else 1.0,
        memory_forward=plan.memory(rank),
        memory_backward=plan.memory(rank, backward=True),
    )


def _halo_rows(plan: RingPlan, rank: int) -> int:
    received = [message.parcel for hop in plan.rank(rank).hops for message in hop.receives]
    return sum(parcel.rows for parcel in received if parcel.branch in _windows(plan)) // plan.sizes.kv_heads


def _windows(plan: RingPlan) -> list[int]:
    """The numbers of the branches that are windows."""
    branches = plan.pattern.branches(plan.layout.rows)
    return [number for number, branch in enumerate(branches) if isinstance(branch, WindowBranch)]


def headline(plan: RingPlan, dtype: str) -> str:
    """The inputs of the plan in one line."""
    sizes, size = plan.sizes, plan.layout.ring_size
    heads = f"{sizes.heads} heads" + (f" ({sizes.kv_heads} KV)" if sizes.kv_heads != sizes.heads else "")
    batch = f", batch {sizes.batch}" if sizes.batch > 1 else ""
    packed = len(plan.documents.lengths)
    documents = f" in {packed:,} documents" if packed > 1 else ""
    return (
        f"{plan.layout.rows:,} tokens{documents} over {size:,} rank{'' if size == 1 else 's'}, {plan.pattern.text}, "
        f"{'causal' if plan.causal else 'not causal'}, {heads} of {sizes.head_dim}, {dtype}{batch}, "
        f"routing: {plan.routing}"
    )


def side_by_side(costs: Mapping[AnyLayout, LayoutCosts]) -> Table:
    """The layouts side by side: the maximum over the given ranks, or the one rank that was requested."""
    some = next(iter(costs.values()))
    lines: Rows = [["", *map(str, costs)]]

    def line(name: str, show: Callable[[Sequence[RankCosts]], str]) -> None:
        lines.append([name, *(show(cost.ranks) for cost in costs.values())])

    lines.append(["branches that cross ranks", *(_crossing(cost.plan) for cost in costs.values())])
    line("rows", lambda ranks: f"{max(rank.rows for rank in ranks):,}")
    line("tiles", lambda ranks: f"{max(rank.tiles for rank in ranks):,}")
    line("hops", lambda ranks: f"{max(rank.hops for rank in ranks):,}")
    line("parcels received", lambda ranks: f"{max(rank.parcels_received for rank in ranks):,}")
    if _windows(some.plan):
        line("halo rows received", lambda ranks: f"{max(rank.halo_rows for rank in ranks):,}")
    line("sent forward, MiB", lambda ranks: _mebi(max(rank.sent_forward for rank in ranks)))
    line("sent backward, MiB", lambda ranks: _mebi(max(rank.sent_backward for rank in ranks)))
    line("work, pairs", lambda ranks: f"{max(rank.work for rank in ranks):.4g}")
    line("work, 1 = even share", lambda ranks: f"{max(rank.share for rank in ranks):.3f}")
    for way in ("forward", "backward"):
        largest = [_largest_memory(cost.ranks, way) for cost in costs.values()]
        lines.append([f"memory {way}, MiB", *(_mebi(memory.total) for memory in largest)])
        lines.append(["  rows", *(_mebi(memory.rows) for memory in largest)])
        lines.append(["  parcels, at their peak", *(_mebi(memory.parcels) for memory in largest)])
    if some.is_whole and len(some.ranks) > 1:
        line("sent by all, MiB", lambda ranks: _mebi(sum(rank.sent_forward + rank.sent_backward for rank in ranks)))
    return Table(_scope(some), lines)


def rank_table(cost: LayoutCosts) -> Table:
    """One line per rank of a small ring; the first, middle, last and busiest rank of a large one."""
    names = "rank, rows, tiles, hops, parcels in, sent fwd, sent bwd, work, memory fwd, memory bwd"
    lines: Rows = [names.split(", ")]
    for name, rank in cost.listed().items():
        lines.append(
            [
                name,
                f"{rank.rows:,}",
                f"{rank.tiles:,}",
                f"{rank.hops:,}",
                f"{rank.parcels_received:,}",
                _mebi(rank.sent_forward),
                _mebi(rank.sent_backward),
                f"{rank.share:.3f}",
                _mebi(rank.memory_forward.total),
                _mebi(rank.memory_backward.total),
            ]
        )
    return Table(f"{cost.plan.layout.name}: each rank, sizes in MiB", lines)


def reach_sentences(costs: Mapping[AnyLayout, LayoutCosts]) -> list[str]:
    """How far a token sees and which segments cross ranks: one sentence, or one per layout if they differ."""
    found = {name: str(cost.plan.reach) for name, cost in costs.items()}
    if len(set(found.values())) == 1:
        return list(found.values())[:1]
    return [f"{name}: {sentence}" for name, sentence in found.items()]


def break_even_sentence(plan: RingPlan, answer: BreakEven, faster: float) -> str:
    """The length from which the ring is faster in the plan's layout, and its speed-up at the planned length."""
    size, tokens, layout = plan.layout.ring_size, plan.layout.rows, plan.layout.name
    if not answer.pays:
        return (
            f"In the model, a ring of {size:,} is never faster than one device up to {answer.length:,} tokens: "
            f"there {answer.reason}; one device takes {answer.alone.work:.2g} s ({layout})."
        )
    shortest = ", the shortest length considered" if answer.length == answer.shortest else ""
    return (
        f"In the model, a ring of {size:,} is faster than one device from {'' if shortest else 'about '}"
        f"{answer.length:,} tokens on{shortest}; at {tokens:,} tokens it is {_times(faster)} as fast ({layout})."
    )


def routing_times(plan: RingPlan, rates: DeviceRates, ranks_per_node: int | None) -> dict[Routing, RankTime]:
    """The modelled time of a ring over several nodes with each routing; empty for a single node."""
    if ranks_per_node is None or ranks_per_node >= plan.layout.ring_size:
        return {}
    routings: tuple[Routing, ...] = ("relay", "direct", ByNode(ranks_per_node))
    return {one: ring_time(replace(plan, routing=one), rates, ranks_per_node) for one in routings}


def routing_sentence(times: Mapping[Routing, RankTime]) -> str:
    """The routings by their modelled time, the fastest first."""
    shown = [f"{one} {short_time(times[one].total)}" for one in sorted(times, key=lambda one: times[one].total)]
    return f"Routing between nodes, by the time in the model: {', '.join(shown)}."


def as_document(
    dtype: str,
    costs: Mapping[AnyLayout, LayoutCosts],
    advice: LayoutAdvice | None,
    routings: Mapping[Routing, RankTime],
    known: KnownRates | None,
    answers: Mapping[AnyLayout, tuple[BreakEven, float]],
    pictures: Sequence[str],
    warnings: Sequence[str],
) -> dict[str, Any]:
    """The whole result as JSON values: bytes and pairs as integers, times in seconds."""
    plan = next(iter(costs.values())).plan
    return {
        "pattern": plan.pattern.text,
        "tokens": plan.layout.rows,
        "documents": len(plan.documents.lengths),
        "ranks": plan.layout.ring_size,
        "causal": plan.causal,
        "routing": str(plan.routing),
        "dtype": dtype,
        "sizes": asdict(plan.sizes),
        "layouts": {
            str(name): {
                "covers_all_ranks": cost.is_whole,
                "reach": asdict(cost.plan.reach),
                "messages": asdict(proof) if (proof := cost.proof) else None,
                "ranks": [asdict(rank) for rank in cost.ranks],
            }
            for name, cost in costs.items()
        },
        "advice": _advice_document(advice) if advice else None,
        "routings": {str(routing): {**asdict(time), "total": time.total} for routing, time in routings.items()},
        "rates": {**asdict(known.rates), "sources": known.sources} if known else None,
        "break_even": {
            str(name): {**asdict(answer), "reason": answer.reason, "speedup_at_tokens": faster}
            for name, (answer, faster) in answers.items()
        },
        "pictures": list(pictures),
        "warnings": list(warnings),
    }


def _advice_document(advice: LayoutAdvice) -> dict[str, Any]:
    return {"layout": str(advice.layout), "reason": advice.reason, "seconds": _seconds(advice)}


def _seconds(advice: LayoutAdvice) -> dict[str, dict[str, float]]:
    return {str(name): {**asdict(time), "total": time.total} for name, time in advice.times.items()}


def _scope(cost: LayoutCosts) -> str:
    size, count = cost.plan.layout.ring_size, len(cost.ranks)
    if count == 1:
        return f"Rank {cost.ranks[0].rank:,} of {size:,}"
    if cost.is_whole:
        return "Maximum over all ranks"
    return f"Maximum over {count} ranks, an even sample of {size:,}"


def _crossing(plan: RingPlan) -> str:
    return f"{len(plan.reach.crossing)} of {len(plan.pattern.branches(plan.layout.rows))}"


def _largest_memory(ranks: Sequence[RankCosts], way: str) -> RankMemory:
    found = [rank.memory_forward if way == "forward" else rank.memory_backward for rank in ranks]
    return max(found, key=lambda memory: memory.total)


def _mebi(count: int) -> str:
    """Mebibytes to about three digits, without the unit.

    >>> _mebi(3 * 2**18), _mebi(2**24), _mebi(2**31)
    ('0.75', '16.0', '2,048')
    """
    size = count / 2**20
    return f"{size:,.2f}" if size < 10 else f"{size:,.1f}" if size < 1000 else f"{size:,.0f}"


def _times(factor: float) -> str:
    return f"{factor:.2f} x" if factor < 10 else f"{factor:,.0f} x"


@dataclass(frozen=True, slots=True)
class LinkRates:
    """The link between two local processes: bytes/s each way at the same time, and the latency of a hop in seconds.

    ``copying``: the seconds of compute that a process loses for each byte that it sends or receives meanwhile.
    """

    bandwidth: float
    latency: float
    copying: float


@dataclass(frozen=True, slots=True)
class KnownRates:
    """Rates, and the source of each: given, measured here, or assumed."""

    rates: DeviceRates
    sources: dict[str, str]

    def __str__(self) -> str:
        rates = self.rates
        parts = [
            f"{rates.flops / 1e9:,.4g} GFLOP/s per device ({self.sources['flops']})",
            f"{rates.bandwidth / 1e9:,.3g} GB/s ({self.sources['bandwidth']})",
            f"{rates.latency * 1e6:,.3g} µs per hop ({self.sources['latency']})",
        ]
        if rates.node_bandwidth is not None:
            parts.append(f"{rates.node_bandwidth / 1e9:,.3g} GB/s between nodes (given)")
        return ", ".join(parts)


def find_rates(
    flops: float | None,
    bandwidth: float | None,
    latency: float | None,
    *,
    dtype: str,
    head_dim: int,
    measure: bool,
    node_bandwidth: float | None = None,
    node_latency: float | None = None,
) -> KnownRates:
    """The given rates; the others are measured with ``measure``, otherwise assumed. Those between nodes are never.

    Latency goes with bandwidth: if the bandwidth is given and the latency is not, the latency is assumed.
    """
    rates = [1.0 if rate is None else rate for rate in (flops, bandwidth, latency)]
    others: dict[str, Any] = dict(node_bandwidth=node_bandwidth, node_latency=node_latency)
    DeviceRates(rates[0], rates[1], rates[2], **others)  # raises for invalid values before anything is measured
    costs = CPU_COSTS if flops is None and measure else ASSUMED_RATES.costs
    sources = {"flops": "given", "bandwidth": "given", "latency": "given"}
    if flops is None and measure:
        flops, sources["flops"] = measure_flop_rate(dtype, head_dim), "measured here, one CPU thread"
    if bandwidth is None and measure:
        link = measure_link()
        bandwidth, sources["bandwidth"] = link.bandwidth, "measured here, two local processes"
        others["copying"] = link.copying
        if latency is None:
            latency, sources["latency"] = link.latency, "measured here"
    found = {"flops": flops, "bandwidth": bandwidth, "latency": latency}
    for name, rate in found.items():
        if rate is None:
            found[name], sources[name] = getattr(ASSUMED_RATES, name), "assumed"
    return KnownRates(DeviceRates(**found, **others, costs=costs), sources)  # type: ignore[arg-type]


def measure_flop_rate(dtype: str, head_dim: int, seconds: float = 0.3) -> float:
    """FLOP/s of one CPU thread in the kernel that attention uses here: full tiles, forward, for about ``seconds``."""
    import torch  # noqa: PLC0415

    from ringspan import kernels  # noqa: PLC0415

    kernel, scores = kernels.choose("cpu", getattr(torch, dtype)).kernel, kernels.ScoreOptions(head_dim**-0.5)
    q, k, v = torch.randn(3, 1, _TILES, _TILE_ROWS, head_dim).to(getattr(torch, dtype)).unbind()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        kernel.forward(q, k, v, "full", scores)  # warm-up
        calls: list[float] = []
        while sum(calls) < seconds:
            start = time.perf_counter()
            kernel.forward(q, k, v, "full", scores)
            calls.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return FORWARD_FLOPS * head_dim * _TILES * _TILE_ROWS**2 / statistics.median(calls)


def measure_link() -> LinkRates:
    """Two local processes (gloo) exchange large and small messages in both directions, like neighbours in a ring."""
    from ringspan.runtime.launch import run_local_ranks  # noqa: PLC0415

    found = run_local_ranks(2, exchange_messages, timeout_seconds=_TIMEOUT_SECONDS)
    return LinkRates(
        min(one.bandwidth for one in found),
        max(one.latency for one in found),
        statistics.mean(one.copying for one in found),
    )


def exchange_messages(peer: int | None = None) -> LinkRates:
    """Runs on all processes, each with a peer (default: the other one of two): the rates that this one sees."""
    import torch.distributed as dist  # noqa: PLC0415

    peer = 1 - dist.get_rank() if peer is None else peer
    large, small = (
        _seconds_of_exchange(peer, size, rounds)
        for size, rounds in ((_LARGE_BYTES, _LARGE_ROUNDS), (_SMALL_BYTES, _SMALL_ROUNDS))
    )
    return LinkRates(_LARGE_BYTES / max(large - small, 1e-9), small, _copying_seconds(peer) / (2 * _LARGE_BYTES))


def _copying_seconds(peer: int) -> float:
    """By how much an exchange of large messages delays compute that takes longer than it does; median of rounds."""
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    left, right = torch.randn(2, _PRODUCT_ROWS, _PRODUCT_ROWS).unbind()
    outgoing, incoming = torch.zeros(2, _LARGE_BYTES, dtype=torch.uint8).unbind()

    def seconds(exchanges: bool) -> float:
        dist.barrier()
        start = time.perf_counter()
        pending = [dist.irecv(incoming, peer), dist.isend(outgoing, peer)] if exchanges else []
        for _ in range(_PRODUCTS):
            torch.mm(left, right)
        spent = time.perf_counter() - start
        for work in pending:
            if work is not None:
                work.wait()
        return spent

    rounds = [(seconds(True), seconds(False)) for _ in range(_LARGE_ROUNDS + 1)][1:]
    return max(0.0, statistics.median(slowed - alone for slowed, alone in rounds))


def _seconds_of_exchange(peer: int, size: int, rounds: int) -> float:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    outgoing, incoming = torch.zeros(2, size, dtype=torch.uint8).unbind()
    spent = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        pending = [dist.irecv(incoming, peer), dist.isend(outgoing, peer)]
        for work in pending:
            if work is not None:
                work.wait()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent[1:])  # the first round sets up the connection
