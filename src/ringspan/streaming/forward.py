"""`stream_attention`: exact attention over a sequence that does not fit in memory, shard by shard.

A shard is a rank of a simulated ring, walked by the ring's own engine; what other ranks would send it is read from the
source. Shards depend on nothing but the source, so a run that was interrupted goes on with the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from ringspan.engine import walk_forward
from ringspan.geometry import Pattern, as_int
from ringspan.ring.players import drive
from ringspan.streaming.job import ShardDone, ShardNotes, Streamed, make_job
from ringspan.streaming.mail import SourceMail, forward_posts, without_sends
from ringspan.streaming.pipeline import run_pipeline
from ringspan.streaming.progress import Progress
from ringspan.streaming.rows import Sink, Source


def stream_attention(
    source: Source,
    sink: Sink,
    n: int,
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
    """Exact attention over ``n`` rows of a source, written to a sink, in bounded memory.

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
        n,
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
        mail = SourceMail(source, job.packing_of, forward_posts(plan), parcel_reader, job.counters)
        with torch.no_grad(), notes.counting_parcels(shard):
            out, lse = drive(walk_forward(plan, mail, *rows, scale=job.scale, kernel=job.kernel))
            return out.to(source.shape.dtype), lse

    def write(shard: int, results: tuple[Tensor, Tensor]) -> None:
        for name, x in zip(("out", "lse"), results, strict=True):
            sink.write(name, job.span(shard).start, x.cpu())
        notes.done(str(shard), shard, sink.finish())

    todo = [shard for shard in wanted if str(shard) not in finished.finished]
    with ThreadPoolExecutor(1, "read parcels") as parcel_reader:
        run_pipeline(todo, lambda shard: job.read(shard, finished.inputs), compute, write)
    return notes.streamed()
