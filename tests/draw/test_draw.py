import json
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

import ringspan as rs
from ringspan.draw import (
    draw_density,
    draw_heat_map,
    draw_pattern,
    draw_plans,
    draw_schedule,
    draw_trace,
    draw_work,
    pairs_by_cell,
    pairs_by_hop,
    scaled_down,
)
from ringspan.draw.pattern import cell_borders, pattern_title
from ringspan.oracle import multiplicity


def test_a_picture_shows_the_counts_of_every_head() -> None:
    pattern = rs.Dilated((4, 8), (1, 2))
    figure = draw_pattern(pattern, 16, 2, causal=True)
    count = multiplicity(pattern, 16, 2, causal=True)
    for head, axis in enumerate(figure.axes):
        assert axis.get_title() == f"KV head {head}"
        (mesh,) = axis.collections
        assert mesh.get_array().reshape(16, 16).tolist() == count[head].tolist()
    assert figure.get_suptitle() == "Segment x rate: 4x1, 8x2, causal, n = 16"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["not seen", "counts once", "counts twice"]


def test_a_schedule_names_whose_rows_arrive_when() -> None:
    figure = draw_schedule(rs.plan(rs.Full(), 4096, ring_size=3, layout="contiguous", causal=True))
    texts = [text.get_text() for text in figure.axes[0].texts]
    none = "nothing to compute"
    assert texts[0] == "1 tiles\n11.1% of all work"
    assert texts[1:3] == [none, none]
    assert texts[4:6] == ["rows of rank 0\n5.3 MiB\n22.2% of all work", none]
    assert [text.split("\n")[0] for text in texts[6:]] == ["1 tiles", "rows of rank 1", "rows of rank 0"]


def test_a_large_schedule_is_drawn_without_words() -> None:
    plan = rs.plan(rs.Full(), 8192, ring_size=100, layout="contiguous", causal=True, heads=1)
    axis = draw_schedule(plan).axes[0]
    assert not axis.texts
    grid = axis.collections[0].get_array()
    assert grid.shape == (64, 100), "an even sample of ranks, and every hop"
    computed = (~grid.mask).sum(axis=1).tolist()
    assert computed == [rank + 1 for rank in plan.sample], "under causality rank i meets i others"
    assert "64 of 100 ranks drawn" in axis.get_title()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(
    "pattern",
    [
        rs.Full(),
        rs.Dilated((6, 16, 48), (1, 2, 4)),
        rs.Dilated((7, 30), (1, 3), shift=2),
        rs.Window(5),
        rs.Window(20, right=3),
        rs.Window(12, right=9, dilation=3),
        rs.Window(4) + rs.Dilated((16, 50), (2, 5)),
    ],
)
def test_every_pair_is_drawn_for_the_rank_that_computes_it(pattern: rs.Pattern, layout: str, causal: bool) -> None:
    plan = rs.plan(pattern, 50, ring_size=3, layout=layout, causal=causal, heads=4, kv_heads=2)  # type: ignore[arg-type]
    owner = {row: part.rank for part in plan.layout.rank_spans(0, 50) for row in range(part.start, part.stop)}
    count = multiplicity(pattern, 50, 2, causal=causal).numpy()
    for head in range(2):
        hops = pairs_by_hop(plan, head)
        assert ((hops >= 0).any(axis=0) == (count[head] > 0)).all()
        for number, grid in enumerate(hops):
            for query, key in zip(*(grid >= 0).nonzero(), strict=True):
                assert grid[query, key] == owner[query]
                assert (owner[query] == owner[key]) == (number == 0), "own keys first, others as they arrive"


def test_who_computes_what_has_a_panel_for_each_hop() -> None:
    plan = rs.plan(rs.Dilated((8, 32), (1, 4)), 32, ring_size=4, layout="contiguous", causal=True)
    figure = draw_work(plan)
    titles = [axis.get_title() for axis in figure.axes]
    assert [title.split(":")[0] for title in titles] == ["own rows", "hop 1", "hop 2", "hop 3"]
    assert [int(title.split()[-2]) for title in titles] == [(grid >= 0).sum() for grid in pairs_by_hop(plan)]
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["0", "1", "2", "3"]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["rank 0", "rank 1", "rank 2", "rank 3", "at another hop", "not seen"]
    drawn = figure.axes[1].collections[0].get_array().reshape(32, 32)
    assert (drawn == pairs_by_hop(plan)[1])[drawn >= 0].all()


