"""`stream_attention` and `stream_backward`: exact attention over sequences larger than memory, shard by shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ringspan.engine import run_backward, run_forward
from ringspan.geometry import Pattern, as_int
from ringspan.kernels import accumulation_dtype
from ringspan.kernels.kernel import Gradients, Needs
from ringspan.layout import AnyLayout
from ringspan.planning import RankPlan
from ringspan.softmax import merge_sinks_
from ringspan.streaming.job import (
    Job,
    RunProgress,
    ShardDone,
    ShardReporter,
    StreamOptions,
    StreamSummary,
    check_gradients,
    check_sink,
    make_job,
)
from ringspan.streaming.sinks import Sink
from ringspan.streaming.sources import GRADIENTS, OUTPUTS, Source
from ringspan.streaming.transport import (
    SourceTransport,
    Spool,
    backward_transfers,
    forward_transfers,
    run_pipeline,
    without_sends,
)
from ringspan.validation import Lengths


def stream_attention(
    source: Source,
    sink: Sink,
    seq_len: int,
    pattern: Pattern,
    *,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    lengths: Lengths | None = None,
    cu_seqlens: Lengths | None = None,
    layout: AnyLayout = "contiguous",
    budget_bytes: int = 4 * 2**30,
    shards: int | None = None,
    only: Sequence[int] | None = None,
    progress: Path | str | None = None,
    device: torch.device | str = "cpu",
    kernel: str | None = None,
    on_shard: Callable[[ShardDone], None] | None = None,
) -> StreamSummary:
    """Exact attention over ``seq_len`` rows of a source, written to a sink, in bounded memory.

    Args:
        source: provides rows of q, k and v: `ringspan.streaming.TensorRows` (tensors in host memory), `open_numpy`,
            `open_safetensors`, `CallableSource`, or any `Source`.
        sink: receives rows of "out" and "lse": `TensorRows`, `create_numpy`, `create_safetensors`, `CallbackSink`, or
            any `Sink`.
        pattern, causal, scale, softcap, lengths, cu_seqlens, kernel: as for `ringspan.attention`.
        sinks: (heads,), as for `ringspan.attention`.
        layout: which rows a shard holds. Contiguous shards are read and written in one piece. In the others,
            ``"zigzag"``, ``"balanced"`` for packed documents, or `rs.Balanced`, work is balanced too: for machines that
            share the shards.
        budget_bytes: how much memory the run may use in addition to what the process already holds.
        shards: the number of shards. Default: the fewest that fit the budget.
        only: compute only these shards. Shards depend on nothing but the source, so machines can share them.
        progress: a file that records finished shards and a fingerprint of the inputs. If it exists, the run resumes
            after them; inputs that differ are an error.
        device: computes the shards. Rows and results pass through host memory.
        on_shard: called after each shard, when its results are durable.

    >>> import torch, ringspan as rs
    >>> q, k, v = torch.randn(3, 1, 1000, 2, 8).unbind()
    >>> out = torch.empty_like(q)
    >>> source = rs.streaming.TensorRows({"q": q, "k": k, "v": v})
    >>> pattern = rs.Dilated((64, 1000), (1, 8))
    >>> done = rs.stream_attention(source, rs.streaming.TensorRows({"out": out}), 1000, pattern, shards=4)
    >>> torch.allclose(out, rs.attention(q, k, v, pattern=pattern), rtol=0, atol=1e-6)
    True
    """
    path = None if progress is None else Path(progress)
    options = StreamOptions(
        causal, scale, softcap, sinks, lengths, cu_seqlens, layout, budget_bytes, shards, device, kernel
    )
    job = make_job(source, seq_len, pattern, options, progress=path, backward=False)
    wanted = list(job.shards) if only is None else [as_int("only", shard) for shard in only]
    for shard in wanted:
        if shard not in job.shards:
            raise ValueError(f"only={wanted}: there is no shard {shard}; must be in 0 .. {job.shards[-1]}")
    check_sink(sink, backward=False)
    state = RunProgress(path, job.settings("stream_attention", sink), job.fingerprint)
    sink.resume(list(state.finished.values()))
    reporter = ShardReporter(job, state, len(job.shards), on_shard)

    def compute(shard: int, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        plan = without_sends(job.plan.rank(shard))
        transport = SourceTransport(source, job.packing_of, forward_transfers(plan), parcel_reader, job.counters)
        with torch.no_grad(), reporter.counting_parcels(shard):
            out, lse = run_forward(plan, transport, *rows, scores=job.scores, kernel=job.kernel)
            if job.sinks is not None:
                merge_sinks_(out, lse, job.sinks)
            return out.to(source.shape.dtype), lse

    def write(shard: int, results: tuple[Tensor, Tensor]) -> None:
        for name, x in zip(OUTPUTS, results, strict=True):
            job.write(sink, name, shard, x.cpu())
        reporter.done(str(shard), shard, sink.finish())

    todo = [shard for shard in wanted if str(shard) not in state.finished]
    with ThreadPoolExecutor(1, "read parcels") as parcel_reader:
        run_pipeline(todo, lambda shard: job.read(shard, state.inputs), compute, write)
    return reporter.summary()


def stream_backward(
    source: Source,
    sink: Sink,
    seq_len: int,
    pattern: Pattern,
    *,
    folder: Path | str,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    lengths: Lengths | None = None,
    cu_seqlens: Lengths | None = None,
    layout: AnyLayout = "contiguous",
    budget_bytes: int = 4 * 2**30,
    shards: int | None = None,
    device: torch.device | str = "cpu",
    kernel: str | None = None,
    on_shard: Callable[[ShardDone], None] | None = None,
) -> StreamSummary:
    """Gradients "dq", "dk" and "dv" of ``sum(out * grad_out)``, written to a sink, in bounded memory.

    In addition to q, k and v, the source provides ``"out"`` and ``"lse"`` as written by `stream_attention`, and
    ``"grad_out"``. The folder holds the progress file, so that the run can be interrupted, and the spool: for each
    parcel, and each shard that uses it, as many rows in the accumulation dtype. That is what a ring with
    ``routing="direct"`` returns to the owners. Delete the folder after the run. All other arguments are as for
    `stream_attention`. Gradients of the sinks and through the lse are refused.
    """
    folder = Path(folder)
    path = folder / "progress.jsonl"
    options = StreamOptions(
        causal, scale, softcap, sinks, lengths, cu_seqlens, layout, budget_bytes, shards, device, kernel
    )
    job = make_job(source, seq_len, pattern, options, progress=path, backward=True)
    check_gradients(source)
    check_sink(sink, backward=True)
    state = RunProgress(path, job.settings("stream_backward", sink), job.fingerprint)
    sink.resume([record for step, record in state.finished.items() if step.startswith("gradients")])
    passes = _passes(single=causal and layout == "contiguous")
    reporter = ShardReporter(job, state, len(passes) * len(job.shards), on_shard)
    with ThreadPoolExecutor(1, "read parcels") as parcel_reader:
        for which in passes:
            _run_pass(which, job, sink, folder / "spool", parcel_reader, reporter)
    return reporter.summary()


@dataclass(frozen=True)
class _Pass:
    """One pass of backward over all shards: in which order, with which part of each plan, and where results go."""

    name: str
    last_shard_first: bool
    plan: Callable[[RankPlan], RankPlan]
    needs: Needs
    fills_spool: bool
    writes: bool


def _passes(*, single: bool) -> list[_Pass]:
    """Under causality one pass from the last contiguous shard to the first suffices: only later ones use its parcels.

    Otherwise the first pass fills the spool, and the second computes everything.
    """
    everything: Needs = (True, True, True)
    if single:
        return [_Pass("gradients", True, without_sends, everything, fills_spool=True, writes=True)]
    keys_only: Needs = (False, True, True)
    return [
        _Pass("parcels", False, _parcels_only, keys_only, fills_spool=True, writes=False),
        _Pass("gradients", False, without_sends, everything, fills_spool=False, writes=True),
    ]


def _parcels_only(plan: RankPlan) -> RankPlan:
    """The part of a plan whose gradients belong to other shards: without hop 0, and without returned gradients."""
    first, *others = (replace(hop, gradients_in=()) for hop in without_sends(plan).hops)
    return replace(plan, hops=(replace(first, tiles=()), *others))


def _run_pass(
    which: _Pass, job: Job, sink: Sink, folder: Path, parcel_reader: ThreadPoolExecutor, reporter: ShardReporter
) -> None:
    sizes, dtype = job.plan.sizes, job.source.shape.dtype
    spool = Spool(folder, accumulation_dtype(dtype), 2 * sizes.batch * sizes.head_dim)

    def compute(shard: int, rows: list[Tensor]) -> Gradients:
        plan = which.plan(job.plan.rank(shard))
        store = spool.of_shard(shard, plan, store=which.fills_spool)
        transport = SourceTransport(
            job.source, job.packing_of, backward_transfers(plan), parcel_reader, job.counters, store
        )
        grad_out, *others = rows
        with torch.no_grad(), reporter.counting_parcels(shard):
            wide = run_backward(
                plan, transport, grad_out, None, *others, scores=job.scores, kernel=job.kernel, needs=which.needs
            )
            dq, dk, dv = (None if x is None else x.to(dtype) for x in wide)
        store.flush()
        return dq, dk, dv

    def write(shard: int, results: Gradients) -> None:
        if which.writes:
            for name, x in zip(GRADIENTS, results, strict=True):
                assert x is not None
                job.write(sink, name, shard, x.cpu())
        reporter.done(f"{which.name} {shard}", shard, sink.finish() if which.writes else {})

    order = reversed(job.shards) if which.last_shard_first else job.shards
    todo = [shard for shard in order if f"{which.name} {shard}" not in reporter.progress.finished]
    run_pipeline(todo, lambda shard: job.read(shard, reporter.progress.inputs), compute, write)
