"""Tile embeddings and coordinates of slides in files: HDF5, safetensors and NumPy. Only the rows asked for are read.

`find_slides` looks at every file of a folder, without its rows. docs/slides.md describes the layouts.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringspan.runtime.settings import RunError, missing_package

FEATURES = ("features", "feats")  # of TRIDENT, CLAM and Prov-GigaPath, and of STAMP
COORDS = "coords"
_PACKAGES = {".h5": "h5py", ".hdf5": "h5py", ".safetensors": "safetensors", ".npz": "numpy", ".npy": "numpy"}


@dataclass(frozen=True)
class SlideFile:
    """Where the tiles of a slide are: everything but the rows. All fields fit JSON."""

    name: str
    features_path: str
    coords_path: str  # the same file, except for .npy
    features: str
    coords: str
    tiles: int
    width: int  # of a tile embedding
    number_bytes: int
    tile_size: int  # in the unit of the coordinates that `read_coords` returns
    micrometres: float  # of a tile, if coordinates are stored in micrometres; otherwise 0
    versions: list[list[int]]  # size and time of change of the files

    @property
    def identity(self) -> dict[str, Any]:
        """What an embedding depends on: other if the content may have changed, the same in another folder."""
        return {name: value for name, value in asdict(self).items() if not name.endswith("_path")}

    def read_features(self, start: int, stop: int) -> Tensor:
        """The embeddings of these tiles, (tiles, width), in the dtype of the file. Raises ValueError if unreadable."""
        with _opened(Path(self.features_path)) as file:
            return file.array(self.features).read(start, stop)

    def read_coords(self) -> Tensor:
        """The coordinates of all tiles, (tiles, 2), in pixels. Raises ValueError if they cannot be read.

        Integers are returned as int64. Micrometres, which are stored as floats, become the nearest pixel.
        """
        with _opened(Path(self.coords_path)) as file:
            found = file.array(self.coords).read(0, self.tiles)
        if self.micrometres:
            return (found.double() * (self.tile_size / self.micrometres)).round()
        return found if found.is_floating_point() else found.long()


@dataclass(frozen=True)
class FoundSlides:
    """The slides of a folder in order of name, and what is wrong with each of the others, by name."""

    slides: tuple[SlideFile, ...]
    problems: dict[str, str]


def find_slides(
    folder: str | Path,
    *,
    width: int,
    tile_size: int | None = None,
    features: Sequence[str] = FEATURES,
    coords: str = COORDS,
) -> FoundSlides:
    """The slides in the files of a folder, without its subfolders. Reads headers only.

    Args:
        width: of the tile embeddings that the encoder accepts.
        tile_size: side of a tile, in the unit of the coordinates, for files that do not store it.
        features, coords: names of the arrays in a file; of ``features``, the first that the file has. A slide in .npy
            files has two: ``NAME.features.npy`` and ``NAME.coords.npy``, with these names.

    Raises RunError if there is no such folder, if it has no such files, or if the package that reads them is missing.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise RunError(f"{folder}: no such folder; give a folder of tile embeddings")
    names: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in _PACKAGES and not path.name.startswith("."):
            kind = path.stem.rpartition(".")[2]  # of a pair of .npy files
            if path.suffix.lower() == ".npy" and kind in (*features, coords):
                names.setdefault(path.stem.removesuffix(f".{kind}"), []).append(path)
            else:
                names.setdefault(path.stem, []).append(path)
    if not names:
        below = next((path.parent for path in sorted(folder.glob("*/*")) if path.suffix.lower() in _PACKAGES), None)
        hint = f"; {below} has some: give that folder" if below else ""
        raise RunError(f"{folder}: has no files that end with {', '.join(_PACKAGES)}{hint}")
    slides, problems = [], {}
    for name, paths in names.items():
        try:
            slides.append(_look_at(name, paths, width, tile_size, features, coords))
        except ValueError as error:  # noqa: PERF203
            problems[name] = str(error)
    return FoundSlides(tuple(slides), problems)


