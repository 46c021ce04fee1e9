"""Streaming equals the oracle, forward and backward, for any shards, source and sink."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import ringspan as rs
from ringspan.oracle import dense_attention
from ringspan.streaming import CallableSource, CallbackSink, ChecksumSink, QueryPosition, RowShape, TensorRows
from tests.exactness import inputs
from tests.strategies import examples, held_heads, lengths, patterns, scales

RESULTS = ("out", "lse", "dq", "dk", "dv")


def streamed(q: Tensor, k: Tensor, v: Tensor, pattern: rs.Pattern, **options: object) -> tuple[Tensor, Tensor]:
    batch, n, heads, _ = q.shape
    out, lse = torch.empty_like(q), torch.empty(batch, heads, n, dtype=torch.float64)
    source = TensorRows({"q": q.detach(), "k": k.detach(), "v": v.detach()})
    rs.stream_attention(source, TensorRows({"out": out, "lse": lse}), n, pattern, **options)  # type: ignore[arg-type]
    return out, lse


def layouts(pattern: rs.Pattern, causal: bool) -> st.SearchStrategy[str | rs.Balanced]:
    return st.sampled_from(["contiguous", "contiguous", "zigzag", "balanced", rs.Balanced(pattern, causal, 0.3)])


@examples(60)
@given(st.data())
def test_forward_equals_the_oracle(data: st.DataObject) -> None:
    sizes = data.draw(lengths().filter(sum))
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    pattern = data.draw(held_heads(data.draw(patterns()), kv_heads))
    causal, shards = data.draw(st.booleans()), data.draw(st.integers(1, min(6, sum(sizes))))
    q, k, v = inputs(data.draw(st.integers(1, 2)), sum(sizes), kv_heads, group, 4)
    options = dict(causal=causal, lengths=sizes, scale=data.draw(scales()))
    layout = data.draw(layouts(pattern, causal))
    found = streamed(q, k, v, pattern, shards=shards, layout=layout, **options)
    wanted = dense_attention(q, k, v, pattern=pattern, **options)  # type: ignore[arg-type]
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y.detach(), rtol=0, atol=1e-12)


@examples(40)
@given(st.data())
def test_backward_equals_the_oracle(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    sizes = data.draw(lengths().filter(sum))
    n, kv_heads, group = sum(sizes), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    pattern = data.draw(patterns())
    causal, shards = data.draw(st.booleans()), data.draw(st.integers(1, min(6, n)))
    q, k, v = inputs(2, n, kv_heads, group, 4)
    scale = data.draw(scales())
    out, lse = dense_attention(q, k, v, pattern=pattern, causal=causal, lengths=sizes, scale=scale)
    grad_out = torch.randn_like(out)
    wanted = torch.autograd.grad((out * grad_out).sum(), (q, k, v))
    names = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "grad_out": grad_out}
    source = TensorRows({name: x.detach() for name, x in names.items()})
    found = {name: torch.empty_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    folder = tmp_path_factory.mktemp("backward")
    options = dict(causal=causal, lengths=sizes, shards=shards, folder=folder, scale=scale)
    options |= dict(layout=data.draw(layouts(pattern, causal)))
    rs.stream_backward(source, TensorRows({name: x.detach() for name, x in found.items()}), n, pattern, **options)  # type: ignore[arg-type]
    for x, y in zip(found.values(), wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_for_bit_the_simulated_ring(tmp_path: Path, causal: bool, dtype: torch.dtype) -> None:
    """The same plan, the same engine, the same order of sums: the same bits, also of gradients in 16 bits."""
    pattern, n = rs.Dilated((32, 500), (1, 4)), 500
    q, k, v = inputs(1, n, 2, 2, 16, dtype)
    sim = rs.SimulatedRing(5, layout="contiguous", routing="direct")
    out, lse = rs.attention(q, k, v, pattern=pattern, causal=causal, return_lse=True, ring=sim)
    grad_out = torch.randn_like(out)
    wanted = [out, lse, *torch.autograd.grad((out * grad_out).sum(), (q, k, v))]
    names = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "grad_out": grad_out}
    source = TensorRows({name: x.detach() for name, x in names.items()})
    results = {
        name: torch.empty_like(x.detach()) for name, x in zip(("out", "lse", "dq", "dk", "dv"), wanted, strict=True)
    }
    rs.stream_attention(source, TensorRows(results), n, pattern, causal=causal, shards=5)
    rs.stream_backward(source, TensorRows(results), n, pattern, causal=causal, shards=5, folder=tmp_path)
    for x, y in zip(results.values(), wanted, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(("layout", "causal"), [("zigzag", False), ("balanced", True)])
def test_interrupted_runs_of_shards_of_equal_work(tmp_path: Path, layout: Any, causal: bool) -> None:
    """Forward and backward stop after each shard and resume; the layout is part of a run's identity."""
    lengths = (70, 1, 0, 200, 9, 30, 90)
    q, k, v = inputs(1, sum(lengths), 2, 2, 8)
    wanted = [*dense_attention(q, k, v, pattern=rs.Window(40), causal=causal, lengths=lengths)]
    wanted += torch.autograd.grad((wanted[0] * q.detach()).sum(), (q, k, v))
    held = {name: x.detach() for name, x in {"q": q, "k": k, "v": v, "grad_out": q}.items()}
    found = {name: torch.full_like(x.detach(), torch.nan) for name, x in zip(RESULTS, wanted, strict=True)}
    options: dict[str, Any] = dict(causal=causal, lengths=lengths, shards=4)

    class Stop(Exception):  # noqa: N818
        pass

    def stop(done: rs.streaming.ShardDone) -> None:
        raise Stop

    def run(call: Any, sink: Any = None, **more: Any) -> Any:
        source = TensorRows({**held, "out": found["out"], "lse": found["lse"]})
        sink = TensorRows(found) if sink is None else sink
        return call(source, sink, sum(lengths), rs.Window(40), **{"layout": layout, **options, **more})

    first, second = dict(progress=tmp_path / "progress.jsonl"), dict(folder=tmp_path / "backward")
    for call, where, steps in ((rs.stream_attention, first, 4), (rs.stream_backward, second, 8)):
        for _ in range(steps):
            with pytest.raises(Stop):
                run(call, on_shard=stop, **where)
        assert run(call, **where).resumed == steps
        with pytest.raises(ValueError, match=r"a run with layout='.*', but this one has 'balanced \(window 3"):
            run(call, layout=rs.Balanced(rs.Window(3)), **where)
    for name, x in zip(RESULTS, wanted, strict=True):
        torch.testing.assert_close(found[name], x.detach(), rtol=0, atol=1e-12)
    whole, resumed = (ChecksumSink([QueryPosition(3, 1), QueryPosition(399, 0)]) for _ in range(2))
    run(rs.stream_attention, whole)
    more = dict(progress=tmp_path / "checksums.jsonl")
    for _ in range(2):
        with pytest.raises(Stop):
            run(rs.stream_attention, ChecksumSink([QueryPosition(3, 1), QueryPosition(399, 0)]), on_shard=stop, **more)
    run(rs.stream_attention, resumed, **more)
    assert resumed.checksum == whole.checksum
    assert torch.equal(resumed.read("out", range(399, 400), range(1)), whole.read("out", range(399, 400), range(1)))
    found["out"][0, 399] += 1
    with pytest.raises(ValueError, match="the progress file marks rows"):
        run(rs.stream_attention, **first)