def test_ranks_can_be_told_apart_in_grey() -> None:
    figure = draw_work(rs.plan(rs.Full(), 32, ring_size=8))
    patches = figure.legends[0].get_patches()[:9]  # eight ranks, and grey
    weights = (0.299, 0.587, 0.114)
    greys = [sum(w * x for w, x in zip(weights, to_rgb(patch.get_facecolor()), strict=True)) for patch in patches]
    assert greys == sorted(greys)
    assert min(b - a for a, b in pairwise(greys)) > 0.03


def test_what_cannot_be_drawn_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"4096 rows: at most 1024 .* scaled_down"):
        draw_work(rs.plan(rs.Full(), 4096, ring_size=2))
    with pytest.raises(ValueError, match=r"head=8"):
        draw_work(rs.plan(rs.Full(), 64, ring_size=2), head=8)


def test_a_short_sequence_is_drawn_as_it_is() -> None:
    plan = rs.plan(rs.Dilated((8, 32), (1, 4)), 60, ring_size=4)
    assert scaled_down(plan) == (plan, "")


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize(("n", "size"), [(131072, 4), (10**9, 10_000), (10**6, 7), (500, 3), (40, 20)])
def test_a_long_ring_is_scaled_down_to_its_likeness(n: int, size: int, layout: str) -> None:
    pattern = rs.Dilated((2048, 8192, 32768), (1, 4, 16))
    plan = rs.plan(pattern, n, ring_size=size, layout=layout, causal=True)  # type: ignore[arg-type]
    small, note = scaled_down(plan)
    assert small.layout.rows <= 64
    assert small.layout.ring_size == (size if size <= 8 else 8 if n / size < 32768 else 4)
    assert f"{small.layout.rows} tokens for {n:,}" in note
    assert isinstance(small.pattern, rs.Dilated)
    shard, small_shard = n / size, small.layout.rows / small.layout.ring_size
    for w, small_w in zip(pattern.segment_lengths, small.pattern.segment_lengths, strict=True):
        likeness = w / shard * small_shard
        assert small_w == small.layout.rows or abs(small_w - max(1, likeness)) <= 0.5
    assert (f" ranks for {size:,}" in note) == (size > 8)
    for pair in ("2048x1", "32768x16", f"{small.pattern.segment_lengths[-1]}x{small.pattern.dilation_rates[-1]}"):
        assert pair in note, "both patterns are named"
    draw_work(small, note=note)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "pattern",
    [
        rs.Full(),
        rs.Dilated((6, 16, 300), (1, 2, 4)),
        rs.Dilated((7, 90), (3, 5), shift=50),
        rs.Dilated.spanning(301, 16),
        rs.Window(0),
        rs.Window(3),
        rs.Window(40, right=500),
        rs.Window(77, right=20, dilation=5),
        rs.Window(30, right=4, dilation=2) + rs.Dilated((7, 90), (3, 5)) + rs.Full(),
    ],
)
@pytest.mark.parametrize("n", [5, 128, 301])
def test_a_cell_has_the_pairs_of_the_definition(pattern: rs.Pattern, n: int, causal: bool) -> None:
    count = multiplicity(pattern, n, 3, causal=causal).sum(0).numpy()
    borders = cell_borders(n)
    wanted = np.add.reduceat(np.add.reduceat(count, borders[:-1], axis=0), borders[:-1], axis=1)
    assert (pairs_by_cell(pattern, n, 3, causal=causal) == wanted).all()