def _look_at(
    name: str, paths: list[Path], width: int, tile_size: int | None, features: Sequence[str], coords: str
) -> SlideFile:
    """The slide in a file or in a pair of .npy files. Raises ValueError if it has no tiles that can be embedded."""
    suffixes = {path.suffix.lower() for path in paths}
    if len(paths) > 1 and (suffixes != {".npy"} or len(paths) > 2):
        raise ValueError(f"is in {len(paths)} files ({', '.join(path.name for path in paths)}): keep one")
    held: dict[str, Path] = {}
    arrays: dict[str, _Array] = {}
    attributes: dict[str, Any] = {}
    for path in paths:
        with _opened(path) as file:
            for key in (*features, coords):
                if key in file.names:
                    held[key], arrays[key] = path, file.array(key)
            attributes |= file.attributes(coords)
    chosen = [key for key in features if key in arrays]
    for wanted, there in ((" or ".join(features), chosen), (coords, coords in arrays)):
        if not there:
            raise ValueError(f"has no array {wanted}: name the arrays with --features and --coords")
    key = chosen[0]
    shape, places = arrays[key].shape, arrays[coords].shape
    if len(shape) == 2 and not shape[0]:
        raise ValueError(f"{key} is empty: no tissue was found in the slide")
    if len(shape) != 2 or shape[1] != width or not arrays[key].is_floating_point:
        kind = "" if arrays[key].is_floating_point else " integers"
        raise ValueError(
            f"{key} is {shape}{kind}: must be (tiles, {width}) floats; use embeddings of the tile encoder that the "
            "slide encoder was trained with"
        )
    if places != (shape[0], 2):
        raise ValueError(f"{coords} is {places}, and {key} is {shape}: must be {(shape[0], 2)}, (x, y) of each tile")
    size, micrometres = _tile_size(attributes, tile_size)
    versions = [[path.stat().st_size, path.stat().st_mtime_ns] for path in paths]
    return SlideFile(
        name=name,
        features_path=str(held[key]),
        coords_path=str(held[coords]),
        features=key,
        coords=coords,
        tiles=shape[0],
        width=width,
        number_bytes=arrays[key].number_bytes,
        tile_size=size,
        micrometres=micrometres,
        versions=versions,
    )


def _tile_size(attributes: Mapping[str, Any], given: int | None) -> tuple[int, float]:
    """The side of a tile in pixels, and in micrometres if the coordinates are stored in them."""
    try:
        micrometres = 0.0
        if "patch_size_level0" in attributes:
            stored = round(float(attributes["patch_size_level0"]))
        elif attributes.get("unit") == "um":
            micrometres = float(attributes.get("tile_size_um", attributes.get("tile_size", 0)))
            stored = round(float(attributes.get("tile_size_px", micrometres)))
        else:
            stored = 0
    except (TypeError, ValueError) as error:
        raise ValueError(f"the stored tile size is not a number ({error}): give --tile-size") from error
    if given is not None and stored and given != stored:
        raise ValueError(f"stores a tile size of {stored}, but --tile-size is {given}: leave out --tile-size")
    if not (stored or given):
        raise ValueError("stores no tile size: give --tile-size, the side of a tile in the unit of the coordinates")
    return stored or given or 0, micrometres if stored else 0.0


@dataclass(frozen=True)
class _Array:
    """An array in an open file. A first dimension of 1 before (tiles, n) is left out of ``shape``."""

    shape: tuple[int, ...]
    number_bytes: int
    is_floating_point: bool
    read: Callable[[int, int], Tensor]  # entries start .. stop of the first dimension


@dataclass(frozen=True)
class _OpenFile:
    names: tuple[str, ...]
    array: Callable[[str], _Array]
    attributes: Callable[[str], dict[str, Any]]  # of the file and of this array