def test_balanced_shards_have_equal_work() -> None:
    lengths = (3000, *[100] * 30, 500)
    q, k, v = torch.randn(3, 1, sum(lengths), 2, 16).unbind()
    source, rows = TensorRows({"q": q, "k": k, "v": v}), list[int]()
    options: dict[str, Any] = dict(causal=True, lengths=lengths, layout="balanced")
    rs.stream_attention(
        source, TensorRows({}), len(q[0]), rs.Full(), shards=4, on_shard=lambda done: rows.append(done.rows), **options
    )
    assert sum(rows) == sum(lengths)
    assert max(rows) <= 1.05 * sum(lengths) / 4 + 1
    plan = rs.plan(rs.Full(), sum(lengths), ring_size=4, **options)
    assert plan.imbalance < 1.05
    with pytest.raises(ValueError, match="layout='even': must be 'contiguous' or 'zigzag' or 'balanced'"):
        rs.stream_attention(source, TensorRows({}), len(q[0]), rs.Full(), layout="even")  # type: ignore[arg-type]


def test_callable_source_and_callback_sink() -> None:
    n, pattern = 300, rs.Dilated((16, 300), (1, 4))
    q, k, v = (x.detach() for x in inputs(1, n, 2, 1, 8))
    held = TensorRows({"q": q, "k": k, "v": v})
    taken: list[tuple[str, int, Tensor]] = []
    source = CallableSource(RowShape(2, 2, 8, torch.float64), held.read)
    rs.stream_attention(
        source, CallbackSink(lambda name, start, rows: taken.append((name, start, rows))), n, pattern, shards=3
    )
    assert [(name, start) for name, start, _ in taken] == [(x, i) for i in (0, 100, 200) for x in ("out", "lse")]
    out = torch.cat([rows for name, _, rows in taken if name == "out"], 1)
    torch.testing.assert_close(out, rs.attention(q, k, v, pattern=pattern), rtol=0, atol=1e-12)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("is_made", [False, True])
