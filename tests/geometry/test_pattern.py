from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from ringspan.geometry import PatternSum, parse_pattern, unselected_row
from ringspan.oracle import multiplicity
from tests.strategies import dilated, lengths, patterns


def seen(p: int, head: int, causal: bool = False) -> dict[int, int]:
    """Keys that query p sees in the worked example of docs/semantics.md, with how often each counts."""
    pattern = rs.Dilated((4, 8), (1, 2))
    counts = {t: pattern.sees(p, t, head=head, kv_heads=2, causal=causal) for t in range(16)}
    return {t: m for t, m in counts.items() if m}


def test_worked_example() -> None:
    assert seen(5, head=0) == {4: 1, 5: 1, 6: 1, 7: 1}
    assert seen(5, head=1) == {1: 1, 3: 1, 4: 1, 5: 2, 6: 1, 7: 2}
    assert seen(5, head=1, causal=True) == {1: 1, 3: 1, 4: 1, 5: 2}


@given(dilated(), st.integers(1, 30), st.integers(1, 4), st.booleans())
def test_oracle_counts_what_the_definition_sees(pattern: rs.Dilated, n: int, kv_heads: int, causal: bool) -> None:
    count = multiplicity(pattern, n, kv_heads, causal=causal)
    by_hand = [
        [[pattern.sees(p, t, head=h, kv_heads=kv_heads, causal=causal) for t in range(n)] for p in range(n)]
        for h in range(kv_heads)
    ]
    assert count.tolist() == by_hand


@given(patterns(), lengths(), st.integers(1, 3), st.booleans())
def test_documents_are_sequences_of_their_own(
    pattern: rs.Pattern, sizes: tuple[int, ...], kv_heads: int, causal: bool
) -> None:
    count = multiplicity(pattern, sum(sizes), kv_heads, causal=causal, lengths=sizes)
    alone = [multiplicity(pattern, n, kv_heads, causal=causal) for n in sizes]
    for head in range(kv_heads):
        assert torch.equal(count[head], torch.block_diag(*(x[head] for x in alone)))


def test_head_offsets() -> None:
    assert rs.Dilated((16,), (4,)).offsets(4, kv_heads=6) == (0, 1, 2, 3, 0, 1)
    assert rs.Dilated((16,), (4,), "blocked").offsets(4, kv_heads=6) == (0, 0, 1, 1, 2, 2)


@given(dilated(), st.integers(1, 4), st.integers(1, 4))
def test_heads_split_over_devices_keep_their_offsets(pattern: rs.Dilated, devices: int, heads_each: int) -> None:
    total = devices * heads_each
    for rate in pattern.dilation_rates:
        parts = [pattern.for_heads(d * heads_each, total).offsets(rate, heads_each) for d in range(devices)]
        assert sum(parts, ()) == pattern.offsets(rate, total)


@given(patterns())
def test_text_reads_back(pattern: rs.Pattern) -> None:
    assert parse_pattern(pattern.text) == pattern
    assert parse_pattern(pattern.for_heads(1, 3).text) == pattern.for_heads(1, 3)


def test_patterns_as_users_type_them() -> None:
    assert parse_pattern(" Full ") == rs.Full()
    for text in ("2048x1,16384x8", "2048x1 16384x8", "2048 x 1, 16384 x 8", "2048X1,16384X8 interleaved"):
        assert parse_pattern(text) == rs.Dilated((2048, 16384), (1, 8))
    assert parse_pattern("8x1 shift 3") == rs.Dilated((8,), (1,), shift=3)
    assert parse_pattern("twox1", read_count={"two": 2, "1": 1}.__getitem__) == rs.Dilated((2,), (1,))


@pytest.mark.parametrize("text", ["", "2048", "2048x", "x2", "8x1,,", "8x1 shifted 3", "8x1x1", "fullish"])
def test_texts_of_no_pattern_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be full"):
        parse_pattern(text)


@pytest.mark.parametrize("text", ["window x", "window 5.5", "window 1_000", "window 3 right -1", "8xtwo"])
def test_counts_in_texts_are_whole_numbers(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be a whole number"):
        parse_pattern(text)


@pytest.mark.parametrize("terms", [(1, 2), "ab", (rs.Full(),), (rs.Full(), rs.Full() + rs.Window(1))])
def test_a_sum_has_at_least_two_simple_patterns(terms: Any) -> None:
    with pytest.raises(ValueError, match="two or more patterns"):
        PatternSum(terms)


def test_patterns_are_values() -> None:
    assert rs.Dilated([4, 8], [1, 2]) == rs.Dilated((4, 8), (1, 2))
    assert len({rs.Dilated([4, 8], [1, 2]), rs.Dilated((4, 8), (1, 2)), rs.Full(), rs.Full()}) == 2
    with pytest.raises(AttributeError):
        rs.Full().shift = 1  # type: ignore[attr-defined]


@given(dilated(), st.integers(1, 40), st.integers(1, 4))
def test_unselected_rows_are_found(pattern: rs.Dilated, n: int, kv_heads: int) -> None:
    blind = (multiplicity(pattern, n, kv_heads) == 0).all(-1)
    found = unselected_row(pattern, n, kv_heads)
    assert (found is not None) == bool(blind.any())
    if found:
        assert blind[found[1], found[0]]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(segment_lengths=(4,), dilation_rates=(0,)), ValueError, "dilation_rates[0]=0: a rate must be at least 1"),
        (dict(segment_lengths=(4, -1), dilation_rates=(1, 1)), ValueError, "segment_lengths[1]=-1: a segment has"),
        (
            dict(segment_lengths=(), dilation_rates=()),
            ValueError,
            "use Full()",
        ),
        (dict(segment_lengths=(4, 8), dilation_rates=(1,)), ValueError, "2 segment_lengths but 1 dilation_rates"),
        (dict(segment_lengths=(4.0,), dilation_rates=(1,)), TypeError, "segment_lengths[0]=4.0: must be an int"),
        (dict(segment_lengths=(True,), dilation_rates=(1,)), TypeError, "segment_lengths[0]=True: must be an int"),
        (dict(segment_lengths=4, dilation_rates=(1,)), TypeError, "segment_lengths=4: must be a sequence of ints"),
        (dict(segment_lengths=(4,), dilation_rates=(1,), shift=-1), ValueError, "shift=-1: must be at least 0"),
        (dict(segment_lengths=(4,), dilation_rates=(1,), head_offsets="odd"), ValueError, "'interleaved' or 'blocked'"),
        (dict(segment_lengths=(4,), dilation_rates=(1,), first_head=2), ValueError, "first=2, total=0"),
    ],
)
def test_bad_patterns_are_refused(arguments: dict[str, object], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        rs.Dilated(**arguments)  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r"leaves room for 2 KV heads, but k and v have 3"):
        rs.Dilated((4,), (2,)).for_heads(2, 4).check_heads(3)
    with pytest.raises(ValueError, match=r"first=4, total=4"):
        rs.Full().for_heads(4, 4)
