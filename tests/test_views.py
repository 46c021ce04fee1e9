import itertools
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringspan.geometry import Comb, Mask
from ringspan.views import CallSize, blocks, comb_view, fold


def test_a_comb_is_a_view_of_its_rows() -> None:
    x = torch.arange(2 * 40 * 6 * 2).reshape(2, 40, 6, 2)
    comb = Comb(head=1, heads=2, head_step=1, start=3, segments=2, stride=15, rows=4, step=3)
    view = comb_view(x, comb, group=2)
    assert view.shape == (2, 2, 2, 2, 4, 2)
    assert view.data_ptr() >= x.data_ptr()
    for b, s, c, g, j in itertools.product(range(2), range(2), range(2), range(2), range(4)):
        row, head = comb.lane(c)[s * 4 + j], (comb.head + c) * 2 + g
        assert torch.equal(view[b, s, c, g, j], x[b, row, head])


@pytest.mark.parametrize("zero_strides", [False, True])
@pytest.mark.parametrize("segments_fill_the_rows", [False, True])
@pytest.mark.parametrize("sizes", [(1, 5, 2, 2), (3, 1, 1, 4), (3, 2, 2, 1), (2, 3, 4, 5)])
def test_folding_keeps_every_tile_once(
    sizes: tuple[int, ...], segments_fill_the_rows: bool, zero_strides: bool
) -> None:
    batch, segments, heads, group = sizes
    rows = 4 * segments + (0 if segments_fill_the_rows else 1)
    x = torch.arange(batch * rows * heads * group).reshape(batch, rows, heads * group, 1)
    comb = Comb(head=0, heads=heads, head_step=0, start=0, segments=segments, stride=4, rows=4, step=1)
    keys = comb_view(x[:, :, :heads], comb).expand(-1, -1, -1, group, -1, -1)
    seen = []
    for parts in fold({"q": comb_view(x, comb, group), "k": keys}, zero_strides):
        assert parts["q"].dim() == 4
        assert parts["q"].shape == parts["k"].shape
        assert zero_strides or 0 not in [
            st for n, st in zip(parts["k"].shape, parts["k"].stride(), strict=True) if n > 1
        ]
        seen += parts["q"].flatten().tolist()
    assert sorted(seen) == sorted(x[:, : 4 * segments].flatten().tolist())


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 20), st.sampled_from(get_args(Mask)))
def test_blocks_cover_a_tile_once(query_rows: int, key_rows: int, edge: int, mask: Mask) -> None:
    key_rows = key_rows if mask == "full" else query_rows
    seen = {"full": lambda x: x, "causal": torch.tril, "anticausal": torch.triu}
    count = torch.zeros(query_rows, key_rows, dtype=torch.int64)
    for block in blocks(query_rows, key_rows, mask, edge):
        (q, q_size), (k, k_size) = block.queries, block.keys
        assert max(q_size, k_size) <= edge
        assert block.mask == "full" or q_size == k_size
        count[q : q + q_size, k : k + k_size] += seen[block.mask](torch.ones(q_size, k_size, dtype=torch.int64))
    assert torch.equal(count, seen[mask](torch.ones_like(count)))


@given(st.integers(1, 2**22), st.integers(1, 2**12), st.sampled_from([4, 256, 4096]), st.sampled_from([0, 16]))
def test_calls_fit_the_workspace(longest: int, independent: int, row_bytes: int, pair_bytes: int) -> None:
    workspace = 2**24
    size = CallSize.that_fits(workspace, longest, independent, row_bytes, pair_bytes)
    assert 1 <= size.edge <= longest
    assert size.tiles >= 1
    assert size.tiles * size.edge * (row_bytes + size.edge * pair_bytes) <= workspace
    assert size.tiles >= min(independent, 8)
