"""Step by step, or block by block, is the same as all at once: against the dense oracle, at every position."""

from __future__ import annotations

import copy
import pickle
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ringspan as rs
from ringspan import kernels
from ringspan.decoding.cache import BranchRows
from ringspan.geometry import WindowBranch
from ringspan.oracle import dense_attention
from tests.exactness import inputs, random_sinks
from tests.strategies import examples, held_heads, patterns, scales, sinks, softcaps

pytestmark = pytest.mark.filterwarnings("ignore:.*selects row")


def cache_for(pattern: rs.Pattern, k: Tensor, batch: int | None = None) -> rs.Cache:
    sizes = dict(batch=batch or k.shape[0], kv_heads=k.shape[2], head_dim=k.shape[3])
    return rs.Cache(pattern, dtype=k.dtype, **sizes)  # type: ignore[arg-type]


def close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def in_blocks(
    tensors: list[Tensor], cache: rs.Cache, sizes: list[int], sinks: Tensor | None = None, **options: object
) -> tuple[Tensor, Tensor]:
    """Decode in blocks of these sizes. Checks after each that no KV head holds more than the bound."""
    parts = zip(*(x.split(sizes, dim=1) for x in tensors), strict=True)
    per_row = sinks.split(sizes, dim=1) if sinks is not None and sinks.dim() == 3 else [sinks] * len(sizes)
    outs, lses = [], []
    for part, logits in zip(parts, per_row, strict=True):
        out, lse = rs.attention_step(*part, cache, return_lse=True, sinks=logits, **options)  # type: ignore[call-overload]
        outs.append(out)
        lses.append(lse)
        assert cache.bound is None or all(cache.rows_held(0, head) <= cache.bound for head in range(cache.kv_heads))
    return torch.cat(outs, 1), torch.cat(lses, 2)


@examples(100)
@given(st.data())
def test_any_blocks_equal_the_oracle(data: st.DataObject) -> None:
    batch, kv_heads, group = (data.draw(st.integers(1, 3)) for _ in range(3))
    pattern = data.draw(held_heads(data.draw(patterns()), kv_heads))
    sizes = data.draw(st.lists(st.sampled_from([1, 1, 1, 2, 5, 17]), min_size=1, max_size=12))
    with torch.no_grad():
        tensors = inputs(batch, sum(sizes), kv_heads, group, 4)
        cache = cache_for(pattern, tensors[1])
        kernel = data.draw(st.sampled_from([None, "reference"]))
        scores = dict(scale=data.draw(scales()), softcap=data.draw(softcaps()), sinks=data.draw(sinks(tensors[0])))
        out, lse = in_blocks(tensors, cache, sizes, kernel=kernel, **scores)  # type: ignore[arg-type]
        wanted, wanted_lse = dense_attention(*tensors, pattern=pattern, causal=True, **scores)  # type: ignore[arg-type]
    close(out, wanted)
    close(lse, wanted_lse)
    assert cache.lengths == (sum(sizes),) * batch


@pytest.mark.parametrize("blocks", [[1] * 60, [7] * 8 + [4], [1, 30, 1, 1, 27], [59, 1]], ids=len)
@pytest.mark.parametrize(
    "pattern",
    [
        rs.Window(0),
        rs.Window(0, right=3),
        rs.Window(1),
        rs.Window(12, right=12),
        rs.Window(58),
        rs.Window(59),
        rs.Window(10**9),
        rs.Window(2**62),
        rs.Window(6, dilation=7),
        rs.Window(7, dilation=7),
        rs.Window(10, dilation=3),
        rs.Window(40, dilation=13),
        rs.Window(9) + rs.Window(9),
        rs.Window(3) + rs.Window(24, dilation=6) + rs.Dilated((16,), (3,), shift=5),
        rs.Window(5) + rs.Full(),
    ],
    ids=lambda pattern: pattern.text,
)
def test_windows_of_odd_sizes(pattern: rs.Pattern, blocks: list[int]) -> None:
    with torch.no_grad():
        tensors = inputs(2, 60, 2, 2, 4)
        out, lse = in_blocks(tensors, cache_for(pattern, tensors[1]), blocks)
        wanted, wanted_lse = dense_attention(*tensors, pattern=pattern, causal=True)
    close(out, wanted)
    close(lse, wanted_lse)


