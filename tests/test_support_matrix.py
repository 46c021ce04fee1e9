"""Every cell of the README's support matrix is run: a tick equals the dense definition, a no raises an error."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ringspan as rs
from ringspan.oracle import dense_attention
from ringspan.streaming import TensorRows

README = (Path(__file__).parent.parent / "README.md").read_text()
ROWS, HEAD_DIM = 64, 8
DILATED = rs.Dilated((16, ROWS), (1, 4))
TOLERANCES = {torch.float64: 1e-12, torch.bfloat16: 3e-2, torch.float16: 4e-3}

# What each row of the matrix asks of a call; `kv_heads`, `rows`, `dtype` and `order` describe the tensors.
FEATURES: dict[str, list[dict[str, Any]]] = {
    "causal attention": [dict(causal=True)],
    "bidirectional attention": [dict(causal=False)],
    "dilated attention, `rs.Dilated`": [dict(pattern=DILATED)],
    "full attention, `rs.Full`": [dict(pattern=rs.Full())],
    "shifted segments, `shift=`": [dict(pattern=rs.Dilated((16, ROWS), (1, 4), shift=5))],
    'torchscale\'s head offsets, `"blocked"`': [dict(pattern=rs.Dilated((16, ROWS), (1, 4), "blocked"))],
    "grouped queries (GQA, MQA)": [dict(kv_heads=2), dict(kv_heads=1)],
    "packed documents, `lengths=`": [dict(lengths=(20, 44))],
    "any length, uneven shards": [dict(rows=61)],
    "tensor-parallel heads, `for_heads`": [dict(pattern=DILATED.for_heads(2, 8))],
    "bf16 and fp16": [dict(dtype=torch.bfloat16), dict(dtype=torch.float16)],
    "gradients": [dict(gradients=True)],
    "log-sum-exp output": [dict(return_lse=True)],
    "folded orders, `rs.Hilbert.folded`": [
        dict(order=rs.Hilbert.folded(16)),
        dict(order=rs.Hilbert.folded(16), causal=False),
    ],
    "grid orders, `rs.Hilbert(shape)`": [dict(order=rs.Hilbert((8, 8)), causal=False)],
    "sliding windows": [dict(options=dict(window=8))],
    "attention sinks": [dict(options=dict(sinks=torch.zeros(4)))],
    "soft caps": [dict(options=dict(softcap=50.0))],
    "masks and biases": [dict(options=dict(attn_mask=torch.ones(ROWS, ROWS, dtype=torch.bool)))],
    "dropout on attention weights": [dict(options=dict(dropout_p=0.1))],
    "cross-attention": [dict(key_rows=ROWS // 2)],
    "second derivatives": [dict(gradients=True, twice=True)],
}


class Case:
    """Tensors and options of one call."""

    def __init__(
        self,
        *,
        pattern: rs.Pattern = DILATED,
        causal: bool = True,
        kv_heads: int = 4,
        rows: int = ROWS,
        key_rows: int | None = None,
        dtype: torch.dtype = torch.float64,
        lengths: tuple[int, ...] | None = None,
        order: Any = None,
        gradients: bool = False,
        twice: bool = False,
        return_lse: bool = False,
        options: dict[str, Any] | None = None,
    ) -> None:
        torch.manual_seed(0)
        sizes = ((rows, 4), (key_rows or rows, kv_heads), (key_rows or rows, kv_heads))
        self.tensors = [torch.randn(1, n, heads, HEAD_DIM, dtype=dtype, requires_grad=gradients) for n, heads in sizes]
        self.pattern, self.causal, self.lengths, self.order = pattern, causal, lengths, order
        self.gradients, self.twice, self.return_lse = gradients, twice, return_lse
        self.options = options or {}
        self.order_option = {} if order is None else {"order": order}

    def attention(self, q: Tensor, k: Tensor, v: Tensor, ring: Any = None) -> Any:
        lengths = None if self.lengths is None else torch.tensor(self.lengths)  # a tensor, so that it compiles
        chosen: dict[str, Any] = dict(pattern=self.pattern, causal=self.causal, order=self.order, **self.options)
        return rs.attention(q, k, v, lengths=lengths, ring=ring, return_lse=self.return_lse, **chosen)

    def wanted(self) -> list[Tensor]:
        """Output, then the log-sum-exp or the gradients if the case is about them."""
        q, k, v = (x.detach().double().requires_grad_(self.gradients) for x in self.tensors)
        out, lse = dense_attention(
            q, k, v, pattern=self.pattern, causal=self.causal, lengths=self.lengths, order=self.order
        )
        return self.results(out, lse, [q, k, v])

    def results(self, out: Tensor, lse: Tensor | None, tensors: list[Tensor]) -> list[Tensor]:
        if self.gradients:
            grads = torch.autograd.grad(out.sin().sum(), tensors, create_graph=self.twice)
            if self.twice:
                grads[0].sum().backward()
            return [out, *grads]
        return [out, lse] if self.return_lse and lse is not None else [out]


def run_attention(case: Case, call: Callable[..., Any], **options: Any) -> list[Tensor]:
    result = call(*case.tensors, **options)
    out, lse = result if case.return_lse else (result, None)
    return case.results(out, lse, case.tensors)


def on_one_device(case: Case, _: Path) -> list[Tensor]:
    return run_attention(case, case.attention)


def on_a_ring(case: Case, _: Path) -> list[Tensor]:
    """A simulated one: same plan, same engine. `tests/ring` runs real processes."""
    return run_attention(case, case.attention, ring=rs.SimulatedRing(4, layout="contiguous"))


def compiled(case: Case, _: Path) -> list[Tensor]:
    torch.compiler.reset()
    return run_attention(case, torch.compile(case.attention, fullgraph=True, backend="aot_eager"))


def decoding(case: Case, _: Path) -> list[Tensor]:
    q, k, v = case.tensors
    options = {**case.options, **({} if case.causal else {"causal": False}), **case.order_option}
    batch = 1 if case.lengths is None else len(case.lengths)
    cache = rs.Cache(case.pattern, kv_heads=k.shape[2], head_dim=HEAD_DIM, batch=batch, dtype=k.dtype)
    result = rs.attention_step(q, k, v, cache, lengths=case.lengths, return_lse=case.return_lse, **options)
    out, lse = result if case.return_lse else (result, None)
    return case.results(out, lse, case.tensors)


def streaming(case: Case, folder: Path) -> list[Tensor]:
    q, k, v = (x.detach() for x in case.tensors)
    n = q.shape[1]
    call: dict[str, Any] = dict(causal=case.causal, lengths=case.lengths, shards=3, **case.options, **case.order_option)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    out, lse = torch.empty_like(q), torch.empty(1, q.shape[2], n, dtype=wide)
    results = TensorRows({"out": out, "lse": lse})
    rs.stream_attention(TensorRows({"q": q, "k": k, "v": v}), results, n, case.pattern, **call)
    if not case.gradients:
        return [out, lse] if case.return_lse else [out]
    names = {"q": q, "k": k, "v": v, "out": out, "lse": lse, "grad_out": out.cos()}
    grads = {name: torch.empty_like(x) for name, x in (("dq", q), ("dk", k), ("dv", v))}
    rs.stream_backward(TensorRows(names), TensorRows(grads), n, case.pattern, folder=folder, **call)
    if case.twice:
        grads["dq"].sum().backward()
    return [out, *grads.values()]


def table() -> dict[tuple[str, str], str]:
    """The cells of the matrix by feature and column."""
    text = re.search(r"<!-- support matrix -->\n(.*?)<!-- end of support matrix -->", README, re.S)
    assert text
    head, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in text[1].strip().splitlines())
    return {(line[0], column): cell for line in lines for column, cell in zip(head[1:], line[1:], strict=True)}


CELLS = table()
RUNNERS: dict[str, Callable[..., list[Tensor]]] = {
    "one device": on_one_device,
    "ring": on_a_ring,
    "torch.compile": compiled,
    "decoding": decoding,
    "streaming": streaming,
}


def test_the_matrix_has_these_rows_and_columns() -> None:
    assert {feature for feature, _ in CELLS} == set(FEATURES)
    assert {column for _, column in CELLS} == set(RUNNERS)
    assert set(CELLS.values()) == {"✓", "no"}


@pytest.mark.parametrize(("feature", "column"), CELLS, ids=lambda text: text.partition(",")[0].replace(" ", "-"))
def test_cell(feature: str, column: str, tmp_path: Path) -> None:
    for settings in FEATURES[feature]:
        case = Case(**settings)
        if CELLS[feature, column] == "no":
            with pytest.raises((TypeError, ValueError, RuntimeError)):
                RUNNERS[column](case, tmp_path)
            continue
        tolerance = TOLERANCES[case.tensors[0].dtype]
        for found, wanted in zip(RUNNERS[column](case, tmp_path), case.wanted(), strict=True):
            torch.testing.assert_close(found.double(), wanted.double(), rtol=0, atol=tolerance)
