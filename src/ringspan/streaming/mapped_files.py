"""Rows in memory-mapped files: NumPy's (.npy, one tensor each, needs numpy) and safetensors (several in one file).

Files are mapped, never read whole, and let go of as soon as rows are copied: what the system keeps of them in its own
cache does not count as memory of this process.
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
from ringspan.streaming.sources import HeldRows, RowShape

_SAFE_NAMES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_SAFE_DTYPES = {dtype: name for name, dtype in _SAFE_NAMES.items()}


class MappedFile:
    """A file in the address space of this process; pages come when they are touched, and go when told."""

    def __init__(self, path: Path, writable: bool) -> None:
        if not path.stat().st_size:
            raise ValueError(f"{path} is empty: write it again")
        with path.open("r+b" if writable else "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        self.path, self.writable = path, writable

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> Tensor:
        if offset % dtype.itemsize:
            raise ValueError(
                f"{self.path}: a tensor of {dtype} begins at byte {offset}, which is no multiple of {dtype.itemsize}: "
                "write the file again with a current safetensors, which aligns them"
            )
        count = torch.Size(shape).numel()
        if not count:
            raise ValueError(f"{self.path}: a tensor of shape {tuple(shape)} has no rows to map; a sequence has some")
        with warnings.catch_warnings():  # torch knows no memory that must not be written; rows are only copied from it
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)

    def keep(self) -> None:
        """Write what has changed to the disk."""
        if self.writable:
            self._map.flush()

    def forget(self) -> None:
        """Let all pages go; those that are touched again come back from the file."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def open_numpy(*folders: Path | str) -> HeldRows:
    """The tensors in these folders, one .npy file each, by the names of the files: q.npy, k.npy, v.npy, ..

    Everything lies in C order. NumPy knows no bf16: for that use safetensors.
    """
    paths = [path for folder in folders for path in sorted(Path(folder).glob("*.npy"))]
    if not paths:
        raise ValueError(f"no .npy file in {', '.join(map(str, folders))}")
    return _held(_by_name((path.stem, *_map_numpy(path, writable=False)) for path in paths))


def create_numpy(folder: Path | str, seq_len: int, shape: RowShape, *, backward: bool = False) -> HeldRows:
    """A sink of .npy files, made at their full size; files of the same shape that are there are gone on with."""
    import numpy as np  # noqa: PLC0415

    if shape.dtype == torch.bfloat16:
        raise ValueError("dtype=torch.bfloat16: NumPy has no such type; use create_safetensors")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, (size, dtype) in shape.results(seq_len, backward=backward).items():
        path = folder / f"{name}.npy"
        wanted = torch.empty(0, dtype=dtype).numpy().dtype
        if not path.exists():
            with atomic_path(path, unique=False) as new:
                np.lib.format.open_memmap(new, mode="w+", dtype=wanted, shape=size).flush()
                make_room(new, new.stat().st_size)
        found[name] = _map_numpy(path, writable=True)
        _check_same(path, found[name][1], size, dtype)
    return _held(found)


def open_safetensors(*paths: Path | str) -> HeldRows:
    """All tensors of these files, by their names: q, k, v, .."""
    files = [MappedFile(Path(path), writable=False) for path in paths]
    return _held(_by_name((name, file, x) for file in files for name, x in _safe_tensors(file).items()))


def create_safetensors(path: Path | str, seq_len: int, shape: RowShape, *, backward: bool = False) -> HeldRows:
    """A sink in one safetensors file, made at its full size; one of the same shapes that is there is gone on with."""
    path = Path(path)
    results = shape.results(seq_len, backward=backward)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _make_safetensors(path, results)
    file = MappedFile(path, writable=True)
    tensors = _safe_tensors(file)
    for name, (size, dtype) in results.items():
        if name not in tensors:
            raise ValueError(f"{path} has no {name}: it belongs to another run; give another path")
        _check_same(path, tensors[name], size, dtype)
    return _held({name: (file, tensors[name]) for name in results})


