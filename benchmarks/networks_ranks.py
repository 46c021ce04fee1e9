"""What each rank of `python -m benchmarks networks` measures; torchrun starts it on the hosts of a test bed.

A host has one core: its ranks share it, with the threads of gloo and the network. Rank 0 prints one line of JSON for
each item, in the order of `names`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

import ringspan as rs
from benchmarks.hosts import limit_own_link, parse_rate, read_traffic
from benchmarks.suite import HEAD_DIM, HEADS
from ringspan.planning.breakeven import time_alone
from ringspan.runtime.collectives import all_gather_json
from ringspan.tools.bench.trials import RankStopwatch, TurnTimer, with_gradients
from ringspan.tools.measure import is_disturbed
from ringspan.tools.plan_report import exchange_messages
from ringspan.tools.rehearse import Network, rehearse_rank

FASTEST = "10gbit"  # the rate at which the cost of copying is measured
TOKENS = {"full": 4096, "dilated": 16384}
ATTEMPTS = 3
LINKS = "links"  # the item of the rates of links, which comes first


@dataclass(frozen=True)
class Case:
    """A ring over all hosts, causal."""

    pattern: str
    layout: rs.LayoutName
    routing: str

    def __str__(self) -> str:
        return f"{self.pattern}, {self.layout}, {self.routing}"

    def plan(self, hosts: int, ranks_per_host: int, tokens: Mapping[str, int]) -> rs.RingPlan:
        routing: Any = rs.ByNode(ranks_per_host) if self.routing == "by node" else self.routing
        return rs.plan(
            pattern_of(self.pattern, tokens),
            tokens[self.pattern],
            ring_size=hosts * ranks_per_host,
            layout=self.layout,
            routing=routing,
            causal=True,
            heads=HEADS,
            head_dim=HEAD_DIM,
        )


def pattern_of(name: str, tokens: Mapping[str, int]) -> rs.Pattern:
    n = tokens[name]
    return rs.Full() if name == "full" else rs.Dilated((n // 16, n // 4, n), (1, 4, 16))


def cases(ranks_per_host: int) -> list[Case]:
    """All that differ: two ranks send the same messages by every routing."""
    routings = ("relay", "direct", "by node") if ranks_per_host > 1 else ("relay",)
    layouts: tuple[rs.LayoutName, ...] = ("contiguous", "zigzag")
    return [Case(pattern, layout, routing) for pattern in TOKENS for layout in layouts for routing in routings]


def names(ranks_per_host: int, rates: Sequence[str]) -> list[str]:
    """All items, in the order of measuring: rates of the links, one rank alone, and rings over links of each rate."""
    alone = [f"alone, {pattern}" for pattern in TOKENS]
    return [LINKS, *alone, *(f"{rate}, {case}" for rate in rates for case in cases(ranks_per_host))]


def rates_of(rate: str, links: Mapping[str, Any], alone: Mapping[str, Any], ranks_per_host: int) -> rs.DeviceRates:
    """The rates of the model: none of them is measured on a ring."""
    return rs.DeviceRates(
        alone["flops"],
        bandwidth=links["inside"]["bandwidth"],
        latency=links["inside"]["latency"],
        node_bandwidth=parse_rate(rate) / 8,
        node_latency=links["across"]["latency"],
        copying=links["across"]["copying"] / ranks_per_host,  # each rank was delayed by the copying of all on its core
        devices_per_core=ranks_per_host,
    )


class Measurements:
    """What this rank measures of each item, with all other ranks."""

    def __init__(self, rounds: int, tokens: Mapping[str, int], known: Mapping[str, Any]) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.per_host = int(os.environ["LOCAL_WORLD_SIZE"])
        self.rounds, self.tokens, self.known = rounds, tokens, dict(known)

    def item(self, name: str) -> Any:
        if name == LINKS:
            found: Any = self.links()
        elif name.startswith("alone, "):
            found = self.alone(name.removeprefix("alone, "))
        else:
            rate, pattern, layout, routing = name.split(", ")
            found = self.ring(rate, Case(pattern, layout, routing))  # type: ignore[arg-type]
        self.known[name] = found
        return found

    def links(self) -> dict[str, Any]:
        """Rates between neighbours on a host, and between hosts, of which all ranks measure at the same time."""
        self.limit(FASTEST)
        across = self.exchange((self.rank + self.per_host) % self.size)
        inside = self.exchange(self.rank ^ 1) if self.per_host > 1 else across
        return dict(inside=inside, across=across)

    def exchange(self, peer: int) -> dict[str, float]:
        every = all_gather_json(asdict(exchange_messages(peer)))
        return {
            "bandwidth": min(one["bandwidth"] for one in every),
            "latency": max(one["latency"] for one in every),
            "copying": sum(one["copying"] for one in every) / len(every),
        }

    def alone(self, name: str) -> dict[str, Any]:
        """The whole sequence on one rank of each host at the same time, which has the core for itself."""
        n = self.tokens[name]
        options: dict[str, Any] = dict(pattern=pattern_of(name, self.tokens), causal=True)
        tensors = [torch.randn(1, n, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3)]
        step = with_gradients(tensors, torch.randn(1, n, HEADS, HEAD_DIM), options)
        own = step if self.rank % self.per_host == 0 else lambda: None
        seconds = TurnTimer(RankStopwatch).in_turns({"alone": own}, self.rounds)["alone"]
        plan = rs.plan(options["pattern"], n, causal=True, heads=HEADS, head_dim=HEAD_DIM)
        unit = rs.DeviceRates(1.0, bandwidth=1.0, latency=0.0)
        return dict(seconds=seconds, flops=time_alone(plan, unit).work / statistics.median(seconds))

    def ring(self, rate: str, case: Case) -> dict[str, Any]:
        """Steps over the ring, after one that warms up, and a rehearsal by all ranks at the same time."""
        self.limit(rate)
        plan = case.plan(self.size // self.per_host, self.per_host, self.tokens)
        ring = rs.Ring(layout=case.layout, routing=plan.routing)
        n, rows = self.tokens[case.pattern], plan.layout.rows_of(self.rank)
        tensors = [torch.randn(1, rows, HEADS, HEAD_DIM, requires_grad=True) for _ in range(3)]
        grad = torch.randn(1, rows, HEADS, HEAD_DIM)
        options: dict[str, Any] = dict(pattern=plan.pattern, causal=True, ring=ring, seq_len=n)

        def step() -> list[float]:
            ring.reset_counters()
            before = read_traffic().sent
            dist.barrier()  # no other rank sends before this host has read its counter
            out = rs.attention(*tensors, **options)
            forward = ring.counters.waiting_seconds
            torch.autograd.grad(out, tensors, grad)
            dist.barrier()
            return [forward, ring.counters.waiting_seconds - forward, read_traffic().sent - before]

        step()
        steps = [undisturbed(step) for _ in range(self.rounds)]
        links, alone = self.known[LINKS], self.known[f"alone, {case.pattern}"]
        network = Network(rates_of(rate, links, alone, self.per_host), self.per_host)
        _, rehearsed = undisturbed(lambda: rehearse(plan, self.rank, network))
        return dict(
            seconds=[seconds for seconds, _ in steps],
            waits=[[rank[:2] for rank in by_rank] for _, by_rank in steps],
            sent=[[rank[2] for rank in by_rank[:: self.per_host]] for _, by_rank in steps],
            rehearsed=rehearsed,
        )

    def limit(self, rate: str) -> None:
        dist.barrier()
        if self.rank % self.per_host == 0:
            limit_own_link(rate)
        dist.barrier()


def rehearse(plan: rs.RingPlan, rank: int, network: Network) -> list[float]:
    """Seconds of work, measured, and of waiting in forward and backward, computed."""
    found = rehearse_rank(plan, rank, network, torch.float32, backward=True)
    assert found.backward is not None
    return [found.working, found.forward.waiting, found.backward.waiting]


def undisturbed(task: Callable[[], list[float]]) -> tuple[float, list[list[float]]]:
    """The seconds of a task of all ranks, and what it returns on each; repeated if other programs disturb it."""
    found = []
    for _ in range(ATTEMPTS):
        with RankStopwatch() as watch:
            mine = task()
        found.append((watch.foreign_cores, watch.seconds, all_gather_json(mine)))
        if not is_disturbed(watch.foreign_cores, watch.seconds):
            break
    _, seconds, by_rank = min(found)
    return seconds, by_rank


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("settings", type=json.loads)
    settings = parser.parse_args().settings
    host = int(os.environ["RANK"]) // int(os.environ["LOCAL_WORLD_SIZE"])
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[host]})  # before gloo starts its threads
    dist.init_process_group("gloo")
    measurements = Measurements(settings["rounds"], settings["tokens"], settings["known"])
    for name in settings["names"]:
        found = measurements.item(name)
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
