"""A run that was killed resumes, and its output is bit-for-bit that of an uninterrupted one."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import ringspan as rs
from ringspan.runtime.files import read_journal
from ringspan.streaming import (
    ChecksumSink,
    QueryPosition,
    RowShape,
    SyntheticSource,
    TensorRows,
    create_numpy,
    open_numpy,
)
from tests.ranks import starts_processes

pytestmark = starts_processes

SHAPE = RowShape(heads=2, kv_heads=1, head_dim=16)
PATTERN = rs.Dilated((64, 4096), (1, 16))
N, SHARDS = 4096, 8
SCRIPT = """
import sys, time
from functools import partial
from pathlib import Path
import ringspan as rs
from tests.streaming.test_killed import forward, backward
folder = Path(sys.argv[2])
slowly = lambda done: (print(done.finished, flush=True), time.sleep(0.1))
forward(folder, slowly) if sys.argv[1] == "forward" else backward(folder, slowly)
"""


def forward(folder: Path, on_shard: object = None) -> rs.streaming.StreamSummary:
    return rs.stream_attention(
        SyntheticSource(SHAPE),
        create_numpy(folder / "out", N, SHAPE),
        N,
        PATTERN,
        causal=True,
        shards=SHARDS,
        progress=folder / "progress.jsonl",
        on_shard=on_shard,  # type: ignore[arg-type]
    )


def backward(folder: Path, on_shard: object = None, causal: bool = False) -> rs.streaming.StreamSummary:
    return rs.stream_backward(
        open_numpy(folder / "inputs"),
        create_numpy(folder / "gradients", N, SHAPE, backward=True),
        N,
        PATTERN,
        causal=causal,
        shards=SHARDS,
        folder=folder / "work",
        on_shard=on_shard,  # type: ignore[arg-type]
    )


def write_inputs(folder: Path) -> None:
    import numpy as np

    rows = SyntheticSource(SHAPE)
    tensors = {name: rows.read(name, range(N), range(SHAPE.heads_of(name))) for name in ("q", "k", "v", "grad_out")}
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    tensors["out"], tensors["lse"] = rs.attention(q, k, v, pattern=PATTERN, return_lse=True)
    (folder / "inputs").mkdir(parents=True)
    for name, x in tensors.items():
        np.save(folder / "inputs" / f"{name}.npy", x.numpy())


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_killed_run_resumes(tmp_path: Path, way: str) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for folder in (killed, whole):
        if way == "backward":
            write_inputs(folder)
    run = forward if way == "forward" else backward
    steps = SHARDS if way == "forward" else 2 * SHARDS  # not causal: twice over the shards
    command = [sys.executable, "-c", SCRIPT, way, str(killed)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            if int(line) >= steps - 5:
                break
        worker.send_signal(signal.SIGKILL)
    done, straight = run(killed), run(whole)
    assert 0 < done.resumed < steps
    assert (straight.resumed, straight.shards) == (0, steps)
    assert done.parcel_bytes == straight.parcel_bytes
    results = "out" if way == "forward" else "gradients"
    for path in (whole / results).iterdir():
        assert path.read_bytes() == (killed / results / path.name).read_bytes()


def test_a_torn_line_is_dropped(tmp_path: Path) -> None:
    forward(tmp_path)
    progress = tmp_path / "progress.jsonl"
    text = progress.read_text()
    progress.write_text(text[:-10])
    before = (tmp_path / "out/out.npy").read_bytes()
    assert forward(tmp_path).resumed == SHARDS - 1
    assert (tmp_path / "out/out.npy").read_bytes() == before
    assert len(read_journal(progress)) == SHARDS + 1
    assert forward(tmp_path).resumed == SHARDS


def test_resuming_with_other_settings_raises(tmp_path: Path) -> None:
    forward(tmp_path)
    with pytest.raises(ValueError, match="causal=True, but this one has False"):
        rs.stream_attention(
            SyntheticSource(SHAPE), TensorRows({}), N, PATTERN, shards=SHARDS, progress=tmp_path / "progress.jsonl"
        )


def test_resuming_with_a_smaller_budget_raises(tmp_path: Path) -> None:
    q = torch.ones(1, 100, 2, 8)
    run = partial(rs.stream_attention, TensorRows({"q": q, "k": q, "v": q}), TensorRows({}), 100, rs.Full())
    run(progress=tmp_path / "progress")
    with pytest.raises(ValueError, match=r"budget_bytes=1,000; the run in .*progress"):
        run(progress=tmp_path / "progress", budget_bytes=1000)


def test_missing_results_are_noticed(tmp_path: Path) -> None:
    forward(tmp_path)
    (tmp_path / "out/out.npy").unlink()
    with pytest.raises(ValueError, match=r"rows 0 to \d+ of out .* differ"):
        forward(tmp_path)
    progress, out = tmp_path / "memory.jsonl", torch.empty(1, N, SHAPE.heads, SHAPE.head_dim)

    def into(x: torch.Tensor) -> rs.streaming.StreamSummary:
        sink = TensorRows({"out": x})
        return rs.stream_attention(SyntheticSource(SHAPE), sink, N, PATTERN, shards=SHARDS, progress=progress)

    into(out)
    assert into(out).resumed == SHARDS
    with pytest.raises(ValueError, match="differ"):
        into(torch.empty_like(out))
    with pytest.raises(ValueError, match=r"rows 0 to 511 of lse .* differ"):
        rs.stream_attention(
            SyntheticSource(SHAPE),
            TensorRows({"out": out, "lse": torch.empty(1, SHAPE.heads, N)}),
            N,
            PATTERN,
            shards=SHARDS,
            progress=progress,
        )


def test_resuming_with_another_source_or_other_positions_raises(tmp_path: Path) -> None:
    options = dict(shards=SHARDS, progress=tmp_path / "progress.jsonl")
    rs.stream_attention(SyntheticSource(SHAPE), ChecksumSink([QueryPosition(3, 0)]), N, PATTERN, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="other inputs: q, k, v differ"):
        rs.stream_attention(SyntheticSource(SHAPE, seed=1), ChecksumSink(), N, PATTERN, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="row 4, head 1 was not kept"):
        rs.stream_attention(SyntheticSource(SHAPE), ChecksumSink([QueryPosition(4, 1)]), N, PATTERN, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    ['{"other": 1}\n', "not JSON\n", '{"run": {}}\n{"finished": "0"}\n', "[1]\n", "5\n", '{"run": null}\n', "no line"],
)
def test_a_file_that_is_not_a_progress_file_raises(tmp_path: Path, text: str) -> None:
    path = tmp_path / "progress.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"progress\.jsonl (is not a progress file|has a line that is not JSON)"):
        rs.stream_attention(SyntheticSource(SHAPE), TensorRows({}), N, PATTERN, progress=path)


def test_a_resumed_run_has_the_same_checksum(tmp_path: Path) -> None:
    positions = [QueryPosition(3, 0), QueryPosition(2000, 1), QueryPosition(4095, 1)]
    uninterrupted = ChecksumSink(positions)
    options = dict(causal=True, shards=SHARDS)
    rs.stream_attention(SyntheticSource(SHAPE), uninterrupted, N, PATTERN, **options)  # type: ignore[arg-type]

    class Stop(Exception):  # noqa: N818
        pass

    def stop(done: rs.streaming.ShardDone) -> None:
        if done.finished == 4:
            raise Stop

    path = tmp_path / "progress.jsonl"
    with pytest.raises(Stop):
        rs.stream_attention(
            SyntheticSource(SHAPE), ChecksumSink(positions), N, PATTERN, progress=path, on_shard=stop, **options
        )  # type: ignore[call-overload]
    resumed = ChecksumSink(positions)
    done = rs.stream_attention(SyntheticSource(SHAPE), resumed, N, PATTERN, progress=path, **options)  # type: ignore[arg-type]
    assert done.resumed >= 4
    assert resumed.checksum == uninterrupted.checksum
    for position in positions:
        rows, heads = range(position.row, position.row + 1), range(position.head, position.head + 1)
        for name in ("out", "lse"):
            assert torch.equal(resumed.read(name, rows, heads), uninterrupted.read(name, rows, heads))
    with pytest.raises(ValueError, match="was not kept"):
        resumed.read("out", range(5, 6), range(1))
