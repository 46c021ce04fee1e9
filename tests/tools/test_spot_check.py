"""The spot check follows the definition, samples every stratum, and detects faults."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ringspan as rs
from ringspan.geometry import Documents
from ringspan.oracle import dense_attention
from ringspan.planning import RingPlan
from ringspan.streaming import QueryPosition, RowShape, SyntheticSource, TensorRows
from ringspan.tools.spot_check import EVERYWHERE, SpotCheck, Stratum, draw_strata, recompute, spot_check
from tests.strategies import lengths, patterns

N, SHARDS = 4096, 16
SHAPE = RowShape(heads=4, kv_heads=2, head_dim=16)
PATTERN = rs.Dilated((64, 512, 4096), (1, 8, 64))


@given(st.data())
def test_recomputed_positions_equal_the_oracle(data: st.DataObject) -> None:
    sizes = data.draw(lengths().filter(sum))
    pattern, causal = data.draw(patterns()), data.draw(st.booleans())
    shape = RowShape(heads=4, kv_heads=2, head_dim=4, dtype=torch.float64, batch=2)
    source, n = SyntheticSource(shape), sum(sizes)
    q, k, v = (source.read(name, range(n), range(shape.heads_of(name))) for name in ("q", "k", "v"))
    out, lse = dense_attention(q, k, v, pattern=pattern, causal=causal, lengths=sizes)
    for position in (QueryPosition(0, 0), QueryPosition(n - 1, 3), QueryPosition(n // 2, 1)):
        exact = recompute(source, position, pattern, Documents(sizes), causal=causal, scale=0.5)
        torch.testing.assert_close(exact.out, out[:, position.row, position.head], rtol=0, atol=1e-13)
        torch.testing.assert_close(exact.lse, lse[:, position.head, position.row], rtol=0, atol=1e-13)


def plan(causal: bool = True, shape: RowShape = SHAPE) -> RingPlan:
    sizes = dict(heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim, dtype=shape.dtype)
    return rs.plan(PATTERN, N, ring_size=SHARDS, layout="contiguous", causal=causal, routing="direct", **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize("causal", [False, True])
def test_every_kind_of_tile_hop_and_boundary_is_sampled(causal: bool) -> None:
    ring = plan(causal)
    strata = draw_strata(ring, anywhere=100)
    assert all(stratum.is_covered for stratum in strata)
    names = {stratum.name for stratum in strata}
    hops = {number for rank in range(SHARDS) for number, hop in enumerate(ring.rank(rank).hops) if hop.tiles}
    assert {f"hop {number}" for number in hops} <= names
    assert len(hops) == SHARDS
    for stratum in strata:
        assert (
            len(set(stratum.positions))
            == len(stratum.positions)
            == min(stratum.population, 100 if stratum.name == EVERYWHERE else 30)
        )
        assert all(0 <= position.row < N and 0 <= position.head < 4 for position in stratum.positions)
    by_name = {stratum.name: stratum for stratum in strata}
    shard = N // SHARDS
    assert {position.row % shard for position in by_name["the first row of a shard"].positions} == {0}
    assert {position.row % shard for position in by_name["the last row of a shard"].positions} == {shard - 1}
    for position in by_name["tiles of parcels, rate 64, full"].positions:
        assert position.row % 64 == position.head // 2, "such a tile has only rows that the branch selects"
    far = by_name[f"hop {SHARDS - 1}"]
    if causal:  # only the last shard attends over this many hops
        assert {position.row // shard for position in far.positions} == {SHARDS - 1}
        assert far.population == len(far.positions) == 4 * shard // 64


def test_samples_are_drawn_evenly() -> None:
    rows = [
        position.row for seed in range(40) for position in draw_strata(plan(), anywhere=100, seed=seed)[0].positions
    ]
    halves = sum(row < N // 2 for row in rows)
    assert abs(halves - 2000) < 5 * 1000**0.5  # 4,000 draws, standard deviation sqrt(4000 / 4)


def streamed(shape: RowShape = SHAPE) -> TensorRows:
    out = torch.empty(1, N, shape.heads, shape.head_dim, dtype=shape.dtype)
    sink = TensorRows({"out": out, "lse": torch.empty(1, shape.heads, N, dtype=torch.float32)})
    rs.stream_attention(SyntheticSource(shape), sink, N, PATTERN, causal=True, shards=SHARDS)
    return sink


def checked(results: TensorRows, shape: RowShape = SHAPE, anywhere: int = 300) -> SpotCheck:
    ring = plan(shape=shape)
    strata = draw_strata(ring, anywhere=anywhere)
    return spot_check(SyntheticSource(shape), results, ring, strata, scale=shape.head_dim**-0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_correct_results_pass(dtype: torch.dtype) -> None:
    shape = replace(SHAPE, dtype=dtype)
    found = checked(streamed(shape), shape)
    assert found.holds
    assert found.wrong_share_bound == 3 / 300
    assert 0 < found.worst_ratio < 1
    assert found.samples > 600


def damage_one_hop(out: Tensor, lse: Tensor, source: SyntheticSource) -> None:
    """Omit the tile of the farthest hop: the last shard does not attend to the first."""
    q, k, v = (source.read(name, range(N), range(SHAPE.heads_of(name))) for name in ("q", "k", "v"))
    first = N // SHARDS
    part, part_lse = rs.attention(
        q[:, first:], k[:, first:], v[:, first:], pattern=PATTERN, causal=True, return_lse=True
    )
    out[:, -first:], lse[:, :, -first:] = part[:, -first:], part_lse[:, :, -first:]


def test_a_missing_tile_is_detected() -> None:
    results = streamed()
    damage_one_hop(results.tensors["out"], results.tensors["lse"], SyntheticSource(SHAPE))
    found = checked(results)
    assert not found.holds
    wrong = {stratum.name: stratum.wrong for stratum in found.strata}
    assert wrong[f"hop {SHARDS - 1}"] == 4 * (N // SHARDS) // 64, "every row of that hop"
    assert wrong["hop 0"] <= 2, "few of the rows drawn there happen to be among them"
    assert found.wrong_share_bound == 1.0


@pytest.mark.parametrize("fault", ["nan", "scaled", "lse"])
def test_other_faults_are_detected(fault: str) -> None:
    results = streamed()
    out, lse = results.tensors["out"], results.tensors["lse"]
    shard_rows = N // SHARDS
    if fault == "nan":
        out[:, shard_rows - 1 :: shard_rows] = torch.nan  # the last row of each shard
    elif fault == "scaled":
        out[:, ::2] *= 1.001
    else:
        lse[:, 3] += 1e-3
    found = checked(results)
    assert not found.holds
    if fault == "nan":
        (last,) = (stratum for stratum in found.strata if stratum.name == "the last row of a shard")
        assert last.wrong == last.samples


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_zeros_exceed_the_allowed_error_in_16_bit(dtype: torch.dtype) -> None:
    """Over thousands of keys outputs are small, and the allowed error must be smaller still."""
    shape = RowShape(2, 2, 32, dtype)
    out = torch.empty(1, N, 2, 32, dtype=dtype)
    results = TensorRows({"out": out, "lse": torch.empty(1, 2, N, dtype=torch.float32)})
    rs.stream_attention(SyntheticSource(shape), results, N, rs.Full(), causal=True, shards=4)
    ring = rs.plan(rs.Full(), N, ring_size=4, layout="contiguous", causal=True, routing="direct", heads=2, head_dim=32)
    positions = tuple(QueryPosition(row, row % 2) for row in range(1, N, N // 40))
    stratum = [Stratum(EVERYWHERE, 2 * N, positions)]
    assert spot_check(SyntheticSource(shape), results, ring, stratum, scale=32**-0.5).wrong == 0
    out.zero_()
    assert spot_check(SyntheticSource(shape), results, ring, stratum, scale=32**-0.5).wrong == len(positions)


def test_rows_without_keys_must_be_zero() -> None:
    pattern = rs.Dilated((64,), (4,))
    shape = RowShape(1, 1, 8)
    ring = rs.plan(pattern, 256, ring_size=4, layout="contiguous", routing="direct", heads=1, head_dim=8)
    stratum = [Stratum(EVERYWHERE, 256, tuple(QueryPosition(row, 0) for row in range(256)))]
    results = TensorRows({"out": torch.empty(1, 256, 1, 8), "lse": torch.empty(1, 1, 256)})
    rs.stream_attention(SyntheticSource(shape), results, 256, pattern, shards=4)
    assert spot_check(SyntheticSource(shape), results, ring, stratum, scale=8**-0.5).holds
    results.tensors["out"][:, 1] = 1e-30
    assert spot_check(SyntheticSource(shape), results, ring, stratum, scale=8**-0.5).wrong == 1