def test_autograd_modes_do_not_matter(tmp_path: Path, mode: Any, is_made: bool) -> None:
    """Other threads read and write rows; there, autograd is on and inference mode off by default."""
    q, k, v = inputs(1, 60, 2, 1, 8)  # these require gradients
    out, lse = rs.attention(q, k, v, pattern=rs.Full(), return_lse=True)
    wanted = (out, lse, *torch.autograd.grad((out * q.detach()).sum(), (q, k, v)))
    held = TensorRows({"q": q, "k": k, "v": v, "out": out, "lse": lse, "grad_out": q})
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    made = CallableSource(held.shape, lambda name, rows, heads: held.read(name, rows, heads) * weight)
    source: Any = made if is_made else held
    with mode():
        found = {name: torch.empty_like(x) for name, x in zip(("out", "lse", "dq", "dk", "dv"), wanted, strict=True)}
        rs.stream_attention(source, TensorRows(found), 60, rs.Full(), shards=3)
        rs.stream_backward(source, TensorRows(found), 60, rs.Full(), shards=3, folder=tmp_path)
    for x, y in zip(found.values(), wanted, strict=True):
        assert not x.requires_grad
        torch.testing.assert_close(x, y.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_results_have_the_dtype_of_the_source(tmp_path: Path, dtype: torch.dtype) -> None:
    q, k, v, grad_out = (x.detach() for x in (*inputs(1, 60, 2, 1, 8, dtype), inputs(1, 60, 2, 1, 8, dtype)[0]))
    taken: dict[str, set[torch.dtype]] = {}
    sink = CallbackSink(lambda name, start, rows: taken.setdefault(name, set()).add(rows.dtype))
    held = TensorRows({"q": q, "k": k, "v": v})
    rs.stream_attention(held, sink, 60, rs.Full(), shards=3)
    out, lse = rs.attention(q, k, v, pattern=rs.Full(), return_lse=True)
    held = TensorRows({"q": q, "k": k, "v": v, "out": out, "lse": lse, "grad_out": grad_out})
    rs.stream_backward(held, sink, 60, rs.Full(), shards=3, folder=tmp_path)
    assert taken.pop("lse") == {lse.dtype}
    assert taken == {name: {dtype} for name in ("out", "dq", "dk", "dv")}


def test_parcel_bytes_are_those_of_a_ring() -> None:
    n, pattern = 512, rs.Dilated((32, 512), (1, 4))
    q, k, v = (x.detach() for x in inputs(1, n, 2, 1, 8))
    source = TensorRows({"q": q, "k": k, "v": v})
    done = rs.stream_attention(source, TensorRows({}), n, pattern, causal=True, shards=4)
    plan = rs.plan(pattern, n, ring_size=4, layout="contiguous", causal=True, heads=2, head_dim=8, dtype=torch.float64)
    assert done.parcel_bytes == sum(plan.bytes_received(rank) for rank in range(4)) > 0


def test_errors_of_a_source_are_raised() -> None:
    def broken(name: str, rows: range, heads: range) -> Tensor:
        if rows.start > 60:
            raise OSError("the disk is gone")
        return torch.ones(1, len(rows), len(heads), 8)

    source = CallableSource(RowShape(1, 1, 8), broken)
    with pytest.raises(OSError, match="the disk is gone"):
        rs.stream_attention(source, TensorRows({}), 100, rs.Full(), shards=4)
    wrong = CallableSource(RowShape(1, 1, 8), lambda name, rows, heads: torch.ones(1, len(rows), len(heads), 4))
    with pytest.raises(ValueError, match=r"must be torch.float32 of shape \(1, 100, 1, 8\)"):
        rs.stream_attention(wrong, TensorRows({}), 100, rs.Full(), shards=1)


def test_rows_of_another_shape_or_dtype_raise(tmp_path: Path) -> None:
    """Otherwise they would be broadcast or rounded silently."""
    q, k, v = (x.detach() for x in inputs(1, 60, 2, 1, 8, torch.float32))
    out, lse = rs.attention(q, k, v, pattern=rs.Full(), return_lse=True)
    held = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "grad_out": q}

    class OneHead:
        shape = TensorRows(held).shape

        def read(self, name: str, rows: range, heads: range) -> Tensor:
            return TensorRows(held).read(name, rows, heads)[:, :, :1]

    with pytest.raises(ValueError, match=r"\(1, 60, 1, 8\): must be .* \(1, 60, 2, 8\)"):
        rs.stream_attention(OneHead(), TensorRows({}), 60, rs.Full(), shards=1)
    for name, x in {"grad_out": q.double(), "out": out[..., :1], "lse": lse[:, :1]}.items():
        with pytest.raises(ValueError, match=rf"read\('{name}', .*: must be torch.float32 of shape"):
            rs.stream_backward(
                TensorRows(held | {name: x}), TensorRows({}), 60, rs.Full(), shards=1, folder=tmp_path / name
            )
    for sink in (out.half(), out.new_empty(3, 60, 2, 8)):
        with pytest.raises(ValueError, match=r"out: the sink takes .* but the shard has torch.float32"):
            rs.stream_attention(TensorRows(held), TensorRows({"out": sink}), 60, rs.Full(), shards=2)


