"""Traces of real ranks: spans match the plan, clocks are aligned, and lanes of several rings share a file."""

import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ringspan as rs
from ringspan.ring import trace
from ringspan.ring.recorder import Recorder
from tests.exactness import inputs
from tests.ranks import on_ranks
from tests.traces import ReadTrace, check_against_plan, read_trace

PATTERN = rs.Window(20) + rs.Dilated((32, 96), (1, 3))


def _step(ring: rs.Ring, seq_len: int | None = None) -> None:
    q, k, v = (ring.split_sequence(x.detach()).requires_grad_() for x in inputs(1, 96, 2, 2, 4))
    out = rs.attention(q, k, v, pattern=PATTERN, causal=True, ring=ring, seq_len=seq_len)
    torch.autograd.grad(out.sum(), (q, k, v))


@contextmanager
def _file() -> Iterator[Path]:
    """A path of this rank; only that of rank 0 is written."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "new" / "trace.json"


def _check(found: ReadTrace, ring: rs.Ring) -> None:
    shape = dict(heads=4, kv_heads=2, head_dim=4, dtype=torch.float64, layout=ring.layout, routing=ring.routing)
    plan = rs.plan(PATTERN, 96, ring_size=ring.size, causal=True, **shape)  # type: ignore[arg-type]
    for rank in range(ring.size):
        check_against_plan(found, plan, rank)


@on_ranks(2, 3)
def test_spans_match_the_plan_and_messages_arrive_after_they_were_sent() -> None:
    for ring in (rs.Ring(layout="zigzag"), rs.Ring(layout="contiguous", routing="direct")):
        with _file() as path:
            with ring.trace(path) as running:
                running.phase("step")
                _step(ring)
            assert path.exists() == (ring.rank == 0)
            if ring.rank == 0:
                found = read_trace(path)
                assert found.names == {rank: f"rank {rank} ({socket.gethostname()})" for rank in range(ring.size)}
                assert set(found.notes.values()) == {"clock of rank 0"}
                _check(found, ring)
                for sent, received in found.messages():
                    assert received["ts"] + received["dur"] >= sent["ts"]
                for rank in range(ring.size):
                    assert [e["name"] for e in found.spans(rank, name="agreement")] == ["agreement"]
                    waits = found.spans(rank, name="wait: ")
                    waited = sum(e["dur"] for e in waits) / 1e6
                    assert waits
                    assert (rank != ring.rank) or waited >= ring.counters.waiting_seconds


@on_ranks(3)
def test_clocks_that_differ_and_drift_are_aligned() -> None:
    rank, began = dist.get_rank(), time.perf_counter_ns()

    def shifted() -> int:
        now = time.perf_counter_ns()
        return now + rank * 10**10 + rank * (now - began) // 10_000

    ring = rs.Ring(layout="contiguous")
    with pytest.MonkeyPatch.context() as patch, _file() as path:
        patch.setattr(trace, "Recorder", lambda: Recorder(shifted))
        with ring.trace(path):
            _step(ring)
            time.sleep(0.05)
            _step(ring)
        if rank == 0:
            found = read_trace(path)
            errors = {0: 0.0}  # in microseconds, as the trace states them, rounded
            errors |= {each: float(found.notes[each].split()[2]) + 1 for each in (1, 2)}
            assert max(errors.values()) < 10_000, "a barrier takes microseconds; the clocks differ by 10 s"
            assert len(found.messages()) > 4
            for sent, received in found.messages():
                slack = errors[sent["pid"]] + errors[received["pid"]]
                assert received["ts"] + received["dur"] >= sent["ts"] - slack


@on_ranks(4)
def test_rings_of_one_group_share_a_trace() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "ring"))
    ring = rs.Ring(mesh["ring"])
    with _file() as path:
        with ring.trace(path, dist.group.WORLD):
            _step(ring, seq_len=96)
        if dist.get_rank() == 0:
            found = read_trace(path)
            assert sorted(found.names) == [0, 1, 2, 3]
            assert {(sent["pid"], sent["args"]["peer"]) for sent, _ in found.messages()} == {
                *((0, 1), (1, 0), (2, 3), (3, 2))
            }


@on_ranks(2)
def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks() -> None:
    ring = rs.Ring()
    with tempfile.TemporaryDirectory() as folder:
        with pytest.raises(rs.RingError, match="cannot write"), ring.trace(folder):
            pass
        with pytest.raises(rs.RingError, match="cannot write"), ring.trace("/dev/null/trace.json"):
            pass
        path = Path(folder) / "trace.json"
        with pytest.raises(KeyError), ring.trace(path):
            raise KeyError
        assert not path.exists()
        assert ring.counters.recorder is None
        with ring.trace(path):
            _step(ring)
        assert path.exists() == (ring.rank == 0)
