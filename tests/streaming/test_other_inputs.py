"""A resumed run raises if its inputs differ from those it began with."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import ringspan as rs
from ringspan.streaming import (
    CallableSource,
    RowShape,
    Source,
    SyntheticSource,
    TensorRows,
    open_numpy,
    open_safetensors,
)
from ringspan.streaming.sources import sampled_rows

SHAPE = RowShape(heads=4, kv_heads=2, head_dim=8)
PATTERN = rs.Dilated((64, 4096), (1, 16))
N, SHARDS = 4096, 8
READ = {False: ("q", "k", "v"), True: ("grad_out", "q", "k", "v", "out", "lse")}


class Stop(Exception):  # noqa: N818
    pass


def stop(done: rs.streaming.ShardDone) -> None:
    if done.finished == 2:
        raise Stop


def tensors(seed: int = 0) -> dict[str, Tensor]:
    rows = SyntheticSource(SHAPE, seed)
    found = {name: rows.read(name, range(N), range(SHAPE.heads_of(name))) for name in ("q", "k", "v", "grad_out")}
    found["out"], found["lse"] = rs.attention(*(found[x] for x in "qkv"), pattern=PATTERN, return_lse=True)  # type: ignore[arg-type]
    return found


def run(source: Source, folder: Path, backward: bool = False, on_shard: object = None) -> rs.streaming.StreamSummary:
    options = dict(shards=SHARDS, on_shard=on_shard)
    if backward:
        return rs.stream_backward(source, TensorRows({}), N, PATTERN, folder=folder, **options)  # type: ignore[arg-type]
    return rs.stream_attention(source, TensorRows({}), N, PATTERN, progress=folder / "progress.jsonl", **options)  # type: ignore[arg-type]


def numpy_files(found: Mapping[str, Tensor], folder: Path) -> Source:
    folder.mkdir(exist_ok=True)
    for name, x in found.items():
        np.save(folder / f"{name}.npy", x.numpy())
    return open_numpy(folder)


def safetensors_file(found: Mapping[str, Tensor], folder: Path) -> Source:
    folder.mkdir(exist_ok=True)
    save_file(dict(found), folder / "rows.safetensors")
    return open_safetensors(folder / "rows.safetensors")


def callable_source(found: Mapping[str, Tensor], folder: Path) -> Source:
    held = TensorRows(found)
    return CallableSource(SHAPE, held.read)


SOURCES = [numpy_files, safetensors_file, callable_source, lambda found, _: TensorRows(found)]


@pytest.mark.parametrize("source", SOURCES, ids=["numpy", "safetensors", "callable", "tensors"])
@pytest.mark.parametrize("name", READ[False])
def test_one_changed_tensor_raises(
    tmp_path: Path, source: Callable[[Mapping[str, Tensor], Path], Source], name: str
) -> None:
    with pytest.raises(Stop):
        run(source(tensors(), tmp_path / "a"), tmp_path, on_shard=stop)
    with pytest.raises(ValueError, match=f"other inputs: {name} differ"):
        run(source(tensors() | {name: tensors(1)[name]}, tmp_path / "b"), tmp_path)
    assert run(source(tensors(), tmp_path / "copy"), tmp_path).resumed >= 2  # the content counts, not the file


@pytest.mark.parametrize("name", READ[True])
def test_one_changed_tensor_raises_in_backward(tmp_path: Path, name: str) -> None:
    with pytest.raises(Stop):
        run(TensorRows(tensors()), tmp_path, backward=True, on_shard=stop)
    with pytest.raises(ValueError, match=f"other inputs: {name} differ"):
        run(TensorRows(tensors() | {name: tensors(1)[name]}), tmp_path, backward=True)
    assert run(TensorRows(tensors()), tmp_path, backward=True).resumed >= 2


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("name", READ[False])
def test_one_changed_shard_raises_finished_or_not(tmp_path: Path, name: str, shard: int) -> None:
    """Keys and values of any shard may have been read for any other."""
    found = tensors()
    with pytest.raises(Stop):
        run(TensorRows(found), tmp_path, on_shard=stop)
    span = slice(shard * N // SHARDS, (shard + 1) * N // SHARDS)
    found[name][:, span] += 1
    with pytest.raises(ValueError, match=f"other inputs: {name} differ"):
        run(TensorRows(found), tmp_path)


def test_inputs_that_change_during_the_run_raise(tmp_path: Path) -> None:
    found = tensors()

    def change(done: rs.streaming.ShardDone) -> None:
        found["k"].neg_()

    with pytest.raises(ValueError, match=r"rows \d+ to \d+ of k have changed"):
        run(TensorRows(found), tmp_path, on_shard=change)


def test_a_source_that_is_not_repeatable_raises(tmp_path: Path) -> None:
    noise = CallableSource(SHAPE, lambda name, rows, heads: torch.randn(1, len(rows), len(heads), SHAPE.head_dim))
    with pytest.raises(ValueError, match=r"rows 0 to 511 of q have changed"):
        run(noise, tmp_path)


def test_samples_cover_every_shard_and_the_same_rows_each_time() -> None:
    for start, stop in ((0, 1), (7, 15), (1000, 10**9)):
        rows = sampled_rows(range(start, stop), 64)
        assert rows == sampled_rows(range(start, stop), 64) == sorted(set(rows))
        assert (rows[0], rows[-1], len(rows)) == (start, stop - 1, min(64, stop - start))