def test_a_callable_source_in_backward(tmp_path: Path) -> None:
    q, k, v = (x.detach() for x in inputs(1, 60, 2, 1, 8))
    out, lse = rs.attention(q, k, v, pattern=rs.Full(), return_lse=True)
    held = TensorRows({"q": q, "k": k, "v": v, "out": out, "lse": lse, "grad_out": q})
    found, wanted = torch.empty_like(q), torch.empty_like(q)
    for number, (source, dq) in enumerate(((held, wanted), (CallableSource(held.shape, held.read), found))):
        rs.stream_backward(source, TensorRows({"dq": dq}), 60, rs.Full(), shards=3, folder=tmp_path / str(number))  # type: ignore[arg-type]
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(n=0), "seq_len=0: must be at least 1"),
        (dict(shards=0), r"shards=0: must be in 1 \.\. 100"),
        (dict(shards=101), r"shards=101: must be in 1 \.\. 100"),
        (dict(budget_bytes=1000), "budget_bytes=1,000: even .* shards of a row or two need"),
        (dict(shards=2, budget_bytes=1000), "shards=2: a run would hold .* more than budget_bytes=1,000"),
        (dict(shards=3.0), "shards=3.0: must be an int"),
        (dict(scale=float("inf")), "scale=inf: must be finite"),
        (dict(scale=1e39), "scale=1e\\+39: must be finite in torch.float32"),
        (dict(scale="half"), "scale='half': must be a number"),
        (dict(lengths=iter([40, 50])), "lengths add up to 90, but the sequence has 100 rows"),
        (dict(only=["0"]), "only='0': must be an int"),
        (dict(kernel="none"), "kernel='none': must be one of"),
        (dict(n=200), "row 199 of q: it has 100 rows"),
    ],
)
def test_invalid_arguments_raise(options: dict[str, object], words: str) -> None:
    q, k, v = torch.ones(3, 1, 100, 2, 8).unbind()
    n = options.pop("n", 100)
    with pytest.raises((ValueError, TypeError), match=words):
        rs.stream_attention(TensorRows({"q": q, "k": k, "v": v}), TensorRows({}), n, rs.Full(), **options)  # type: ignore[arg-type]


