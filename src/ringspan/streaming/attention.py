"""`stream_attention` and `stream_backward`: exact attention over sequences larger than memory, by shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ringspan.engine import Gradients, run_backward, run_forward
from ringspan.geometry import Pattern, as_int
from ringspan.kernels import accumulation_dtype
from ringspan.kernels.kernel import Needs
from ringspan.planning import RankPlan
from ringspan.streaming.job import Job, Progress, ShardDone, ShardNotes, Streamed, make_job
from ringspan.streaming.sources import Sink, Source
from ringspan.streaming.spool import Spool
from ringspan.streaming.transport import (
    SourceTransport,
    backward_transfers,
    forward_transfers,
    run_pipeline,
    without_sends,
)


def stream_attention(
    source: Source,
    sink: Sink,
    seq_len: int,
    pattern: Pattern,
    *,
    causal: bool = False,
    scale: float | None = None,
    lengths: Sequence[int] | None = None,
    budget_bytes: int = 4 * 2**30,
    shards: int | None = None,
    only: Sequence[int] | None = None,
    progress: Path | str | None = None,
    device: torch.device | str = "cpu",
    kernel: str | None = None,
    on_shard: Callable[[ShardDone], None] | None = None,
) -> Streamed:
    """Exact attention over ``seq_len`` rows of a source, written to a sink, in bounded memory.

    Args:
        source: where rows of q, k and v come from: `ringspan.streaming.HeldRows` (tensors in host memory),
            `open_numpy`, `open_safetensors`, `MadeRows` (a callable), or anything with their methods.
        sink: where rows of "out" and "lse" go: `HeldRows`, `create_numpy`, `create_safetensors`, `ConsumedRows`.
        pattern, causal, scale, lengths, kernel: as for `ringspan.attention`.
        budget_bytes: what the run may hold beyond what the process holds already; decides how many shards there are.
        shards: how many shards, if not as few as the budget allows.
        only: walk these shards and no others: shards depend on nothing but the source, so that machines can share them.
        progress: a file that records finished shards and a fingerprint of the inputs. If it exists, the run resumes
            after them; inputs that differ are an error.
        device: where shards are computed; rows and results pass through host memory.
        on_shard: called after each shard, when its results last.

    >>> import torch, ringspan as rs
    >>> q, k, v = torch.randn(3, 1, 1000, 2, 8).unbind()
    >>> out = torch.empty_like(q)
    >>> source = rs.streaming.HeldRows({"q": q, "k": k, "v": v})
    >>> pattern = rs.Dilated((64, 1000), (1, 8))
    >>> done = rs.stream_attention(source, rs.streaming.HeldRows({"out": out}), 1000, pattern, shards=4)
    >>> torch.allclose(out, rs.attention(q, k, v, pattern=pattern), rtol=0, atol=1e-6)
    True
    """
    path = None if progress is None else Path(progress)
    job = make_job(
        source,
        seq_len,
        pattern,
        causal=causal,
        scale=scale,
        lengths=lengths,
        budget_bytes=budget_bytes,
        shards=shards,
        progress=path,
        device=device,
        kernel=kernel,
        backward=False,
    )
    count = job.plan.layout.ring_size
    wanted = list(range(count)) if only is None else [as_int("only", shard) for shard in only]
    for shard in wanted:
        if not 0 <= shard < count:
            raise ValueError(f"only={wanted}: there is no shard {shard}, they are 0 .. {count - 1}")
    finished = Progress(path, job.settings("stream_attention", sink), job.fingerprint)
    sink.resume(list(finished.finished.values()))
    notes = ShardNotes(job, finished, count, on_shard)

    def compute(shard: int, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
        plan = without_sends(job.plan.rank(shard))
        transport = SourceTransport(source, job.packing_of, forward_transfers(plan), parcel_reader, job.counters)
        with torch.no_grad(), notes.counting_parcels(shard):
            out, lse = run_forward(plan, transport, *rows, scale=job.scale, kernel=job.kernel)
            return out.to(source.shape.dtype), lse

    def write(shard: int, results: tuple[Tensor, Tensor]) -> None:
        for name, x in zip(("out", "lse"), results, strict=True):
            sink.write(name, job.span(shard).start, x.cpu())
        notes.done(str(shard), shard, sink.finish())

    todo = [shard for shard in wanted if str(shard) not in finished.finished]
    with ThreadPoolExecutor(1, "read parcels") as parcel_reader:
        run_pipeline(todo, lambda shard: job.read(shard, finished.inputs), compute, write)
    return notes.streamed()


_NAMES = ("dq", "dk", "dv")


@dataclass(frozen=True)
class _Pass:
    """One walk over all shards: in which order, over how much of each plan, and what becomes of it."""

    name: str
    backwards: bool
    plan: Callable[[RankPlan], RankPlan]
    needs: Needs
    fills_spool: bool
    writes: bool


def _passes(causal: bool) -> list[_Pass]:
    everything: Needs = (True, True, True)
    if causal:
        return [_Pass("gradients", True, without_sends, everything, fills_spool=True, writes=True)]
    keys_only: Needs = (False, True, True)
    return [
        _Pass("parcels", False, _parcels_only, keys_only, fills_spool=True, writes=False),
        _Pass("gradients", False, without_sends, everything, fills_spool=False, writes=True),
    ]


def _parcels_only(plan: RankPlan) -> RankPlan:
    """The part of a plan whose gradients go to others: nothing of hop 0, and nothing comes home."""
    first, *others = (replace(hop, gradients_in=()) for hop in without_sends(plan).hops)
    return replace(plan, hops=(replace(first, tiles=()), *others))


def stream_backward(
    source: Source,
    sink: Sink,
    seq_len: int,
    pattern: Pattern,
    *,
    folder: Path | str,
    causal: bool = False,
    scale: float | None = None,
    lengths: Sequence[int] | None = None,
    budget_bytes: int = 4 * 2**30,
    shards: int | None = None,
    device: torch.device | str = "cpu",
    kernel: str | None = None,
    on_shard: Callable[[ShardDone], None] | None = None,
) -> Streamed:
    """Gradients "dq", "dk" and "dv" of ``sum(out * grad_out)``, written to a sink, in bounded memory.

    The source has, beside q, k and v, the ``"out"`` and ``"lse"`` that `stream_attention` wrote, and ``"grad_out"``.
    The folder holds the progress of the run, so that it can be interrupted, and the spool: for each parcel, and each
    shard that uses it, as many rows in the accumulation dtype; that is what a ring with
    ``routing="direct"`` sends home. It can be deleted after. Everything else is as for `stream_attention`.
    """
    folder = Path(folder)
    path = folder / "progress.jsonl"
    job = make_job(
        source,
        seq_len,
        pattern,
        causal=causal,
        scale=scale,
        lengths=lengths,
        budget_bytes=budget_bytes,
        shards=shards,
        progress=path,
        device=device,
        kernel=kernel,
        backward=True,
    )
    finished = Progress(path, job.settings("stream_backward", sink), job.fingerprint)
    passes = _passes(causal)
    notes = ShardNotes(job, finished, len(passes) * job.plan.layout.ring_size, on_shard)

    sink.resume([known for step, known in finished.finished.items() if step.startswith("gradients")])
    with ThreadPoolExecutor(1, "read parcels") as parcel_reader:
        for which in passes:
            _run_pass(which, job, sink, folder / "spool", finished, parcel_reader, notes)
    return notes.streamed()


def _run_pass(
    which: _Pass,
    job: Job,
    sink: Sink,
    folder: Path,
    finished: Progress,
    parcel_reader: ThreadPoolExecutor,
    notes: ShardNotes,
) -> None:
    sizes = job.plan.sizes
    spool = Spool(folder, accumulation_dtype(job.source.shape.dtype), 2 * sizes.batch * sizes.head_dim)

    def compute(shard: int, rows: list[Tensor]) -> Gradients:
        plan = which.plan(job.plan.rank(shard))
        gradients = spool.of_shard(shard, plan, keep=which.fills_spool)
        transport = SourceTransport(
            job.source, job.packing_of, backward_transfers(plan), parcel_reader, job.counters, gradients
        )
        grad_out, *others = rows
        with torch.no_grad(), notes.counting_parcels(shard):
            wide = run_backward(
                plan, transport, grad_out, None, *others, scale=job.scale, kernel=job.kernel, needs=which.needs
            )
            dq, dk, dv = (None if x is None else x.to(job.source.shape.dtype) for x in wide)
        gradients.keep()
        return dq, dk, dv

    def write(shard: int, results: Gradients) -> None:
        if which.writes:
            for name, x in zip(_NAMES, results, strict=True):
                assert x is not None
                sink.write(name, job.span(shard).start, x.cpu())
        notes.done(f"{which.name} {shard}", shard, sink.finish() if which.writes else {})

    shards = range(job.plan.layout.ring_size)
    order = reversed(shards) if which.backwards else shards
    todo = [shard for shard in order if f"{which.name} {shard}" not in finished.finished]
    run_pipeline(todo, lambda shard: job.read(shard, finished.inputs), compute, write)