def _by_name(tensors: Iterable[tuple[str, MappedFile, Tensor]]) -> dict[str, tuple[MappedFile, Tensor]]:
    found: dict[str, tuple[MappedFile, Tensor]] = {}
    for name, file, x in tensors:
        if name in found:
            raise ValueError(f"{name} is in {found[name][0].path} and in {file.path}: give only one of them")
        found[name] = file, x
    return found


def _held(found: Mapping[str, tuple[MappedFile, Tensor]]) -> HeldRows:
    files = {id(file): file for file, _ in found.values()}.values()

    def keep() -> None:
        for file in files:
            file.keep()
            file.forget()

    def forget() -> None:
        for file in files:
            if not file.writable:
                file.forget()

    return HeldRows({name: x for name, (_, x) in found.items()}, keep, forget, all(file.writable for file in files))


def _map_numpy(path: Path, writable: bool) -> tuple[MappedFile, Tensor]:
    import numpy as np  # noqa: PLC0415

    try:
        probe = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a whole .npy file of numbers ({error}): save it again with np.save") from error
    if not probe.dtype.isnative:
        raise ValueError(
            f"{path} holds {probe.dtype.str!r}, the byte order of other machines: save it again with "
            f"x.astype({probe.dtype.newbyteorder('=').name!r})"
        )
    if not probe.flags.c_contiguous:
        raise ValueError(f"{path} is in Fortran order: save it again with np.ascontiguousarray")
    dtype = torch.from_numpy(np.empty(0, probe.dtype)).dtype
    file = MappedFile(path, writable)
    return file, file.tensor(dtype, probe.shape, probe.offset)


def _safe_tensors(file: MappedFile) -> dict[str, Tensor]:
    length = file.path.stat().st_size
    with file.path.open("rb") as opened:
        (size,) = struct.unpack("<Q", opened.read(8).ljust(8, b"\xff"))
        try:
            header = json.loads(opened.read(size)) if 8 + size <= length else None
        except ValueError:
            header = None
    if not isinstance(header, dict):
        raise ValueError(f"{file.path} is not a safetensors file, or it is cut off: write it again")
    entries = {name: x for name, x in header.items() if name != "__metadata__" and x["dtype"] in _SAFE_NAMES}
    for name, entry in entries.items():
        if 8 + size + entry["data_offsets"][1] > length:
            raise ValueError(
                f"{file.path} has {length:,} bytes, but {name} ends at byte {8 + size + entry['data_offsets'][1]:,}: "
                "the file is cut off; write it again"
            )
    return {
        name: file.tensor(_SAFE_NAMES[entry["dtype"]], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])
        for name, entry in entries.items()
    }


def _make_safetensors(path: Path, results: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
    header, end = {}, 0
    for name in sorted(results, key=lambda name: -results[name][1].itemsize):  # the widest first keeps all aligned
        size, dtype = results[name]
        start, end = end, end + torch.Size(size).numel() * dtype.itemsize
        header[name] = {"dtype": _SAFE_DTYPES[dtype], "shape": size, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    with atomic_path(path, unique=False) as new:
        new.write_bytes(struct.pack("<Q", len(text)) + text)
        make_room(new, 8 + len(text) + end)


def make_room(path: Path, size: int) -> None:
    """Let a file have so many bytes, and the disk the room for them: a full disk is an error here, not a crash later.

    Memory that is mapped from a file is written behind the back of the process: if there is no room, it is killed.
    """
    with path.open("r+b") as file:
        file.truncate(size)
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (
                    errno.EOPNOTSUPP,
                    errno.EINVAL,
                ):  # there are file systems that know no such thing
                    raise


def _check_same(path: Path, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(x.shape) != tuple(shape) or x.dtype != dtype:
        raise ValueError(
            f"{path} holds {x.dtype} of shape {tuple(x.shape)}, but the run writes {dtype} of shape {tuple(shape)}: "
            "it belongs to another run; give another place"
        )