@examples(40)
@given(st.data())
def test_rows_held_are_those_of_the_current_segments_and_windows(data: st.DataObject) -> None:
    kv_heads = data.draw(st.integers(1, 4))
    pattern = data.draw(patterns())
    _, k, _ = (x.detach() for x in inputs(1, 40, kv_heads, 1, 2))
    cache = cache_for(pattern, k)
    for p in range(40):
        rs.attention_step(k[:, [p]], k[:, [p]], k[:, [p]], cache)
        for head in range(kv_heads):
            held = 0
            for branch in pattern.branches(10**9, kv_heads):
                if isinstance(branch, WindowBranch):
                    held += min(p, branch.left) + 1
                    continue
                segment = (p + branch.shift) // branch.segment_length
                same = [t for t in range(p + 1) if (t + branch.shift) // branch.segment_length == segment]
                held += sum(branch.sees(t, t, head) for t in same)
            assert cache.rows_held(0, head) == held
            assert cache.bound is None or held <= cache.bound


@pytest.mark.parametrize(
    ("pattern", "bound"),
    [
        (rs.Window(100), 101),
        (rs.Window(101, dilation=5), 101),
        (rs.Window(0), 1),
        (rs.Window(30) + rs.Dilated((16, 64), (1, 4)), 31 + 16 + 16),
    ],
    ids=str,
)
def test_a_window_is_kept_in_a_ring_buffer(pattern: rs.Pattern, bound: int) -> None:
    """Once full, the buffers stay where they are, and hold the bound and no more."""
    q, k, v = torch.randn(3, 1, 1, 2, 4).unbind()
    cache = cache_for(pattern, k)
    assert cache.bound == bound
    for _ in range(128):
        rs.attention_step(q, k, v, cache)
    addresses = [branch.rows.data_ptr() for branch in cache.branches]
    for block in (1, 1, 1, 90, 1, 1):
        rs.attention_step(*(x.expand(1, block, 2, 4) for x in (q, k, v)), cache)
    assert [branch.rows.data_ptr() for branch in cache.branches] == addresses
    assert cache.nbytes == 2 * 2 * bound * 4 * 4  # keys and values, heads, rows, dim, bytes


def test_one_token_over_a_window_is_one_kernel_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two, where the ring buffer of a dilated window wraps."""
    calls: list[int] = []
    kernel = kernels.get("reference")

    def counted(*operands: Any) -> tuple[Tensor, Tensor]:
        calls.append(operands[1].shape[2])
        return forward(*operands)

    forward = kernel.compute_forward
    monkeypatch.setattr(kernels, "_KERNELS", {"reference": replace(kernel, compute_forward=counted)})
    x = torch.randn(1, 1, 2, 4)
    for pattern, seen in ((rs.Window(15), [16]), (rs.Window(15, dilation=3), [2, 4])):
        cache = cache_for(pattern, x)
        for _ in range(21):
            rs.attention_step(x, x, x, cache, kernel="reference")
        calls.clear()
        rs.attention_step(x, x, x, cache, kernel="reference")
        assert sorted(calls) == seen


def test_the_bound_is_reached_and_never_passed_and_memory_stays() -> None:
    pattern = rs.Dilated((16, 64, 256), (1, 4, 16), shift=8)
    q, k, v = (x.detach() for x in inputs(2, 1500, 4, 2, 8))
    cache = cache_for(pattern, k)
    assert cache.bound == 16 + 16 + 16
    most, sizes = 0, set()
    for p in range(1500):
        rs.attention_step(q[:, [p]], k[:, [p]], v[:, [p]], cache)
        most = max(most, *(cache.rows_held(1, head) for head in range(4)))
        if p >= 256:
            sizes.add(cache.nbytes)
    assert most == cache.bound
    assert sizes == {2 * 2 * 4 * cache.bound * 8 * 8}  # keys and values, batch, heads, rows, dim, bytes


def test_full_grows_and_says_so() -> None:
    q, k, v = (x.detach() for x in inputs(1, 300, 2, 1, 4))
    cache = cache_for(rs.Full(), k)
    for p in range(300):
        rs.attention_step(q[:, [p]], k[:, [p]], v[:, [p]], cache)
    assert cache.rows_held(0, 0) == 300
    assert cache.bound is None
    assert "keeps every row" in repr(cache)
    assert "at most 12 rows" in repr(cache_for(rs.Dilated((8, 32), (1, 8)), k))
    assert cache_for(rs.Full() + rs.Window(3), k).bound is None


@examples(40)
@given(st.data())
def test_prompts_of_different_lengths_packed_then_steps_side_by_side(data: st.DataObject) -> None:
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    pattern = data.draw(patterns())
    lengths = data.draw(st.lists(st.integers(0, 30), min_size=1, max_size=4))
    steps = data.draw(st.integers(1, 12))
    with torch.no_grad():
        texts = [inputs(1, length + steps, kv_heads, group, 4) for length in lengths]
        scores: dict[str, Any] = dict(softcap=data.draw(softcaps()))
        logits = [random_sinks(tuple(text[0].shape[:3])) for text in texts]
        wanted = [
            dense_attention(*text, pattern=pattern, causal=True, sinks=sink, **scores)[0]
            for text, sink in zip(texts, logits, strict=True)
        ]
        cache = cache_for(pattern, texts[0][1], batch=len(lengths))
        packed = [torch.cat([t[i][:, :n] for t, n in zip(texts, lengths, strict=True)], 1) for i in range(3)]
        sink = torch.cat([x[:, :n] for x, n in zip(logits, lengths, strict=True)], 1)
        out = rs.attention_step(*packed, cache, lengths=tuple(lengths), sinks=sink, **scores)
        close(out, torch.cat([w[:, :n] for w, n in zip(wanted, lengths, strict=True)], 1))
        for step in range(steps):
            rows = [torch.cat([t[i][:, [n + step]] for t, n in zip(texts, lengths, strict=True)]) for i in range(3)]
            sink = torch.cat([x[:, [n + step]] for x, n in zip(logits, lengths, strict=True)])
            out = rs.attention_step(*rows, cache, sinks=sink, **scores)
            close(out, torch.cat([w[:, [n + step]] for w, n in zip(wanted, lengths, strict=True)]))
    assert cache.lengths == tuple(n + steps for n in lengths)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_lower_precision(dtype: torch.dtype, tolerance: float) -> None:
    pattern = rs.Dilated((16, 64), (1, 4), "blocked", shift=5)
    tensors = [x.detach() for x in inputs(1, 130, 4, 2, 16, dtype)]
    out, _ = in_blocks(tensors, cache_for(pattern, tensors[1]), [50, *[1] * 40, 40])
    assert out.dtype == dtype
    wanted, _ = dense_attention(*(x.double() for x in tensors), pattern=pattern, causal=True)
    assert (out.double() - wanted).abs().max() < tolerance


@pytest.mark.parametrize("before", [0, 1, 6, 20])
@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_in_a_new_row_is_visible(before: int, block: int, name: str) -> None:
    pattern = rs.Dilated((4, 16), (1, 2))
    tensors = dict(zip("qkv", torch.randn(3, 1, before + block, 2, 8).unbind(), strict=True))
    tensors[name][:, -1, :, 2] = torch.nan
    cache = rs.Cache(pattern, batch=1, kv_heads=2, head_dim=8)
    if before:
        rs.attention_step(*(x[:, :before] for x in tensors.values()), cache)
    out, lse = rs.attention_step(*(x[:, before:] for x in tensors.values()), cache, return_lse=True)
    assert out[:, -1].isnan().any(-1).all()
    assert name == "v" or lse[..., -1].isnan().all()


def test_sequences_can_be_chosen_repeated_and_dropped() -> None:
    pattern = rs.Dilated((8, 32), (1, 4))
    q, k, v = (x.detach() for x in inputs(3, 60, 2, 1, 4))
    wanted, _ = dense_attention(q, k, v, pattern=pattern, causal=True)
    cache = cache_for(pattern, k)
    rs.attention_step(q[:, :30], k[:, :30], v[:, :30], cache)
    chosen = [2, 0, 0]
    cache.select(chosen)
    out, _ = in_blocks([x[chosen, 30:] for x in (q, k, v)], cache, [1] * 30)
    close(out, wanted[chosen, 30:])
    cache.select(torch.tensor([1]))
    assert cache.lengths == (60,)
    cache.reset()
    close(in_blocks([x[:1] for x in (q, k, v)], cache, [40, 20])[0], wanted[:1])


def test_a_cache_that_is_used_in_inference_mode_can_be_used_outside() -> None:
    pattern = rs.Dilated((8, 32), (1, 4))
    q, k, v = (x.detach() for x in inputs(1, 100, 2, 1, 4))
    cache = cache_for(pattern, k)
    with torch.inference_mode():
        rs.attention_step(q[:, :70], k[:, :70], v[:, :70], cache)
    out, _ = in_blocks([x[:, 70:] for x in (q, k, v)], cache, [1] * 30)
    close(out, dense_attention(q, k, v, pattern=pattern, causal=True)[0][:, 70:])


def test_views_that_are_not_dense_are_taken() -> None:
    pattern = rs.Dilated((8, 32), (1, 4))
    q, k, v = (x.detach() for x in inputs(2, 50, 2, 2, 4))
    strange = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in (q, k, v)]
    out, _ = in_blocks(strange, cache_for(pattern, k), [20, *[1] * 30])
    close(out, dense_attention(q, k, v, pattern=pattern, causal=True)[0])


def test_single_elements_of_any_stride_are_taken() -> None:
    """Heads of one number: PyTorch calls a tensor of single elements contiguous, whatever its strides."""
    x = torch.randn(1, 1, 1, 2)[..., ::2]
    assert x.is_contiguous()
    assert x.stride(-1) == 2
    for kernel in (None, "reference"):
        assert torch.equal(rs.attention_step(x, x, x, cache_for(rs.Full(), x), kernel=kernel), x)
        assert torch.equal(rs.attention(x, x, x, pattern=rs.Full(), kernel=kernel), x)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("failing", [1, 2])
def test_a_cache_whose_step_was_interrupted_is_refused(
    rows: int, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first branch would have the new rows, and its second not."""
    pattern = rs.Dilated((8, 32), (1, 4))
    q, k, v = (x.detach() for x in inputs(1, 40, 2, 1, 4))
    cache = cache_for(pattern, k)
    rs.attention_step(q[:, :12], k[:, :12], v[:, :12], cache)
    calls = 0
    reserve = BranchRows.reserve

    def interrupted(self: BranchRows, wanted: int) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise KeyboardInterrupt
        reserve(self, wanted)

    block = [x[:, 12 : 12 + rows] for x in (q, k, v)]
    with monkeypatch.context() as patch:
        patch.setattr(BranchRows, "reserve", interrupted)
        with pytest.raises(KeyboardInterrupt):
            rs.attention_step(*block, cache)
    for change in (lambda: rs.attention_step(*block, cache), lambda: cache.select([0])):
        with pytest.raises(RuntimeError, match=r"incomplete: .* reset\(\)"):
            change()
    with pytest.raises(RuntimeError, match="the cache is incomplete"):
        rs.attention_prefill(*block, cache, ring=rs.SimulatedRing(2))
    cache.reset()
    close(in_blocks([q, k, v], cache, [30, 10])[0], dense_attention(q, k, v, pattern=pattern, causal=True)[0])


def test_a_copy_of_a_cache_has_rows_of_its_own() -> None:
    pattern = rs.Dilated((8, 32), (1, 4))
    q, k, v = (x.detach() for x in inputs(1, 40, 2, 1, 4))
    wanted, _ = dense_attention(q, k, v, pattern=pattern, causal=True)
    cache = cache_for(pattern, k)
    rs.attention_step(q[:, :20], k[:, :20], v[:, :20], cache)
    for copied in (copy.copy(cache), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        rs.attention_step(*torch.randn(3, 1, 1, 2, 4, dtype=q.dtype), copied)
        assert (cache.lengths, copied.lengths) == ((20,), (21,))
    close(in_blocks([x[:, 20:] for x in (q, k, v)], cache, [1] * 20)[0], wanted[:, 20:])


def test_a_short_block_with_many_heads_is_not_taken_for_a_transposed_one() -> None:
    q, k, v = torch.randn(3, 1, 10, 64, 4).unbind()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rs.attention_step(q, k, v, cache_for(rs.Full(), k))
        rs.attention_prefill(q, k, v, cache_for(rs.Full(), k), ring=rs.SimulatedRing(2))


class TestBadInput:
    x = torch.zeros(2, 1, 2, 4)
    cache = rs.Cache(rs.Dilated((8,), (1,)), batch=2, kv_heads=2, head_dim=4)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            (dict(k=torch.zeros(2, 1, 1, 4), v=torch.zeros(2, 1, 1, 4)), "KV heads: 1 in k, 2 in the cache"),
            (dict(lengths=(1, 1)), "2 lengths and a batch of 2: packed rows need a batch of 1"),
            (dict(lengths=(1,)), "1 lengths and a batch of 2: packed rows need a batch of 1"),
            (dict(q=torch.zeros(2, 1, 2, 4, requires_grad=True)), "requires gradients"),
            (dict(scale=float("nan")), "scale=nan: must be finite"),
            (dict(softcap=0), "softcap=0: must be positive"),
            (dict(softcap=30.0, kernel="cpu_flash"), "kernel 'cpu_flash': softcap=30.0: this kernel cannot cap scores"),
            (dict(sinks=torch.zeros(3)), r"sinks has shape \(3,\)"),
            (dict(sinks=torch.zeros(1, 1, 2)), r"sinks has shape \(1, 1, 2\)"),
            (dict(sinks=torch.zeros(2, requires_grad=True)), "sinks requires gradients"),
        ],
    )
    def test_steps(self, change: dict[str, Any], reason: str) -> None:
        with pytest.raises(ValueError, match=reason):
            rs.attention_step(**{"q": self.x, "k": self.x, "v": self.x, "cache": self.cache, **change})

    def test_dtype_and_batch(self) -> None:
        half, one = self.x.half(), self.x[:1]
        with pytest.raises(ValueError, match=r"dtype: torch\.float16 in k, torch\.float32 in the cache"):
            rs.attention_step(half, half, half, self.cache)
        with pytest.raises(ValueError, match="k has a batch of 1, the cache one of 2"):
            rs.attention_step(one, one, one, self.cache)
        with pytest.raises(ValueError, match="lengths add up to 2, but the sequence has 1 rows"):
            rs.attention_step(one, one, one, self.cache, lengths=(1, 1))
        with pytest.raises(TypeError, match=r"cache is a dict: must be a ringspan\.Cache"):
            rs.attention_step(one, one, one, {})  # type: ignore[call-overload]

    def test_lengths_rows_and_gradients_of_prompts(self) -> None:
        one = self.x[:1]
        with pytest.raises(TypeError, match="lengths=5: must be a sequence of ints"):
            rs.attention_step(one, one, one, self.cache, lengths=5)  # type: ignore[call-overload]
        with pytest.raises(ValueError, match=r"head=2: must be in 0 \.\. 1"):
            self.cache.rows_held(0, 2)
        asking = self.x.clone().requires_grad_()
        with pytest.raises(ValueError, match="requires gradients"):
            rs.attention_prefill(asking, self.x, self.x, self.cache, ring=rs.SimulatedRing(2))

    def test_caches(self) -> None:
        with pytest.raises(ValueError, match="kv_heads=0: must be at least 1"):
            rs.Cache(rs.Full(), kv_heads=0, head_dim=4)
        with pytest.raises(TypeError, match="pattern='full'"):
            rs.Cache("full", kv_heads=1, head_dim=4)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="ring is a SimulatedRing: must be a Ring"):
            rs.Cache(rs.Full(), kv_heads=1, head_dim=4, ring=rs.SimulatedRing(2))  # type: ignore[arg-type]
        for wrong in ([2], [], [-1]):
            with pytest.raises(ValueError, match=r"must be in 0 \.\. 1"):
                self.cache.select(wrong)
        for unclear in (0, None, torch.tensor(0), torch.zeros(1, 2, dtype=torch.int64)):
            with pytest.raises(TypeError, match="must be a sequence of ints"):
                self.cache.select(unclear)  # type: ignore[arg-type]


def test_unselected_rows_warn_once_when_the_cache_is_created() -> None:
    pattern = rs.Dilated((6, 12), (2, 3))
    with pytest.warns(UserWarning, match="no branch selects row 1") as found:
        cache = rs.Cache(pattern, kv_heads=1, head_dim=4)
    assert len(found) == 1
    assert found[0].filename == __file__
    x = torch.randn(1, 5, 1, 4)
    for _ in range(6):  # warnings are errors here
        rs.attention_step(x, x, x, cache)
    rs.Cache(pattern, kv_heads=1, head_dim=4)
