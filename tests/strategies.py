"""Random patterns, lengths and documents for property tests: small, odd, and with every feature."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

import ringspan as rs
from tests.exactness import random_sinks

FULL_PROFILE = 100  # examples of a test that sets none, in the full profile


def examples(count: int, fast: int | None = None) -> settings:
    """So many examples in the full profile; in the fast one ``fast``, by default in proportion fewer."""
    default = settings.default.max_examples  # type: ignore[union-attr]
    if fast is not None and default < FULL_PROFILE:
        return settings(max_examples=fast)
    return settings(max_examples=max(10, count * default // FULL_PROFILE))


@st.composite
def dilated(draw: st.DrawFn, longest_segment: int = 24, largest_rate: int = 6) -> rs.Dilated:
    branches = draw(st.integers(1, 3))
    numbers = lambda high: st.lists(st.integers(1, high), min_size=branches, max_size=branches)  # noqa: E731
    return rs.Dilated(
        tuple(draw(numbers(longest_segment))),
        tuple(draw(numbers(largest_rate))),
        head_offsets=draw(st.sampled_from(["interleaved", "blocked"])),
        shift=draw(st.sampled_from([0, 0, 1, 5, 30])),
    )


@st.composite
def nested(draw: st.DrawFn) -> rs.Dilated:
    """Segments and rates that divide one another, mostly: some branches nest with all others, some with a few."""
    length, rate = draw(st.sampled_from([2, 4, 6, 8, 12])), 1
    lengths, rates = [length], [rate]
    for _ in range(draw(st.integers(1, 3))):
        lengths.append(lengths[-1] * draw(st.sampled_from([1, 2, 2, 2, 3])) + draw(st.sampled_from([0, 0, 0, 0, 1])))
        rates.append(rates[-1] * draw(st.sampled_from([1, 2, 2, 3])))
    together = draw(st.permutations(list(zip(lengths, rates, strict=True))))
    offsets, shift = draw(st.sampled_from(["interleaved", "blocked"])), draw(st.sampled_from([0, 0, 1, 5, 30]))
    return rs.Dilated(*zip(*together, strict=True), head_offsets=offsets, shift=shift)


def tile_costs() -> st.SearchStrategy[rs.TileCosts | None]:
    """Compute each pair of branches that nest once, even where that costs more; leave some doubled; leave all."""
    return st.sampled_from([rs.TileCosts(0, 0, 0), rs.TileCosts(0, 0, 0), rs.TileCosts(1, 4, 4), rs.TileCosts(), None])


@st.composite
def windows(draw: st.DrawFn) -> rs.Window:
    """Windows of one row, shorter and longer than a sequence, also ahead, also dilated by what does not divide them."""
    left = draw(st.sampled_from([0, 1, 2, 3, 5, 8, 13, 21, 50]))
    return rs.Window(left, draw(st.sampled_from([0, 0, 0, 1, 4, 60])), draw(st.sampled_from([1, 1, 1, 2, 3, 7])))


def patterns() -> st.SearchStrategy[rs.Pattern]:
    """Full, dilated, windows, and sums of two or three."""
    single = st.one_of(st.just(rs.Full()), dilated(), nested(), nested(), windows(), windows())
    sums = st.lists(single, min_size=2, max_size=3).map(lambda terms: sum(terms[1:], start=terms[0]))
    return st.one_of(single, single, single, sums)


@st.composite
def lengths(draw: st.DrawFn, longest: int = 40) -> tuple[int, ...]:
    """Mostly one document; sometimes several, some of them empty."""
    count = draw(st.sampled_from([1, 1, 2, 4]))
    return tuple(draw(st.integers(0, longest // count)) for _ in range(count))


def routings() -> st.SearchStrategy[rs.Routing]:
    """Every way to route parcels, with nodes of one to three ranks."""
    return st.sampled_from(["relay", "direct", rs.ByNode(1), rs.ByNode(2), rs.ByNode(3)])


def scales() -> st.SearchStrategy[float | None]:
    """Mostly the default; also values that fused kernels do not accept directly."""
    return st.sampled_from([None, None, 0.7, -0.5, 0.0])


def softcaps() -> st.SearchStrategy[float | None]:
    """Mostly none."""
    return st.sampled_from([None, None, None, 0.7, 30.0])


@st.composite
def sinks(draw: st.DrawFn, q: Tensor) -> Tensor | None:
    """Mostly none; a logit for each head, or for each row and head, some of them without effect (-inf)."""
    shape = draw(st.sampled_from([None, None, q.shape[2:3], q.shape[:3]]))
    if shape is None:
        return None
    logits = random_sinks(tuple(shape)).detach()
    if draw(st.booleans()) and logits.numel():
        logits.view(-1)[0] = -torch.inf
    return logits.requires_grad_()


@st.composite
def held_heads(draw: st.DrawFn, pattern: rs.Pattern, kv_heads: int) -> rs.Pattern:
    """The pattern; sometimes as one of several devices sees it that share the heads."""
    first, after = draw(st.sampled_from([(0, 0), (0, 0), (1, 0), (2, 3)]))
    return pattern.for_heads(first, first + kv_heads + after) if first + after else pattern
