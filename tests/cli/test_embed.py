"""`ringspan embed`: the table of a folder, alone and under torchrun, its exit status, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import psutil
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from ringspan.cli.app import app
from tests.ranks import shares_processes
from tests.slides.test_embed_slides import (
    COUNTS,
    assert_equal_up_to_rounding,
    directly,
    make_encoder,
    make_tiles,
    table_of,
    write_bad_files,
    write_clam,
    write_folder,
)

SIZE = "in_chans=24,embed_dim=64,depth=2"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with slides in ``in``, and weights."""
    write_folder(tmp_path / "in")
    save_file(make_encoder().state_dict(), tmp_path / "weights.safetensors")
    return tmp_path


def command(place: Path, *arguments: str) -> list[str]:
    named = ["--weights", str(place / "weights.safetensors"), "--output", str(place / "out"), "--size", SIZE]
    return ["embed", str(place / "in"), *named, *arguments]


def run(place: Path, *arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(app, command(place, *arguments), env={"COLUMNS": "250"})
    assert result.exit_code == status, result.output
    return " ".join(result.output.replace("│", " ").split())


def test_the_table_the_summary_and_a_second_run(place: Path) -> None:
    said = run(place)
    assert "3 slides, 0 of them finished before, 0 bad files. The largest, a, has 60 tiles: about" in said
    assert "3 slides (3 computed now), 94 tiles, 0 skipped" in said
    assert f"The embeddings are in {place / 'out/embeddings.safetensors'}." in said
    assert table_of(place / "out").keys() == COUNTS.keys()
    assert "3 slides (0 computed now)" in run(place)
    assert table_of(place / "out").keys() == COUNTS.keys()


def test_the_json_document_and_options(place: Path) -> None:
    for path in (place / "in").iterdir():
        path.unlink()
    x, coords = torch.randn(9, 24), 512 * torch.cartesian_prod(torch.arange(3), torch.arange(3))
    write_clam(place / "in", "one", x, coords)
    options = ["--tile-size", "512", "--global-pool", "--dtype", "float64", "--json"]
    result = CliRunner().invoke(app, command(place, *options))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["names"], found["tiles"], found["computed"], found["skipped"]) == (["one"], 9, 1, {})
    wanted = directly(make_encoder(global_pool=True).double(), x.double(), coords)
    assert torch.equal(table_of(place / "out")["one"], wanted)


def test_bad_files_are_listed_and_fail_the_command(place: Path) -> None:
    wanted = write_bad_files(place / "in")
    for arguments, status in (((), 1), (("--skip-bad",), 0)):
        said = run(place, *arguments, status=status)
        assert f"94 tiles, {len(wanted)} skipped" in said
        for name, stem in wanted.items():
            assert f"Skipped {name}: " in said
            assert stem in said.partition(f"Skipped {name}: ")[2].partition("Skipped ")[0]
        assert table_of(place / "out").keys() == COUNTS.keys()


def test_invalid_arguments_are_refused_with_the_way_out(place: Path) -> None:
    for arguments, words in {
        ("--size", "gigapath"): "must be one of gigapath_slide_enc12l768d",
        ("--size", "widths=3"): "unexpected keyword argument 'widths'",
        ("--size", "gigapath_slide_enc12l768d"): "give its --size",
        ("--weights", str(place / "none.pth")): "none.pth",
        ("--weights", str(place / "in/a.h5")): f"{place}/in/a.h5: ",
        ("--output", str(place / "in")): "must not be the folder of tile embeddings",
        ("--output", "/proc/nowhere"): "--output",
        ("--dtype", "int8"): "float32",
    }.items():
        assert words in run(place, *arguments, status=2)
    assert "no such folder" in run(place / "none", status=2)
    assert not (place / "out/slides").exists()


def test_other_weights_need_another_output(place: Path) -> None:
    run(place)
    save_file(make_encoder(1).state_dict(), place / "weights.safetensors")
    assert "holds embeddings with other weights: give another output folder" in run(place, status=1)


def test_a_slide_that_does_not_fit_is_refused_before_anything_is_computed(place: Path) -> None:
    free = mock.Mock(available=2**16)
    with mock.patch.object(psutil, "virtual_memory", return_value=free):
        said = run(place, status=2)
        assert "a has 60 tiles and needs about" in said
        assert "--no-check-memory" in said
        assert not (place / "out/slides").exists()
        run(place, "--no-check-memory")


def test_an_interrupt_says_how_to_continue(place: Path) -> None:
    with mock.patch("ringspan.cli.embed.embed_slides", side_effect=KeyboardInterrupt):
        assert "Finished slides are kept in" in run(place, status=130)


@shares_processes(__name__)
def test_torchrun_splits_every_slide(place: Path) -> None:
    (place / "in/broken.h5").write_text("")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "ringspan"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    arguments = [*launcher, *command(place, "--skip-bad", "--json")]
    found = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert found.returncode == 0, found.stderr
    assert [*json.loads(found.stdout)["skipped"]] == ["broken"]
    assert "on each of 2 ranks" in " ".join(found.stderr.split())
    slides = {name: make_tiles(tiles, tiles) for name, tiles in COUNTS.items()}
    assert_equal_up_to_rounding(table_of(place / "out"), slides)
