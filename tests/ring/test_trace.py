"""Traces of simulated rings, which must match the plan, and the alignment of clocks."""

import random
from pathlib import Path

import pytest
import torch

import ringspan as rs
from ringspan.ring import recorder, trace
from ringspan.ring.trace import Clock
from tests.exactness import inputs
from tests.traces import check_against_plan, read_trace

PATTERN = rs.Window(40) + rs.Dilated((32, 200), (1, 3))


def step(ring: rs.SimulatedRing, **options: object) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q, k, v = inputs(2, 200, 3, 2, 4)
    out = rs.attention(q, k, v, pattern=PATTERN, ring=ring, **options)  # type: ignore[call-overload]
    return (out, *torch.autograd.grad(out.sum(), (q, k, v)))


@pytest.mark.parametrize("routing", ["relay", "direct", rs.ByNode(2)], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("causal", [False, True])
def test_spans_match_the_plan(layout: rs.LayoutName, routing: rs.Routing, causal: bool, tmp_path: Path) -> None:
    ring = rs.SimulatedRing(4, layout, routing)
    with ring.trace(tmp_path / "trace.json") as running:
        running.phase("step", number=1)
        step(ring, causal=causal)
    found = read_trace(tmp_path / "trace.json")
    assert found.names == {rank: f"rank {rank} (simulated)" for rank in range(4)}
    shape = dict(batch=2, heads=6, kv_heads=3, head_dim=4, dtype=torch.float64)
    plan = rs.plan(PATTERN, 200, ring_size=4, layout=layout, routing=routing, causal=causal, **shape)  # type: ignore[arg-type]
    for rank in range(4):
        check_against_plan(found, plan, rank)
        assert sum(e["args"]["bytes"] for e in found.spans(rank, "sends")) == ring.counters[rank].bytes_sent
        assert len(found.spans(rank, "receives")) == ring.counters[rank].messages_received
        assert [e["name"] for e in found.spans(rank) if e["name"] in ("forward", "backward")] == ["forward", "backward"]
        ((phase),) = found.spans(rank, "phases")
        assert (phase["name"], phase["args"]) == ("step", {"number": 1})
        held = [e["args"]["held"] for e in found.events if e["pid"] == rank and "buffers" in e["name"]]
        assert max(held) == ring.counters[rank].peak_parcel_bytes
        assert held[-1] == 0
        (*_, last) = (e["args"] for e in found.events if e["pid"] == rank and e["name"] == "bytes in flight")
        assert last == {"sends": 0, "receives": 0}


def test_head_ranks_are_lanes_of_their_own(tmp_path: Path) -> None:
    ring = rs.SimulatedRing(4, "contiguous", head_ranks=2)
    q, k, v = inputs(1, 64, 2, 1, 4)
    with ring.trace(tmp_path / "trace.json"), torch.no_grad():
        rs.attention(q, k, v, pattern=rs.Full(), causal=True, ring=ring)
    found = read_trace(tmp_path / "trace.json")
    exchanged = {(rank, e["args"]["peer"]) for rank in range(4) for e in found.spans(rank, "sends", "exchange")}
    assert exchanged == {(0, 1), (1, 0), (2, 3), (3, 2)}
    parcels = {(rank, e["args"]["peer"]) for rank in range(4) for e in found.spans(rank, "sends", "parcels")}
    assert parcels == {(0, 2), (1, 3)}


def test_tracing_changes_no_number_and_ends_with_its_block(tmp_path: Path) -> None:
    ring = rs.SimulatedRing(3)
    before, counters = step(ring, causal=True), ring.counters
    ring.reset_counters()
    with ring.trace(tmp_path / "trace.json"):
        ring.reset_counters()  # a trainer does so in every step
        during = step(ring, causal=True)
        with pytest.raises(rs.RingError, match="nested"), ring.trace(tmp_path / "inner.json"):
            pass
    assert all(map(torch.equal, before, during))
    assert ring.counters == counters
    assert (tmp_path / "trace.json").exists()
    assert not (tmp_path / "inner.json").exists()


def test_nothing_is_recorded_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("recorded without a trace")

    for name in ("__init__", "timed", "begin_pass", "add_transfer", "hold"):
        monkeypatch.setattr(recorder.Recorder, name, refuse)
    ring = rs.SimulatedRing(3)
    step(ring, causal=True)
    transport = ring.shard(ring.agree(6, dict, None, torch.ones(1)), [])[0][1]
    assert recorder.traced(transport) is transport


def test_nothing_is_written_after_an_exception(tmp_path: Path) -> None:
    ring = rs.SimulatedRing(2)
    with pytest.raises(KeyError), ring.trace(tmp_path / "trace.json"):
        raise KeyError
    assert not list(tmp_path.iterdir())
    with ring.trace(tmp_path / "trace.json"):
        step(ring, causal=True)
    read_trace(tmp_path / "trace.json")


def barriers(now: int, clocks: list, latency: int) -> list[list[tuple[int, int]]]:  # type: ignore[type-arg]
    """What clocks show when ranks pass barriers, from a true time ``now`` on; nobody leaves before all have entered."""
    found: list[list[tuple[int, int]]] = [[] for _ in clocks]
    ready = [now] * len(clocks)
    for _ in range(trace._BARRIERS):
        entered = [time + random.randint(0, latency) for time in ready]
        ready = [max(entered) + random.randint(1, latency) for _ in clocks]
        for rank, clock in enumerate(clocks):
            found[rank].append((clock(entered[rank]), clock(ready[rank])))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_clocks_are_aligned_within_the_error_that_is_stated(seed: int) -> None:
    """The true difference lies within the bounds, also in the middle of the trace of a clock that drifts."""
    random.seed(seed)
    offsets = [0, random.randint(-(10**12), 10**12)]
    drifts = [0, random.uniform(-1e-4, 1e-4)]
    clocks = [lambda t, o=o, d=d: round(t * (1 + d)) + o for o, d in zip(offsets, drifts, strict=True)]
    start, stop, latency = 10**9, 7 * 10**9, 10**5
    before, after = barriers(start, clocks, latency), barriers(stop, clocks, latency)
    found = [Clock(before[rank], after[rank], before[0], after[0]) for rank in range(2)]
    assert found[0].is_shared
    assert not found[1].is_shared
    assert found[1].error <= 2 * latency
    for true_time in range(before[0][-1][1], after[0][0][0], 10**8):
        first, second = (clock.time(shown(true_time)) for clock, shown in zip(found, clocks, strict=True))
        # 20 barriers take a moment, in which the clock drifts.
        assert abs(first - second) <= found[1].error + 1e-4 * 20 * 2 * latency + 2
        assert first >= 0


def test_a_shared_clock_is_not_moved() -> None:
    random.seed(0)
    clocks = [lambda t: t] * 2
    before, after = barriers(10**6, clocks, 1000), barriers(10**8, clocks, 1000)
    clock = Clock(before[1], after[1], before[0], after[0])
    assert clock.is_shared
    assert clock.time(10**7) == 10**7 - before[0][-1][0]
    assert clock.note == "clock of rank 0"


def test_a_clock_never_runs_backwards() -> None:
    clocks = [lambda t: t, lambda t: round(t * 1.0001) + 10**10]
    before, after = barriers(10**6, clocks, 1000), barriers(10**8, clocks, 1000)
    clock = Clock(before[1], after[1], before[0], after[0])
    times = [clock.time(clocks[1](time)) for time in range(10**7, 10**7 + 50_000)]
    assert times == sorted(times)
