"""The support matrix: runs every cell, and writes docs/support.md and the README's table from what was found.

`python -m tests.support_matrix` writes both. `tests/test_support_matrix.py` runs the same cells, and fails if a page
says anything else. A cell is supported if all results equal the dense oracle: output, lse and, where the path computes
them, all gradients. It is refused if every call raises. Anything else is an error, and nothing is written.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product, starmap, zip_longest
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

import ringspan as rs
from ringspan.kernels import accumulation_dtype
from ringspan.oracle import dense_attention
from ringspan.streaming import TensorRows
from ringspan.tools.measure import describe_machine, one_line
from ringspan.tools.pages import Page, Rows, Table, markdown, markdown_table, write_into
from tests.exactness import loss_weights, weighted_loss

ROOT = Path(__file__).parent.parent
PAGE, README, MARKER = ROOT / "docs/support.md", ROOT / "README.md", "support matrix"
REFUSALS = (ValueError, TypeError, RuntimeError)  # NotImplementedError is a RuntimeError
TIMES_DENSE = {torch.float32: 10, torch.bfloat16: 2, torch.float16: 2}

ROWS, HEADS, HEAD_DIM, RANKS = 57, 8, 8, 4  # folds of 7 rows fit the uneven shards of 57 rows, contiguous or zigzag
FOLDED, GRID = rs.Hilbert.folded(7), rs.Hilbert((3, 19))
DILATED = rs.Dilated((16, ROWS), (1, 3))  # a rate below 4 heads, so that blocked and interleaved offsets differ
WINDOW = rs.Window(9, right=3)
UNKNOWN = {"attn_mask": torch.ones(ROWS, ROWS, dtype=torch.bool), "dropout_p": 0.1}  # arguments that no path has

NOT_APPLICABLE = "n/a"

COMMAND = "python -m tests.support_matrix"
INTRODUCTION = """\
`tests/test_support_matrix.py` runs every cell, and fails if this page says anything else. All cells run on the CPU;
none has been run on a GPU.

- ✓: supported. The output, the log-sum-exp and, where the path computes them, all gradients equal a dense fp64 oracle
  within 1e-12. The gradients include those of the sinks.
