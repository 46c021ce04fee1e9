"""`embed_slides` equals calling the encoder: every file format, on one device and over rings, also after a restart."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import ringspan as rs
from ringspan.integrations.embed_slides import EmbeddedSlides, EmbeddingPlan, embed_slides, estimate_bytes
from ringspan.integrations.gigapath import SlideEncoder
from ringspan.integrations.slide_files import SlideFile, find_slides
from ringspan.runtime.device import Cpu
from ringspan.runtime.launch import run_local_ranks
from ringspan.runtime.settings import RunError
from tests.ranks import shares_processes

WIDTH, TILE = 24, 512


def make_encoder(seed: int = 0, **arguments: Any) -> SlideEncoder:
    torch.manual_seed(seed)
    return SlideEncoder(**dict(in_chans=WIDTH, embed_dim=64, depth=2) | arguments).eval()


def make_tiles(tiles: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Embeddings and level-0 coordinates of tiles that are 512 wide, in a random order, not at multiples of 512."""
    generator = torch.Generator().manual_seed(seed)
    cells = torch.randperm(900, generator=generator)[:tiles]
    coords = torch.stack([cells // 30, cells % 30], 1) * TILE + 77
    return torch.randn(tiles, WIDTH, generator=generator), coords


@torch.inference_mode()
def directly(encoder: SlideEncoder, x: Tensor, coords: Tensor, tile_size: int = TILE) -> Tensor:
    """The encoder's own result. Coordinates are divided here, as its segment lengths follow its own tile size."""
    (found,) = encoder(x[None], coords.div(tile_size, rounding_mode="floor").long()[None] * encoder.grid.tile_size)
    return found[0]


def write_hdf5(
    path: Path, x: Tensor, coords: Tensor, names: tuple[str, str] = ("features", "coords"), **at: Any
) -> None:
    """``at`` has attributes: those in ``file`` of the file, the others of the coordinates."""
    with h5py.File(path, "w") as file:
        for name, value in zip(names, (x, coords), strict=True):
            file.create_dataset(
                name, data=value.numpy(), chunks=(1, *value.shape[1:]), maxshape=(None, *value.shape[1:])
            )
        file.attrs.update(at.pop("file", {}))
        file[names[1]].attrs.update(at)


def write_trident(folder: Path, name: str, x: Tensor, coords: Tensor) -> None:
    write_hdf5(folder / f"{name}.h5", x, coords, patch_size=256, patch_size_level0=TILE, level0_magnification=40)


def write_clam(folder: Path, name: str, x: Tensor, coords: Tensor) -> None:
    write_hdf5(folder / f"{name}.h5", x, coords.int())


def write_stamp(folder: Path, name: str, x: Tensor, coords: Tensor) -> None:
    """A tile of 512 level-0 pixels is 256 µm wide, and was read as 224 pixels."""
    about = {"unit": "um", "tile_size_um": 256.0, "tile_size_px": 224, "feat_type": "tile"}
    write_hdf5(folder / f"{name}.h5", x, ((coords - 77) / 2).float(), ("feats", "coords"), file=about)


def write_batched(folder: Path, name: str, x: Tensor, coords: Tensor) -> None:
    write_hdf5(folder / f"{name}.h5", x[None], coords[None], patch_size_level0=TILE)


def write_safetensors(folder: Path, name: str, x: Tensor, coords: Tensor) -> None:
    save_file({"features": x, "coords": coords}, folder / f"{name}.safetensors", {"patch_size_level0": str(TILE)})


def write_batched_safetensors(folder: Path, name: str, x: Tensor, coords: Tensor) -> None:
    save_file({"features": x[None], "coords": coords[None]}, folder / f"{name}.safetensors")


def write_npz(folder: Path, name: str, x: Tensor, coords: Tensor) -> None:
    np.savez(folder / f"{name}.npz", features=x.numpy(), coords=coords.numpy())


def write_compressed_npz(folder: Path, name: str, x: Tensor, coords: Tensor) -> None:
    np.savez_compressed(folder / f"{name}.npz", features=x[None].numpy(), coords=coords.double().numpy())


def write_npy(folder: Path, name: str, x: Tensor, coords: Tensor) -> None:
    np.save(folder / f"{name}.features.npy", x.numpy().astype(">f4"))
    np.save(folder / f"{name}.coords.npy", coords.numpy().astype("uint32"))


STORED_SIZE = (write_trident, write_stamp, write_batched, write_safetensors)
FORMATS = (*STORED_SIZE, write_clam, write_batched_safetensors, write_npz, write_compressed_npz, write_npy)
COUNTS = {"a": 60, "b.svs": 1, "c": 33}


def write_folder(folder: Path, write: Callable[..., None] = write_trident) -> dict[str, tuple[Tensor, Tensor]]:
    folder.mkdir()
    slides = {name: make_tiles(tiles, tiles) for name, tiles in COUNTS.items()}
    for name, slide in slides.items():
        write(folder, name, *slide)
    return slides


def table_of(output: Path) -> dict[str, Tensor]:
    path = output / "embeddings.safetensors"
    with safe_open(path, framework="pt") as file:
        names = json.loads(file.metadata()["names"])
    return dict(zip(names, load_file(path)["embeddings"], strict=True))


@pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__.removeprefix("write_"))
def test_every_format_gives_what_the_encoder_gives(write: Callable[..., None], tmp_path: Path) -> None:
    slides = write_folder(tmp_path / "in", write)
    encoder = make_encoder()
    size = None if write in STORED_SIZE else TILE
    done = embed_slides(encoder, tmp_path / "in", tmp_path / "out", tile_size=size)
    assert (done.names, done.computed, done.skipped) == (tuple(COUNTS), 3, {})
    assert done.tiles == sum(COUNTS.values())
    table = table_of(tmp_path / "out")
    assert [*table] == [*COUNTS]
    for name, (x, coords) in slides.items():
        wanted = directly(encoder, x, coords - 77 if write is write_stamp else coords)
        assert torch.equal(table[name], wanted), "the same calls give the same bits"
        assert torch.equal(load_file(tmp_path / "out/slides" / f"{name}.safetensors")["embedding"], wanted)


@pytest.mark.parametrize("write", FORMATS, ids=lambda write: write.__name__.removeprefix("write_"))
def test_rows_are_read_from_the_middle(write: Callable[..., None], tmp_path: Path) -> None:
    x, coords = make_tiles(40)
    write(tmp_path, "a", x, coords)
    (slide,) = find_slides(tmp_path, width=WIDTH, tile_size=None if write in STORED_SIZE else TILE).slides
    assert (slide.tiles, slide.tile_size) == (40, 224 if write is write_stamp else TILE)
    for start, stop in ((0, 40), (7, 19), (39, 40), (0, 0)):
        assert torch.equal(slide.read_features(start, stop), x[start:stop])
    wanted = ((coords - 77) * 224 / 512).round() if write is write_stamp else coords
    torch.testing.assert_close(slide.read_coords(), wanted, check_dtype=False, rtol=0, atol=0)
    assert SlideFile(**json.loads(json.dumps(asdict(slide)))) == slide


def test_all_layers_and_averages_are_those_of_the_encoder(tmp_path: Path) -> None:
    slides = write_folder(tmp_path / "in")
    encoder = make_encoder(global_pool=True)
    embed_slides(encoder, tmp_path / "in", tmp_path / "out", all_layers=True)
    x, coords = slides["a"]
    with torch.inference_mode():
        wanted = torch.cat(encoder(x[None], (coords // TILE * 256)[None], all_layer_embed=True))
    assert torch.equal(table_of(tmp_path / "out")["a"], wanted)
    assert wanted.shape == (3, 64)


def assert_equal_up_to_rounding(table: dict[str, Tensor], slides: dict[str, tuple[Tensor, Tensor]]) -> None:
    """No farther from fp64 than twice the error of one process, or four roundings."""
    assert table.keys() == slides.keys()
    for name, (x, coords) in slides.items():
        alone, right = directly(make_encoder(), x, coords), directly(make_encoder().double(), x.double(), coords)
        rounding = torch.finfo(torch.float32).eps * right.abs().max()
        allowed = max(2 * (alone - right).abs().max(), 4 * rounding)
        assert (table[name] - right).abs().max() <= allowed


def _embed_on_ring(folder: str, output: str, layout: str) -> tuple[EmbeddedSlides, list[tuple[str, int]]]:
    read: list[tuple[str, int]] = []
    original = SlideFile.read_features

    def counted(slide: SlideFile, start: int, stop: int) -> Tensor:
        read.append((slide.name, stop - start))
        return original(slide, start, stop)

    ring = rs.Ring(layout=layout, min_size=1)  # type: ignore[arg-type]
    with mock.patch.object(SlideFile, "read_features", counted):
        return embed_slides(make_encoder(), folder, output, ring=ring), read


@shares_processes(__name__)
@pytest.mark.parametrize("ranks", [2, 3])
def test_rings_equal_one_process_and_ranks_read_their_own_rows(ranks: int, tmp_path: Path) -> None:
    slides = write_folder(tmp_path / "in")
    x, coords = make_tiles(50)
    x[-1] = torch.nan  # on the last rank
    write_trident(tmp_path / "in", "bad", x, coords)
    write_trident(tmp_path / "in", "twice", *(torch.cat([each, each[:1]]) for each in make_tiles(50)))  # on two ranks
    results = run_local_ranks(ranks, _embed_on_ring, str(tmp_path / "in"), str(tmp_path / "out"), "contiguous")
    for done, _ in results:
        assert done.names == tuple(COUNTS)
        assert done.skipped.keys() == {"bad", "twice"}
        assert f"rank {ranks - 1}: x[0, " in done.skipped["bad"]
        assert "same tile twice" in done.skipped["twice"]
    for name, tiles in COUNTS.items():
        rows = [dict(read)[name] for _, read in results]
        assert sum(rows) == tiles
        assert max(rows) <= tiles // ranks + 1
    assert_equal_up_to_rounding(table_of(tmp_path / "out"), slides)


def _refused_on_ring(folder: str, output: str) -> list[str]:
    said = []
    for layout, seed in (("zigzag", 0), ("contiguous", dist.get_rank())):
        ring = rs.Ring(layout=layout)  # type: ignore[arg-type]
        with pytest.raises((ValueError, rs.RingError)) as caught:
            embed_slides(make_encoder(seed), folder, output, ring=ring)
        said.append(str(caught.value))
    with pytest.raises(RunError) as missing:
        embed_slides(make_encoder(), f"{folder}/none", output, ring=rs.Ring(layout="contiguous"))
    return [*said, str(missing.value)]


@shares_processes(__name__)
def test_ranks_that_differ_are_refused_on_all(tmp_path: Path) -> None:
    write_folder(tmp_path / "in")
    for layout, weights, folder in run_local_ranks(2, _refused_on_ring, str(tmp_path / "in"), str(tmp_path / "out")):
        assert "'zigzag'" in layout
        assert "ranks [1] is not that of rank 0" in weights
        assert "none: no such folder" in folder
    assert not (tmp_path / "out/embeddings.safetensors").exists()


def test_a_run_resumes_and_computes_changed_files_again(tmp_path: Path) -> None:
    folder, output, encoder = tmp_path / "in", tmp_path / "out", make_encoder()
    write_folder(folder)

    def stop(slide: SlideFile) -> None:
        if slide.name == "b.svs":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed_slides(encoder, folder, output, on_slide=stop)
    assert {path.name for path in (output / "slides").iterdir()} == {"a.safetensors", "b.svs.safetensors"}
    assert not (output / "embeddings.safetensors").exists()
    plans: list[EmbeddingPlan] = []
    done = embed_slides(encoder, folder, output, on_start=plans.append)
    assert (done.computed, plans[0].finished, plans[0].largest) == (1, 2, "c")
    assert embed_slides(encoder, folder, output).computed == 0
    before = table_of(output)

    write_trident(folder, "a", *make_tiles(61, 5))  # other content
    os.utime(folder / "c.h5")  # perhaps other content
    assert embed_slides(encoder, folder, output).computed == 2
    assert not torch.equal(table_of(output)["a"], before["a"])
    assert torch.equal(table_of(output)["c"], before["c"])
    (folder / "a.h5").write_bytes(b"broken")
    done = embed_slides(encoder, folder, output)
    assert "cannot be read" in done.skipped["a"]
    assert [*table_of(output)] == ["b.svs", "c"]
    assert not (output / "slides/a.safetensors").exists(), "no embedding of a file that is gone"
    (output / "slides/c.safetensors").unlink()
    assert embed_slides(encoder, folder, output).computed == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (dict(seed=1), "other weights:"),
        (dict(global_pool=True), "other readout:"),
        (dict(padding="none"), "other encoder:"),
        (dict(all_layers=True), "other layers:"),
    ],
)
def test_other_weights_or_settings_are_not_mixed(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "in")
    embed_slides(make_encoder(), tmp_path / "in", tmp_path / "out")
    all_layers = change.pop("all_layers", False)
    with pytest.raises(RunError, match=named):
        embed_slides(make_encoder(**change), tmp_path / "in", tmp_path / "out", all_layers=all_layers)
    assert table_of(tmp_path / "out").keys() == COUNTS.keys()


def write_bad_files(folder: Path) -> dict[str, str]:
    """One file of each kind of fault, and a stem of what is said about it."""
    x, coords = make_tiles(20)
    bad = x.clone()
    bad[3, 4] = torch.inf
    at = dict(patch_size_level0=TILE)
    write_hdf5(folder / "not_finite.h5", bad, coords, **at)
    write_hdf5(folder / "width.h5", x[:, 1:], coords, **at)
    write_hdf5(folder / "integers.h5", x.int(), coords, **at)
    write_hdf5(folder / "empty.h5", x[:0], coords[:0], **at)
    write_hdf5(folder / "fewer_coords.h5", x, coords[1:], **at)
    write_hdf5(folder / "names.h5", x, coords, ("features", "places"), **at)
    write_hdf5(folder / "twice.h5", x, coords.clone().index_copy_(0, torch.tensor([9]), coords[:1]), **at)
    write_hdf5(folder / "outside.h5", x, coords - 1000000, **at)
    write_hdf5(folder / "no_size.h5", x, coords)
    write_hdf5(folder / "no_number.h5", x, coords, patch_size_level0="None")
    write_hdf5(folder / "text.h5", x, coords, **at)
    (folder / "text.h5").write_text("an error page")
    write_safetensors(folder, "truncated", x, coords)
    content = (folder / "truncated.safetensors").read_bytes()
    (folder / "truncated.safetensors").write_bytes(content[:-100])
    save_file({"features": x, "coords": coords.half()}, folder / "rounded.safetensors", {"patch_size_level0": "512"})
    np.savez(folder / "objects.npz", features=np.array([{}]), coords=coords.numpy())
    np.save(folder / "alone.features.npy", x.numpy())
    write_hdf5(folder / "two.h5", x, coords, **at)
    write_safetensors(folder, "two", x, coords)
    return {
        "alone": "has no array coords",
        "empty": "no tissue",
        "fewer_coords": "coords is (19, 2), and features is (20, 24)",
        "integers": "must be (tiles, 24) floats",
        "names": "has no array coords",
        "no_number": "the stored tile size is not a number",
        "no_size": "stores no tile size",
        "not_finite": "x[0, 3] is not finite",
        "objects": "Python objects",
        "outside": "outside the grid",
        "rounded": "may round coordinates",
        "text": "cannot be read",
        "truncated": "cannot be read",
        "twice": "same tile twice",
        "two": "is in 2 files (two.h5, two.safetensors)",
        "width": "features is (20, 23): must be (tiles, 24)",
    }


def test_bad_files_are_skipped_and_the_others_are_embedded(tmp_path: Path) -> None:
    write_folder(tmp_path / "in")
    wanted = write_bad_files(tmp_path / "in")
    done = embed_slides(make_encoder(), tmp_path / "in", tmp_path / "out")
    assert done.names == tuple(COUNTS)
    assert [*done.skipped] == [*wanted]
    for name, stem in wanted.items():
        assert stem in done.skipped[name], name
    assert {path.stem for path in (tmp_path / "out/slides").iterdir()} == COUNTS.keys()


def test_a_tile_size_that_contradicts_the_file_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "in")
    found = find_slides(tmp_path / "in", width=WIDTH, tile_size=256)
    assert not found.slides
    assert "stores a tile size of 512, but --tile-size is 256" in found.problems["a"]
    assert len(find_slides(tmp_path / "in", width=WIDTH, tile_size=512).slides) == 3


@pytest.mark.parametrize("package", ["h5py", "numpy"])
def test_a_missing_package_is_named(package: str, tmp_path: Path) -> None:
    write_folder(tmp_path / "in", {"h5py": write_trident, "numpy": write_npy}[package])
    with (
        mock.patch.dict(sys.modules, {package: None}),
        pytest.raises(RunError, match=rf"needs {package}: .*\[slides\]"),
    ):
        find_slides(tmp_path / "in", width=WIDTH)


def test_a_folder_without_slides_names_the_one_below(tmp_path: Path) -> None:
    write_folder(tmp_path / "h5_files")
    with pytest.raises(RunError, match="h5_files has some"):
        find_slides(tmp_path, width=WIDTH)


def _growth(tiles: int, arguments: dict[str, Any], dtype: torch.dtype) -> tuple[int, int]:
    """Estimated and measured growth of memory, in a fresh process."""
    encoder = make_encoder(**arguments).to(dtype)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        x = torch.randn(tiles, encoder.in_chans)
        places = 256 * torch.cartesian_prod(torch.arange(tiles // 100), torch.arange(100))
        for slide, rows in (("in/a", 100), ("all/b", tiles)):  # the first run imports and creates what remains
            (folder / slide).parent.mkdir()
            save_file({"features": x[:rows], "coords": places[:rows]}, folder / f"{slide}.safetensors")
        embed_slides(encoder, folder / "in", folder / "out", tile_size=256)
        _, grown = Cpu().peak_growth(lambda: embed_slides(encoder, folder / "all", folder / "out", tile_size=256))
    return estimate_bytes(encoder, tiles), grown


@pytest.mark.slow
@shares_processes(__name__)
@pytest.mark.parametrize(
    ("in_chans", "dtype", "tiles"),
    [
        (64, torch.float32, 18000),
        (1536, torch.float32, 18000),
        (64, torch.bfloat16, 24000),
    ],
)
def test_memory_grows_as_estimated(in_chans: int, dtype: torch.dtype, tiles: int) -> None:
    """Between 70 % and 110 % of the estimate, which includes a quarter for the allocator.

    Tensors are larger than 32 MiB: the C library gives these back to the system, and keeps smaller ones for later.
    """
    arguments = dict(in_chans=in_chans, embed_dim=768, depth=2)
    ((estimated, grown),) = run_local_ranks(1, _growth, tiles, arguments, dtype)
    assert 0.7 * estimated < grown < 1.1 * estimated


def test_the_estimate_of_a_rank_is_its_share() -> None:
    encoder = make_encoder(embed_dim=256)
    whole = estimate_bytes(encoder, 100000)
    assert 0.25 * whole < estimate_bytes(encoder, 100000, ring_size=4) < 0.4 * whole  # with its parcels
