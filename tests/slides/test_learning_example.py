"""The slides of examples/slide_learning.py: no piece and no mean of tiles says anything about the label."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ringspan.integrations.gigapath import SlideEncoder
from ringspan.layout import Layout

EXAMPLE = Path(__file__).parent.parent.parent / "examples/slide_learning.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slide_learning", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_mean_of_the_tiles_is_the_same_on_all_slides(example: ModuleType) -> None:
    slides = example.make_slides(64, seed=1, noise=0.0)
    assert set(slides.labels.tolist()) == {0, 1}
    for piece in slides.x.split(example.PIECES, dim=1):
        means = piece.mean(1)
        torch.testing.assert_close(means, means[:1].expand_as(means), rtol=0, atol=1e-6)


def test_each_piece_is_the_shard_of_one_rank_and_has_both_regions(example: ModuleType) -> None:
    layout = Layout("contiguous", 1 + sum(example.PIECES), 2)
    assert [layout.rows_of(rank) for rank in range(2)] == [1 + example.PIECES[0], example.PIECES[1]]
    slides = example.make_slides(4, seed=2, noise=0.0)
    SlideEncoder(example.FEATURES, embed_dim=64, depth=1).eval()(slides.x, slides.coords)  # no two tiles in one cell
    left, right = slides.coords.split(example.PIECES, dim=1)
    assert (left[..., 0].amax(1) < right[..., 0].amin(1)).all()
    for piece in slides.x.split(example.PIECES, dim=1):
        assert ((piece != 0).any(-1).sum(1) == 2 * example.REGION).all()


def test_the_label_is_whether_both_pieces_are_inflamed_in_the_same_tissue(example: ModuleType) -> None:
    slides = example.make_slides(32, seed=3, noise=0.0)
    gland, _, inflamed, _ = example.directions() / example.STRENGTH**2
    in_gland = [
        ((piece @ gland > 0.5) & (piece @ inflamed > 0.5)).any(1) for piece in slides.x.split(example.PIECES, 1)
    ]
    assert torch.equal((in_gland[0] == in_gland[1]).long(), slides.labels)
    for of_piece in in_gland:  # alone, it says nothing: both kinds have both labels
        assert len({(bool(a), int(b)) for a, b in zip(of_piece, slides.labels, strict=True)}) == 4