- no: refused. The call raises the error with this number.
- n/a: not applicable, for the reason with this number."""
PATTERNS_TEXT = f"""\
{ROWS} rows, {HEADS} heads of {HEAD_DIM}. Unless its name says otherwise, a row is run on one device, in fp64, with and
without causality; decoding is always causal. Rings are simulated, with {RANKS} ranks; `tests/ring` runs real processes.
The rows about dtypes, rings, torch.compile, decoding and streaming also combine GQA, packed documents, sinks and a soft
cap. In bf16 and fp16, the allowed error is twice that of dense attention in the same dtype; in fp32, ten times."""
FEATURES_TEXT = "Rings are contiguous and zigzag. The README shows this table without the numbers."
REFUSALS_TEXT = """\
If torch.compile fails while it traces a call, it reports the error in its own words. The table then has the error of
the same call without torch.compile."""

Results = dict[str, Tensor]  # out, lse, dq, dk, dv, dsinks and, of second derivatives, ddq
Run = Callable[["Case"], Results]


@dataclass(frozen=True)
class Case:
    """The tensors and options of one call.

    Without ``lse`` it is neither returned nor part of the loss. Paths with gradients always compute them; a case
    with ``gradient_of`` also asks the others for one.
    """

    pattern: rs.Pattern = DILATED
    causal: bool = True
    rows: int = ROWS
    key_rows: int | None = None
    kv_heads: int = HEADS
    lengths: tuple[int, ...] | None = None
    order: rs.Order | None = None
    dtype: torch.dtype = torch.float64
    sinks: Literal["", "head", "row"] = ""
    softcap: float | None = None
    scale: float | None = None
    lse: bool = True
    gradient_of: Literal["", "qkv", "lse", "sinks", "second"] = ""
    unknown: str = ""

    def tensors(self) -> list[Tensor]:
        """q, k, v and the sinks, if any."""
        keys = (1, self.key_rows or self.rows, self.kv_heads, HEAD_DIM)
        shapes: list[tuple[int, ...]] = [(1, self.rows, HEADS, HEAD_DIM), keys, keys]
        if self.sinks:
            shapes.append((HEADS,) if self.sinks == "head" else (1, self.rows, HEADS))
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(shape, generator=generator, dtype=torch.float64).to(self.dtype) for shape in shapes]

    def weights(self) -> tuple[Tensor, Tensor]:
        """The weights of out and lse in the loss."""
        out = torch.empty(1, self.rows, HEADS, HEAD_DIM, dtype=self.dtype)
        return loss_weights(out, torch.empty(1, HEADS, self.rows, dtype=accumulation_dtype(self.dtype)))

    def options(self, sinks: list[Tensor]) -> dict[str, Any]:
        """The options that all paths have, and those that the case asks all paths for."""
        options: dict[str, Any] = dict(scale=self.scale, softcap=self.softcap, sinks=sinks[0] if sinks else None)
        if self.unknown:
            options[self.unknown] = UNKNOWN[self.unknown]
        return options


def gradients(case: Case, out: Tensor, lse: Tensor, tensors: list[Tensor]) -> Results:
    """The gradients of a loss in which every output has its own weight."""
    weights = case.weights()
    loss = (out * weights[0].to(out)).sum()
    if case.lse:
        loss = weighted_loss(out, lse, (weights[0].to(out), weights[1].to(lse)))
    twice = case.gradient_of == "second"
    grads = torch.autograd.grad(loss, tensors, create_graph=twice)
    found = dict(zip(("dq", "dk", "dv", "dsinks"), grads, strict=False))
    return {**found, "ddq": torch.autograd.grad(found["dq"].square().sum(), tensors[0])[0]} if twice else found


@cache
def oracle(case: Case, dtype: torch.dtype) -> Results:
    """The definition, computed in ``dtype`` from the inputs of the case."""
    q, k, v, *sinks = tensors = [x.to(dtype).requires_grad_() for x in case.tensors()]
    where = dict(pattern=case.pattern, causal=case.causal, lengths=case.lengths, order=case.order)
    out, lse = dense_attention(q, k, v, **where, **case.options(sinks))  # type: ignore[arg-type]
    return {name: x.detach() for name, x in {"out": out, "lse": lse, **gradients(case, out, lse, tensors)}.items()}


def check(case: Case, found: Results) -> None:
    """Raise AssertionError unless all results equal the oracle's.

    In fp64 within 1e-12. Otherwise within a multiple of the error of dense attention in that dtype, or of the rounding
    of the largest number, if that is more: what docs/promises.md states for 16 bits, and `ringspan verify` for fp32.
    """
    right = oracle(case, torch.float64)
    for name, x in found.items():
        allowed = 1e-12
        if case.dtype != torch.float64:
            rounding = torch.finfo(case.dtype).eps * _largest(right[name])
            allowed = TIMES_DENSE[case.dtype] * max(
                rounding, _largest(oracle(case, case.dtype)[name].double() - right[name])
            )
        note = partial("{0}: {1}\n{2}".format, name, case)
        torch.testing.assert_close(x.detach().double(), right[name], rtol=0, atol=allowed, msg=note)


def _largest(x: Tensor) -> float:
    return float(x.nan_to_num(nan=0.0, neginf=0.0).abs().max())  # a row that sees no key has an lse of -inf


def attend(case: Case, ring: rs.SimulatedRing | None = None, compiled: bool = False) -> Results:
    """`rs.attention`, and autograd."""
    q, k, v, *sinks = tensors = [x.requires_grad_() for x in case.tensors()]
    lengths = None if case.lengths is None else torch.tensor(case.lengths)  # a tensor, so that it compiles
    call: Callable[..., Any] = partial(rs.attention, pattern=case.pattern, causal=case.causal, order=case.order)
    options = dict(lengths=lengths, ring=ring, return_lse=case.lse, **case.options(sinks))
    if not compiled:
        found = call(q, k, v, **options)
    else:
        torch.compiler.reset()
        try:
            found = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v, **options)
        except TorchDynamoException as error:  # in Dynamo's words; the same call without it has ringspan's
            call(q, k, v, **options)
            raise AssertionError(f"{case} runs, but does not compile") from error
    results = _named(found, case)
    return {**results, **gradients(case, results["out"], results.get("lse", torch.empty(0)), tensors)}


def _named(found: Any, case: Case) -> Results:
    return dict(zip(("out", "lse"), found, strict=True)) if case.lse else {"out": found}


def over_ring(layout: rs.LayoutName, routing: rs.Routing = "relay", compiled: bool = False) -> Run:
    """A simulated ring: same plan, same engine. `tests/ring` runs real processes."""
    return partial(attend, ring=rs.SimulatedRing(RANKS, layout, routing), compiled=compiled)


def decode(case: Case, prefill: bool = False) -> Results:
    """A block of tokens, or a prompt over a ring; then single tokens; then a block again."""
    q, k, v, *sinks = case.tensors()
    for x in sinks if case.gradient_of == "sinks" else (q, k, v) if case.gradient_of else ():
        x.requires_grad_()
    documents = case.lengths or (case.rows,)
    held = rs.Cache(case.pattern, kv_heads=case.kv_heads, head_dim=HEAD_DIM, batch=len(documents), dtype=case.dtype)
    more = {**({} if case.order is None else {"order": case.order}), **({} if case.causal else {"causal": False})}
    call: Callable[..., Any] = (
        partial(rs.attention_prefill, ring=rs.SimulatedRing(RANKS)) if prefill else rs.attention_step
    )
    parts: list[Results] = []
    order: list[Tensor] = []
    starts = [sum(documents[:i]) for i in range(len(documents))]
    for sizes in zip_longest(*map(_blocks, documents), fillvalue=0):
        rows = torch.cat([torch.arange(start, start + size) for start, size in zip(starts, sizes, strict=True)])
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
        options = case.options([x[:, rows] if case.sinks == "row" else x for x in sinks])
        lengths = None if case.lengths is None else sizes
        keys = rows if case.key_rows is None else rows[: len(rows) // 2]
        found = call(q[:, rows], k[:, keys], v[:, keys], held, lengths=lengths, return_lse=case.lse, **options, **more)
        parts.append(_named(found, case))
        order.append(rows)
        call = rs.attention_step
    back = torch.cat(order).argsort()
    return {
        name: torch.cat([part[name] for part in parts], dim).index_select(dim, back)
        for name, dim in (("out", 1), ("lse", 2))[: len(parts[0])]
    }


def _blocks(rows: int) -> list[int]:
    return [rows // 3, *[1] * (rows // 3), rows - 2 * (rows // 3)]


def stream(case: Case, backward: bool = True, layout: rs.LayoutName = "contiguous") -> Results:
    """Forward, and backward from its results. Neither has an option for the lse: both write or read it."""
    q, k, v, *sinks = case.tensors()
    if case.gradient_of == "sinks":
        sinks[0].requires_grad_()
    call: dict[str, Any] = dict(
        causal=case.causal, lengths=case.lengths, shards=3, layout=layout, **case.options(sinks)
    )
    call |= {} if case.order is None else {"order": case.order}
    found = {"out": torch.empty_like(q), "lse": torch.empty(1, HEADS, case.rows, dtype=accumulation_dtype(case.dtype))}
    source = {"q": q, "k": k, "v": v}
    rs.stream_attention(TensorRows(source), TensorRows(found), case.rows, case.pattern, **call)
    if not backward:
        return found
    grad_out, grad_lse = case.weights()
    source |= {**found, "grad_out": grad_out, **({"grad_lse": grad_lse} if case.lse else {})}
    grads = {"dq": torch.empty_like(q), "dk": torch.empty_like(k), "dv": torch.empty_like(v)}
    with tempfile.TemporaryDirectory() as folder:
        rs.stream_backward(TensorRows(source), TensorRows(grads), case.rows, case.pattern, folder=folder, **call)
    if case.gradient_of == "sinks":
        (grads["dsinks"],) = torch.autograd.grad(found["out"].sum(), sinks)
    if case.gradient_of == "second":
        (grads["ddq"],) = torch.autograd.grad(grads["dq"].sum(), q)
    return {**found, **grads}


@dataclass(frozen=True)
class Outcome:
    """What a cell says: ✓, ✓ under a condition, no or n/a; and the errors, or the reason why it does not apply."""

    mark: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Line:
    """A line of the table of patterns: what it changes in a call, where it runs, and under which causality."""

    changes: tuple[dict[str, Any], ...]
    runs: tuple[Run, ...] = (attend,)
    causality: tuple[bool, ...] = (True, False)


KINDS: dict[str, dict[str, Any]] = {
    "full": dict(pattern=rs.Full()),
    "dilated": dict(pattern=DILATED),
    "dilated, shifted": dict(pattern=replace(DILATED, shift=5)),
    "dilated, blocked offsets": dict(pattern=replace(DILATED, head_offsets="blocked")),
    "window": dict(pattern=WINDOW),
    "dilated window": dict(pattern=rs.Window(12, right=7, dilation=3)),
    "window + dilated": dict(pattern=WINDOW + rs.Dilated((ROWS,), (4,))),
    "dilated, folded order": dict(order=FOLDED),
    "dilated, grid order": dict(order=GRID),
}
PLAIN: dict[str, Any] = {}
PACKED: dict[str, Any] = dict(lengths=(21, 0, 36))
PACKED_GRIDS: dict[str, Any] = dict(rows=2 * ROWS, lengths=(ROWS, 0, ROWS))
TOGETHER: dict[str, Any] = dict(kv_heads=4, sinks="head", softcap=1.5, **PACKED)
ROUTINGS: tuple[rs.Routing, ...] = ("direct", rs.ByNode(2), rs.ByNode(3))
LINES = {
    "causal": Line((PLAIN,), causality=(True,)),
    "not causal": Line((PLAIN,), causality=(False,)),
    "packed documents": Line((PACKED,)),
    "GQA and MQA": Line((dict(kv_heads=4), dict(kv_heads=1))),
    "sinks for each head, or for each row": Line((dict(sinks="head"), dict(sinks="row"))),
    "soft cap": Line((dict(softcap=1.5),)),
    "fp64": Line((PLAIN, TOGETHER)),
    "fp32": Line((dict(dtype=torch.float32), dict(dtype=torch.float32, **TOGETHER))),
    "bf16": Line((dict(dtype=torch.bfloat16), dict(dtype=torch.bfloat16, **TOGETHER))),
    "fp16": Line((dict(dtype=torch.float16), dict(dtype=torch.float16, **TOGETHER))),
    "ring, contiguous": Line((PLAIN, TOGETHER), (over_ring("contiguous"),)),
    "ring, zigzag": Line((PLAIN, TOGETHER), (over_ring("zigzag"),)),
    "ring, balanced": Line(
        (PACKED, TOGETHER), tuple(over_ring("balanced", routing) for routing in ("relay", *ROUTINGS))
    ),
    "ring, other routings": Line((TOGETHER,), tuple(starmap(over_ring, product(("contiguous", "zigzag"), ROUTINGS)))),
    "torch.compile": Line((TOGETHER,), (partial(attend, compiled=True),)),
    "torch.compile, ring": Line((TOGETHER,), (over_ring("contiguous", compiled=True),)),
    "decoding": Line((PLAIN, TOGETHER), (decode, partial(decode, prefill=True)), causality=(True,)),
    "streaming, forward": Line((dict(lse=False), dict(lse=False, **TOGETHER)), (partial(stream, backward=False),)),
    "streaming, backward": Line(
        (dict(lse=False), dict(lse=False, **TOGETHER)), (stream, partial(stream, layout="balanced"))
    ),
    "folded order": Line((dict(order=FOLDED),)),
    "grid order": Line((dict(order=GRID),)),
}

# What each row of the second table asks of a call.
FEATURES: dict[str, tuple[dict[str, Any], ...]] = {
    "causal attention": (dict(causal=True),),
    "bidirectional attention": (dict(causal=False),),
    "full attention, `rs.Full`": (dict(pattern=rs.Full()),),
    "dilated attention, `rs.Dilated`": (dict(pattern=DILATED),),
    "shifted segments, `shift=`": (KINDS["dilated, shifted"],),
    'torchscale\'s head offsets, `"blocked"`': (KINDS["dilated, blocked offsets"],),
    "sliding windows, `rs.Window`": (KINDS["window"], KINDS["dilated window"]),
    "sums of patterns, `a + b`": (KINDS["window + dilated"],),
    "grouped queries (GQA, MQA)": (dict(kv_heads=4), dict(kv_heads=1)),
    "packed documents, `lengths=`": (PACKED,),
    "attention sinks, `sinks=`, per head": (dict(sinks="head"),),
    "attention sinks per row and head": (dict(sinks="row"),),
    "soft caps, `softcap=`": (dict(softcap=1.5),),
    "other scales, `scale=`": (dict(scale=0.7), dict(scale=-0.5)),
    "any length, uneven shards": (dict(rows=61), dict(rows=64), dict(rows=3)),
    "tensor-parallel heads, `for_heads`": (dict(pattern=DILATED.for_heads(2, 8), kv_heads=4),),
    "bf16 and fp16": (dict(dtype=torch.bfloat16), dict(dtype=torch.float16)),
    "log-sum-exp output": (dict(lse=True),),
    "gradients": (dict(lse=False, gradient_of="qkv"),),
    "gradients of the sinks": (dict(lse=False, sinks="head", gradient_of="sinks"),),
    "gradients through the log-sum-exp": (dict(gradient_of="lse"),),
    "folded orders, `rs.Hilbert.folded`": (dict(order=FOLDED), dict(order=FOLDED, causal=False)),
    "grid orders, `rs.Hilbert(shape)`": (dict(order=GRID, causal=False),),
    "masks and biases": (dict(unknown="attn_mask"),),
    "dropout on attention weights": (dict(unknown="dropout_p"),),
    "cross-attention": (dict(key_rows=ROWS // 2),),
    "second derivatives": (dict(lse=False, gradient_of="second"),),
}
PATHS: dict[str, tuple[Run, ...]] = {
    "one device": (attend,),
    "ring": (over_ring("contiguous"), over_ring("zigzag")),
    "torch.compile": (partial(attend, compiled=True),),
    "decoding": (decode, partial(decode, prefill=True)),
    "streaming": (stream,),
}


@dataclass(frozen=True)
class Cell:
    """A cell of a table: of `LINES` and `KINDS`, or of `FEATURES` and `PATHS`."""

    row: str
    column: str

    def run(self) -> Outcome:
        """Run all calls of the cell. Calls with the same causality must all be supported, or all be refused."""
        if self.row.endswith(" order") and "order" in KINDS.get(self.column, {}):
            return Outcome(NOT_APPLICABLE, ("This kind of pattern has an order already.",))
        refusals: dict[str, dict[Run, str]] = {}  # by causality, and by path: the first message
        for case, run in self._calls():
            found, reason = refusals.setdefault("causal" if case.causal else "not causal", {}), refusal(case, run)
            known = found.setdefault(run, reason)
            assert bool(known) == bool(reason), f"{self}: one call is supported, and another raises {known or reason}"
        supported = [label for label, found in refusals.items() if not any(found.values())]
        for label, found in refusals.items():
            assert label in supported or all(found.values()), f"{self}: some calls are supported: {found}"
        mark = "✓" if len(supported) == len(refusals) else f"✓ if {supported[0]}" if supported else "no"
        return Outcome(mark, tuple(dict.fromkeys(x for found in refusals.values() for x in found.values() if x)))

    def _calls(self) -> Iterator[tuple[Case, Run]]:
        if self.row in FEATURES:
            for settings in FEATURES[self.row]:
                case = Case(**settings)
                if self.column == "streaming" and case.gradient_of != "lse":
                    case = replace(case, lse=False)  # stream_backward has no gradient of the lse
                yield from ((case, run) for run in PATHS[self.column])
            return
        line = LINES[self.row]
        for causal, change in product(line.causality, line.changes):
            case = Case(**{**KINDS[self.column], **change, "causal": causal})
            if case.order == GRID and case.lengths:
                case = replace(case, **PACKED_GRIDS)
            yield from ((case, run) for run in line.runs)


def refusal(case: Case, run: Run) -> str:
    """The error that a call raises; empty if its results are right."""
    try:
        found = run(case)
    except REFUSALS as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    check(case, found)
    return ""


TABLES: dict[str, tuple[Iterable[str], Iterable[str]]] = {"Patterns": (LINES, KINDS), "Features": (FEATURES, PATHS)}
CELLS = [Cell(row, column) for rows, columns in TABLES.values() for row in rows for column in columns]
Outcomes = dict[Cell, Outcome]


def support_page(outcomes: Outcomes, machine: str) -> str:
    """docs/support.md. Reasons are numbered in the order of the cells."""
    numbers: dict[str, int] = {}
    for outcome in outcomes.values():
        for reason in outcome.reasons:
            numbers.setdefault(reason, len(numbers) + 1)
    inapplicable = {x for outcome in outcomes.values() if outcome.mark == NOT_APPLICABLE for x in outcome.reasons}

    def cells(title: str) -> Rows:
        def text(outcome: Outcome) -> str:
            notes = ", ".join(str(numbers[reason]) for reason in outcome.reasons)
            return f"{outcome.mark} ({notes})" if notes else outcome.mark

        rows, columns = TABLES[title]
        return [["", *columns], *([row, *(text(outcomes[Cell(row, column)]) for column in columns)] for row in rows)]

    messages = [[str(number), f"`{reason}`"] for reason, number in numbers.items() if reason not in inapplicable]
    others = [[str(number), reason] for reason, number in numbers.items() if reason in inapplicable]
    parts = [
        Table("Patterns", cells("Patterns"), PATTERNS_TEXT),
        Table("Features", cells("Features"), FEATURES_TEXT),
        Table("Refusals", [["note", "error"], *messages], REFUSALS_TEXT),
        Table("Not applicable", [["note", "reason"], *others]),
    ]
    return markdown(Page("What is supported", INTRODUCTION, COMMAND, machine, [*parts]), "figures")


def readme_table(outcomes: Outcomes) -> list[str]:
    """The table of features without notes."""
    marks = [[row, *(outcomes[Cell(row, column)].mark for column in PATHS)] for row in FEATURES]
    head, _, *lines = markdown_table([["a model may need", *PATHS], *marks])
    return ["", head, "| --- |" + " :-: |" * len(PATHS), *lines, ""]


def read_support_page(text: str) -> tuple[Outcomes, str]:
    """What docs/support.md says, and the machine that it names."""
    sections = dict(section.split("\n", 1) for section in text.split("\n## ")[1:])
    tables = {
        title: [_cells(line) for line in body.splitlines() if line[:1] == "|"] for title, body in sections.items()
    }
    notes = {row[0]: row[1].strip("`") for title in ("Refusals", "Not applicable") for row in tables[title][2:]}
    outcomes: Outcomes = {}
    for title in TABLES:
        (_, *columns), _, *rows = tables[title]
        for row, *marks in rows:
            for column, mark in zip(columns, marks, strict=True):
                said = re.fullmatch(r"(.+?)(?: \(([\d, ]+)\))?", mark)
                assert said, f"{row}, {column}: an empty cell"
                reasons = tuple(notes[number] for number in said[2].split(", ")) if said[2] else ()
                outcomes[Cell(row, column)] = Outcome(said[1], reasons)
    machine = re.search(rf"Written by `{re.escape(COMMAND)}`; do not edit\. (.*)\.\n", text)
    assert machine, "the page does not name its command"
    return outcomes, machine[1]


def _cells(line: str) -> list[str]:
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def main() -> None:
    outcomes = {}
    for cell in CELLS:
        outcomes[cell] = outcome = cell.run()
        sys.stdout.write(f"{cell.row}; {cell.column}: {outcome.mark}\n")
    PAGE.write_text(support_page(outcomes, one_line(describe_machine())))
    write_into(README, MARKER, readme_table(outcomes))
    sys.stdout.write(f"Written: {PAGE.relative_to(ROOT)}, {README.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
