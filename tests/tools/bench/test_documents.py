"""Benchmarks of packed documents, of shared pairs and of small calls: what is counted, and pages of older results."""

import pytest

import ringspan as rs
from benchmarks.documents import MIXES, TOTAL
from benchmarks.one_device import NOT_NESTED, count_pairs, pairs_tables, share_table
from ringspan.tools.bench.share import BareKernel, pattern_up_to


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("total", [2**12, 2**15, TOTAL])
def test_mixes_have_the_given_total_and_do_not_change(name: str, total: int) -> None:
    lengths = MIXES[name](total)
    assert sum(lengths) == total
    assert min(lengths) > 0
    assert lengths == MIXES[name](total)


def test_the_mixes_are_those_of_the_page() -> None:
    assert [len(mix(TOTAL)) for mix in MIXES.values()] == [80, 29, 2069]
    assert max(MIXES["one of half of the rows"](TOTAL)) == 131072


@pytest.mark.parametrize("causal", [False, True])
def test_pairs_of_nested_branches(causal: bool) -> None:
    """Counted one by one: a pair is seen once for each branch, and distinct pairs are the ones seen at all."""
    pattern, n, heads = rs.Dilated((64, 128, 256), (1, 2, 4)), 256, 8
    counts = count_pairs(pattern, n, causal)
    seen = [
        pattern.sees(p, t, head=h, kv_heads=heads, causal=causal) for h in range(4) for p in range(n) for t in range(n)
    ]
    assert counts["seen"] == 2 * sum(seen)  # offsets repeat after four heads
    assert counts["distinct"] == 2 * sum(map(bool, seen))
    assert counts["distinct"] <= counts["computed"] <= counts["seen"]


@pytest.mark.parametrize("pattern", [pattern_up_to(8192), NOT_NESTED, rs.Window(255)])
def test_the_bare_kernel_computes_every_pair_of_the_definition(pattern: rs.Pattern) -> None:
    n = 4096
    bare = BareKernel.of(pattern, n, causal=False)
    pairs = sum(q.shape[0] * q.shape[1] * _pairs(q.shape[2], k.shape[2], mask) for q, k, _, mask in bare.tiles)
    assert pairs == count_pairs(pattern, n, causal=False)["seen"]


def _pairs(queries: int, keys: int, mask: str) -> int:
    return queries * keys if mask == "full" else queries * (queries + 1) // 2


def test_rows_measured_before_pairs_were_shared_are_shown() -> None:
    old = dict(n=32768, causal=True, mode="both", ours=[3.0, 3.1], bare=[2.9, 3.0], foreign_cores=0.0)
    pairs = dict(seen=200, distinct=150, computed=160)
    new = dict(old, nested=True, ours=[2.0, 2.0], plain=[4.0, 4.0], bare=[3.0, 3.0], pairs=pairs)
    _, before, after = share_table([old, new]).rows
    assert before[8] == before[11] == "0.967"
    assert (after[8], after[11]) == ("1.500", "0.750")
    assert not pairs_tables([old])
    assert pairs_tables([old, new])[0].rows[1][-1] == "0.800"