def test_a_window_over_a_billion_tokens_is_counted_by_arithmetic() -> None:
    n, left = 2**30, 2**25 + 1
    counts = pairs_by_cell(rs.Window(left, right=7), n, 2, causal=True)
    assert counts.sum() == 2 * (n * (left + 1) - left * (left + 1) // 2)
    side = n // 128
    assert counts[64, 64] == 2 * side * (side + 1) // 2
    assert counts[64, 62] == 2 * side * side
    assert counts[64, 60] == 2 * (side * (side + 1) // 2 + side - 1), "a triangle, and part of a diagonal"
    assert counts[64, 59] == 2, "only the first query of the cell sees the last key of that cell"
    assert counts[64, 58] == counts[64, 65] == 0


@pytest.mark.parametrize(
    ("pattern", "title"),
    [
        (rs.Window(511), "Window 511, n = 4,096"),
        (rs.Window(64, 32, 4) + rs.Full(), "Window 64 right 32 dilation 4 + full attention, n = 4,096"),
        (rs.Dilated((8, 64), (1, 4)) + rs.Window(3), "Segment x rate: 8x1, 64x4 + window 3, n = 4,096"),
    ],
)
def test_titles_name_every_term(pattern: rs.Pattern, title: str) -> None:
    assert pattern_title(pattern, 4096, causal=False) == title


def test_windows_are_scaled_down_with_their_shards() -> None:
    pattern = rs.Window(4096, right=1024, dilation=64) + rs.Dilated((32768,), (16,))
    small, note = scaled_down(rs.plan(pattern, 131072, ring_size=4, causal=True))
    assert small.pattern.text == "window 2 right 1 + 16x2"
    assert note == f"Scaled down: 64 tokens for 131,072; pattern {small.pattern.text} for {pattern.text}"
    wide, _ = scaled_down(rs.plan(rs.Window(65536, dilation=64), 131072, ring_size=4, causal=True))
    assert wide.pattern == rs.Window(32, dilation=4)
    narrow, note = scaled_down(rs.plan(rs.Window(1023), 10**9, ring_size=10_000, causal=True))
    assert narrow.pattern == rs.Window(1), "a window keeps at least one row"
    assert "4 ranks for 10,000" in note


def test_a_million_tokens_are_drawn_at_their_length(tmp_path: Path) -> None:
    """The pattern itself in cells; what is drawn small instead says what it is."""
    n = 2**20
    plan = rs.plan(rs.Dilated.spanning(n), n, ring_size=8, layout="contiguous", causal=True)
    axis = draw_density(plan.pattern, n, 8, causal=True).axes[0]
    assert "2048x1, 8192x4, 32768x16, 131072x64, 524288x256, 1048576x512" in " ".join(axis.get_title("left").split())
    shares = axis.collections[0].get_array().reshape(128, 128)
    assert shares.mask[0, 127], "no later key is seen"
    assert not shares.mask[127, 0], "the whole sequence is seen"
    assert shares.max() == shares[0, 0]
    work = draw_work(*scaled_down(plan)[:1], note=scaled_down(plan)[1]).get_suptitle()
    assert "Scaled down" in " ".join(work.split())
    assert (tmp_path / "who_sees_what.png") in draw_plans({"contiguous": plan}, tmp_path)


def test_all_pictures_of_a_plan_are_files(tmp_path: Path) -> None:
    plans = {
        layout: rs.plan(rs.Dilated((64, 512), (1, 4)), 1024, ring_size=4, layout=layout, causal=True)
        for layout in ("contiguous", "zigzag")
    }
    paths = draw_plans(plans, tmp_path / "new" / "folder")  # type: ignore[arg-type]
    assert len(paths) == 10
    for path in paths:
        if path.suffix == ".svg":
            assert ElementTree.parse(path).getroot().tag.endswith("svg")
            assert path.stat().st_size < 2**20
        else:
            assert path.read_bytes().startswith(b"\x89PNG")


def tiles_of(side: int) -> torch.Tensor:
    return 256 * torch.cartesian_prod(torch.arange(side), torch.arange(side + 1))


def test_a_heat_map_has_each_tile_at_its_place() -> None:
    xy, weights = tiles_of(3), torch.rand(4, 12, requires_grad=True)
    figure = draw_heat_map(xy, weights, 256)
    axis, bar = figure.axes
    (tiles,) = axis.collections
    drawn = {
        tuple(path.vertices.min(0)): value for path, value in zip(tiles.get_paths(), tiles.get_array(), strict=True)
    }
    wanted = {
        tuple(corner): value for corner, value in zip(xy.tolist(), weights.double().mean(0).tolist(), strict=True)
    }
    assert drawn == wanted
    assert all((path.vertices.max(0) - path.vertices.min(0) == 256).all() for path in tiles.get_paths())
    assert axis.get_ylim()[0] > axis.get_ylim()[1], "y points down"
    assert bar.get_ylabel() == "attention weight, mean over 4 heads"
    assert not figure.legends


def test_heat_maps_of_heads_share_their_colours() -> None:
    weights = torch.rand(6, 12)
    weights[2] = 0
    figure = draw_heat_map(tiles_of(3).numpy(), weights.numpy(), 256, per_head=True, title="a slide")
    shown = [axis for axis in figure.axes if axis.collections and axis.get_title()]
    assert [axis.get_title() for axis in shown] == [f"head {i}" for i in range(6)]
    for axis, head in zip(shown, weights, strict=True):
        (tiles,) = axis.collections
        assert tiles.norm.vmin == 0
        assert tiles.norm.vmax == pytest.approx(weights.max().item())
        assert (tiles.get_array().mask.sum() if (head == 0).any() else 0) == (head == 0).sum()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["no weight"]
    assert figure.get_suptitle() == "a slide"


def test_a_heat_map_on_a_log_scale_ends_after_four_decades() -> None:
    weights = torch.tensor([0.0, 1e-12, 0.001, 0.5])
    figure = draw_heat_map(tiles_of(4)[:4], weights, 256, log=True)
    (tiles,) = figure.axes[0].collections
    assert (tiles.norm.vmin, tiles.norm.vmax) == (pytest.approx(5e-5), 0.5)
    assert tiles.to_rgba(0.5) != tiles.to_rgba(0.001) != tiles.to_rgba(1e-12)
    assert tiles.get_array().mask.tolist() == [True, False, False, False]
    for empty in (torch.zeros(4), torch.full((4,), 0.25)):
        for log in (False, True):
            draw_heat_map(tiles_of(4)[:4], empty, 256, log=log).savefig("/dev/null", format="png")


@pytest.mark.parametrize(
    ("xy", "weights", "tile_size", "words"),
    [
        (torch.zeros(4, 3), torch.ones(4), 1, r"coordinates have shape \(4, 3\)"),
        (torch.zeros(0, 2), torch.ones(0), 1, r"coordinates have shape \(0, 2\)"),
        (torch.zeros(4, 2), torch.ones(5), 1, "there are 4 tiles.*leave out the weights of other tokens"),
        (torch.zeros(4, 2), torch.ones(1, 2, 4), 1, r"weights have shape \(1, 2, 4\)"),
        (torch.zeros(4, 2), -torch.ones(4), 1, "at least 0"),
        (torch.full((4, 2), torch.nan), torch.ones(4), 1, "must be finite"),
        (torch.zeros(4, 2), torch.ones(4), 0, "tile_size=0"),
    ],
)
def test_heat_maps_that_cannot_be_drawn(xy: torch.Tensor, weights: torch.Tensor, tile_size: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        draw_heat_map(xy, weights, tile_size)


def test_a_trace_is_drawn_with_a_bar_for_each_span_and_an_arrow_for_each_message(tmp_path: Path) -> None:
    ring, path = rs.SimulatedRing(3, "contiguous"), tmp_path / "trace.json"
    with ring.trace(path) as trace:
        trace.phase("forward")
        rs.attention(*torch.randn(3, 1, 96, 2, 8), pattern=rs.Full(), ring=ring)
    spans = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    (axis,) = draw_trace(path).axes
    assert [label.get_text() for label in axis.get_yticklabels()] == [f"rank {rank} (simulated)" for rank in range(3)]
    assert sum(len(bars.get_paths()) for bars in axis.collections) == len(spans)
    texts = [text.get_text() for text in axis.texts]
    assert texts.count("forward") == 3
    assert texts.count("") == ring.counters[0].messages_sent * 3
    tile = next(e for e in spans if e["name"] == "tile of hop 2")
    cut = draw_trace(path, start=tile["ts"] / 1000, stop=(tile["ts"] + tile["dur"]) / 1000).axes[0]
    assert cut.get_xlim() == pytest.approx((0, tile["dur"] / 1000))
    with ring.trace(path):
        pass
    with pytest.raises(ValueError, match="no spans"):
        draw_trace(path)
