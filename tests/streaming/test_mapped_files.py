"""Rows in memory-mapped files: other libraries can read what is written, and memory stays within the budget."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import ringspan as rs
from ringspan.runtime.device import Cpu
from ringspan.streaming import (
    RowShape,
    SyntheticSource,
    TensorRows,
    create_numpy,
    create_safetensors,
    open_numpy,
    open_safetensors,
)

SHAPE = RowShape(heads=4, kv_heads=2, head_dim=8)
PATTERN = rs.Dilated((64, 1000), (1, 8))
N = 1000


def made() -> dict[str, torch.Tensor]:
    rows = SyntheticSource(SHAPE)
    return {name: rows.read(name, range(N), range(SHAPE.heads_of(name))) for name in ("q", "k", "v", "grad_out")}


def write_inputs(folder: Path, kind: str, tensors: dict[str, torch.Tensor]) -> TensorRows:
    if kind == "numpy":
        for name, x in tensors.items():
            np.save(folder / f"{name}.npy", x.numpy())
        return open_numpy(folder)
    save_file(tensors, folder / "rows.safetensors")
    return open_safetensors(folder / "rows.safetensors")


@pytest.mark.parametrize("kind", ["numpy", "safetensors"])
def test_from_file_to_file_forward_and_backward(tmp_path: Path, kind: str) -> None:
    tensors = made()
    source = write_inputs(tmp_path, kind, tensors)
    create = create_numpy if kind == "numpy" else create_safetensors
    out_path, grad_path = tmp_path / "out", tmp_path / "gradients"
    rs.stream_attention(source, create(out_path, N, SHAPE), N, PATTERN, causal=True, shards=3)
    opened = (
        open_numpy(tmp_path, out_path) if kind == "numpy" else open_safetensors(tmp_path / "rows.safetensors", out_path)
    )
    gradients = create(grad_path, N, SHAPE, backward=True)
    rs.stream_backward(opened, gradients, N, PATTERN, causal=True, shards=3, folder=tmp_path / "work")

    q, k, v = (tensors[name].requires_grad_() for name in ("q", "k", "v"))
    out, lse = rs.attention(q, k, v, pattern=PATTERN, causal=True, return_lse=True)
    wanted = dict(
        zip(("dq", "dk", "dv"), torch.autograd.grad((out * tensors["grad_out"]).sum(), (q, k, v)), strict=True)
    )
    wanted |= {"out": out.detach(), "lse": lse.detach()}
    if kind == "numpy":  # read by the libraries that define the formats
        found = {path.stem: torch.from_numpy(np.load(path)) for path in (*out_path.iterdir(), *grad_path.iterdir())}
    else:
        found = {**load_file(out_path), **load_file(grad_path)}
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        torch.testing.assert_close(found[name], x, rtol=0, atol=2e-5)


def test_bf16_in_safetensors(tmp_path: Path) -> None:
    shape = RowShape(2, 2, 8, torch.bfloat16)
    sink = create_safetensors(tmp_path / "out.safetensors", 100, shape)
    rs.stream_attention(SyntheticSource(shape), sink, 100, rs.Full(), shards=3)
    found = load_file(tmp_path / "out.safetensors")
    assert found["out"].dtype == torch.bfloat16
    assert found["lse"].dtype == torch.float32
    q, k, v = (SyntheticSource(shape).read(name, range(100), range(2)) for name in ("q", "k", "v"))
    wanted = rs.attention(q, k, v, pattern=rs.Full())
    torch.testing.assert_close(found["out"], wanted, rtol=0, atol=2**-7)


def test_files_of_another_run_raise(tmp_path: Path) -> None:
    create_numpy(tmp_path, 10, SHAPE)
    create_safetensors(tmp_path / "x.safetensors", 10, SHAPE)
    with pytest.raises(ValueError, match=r"out.npy holds torch.float32 of shape \(1, 10, 4, 8\)"):
        create_numpy(tmp_path, 11, SHAPE)
    with pytest.raises(ValueError, match="belongs to another run"):
        create_safetensors(tmp_path / "x.safetensors", 11, SHAPE)
    with pytest.raises(ValueError, match="has no dq"):
        create_safetensors(tmp_path / "x.safetensors", 10, SHAPE, backward=True)
    with pytest.raises(ValueError, match=r"no \.npy file in"):
        open_numpy(tmp_path / "nowhere")
    (tmp_path / "more").mkdir()
    np.save(tmp_path / "more/out.npy", np.ones((3, 2, 2, 2)))
    with pytest.raises(ValueError, match=r"out is in .*out.npy and in .*more/out.npy"):
        open_numpy(tmp_path, tmp_path / "more")
    with pytest.raises(ValueError, match=r"is in .*x.safetensors and in .*x.safetensors"):
        open_safetensors(tmp_path / "x.safetensors", tmp_path / "x.safetensors")
    np.save(tmp_path / "out.npy", np.ones((3, 2, 2, 2), order="F"))
    with pytest.raises(ValueError, match="Fortran order"):
        open_numpy(tmp_path)


def test_memory_stays_within_the_budget(tmp_path: Path) -> None:
    """Three times as much in files as the budget allows in memory."""
    n, shape, budget = 2**18, RowShape(heads=4, kv_heads=4, head_dim=32), 160 * 2**20
    rows = SyntheticSource(shape)
    for name in ("q", "k", "v"):
        file = np.lib.format.open_memmap(tmp_path / f"{name}.npy", mode="w+", dtype=np.float32, shape=(1, n, 4, 32))
        for start in range(0, n, 2**13):
            file[:, start : start + 2**13] = rows.read(name, range(start, start + 2**13), range(4)).numpy()
        del file
    source, sink = open_numpy(tmp_path), create_numpy(tmp_path / "out", n, shape)
    pattern = rs.Dilated((256, n), (1, n // 256))
    rs.stream_attention(source, TensorRows({}), 2**10, pattern, causal=True)  # one-time set-up of torch does not count
    done, grown = Cpu().peak_growth(
        lambda: rs.stream_attention(source, sink, n, pattern, causal=True, budget_bytes=budget)
    )
    assert done.shards >= 8
    assert 4 * n * 512 > 3 * budget
    assert grown <= budget
    place = range(77_777, 77_778)
    q, k, v = (rows.read(name, range(77_568, 77_824), range(4)) for name in ("q", "k", "v"))
    near = rs.attention(q, k, v, pattern=rs.Full(), causal=True)[:, 77_777 - 77_568]  # selected in one branch only
    torch.testing.assert_close(sink.read("out", place, range(4))[:, 0], near, rtol=0, atol=1e-5)


def test_files_may_be_larger_than_all_memory(tmp_path: Path) -> None:
    """128 GiB each, sparse: only the requested rows are read."""
    n, shape = 2**31, RowShape(heads=2, kv_heads=2, head_dim=8)
    for name in ("q", "k", "v"):
        with (tmp_path / f"{name}.npy").open("wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (1, n, 2, 8)}
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + n * 2 * 8 * 4)
    rows = open_numpy(tmp_path)
    assert rows.shape == shape
    assert rows.read("v", range(n - 100, n, 10), range(1, 2)).eq(0).all()


def test_damaged_files_raise_with_their_name(tmp_path: Path) -> None:
    tensors = made()
    write_inputs(tmp_path, "numpy", tensors)
    write_inputs(tmp_path, "safetensors", tensors)
    array, several = tmp_path / "q.npy", tmp_path / "rows.safetensors"
    whole = several.read_bytes()
    for content, words in {
        b"": "is empty",
        b"short": "is not a safetensors file",
        b"a text that is no table": "is not a safetensors file",
        whole[:50]: "is not a safetensors file",
        whole[:-1]: r"has [\d,]+ bytes, but . ends at byte [\d,]+: the file is truncated",
    }.items():
        several.write_bytes(content)
        with pytest.raises(ValueError, match=rf"rows\.safetensors {words}"):
            open_safetensors(several)
    for content in (b"", b"a text that is no array", array.read_bytes()[:-1]):
        array.write_bytes(content)
        with pytest.raises(ValueError, match=r"q\.npy is not a complete \.npy file"):
            open_numpy(tmp_path)
    np.save(array, tensors["q"].numpy().astype(">f4"))
    with pytest.raises(ValueError, match=r"q\.npy holds '>f4', .* save it again with x\.astype\('float32'\)"):
        open_numpy(tmp_path)
    with pytest.raises(ValueError, match=r"bfloat16.*create_safetensors"):
        create_numpy(tmp_path / "sink", N, RowShape(1, 1, 8, torch.bfloat16))


def test_disk_space_is_reserved(tmp_path: Path) -> None:
    create_numpy(tmp_path, 2**16, SHAPE)
    create_safetensors(tmp_path / "out.safetensors", 2**16, SHAPE)
    assert not list(tmp_path.glob("*.new"))
    for name, size in (("out.npy", 8 * 4 * 4 * 2**16), ("out.safetensors", (8 + 1) * 4 * 4 * 2**16)):
        found = (tmp_path / name).stat()
        kept = (
            found.st_blocks * 512 if hasattr(os, "posix_fallocate") else found.st_size
        )  # other systems cannot reserve space
        assert kept >= size


def test_read_only_files_are_not_written(tmp_path: Path) -> None:
    source = write_inputs(tmp_path, "numpy", made() | {"out": made()["q"]})
    with pytest.raises(ValueError, match="reading only"):
        rs.stream_attention(source, source, N, PATTERN, shards=2)


def test_a_truncated_spool_raises(tmp_path: Path) -> None:
    source = write_inputs(tmp_path, "numpy", made())
    rs.stream_attention(source, create_numpy(tmp_path, N, SHAPE), N, PATTERN, causal=True, shards=3)
    source = open_numpy(tmp_path)

    def cut(done: rs.streaming.ShardDone) -> None:
        if done.finished == 1:  # the last shard, which uses rows of all others
            with (tmp_path / "work/spool/2.gradients").open("r+b") as file:
                file.truncate(100)

    with pytest.raises(RuntimeError, match=r"lacks rows .*: delete .*/work"):
        rs.stream_backward(
            source, TensorRows({}), N, PATTERN, causal=True, shards=3, folder=tmp_path / "work", on_shard=cut
        )
