"""Rows in memory-mapped files: NumPy (.npy, one tensor per file, needs numpy) and safetensors (many per file).

Files are mapped, never read whole, and their pages are released after rows are copied: the system's page cache
does not count as memory of this process.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import struct
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ringspan.runtime.files import atomic_path
from ringspan.streaming.sources import RowShape, TensorRows

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_SAFETENSORS_NAMES = {dtype: name for name, dtype in _SAFETENSORS_DTYPES.items()}


class MappedFile:
    """A file mapped into memory; its pages are loaded on access and freed by `release`."""

    def __init__(self, path: Path, writable: bool) -> None:
        if not path.stat().st_size:
            raise ValueError(f"{path} is empty: save it again")
        with path.open("r+b" if writable else "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        self.path, self.writable = path, writable

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
        if offset % dtype.itemsize:
            raise ValueError(
                f"{self.path}: a tensor of {dtype} starts at byte {offset}, which is not a multiple of "
                f"{dtype.itemsize}: save the file again with a recent safetensors, which aligns tensors"
            )
        count = torch.Size(shape).numel()
        if not count:
            raise ValueError(f"{self.path}: a tensor of shape {tuple(shape)} is empty: a sequence has at least 1 row")
        with warnings.catch_warnings():  # torch has no read-only tensors; rows are only copied from this one
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)

    def flush(self) -> None:
        """Write changes to disk."""
        if self.writable:
            self._map.flush()

    def release(self) -> None:
        """Free all pages; they are loaded from the file again on access."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def open_numpy(*folders: Path | str) -> TensorRows:
    """A source of the .npy files in these folders, one tensor per file, named after it: q.npy, k.npy, v.npy, ..

    Arrays must be in C order. NumPy has no bf16: use safetensors for that.
    """
    paths = [path for folder in folders for path in sorted(Path(folder).glob("*.npy"))]
    if not paths:
        raise ValueError(f"no .npy file in {', '.join(map(str, folders))}")
    return _tensor_rows(_by_name((path.stem, *_map_numpy(path, writable=False)) for path in paths))


def create_numpy(folder: Path | str, seq_len: int, shape: RowShape, *, backward: bool = False) -> TensorRows:
    """A sink of .npy files, created at full size. Existing files of the same shape are reused, so a run can resume."""
    import numpy as np  # noqa: PLC0415

    if shape.dtype == torch.bfloat16:
        raise ValueError("dtype=torch.bfloat16: NumPy does not support it; use create_safetensors")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, (size, dtype) in shape.results(seq_len, backward=backward).items():
        path = folder / f"{name}.npy"
        wanted = torch.empty(0, dtype=dtype).numpy().dtype
        if not path.exists():
            with atomic_path(path, unique=False) as new:
                np.lib.format.open_memmap(new, mode="w+", dtype=wanted, shape=size).flush()
                allocate(new, new.stat().st_size)
        found[name] = _map_numpy(path, writable=True)
        _check_shape(path, found[name][1], size, dtype)
    return _tensor_rows(found)


def open_safetensors(*paths: Path | str) -> TensorRows:
    """A source of all tensors in these files, by their names: q, k, v, .."""
    files = [MappedFile(Path(path), writable=False) for path in paths]
    return _tensor_rows(_by_name((name, file, x) for file in files for name, x in _map_safetensors(file).items()))


def create_safetensors(path: Path | str, seq_len: int, shape: RowShape, *, backward: bool = False) -> TensorRows:
    """A sink in one safetensors file, created at full size. An existing file of the same shapes is reused."""
    path = Path(path)
    results = shape.results(seq_len, backward=backward)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _create_safetensors_file(path, results)
    file = MappedFile(path, writable=True)
    tensors = _map_safetensors(file)
    for name, (size, dtype) in results.items():
        if name not in tensors:
            raise ValueError(f"{path} has no {name}: it belongs to another run; use another path")
        _check_shape(path, tensors[name], size, dtype)
    return _tensor_rows({name: (file, tensors[name]) for name in results})


def _by_name(tensors: Iterable[tuple[str, MappedFile, Tensor]]) -> dict[str, tuple[MappedFile, Tensor]]:
    found: dict[str, tuple[MappedFile, Tensor]] = {}
    for name, file, x in tensors:
        if name in found:
            raise ValueError(f"{name} is in {found[name][0].path} and in {file.path}: pass only one of them")
        found[name] = file, x
    return found


def _tensor_rows(found: Mapping[str, tuple[MappedFile, Tensor]]) -> TensorRows:
    files = {id(file): file for file, _ in found.values()}.values()

    def flush() -> None:
        for file in files:
            file.flush()
            file.release()

    def release() -> None:
        for file in files:
            if not file.writable:
                file.release()

    return TensorRows({name: x for name, (_, x) in found.items()}, flush, release, all(file.writable for file in files))


def _map_numpy(path: Path, writable: bool) -> tuple[MappedFile, Tensor]:
    import numpy as np  # noqa: PLC0415

    try:
        probe = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{path} is not a complete .npy file of numbers ({error}): save it again with np.save"
        ) from error
    if not probe.dtype.isnative:
        raise ValueError(
            f"{path} holds {probe.dtype.str!r}, the byte order of another platform: save it again with "
            f"x.astype({probe.dtype.newbyteorder('=').name!r})"
        )
    if not probe.flags.c_contiguous:
        raise ValueError(f"{path} is in Fortran order: save it again with np.ascontiguousarray")
    dtype = torch.from_numpy(np.empty(0, probe.dtype)).dtype
    file = MappedFile(path, writable)
    return file, file.tensor(dtype, probe.shape, probe.offset)


def _map_safetensors(file: MappedFile) -> dict[str, Tensor]:
    length = file.path.stat().st_size
    with file.path.open("rb") as opened:
        (size,) = struct.unpack("<Q", opened.read(8).ljust(8, b"\xff"))
        try:
            header = json.loads(opened.read(size)) if 8 + size <= length else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise ValueError(f"{file.path} is not a safetensors file, or it is truncated: save it again")
    entries = {name: x for name, x in header.items() if name != "__metadata__" and x["dtype"] in _SAFETENSORS_DTYPES}
    for name, entry in entries.items():
        if 8 + size + entry["data_offsets"][1] > length:
            raise ValueError(
                f"{file.path} has {length:,} bytes, but {name} ends at byte {8 + size + entry['data_offsets'][1]:,}: "
                "the file is truncated; save it again"
            )
    return {
        name: file.tensor(
            _SAFETENSORS_DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0]
        )
        for name, entry in entries.items()
    }


def _create_safetensors_file(path: Path, results: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    header, end = {}, 0
    for name in sorted(
        results, key=lambda name: -results[name][1].itemsize
    ):  # the widest dtype first keeps all aligned
        size, dtype = results[name]
        start, end = end, end + torch.Size(size).numel() * dtype.itemsize
        header[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": size, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with atomic_path(path, unique=False) as new:
        new.write_bytes(struct.pack("<Q", len(text)) + text)
        allocate(new, 8 + len(text) + end)


def allocate(path: Path, size: int) -> None:
    """Resize a file and reserve its disk space, so that a full disk raises here.

    Mapped memory is written back asynchronously: without space, the process would be killed.
    """
    with path.open("r+b") as file:
        file.truncate(size)
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # not supported by this file system
                    raise


def _check_shape(path: Path, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(x.shape) != tuple(shape) or x.dtype != dtype:
        raise ValueError(
            f"{path} holds {x.dtype} of shape {tuple(x.shape)}, but the run writes {dtype} of shape {tuple(shape)}: "
            "it belongs to another run; use another path"
        )