def test_invalid_tensors_raise() -> None:
    q = torch.ones(1, 10, 2, 8)
    with pytest.raises(TypeError, match="pattern='full': must be "):
        rs.stream_attention(TensorRows({"q": q, "k": q, "v": q}), TensorRows({}), 10, "full")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out: the sink has 7 rows, but the shard ends with row 9"):
        rs.stream_attention(TensorRows({"q": q, "k": q, "v": q}), TensorRows({"out": q[:, :7].clone()}), 10, rs.Full())
    with pytest.raises(ValueError, match="no k, v among q"):
        _ = TensorRows({"q": q}).shape
    with pytest.raises(ValueError, match="must be equal"):
        _ = TensorRows({"q": q, "k": q[:, :5], "v": q[:, :5]}).shape
    with pytest.raises(ValueError, match="same dtype"):
        _ = TensorRows({"q": q, "k": q.double(), "v": q}).shape
    with pytest.raises(ValueError, match=r"lse has shape \(1, 10, 2, 8\)"):
        TensorRows({"lse": q})
    with torch.autocast("cpu"), pytest.raises(ValueError, match=r"torch\.autocast is on"):
        rs.stream_attention(TensorRows({"q": q, "k": q, "v": q}), TensorRows({}), 10, rs.Full())


def test_only_some_shards() -> None:
    n, pattern = 300, rs.Dilated((32, 300), (1, 4))
    q, k, v = (x.detach() for x in inputs(1, n, 2, 1, 8))
    source, out = TensorRows({"q": q, "k": k, "v": v}), torch.full_like(q, torch.nan)
    for only in (iter(range(3)), [4], [3]):
        rs.stream_attention(source, TensorRows({"out": out}), n, pattern, causal=True, shards=5, only=only)
    whole = torch.empty_like(q)
    rs.stream_attention(source, TensorRows({"out": whole}), n, pattern, causal=True, shards=5)
    assert torch.equal(out, whole)
    with pytest.raises(ValueError, match=r"only=\[5\]: there is no shard 5"):
        rs.stream_attention(source, TensorRows({}), n, pattern, shards=5, only=[5])


def test_a_sink_with_a_misspelt_name_raises(tmp_path: Path) -> None:
    """Otherwise its results would be dropped silently."""
    q, k, v = (x.detach() for x in inputs(1, 60, 2, 1, 8))
    source = TensorRows({"q": q, "k": k, "v": v, "out": q, "lse": q[..., 0].mT.contiguous(), "grad_out": q})
    for names in (["Out"], ["out", "outt"], ["dq"]):
        with pytest.raises(ValueError, match=rf"the sink has {names[-1]}, .* out, lse"):
            rs.stream_attention(source, TensorRows(dict.fromkeys(names, q.clone())), 60, rs.Full())
    with pytest.raises(ValueError, match=r"the sink has d_q, .* dq, dk, dv"):
        rs.stream_backward(source, TensorRows({"dk": k.clone(), "d_q": q}), 60, rs.Full(), folder=tmp_path)