@contextmanager
def _opened(path: Path) -> Iterator[_OpenFile]:
    """Errors in the block other than ValueError, MemoryError and RunError become ValueError: the file is broken."""
    suffix = path.suffix.lower()
    try:
        package = import_module(_PACKAGES[suffix])
    except ModuleNotFoundError as error:
        raise RunError(missing_package(f"reading {path.name}", error.name, "slides")) from None
    opened = {"h5py": _open_hdf5, "safetensors": _open_safetensors, "numpy": _open_numpy}[_PACKAGES[suffix]]
    try:
        with opened(path, package) as file:
            yield file
    except (ValueError, MemoryError, RunError):
        raise
    except Exception as error:  # each package has its own kinds
        raise ValueError(f"cannot be read ({error}); the file may be truncated") from error


@contextmanager
def _open_hdf5(path: Path, h5py: Any) -> Iterator[_OpenFile]:
    with h5py.File(path, "r") as file:

        def array(name: str) -> _Array:
            data = file[name]

            def read(start: int, stop: int) -> Tensor:
                return torch.from_numpy(data[0, start:stop] if data.ndim == 3 else data[start:stop])

            return _Array(_without_batch(data.shape), data.dtype.itemsize, data.dtype.kind == "f", read)

        def attributes(name: str) -> dict[str, Any]:
            return {**file.attrs, **(file[name].attrs if name in file else {})}

        arrays = tuple(name for name in file if isinstance(file[name], h5py.Dataset))
        yield _OpenFile(arrays, array, attributes)


@contextmanager
def _open_safetensors(path: Path, safetensors: Any) -> Iterator[_OpenFile]:
    with safetensors.safe_open(path, framework="pt") as file:

        def array(name: str) -> _Array:
            data = file.get_slice(name)
            shape = tuple(data.get_shape())

            def read(start: int, stop: int) -> Tensor:
                return data[0:1, start:stop][0] if len(shape) == 3 else data[start:stop]

            sample = data[0:0]  # its dtype as torch's
            return _Array(_without_batch(shape), sample.element_size(), sample.is_floating_point(), read)

        yield _OpenFile(tuple(file.keys()), array, lambda _: file.metadata() or {})


@contextmanager
def _open_numpy(path: Path, numpy: Any) -> Iterator[_OpenFile]:
    """.npz, and .npy, whose name says which array it holds. Rows before the wanted ones are skipped, not kept."""
    if path.suffix.lower() == ".npy":
        name = path.stem.rpartition(".")[2]
        yield _OpenFile((name,), lambda _: _numpy_array(lambda: path.open("rb"), numpy), lambda _: {})
        return
    with zipfile.ZipFile(path) as archive:
        names = tuple(name.removesuffix(".npy") for name in archive.namelist())
        yield _OpenFile(
            names, lambda name: _numpy_array(lambda: archive.open(f"{name}.npy"), numpy), lambda _: {}
        )  # fmt: skip


def _numpy_array(open_member: Callable[[], Any], numpy: Any) -> _Array:
    def header(file: Any) -> tuple[tuple[int, ...], bool, Any]:
        version = numpy.lib.format.read_magic(file)
        reader = {(1, 0): "read_array_header_1_0", (2, 0): "read_array_header_2_0"}[version]
        return getattr(numpy.lib.format, reader)(file)

    with open_member() as file:
        stored, by_column, dtype = header(file)
    if by_column or dtype.hasobject:
        raise ValueError(
            "holds arrays in Fortran order, or Python objects: save numpy.ascontiguousarray of plain numbers"
        )
    shape = _without_batch(stored)
    row_bytes = dtype.itemsize * (shape[1] if len(shape) == 2 else 1)

    def read(start: int, stop: int) -> Tensor:
        with open_member() as file:
            header(file)
            file.seek(start * row_bytes, 1)
            content = bytearray(file.read((stop - start) * row_bytes))
        if len(content) < (stop - start) * row_bytes:
            raise ValueError("ends before its last row: the file is truncated")
        rows = numpy.frombuffer(content, dtype).reshape(stop - start, *shape[1:])
        return torch.from_numpy(rows.astype(dtype.newbyteorder("="), copy=False))

    return _Array(shape, dtype.itemsize, dtype.kind == "f", read)


def _without_batch(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape[1:] if len(shape) == 3 and shape[0] == 1 else shape)
