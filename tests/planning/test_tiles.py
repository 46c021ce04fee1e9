from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.geometry import Documents
from ringspan.oracle import multiplicity
from ringspan.planning import Plan, plan_rows
from tests.strategies import lengths, patterns


def computed_pairs(plan: Plan) -> Counter[tuple[int, int, int]]:
    """How often the plan's tiles compute each (head, query, key)."""
    pairs: Counter[tuple[int, int, int]] = Counter()
    for tile in plan.tiles:
        assert tile.queries.heads == tile.keys.heads
        assert tile.queries.segments == tile.keys.segments
        for i in range(tile.queries.heads):
            queries, keys = tile.queries.lane(i), tile.keys.lane(i)
            for s in range(tile.queries.segments):
                for a in range(tile.queries.rows):
                    seen = a + 1 if tile.causal else tile.keys.rows
                    for b in range(seen):
                        query, key = queries[s * tile.queries.rows + a], keys[s * tile.keys.rows + b]
                        pairs[tile.queries.head + i, query, key] += 1
    return pairs


@given(patterns(), lengths(), st.integers(1, 5), st.booleans())
def test_tiles_compute_what_the_definition_sees(
    pattern: rs.Pattern, sizes: tuple[int, ...], kv_heads: int, causal: bool
) -> None:
    plan = plan_rows(pattern, Documents(sizes), kv_heads, causal)
    count = multiplicity(pattern, sum(sizes), kv_heads, causal=causal, lengths=sizes)
    wanted = {tuple(index): count[tuple(index)].item() for index in count.nonzero().tolist()}
    assert computed_pairs(plan) == wanted
    assert plan.pairs == count.sum()


@pytest.mark.parametrize("shift", [0, 1000])
@pytest.mark.parametrize("head_offsets", ["interleaved", "blocked"])
@pytest.mark.parametrize("kv_heads", [1, 8, 12])
def test_tiles_do_not_multiply_with_length(kv_heads: int, head_offsets: str, shift: int) -> None:
    widths, rates = (1024, 2048, 3000), (1, 2, 16)
    pattern = rs.Dilated(widths, rates, head_offsets=head_offsets, shift=shift)  # type: ignore[arg-type]
    counts = [len(plan_rows(pattern, Documents((n,)), kv_heads, True).tiles) for n in (2**12, 2**20, 2**30)]
    head_groups = sum(2 * -(-kv_heads // rate) + min(rate, kv_heads) for rate in rates)
    assert max(counts) <= 3 * head_groups
    assert counts[2] <= counts[0] + 2 * head_groups
    assert abs(counts[2] - counts[1]) <= 2 * head_groups


def test_equal_documents_are_one_tile() -> None:
    plan = plan_rows(rs.Dilated((64,), (1,)), Documents((48,) * 1000), 4, True)
    assert len(plan.tiles) == 1
    assert plan.tiles[0].queries.segments == 1000


def test_long_plans_are_exact_in_the_large() -> None:
    n, w, r = 2**30, 2**15, 2**4
    plan = plan_rows(rs.Dilated((w,), (r,)), Documents((n,)), 1, False)
    assert plan.pairs == n // w * (w // r) ** 2
