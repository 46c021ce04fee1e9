"""A streaming job: its options, how many shards it has, and the progress file from which it resumes.

A shard is a virtual rank of a ring, contiguous by default. While one is computed, the rows of the next are read and the
results of the previous one are written, so a run holds three shards at a time.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringspan.engine import WORKSPACE_BYTES
from ringspan.geometry import Pattern, as_int, check_pattern
from ringspan.kernels import Kernel, ScoreOptions
from ringspan.layout import AnyLayout, check_layout_name
from ringspan.planning import Packing, Parcel, RingPlan, packing_from_sequence
from ringspan.planning.api import plan
from ringspan.ring.transport import Counters
from ringspan.runtime.files import Journal, read_journal
from ringspan.streaming.sinks import Sink
from ringspan.streaming.sources import (
    GRADIENTS,
    INPUTS,
    OUTPUTS,
    SAMPLED_ROWS,
    SAMPLED_ROWS_PER_SHARD,
    Fingerprint,
    Source,
    TensorRows,
    checksum,
    empty_rows,
    read_rows,
    sampled_rows,
    seq_dim,
)
from ringspan.validation import Lengths, document_lengths, kernel_for, scale_for, softcap_for

ENOUGH_TO_OVERLAP = 16  # shards: the first read and the last write, which overlap with nothing, then cost little
MIN_ROWS_TO_OVERLAP = 2**17  # per shard: with fewer, the cost of each hop exceeds the gain from overlapping
OVERHEAD_BYTES = 48 * 2**20  # buffers that allocators keep (glibc: below 32 MiB), copies of file pages, threads
_FIRST_BYTES = b'{"run": '  # of a progress file, also if its first line is torn


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """The options that `stream_attention` and `stream_backward` have in common."""

    causal: bool = False
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    lengths: Lengths | None = None
    cu_seqlens: Lengths | None = None
    layout: AnyLayout = "contiguous"
    budget_bytes: int = 4 * 2**30
    shards: int | None = None
    device: torch.device | str = "cpu"
    kernel: str | None = None


@dataclass(frozen=True)
class Job:
    """What to compute, over which shards, with which kernel, on which device; ``names`` are the tensors to read."""

    source: Source
    names: tuple[str, ...]
    plan: RingPlan
    scores: ScoreOptions
    sinks: Tensor | None
    kernel: Kernel
    device: torch.device
    counters: Counters

    @property
    def shards(self) -> range:
        return range(self.plan.layout.ring_size)

    def write(self, sink: Sink, name: str, shard: int, x: Tensor) -> None:
        """Write the rows of a shard: each span by itself."""
        for span in self.plan.layout.spans(shard):
            sink.write(name, span.start, x.narrow(seq_dim(name), span.local, span.stop - span.start))

    def read(self, shard: int, known: Fingerprint) -> list[Tensor]:
        """The rows of a shard. Raises if their checksums differ from ``known``, unless that is empty."""
        found = [self._read_shard(name, shard) for name in self.names]
        if known:
            sample, spans = self._sampled(shard), self.plan.layout.spans(shard)
            for name, x in zip(self.names, found, strict=True):
                if checksum([x.select(seq_dim(name), row) for row in sample]) != known[name][shard]:
                    raise ValueError(
                        f"{'some of ' * (len(spans) > 1)}rows {spans[0].start} to {spans[-1].stop - 1} of {name} have "
                        "changed since the run began: restore them and resume, or delete the progress file to start "
                        "over"
                    )
        return [x.to(self.device) for x in found]

    def fingerprint(self) -> Fingerprint:
        """Checksums of sampled rows of every shard."""

        def of_shard(name: str, shard: int) -> int:
            spans = self.plan.layout.spans(shard)
            found: list[Tensor] = []
            for local in self._sampled(shard):
                span = spans[bisect_right(spans, local, key=lambda span: span.local) - 1]
                row = span.start + local - span.local
                found.append(self._read(name, range(row, row + 1)))
            return checksum(found)

        return {name: [of_shard(name, shard) for shard in self.shards] for name in self.names}

    def _read(self, name: str, rows: range) -> Tensor:
        return read_rows(self.source, name, rows, range(self.source.shape.heads_of(name)))

    def _read_shard(self, name: str, shard: int) -> Tensor:
        spans = [range(span.start, span.stop) for span in self.plan.layout.spans(shard)] or [range(0)]
        first, *others = (self._read(name, span) for span in spans)
        if not others:
            return first
        dim = seq_dim(name)
        shape = (*first.shape[:dim], self.plan.layout.rows_of(shard), *first.shape[dim + 1 :])
        return torch.cat([first, *others], dim, out=empty_rows(shape, first.dtype))

    def _sampled(self, shard: int) -> list[int]:
        """Sampled rows of a shard, as it stores them."""
        spans = self.plan.layout.spans(shard)
        start = spans[0].start if spans else 0  # so that shards sample different rows
        rows = range(start, start + self.plan.layout.rows_of(shard))
        sample = sampled_rows(rows, max(SAMPLED_ROWS_PER_SHARD, SAMPLED_ROWS // len(self.shards)))
        return [row - start for row in sample]

    def packing_of(self, parcel: Parcel) -> Packing:
        plan = self.plan
        return packing_from_sequence(
            parcel, plan.pattern, plan.documents, plan.layout, plan.sizes.kv_heads, plan.causal, plan.costs
        )

    def settings(self, call: str, sink: Sink) -> dict[str, Any]:
        """What a resumed run must have in common with the interrupted one."""
        return {
            "call": call,
            "seq_len": self.plan.layout.rows,
            "pattern": self.plan.pattern.text,
            "causal": self.plan.causal,
            "lengths": list(self.plan.documents.lengths),
            "layout": str(self.plan.layout.name),
            "shards": len(self.shards),
            "rows": str(self.source.shape),
            "sink": type(sink).__name__,
            "scale": self.scores.scale,
            "softcap": self.scores.softcap,
            "sinks": None if self.sinks is None else str(self.sinks.tolist()),  # as text: NaN equals no other NaN
            "kernel": self.kernel.name,
        }


def make_job(
    source: Source, seq_len: int, pattern: Pattern, options: StreamOptions, *, progress: Path | None, backward: bool
) -> Job:
    """Validate all arguments and split the sequence into shards that fit the budget.

    The number of shards is that of the options or, by default, of the run in the progress file, or the fewest that fit.
    """
    seq_len, shape, device = as_int("seq_len", seq_len), source.shape, torch.device(options.device)
    if seq_len < 1:
        raise ValueError(f"seq_len={seq_len}: must be at least 1")
    if torch.is_autocast_enabled(device.type):
        raise ValueError("torch.autocast is on: streaming computes in the dtype of the source; exit autocast first")
    like_q = torch.empty(0, shape.head_dim, dtype=shape.dtype, device=device)
    scores = ScoreOptions(scale_for(options.scale, like_q), softcap_for(options.softcap, like_q))
    kernel = kernel_for(options.kernel, like_q, scores.softcap)
    check_pattern(pattern, shape.kv_heads)
    if not isinstance(options.causal, bool):
        raise TypeError(f"causal={options.causal!r}: must be True or False")
    sinks = None if options.sinks is None else _one_per_head(options.sinks, shape.heads).to(device)
    shards, budget_bytes = options.shards, options.budget_bytes
    if shards is not None and not 1 <= as_int("shards", shards) <= seq_len:
        raise ValueError(f"shards={shards}: must be in 1 .. {seq_len}, so that each has rows")
    lengths = document_lengths(options.lengths, options.cu_seqlens, seq_len)
    check_layout_name(options.layout)

    def plan_with(shards: int) -> RingPlan:
        return plan(
            pattern,
            seq_len,
            ring_size=shards,
            layout=options.layout,
            causal=options.causal,
            routing="direct",
            lengths=lengths,
            batch=shape.batch,
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
        )

    way_out = "use more shards, or omit shards="
    if shards is None:
        way_out = f"the run in {progress} began with this many. Raise the budget, or delete the file to start over"
        begun = _shards_of_run(progress)
        shards = begun or fewest_shards(plan_with, WORKSPACE_BYTES, budget_bytes, backward=backward)
    needed = held_bytes(plan_with(shards), WORKSPACE_BYTES, backward=backward)
    if needed > budget_bytes:
        raise ValueError(
            f"shards={shards}: a run would hold {needed:,} bytes, more than budget_bytes={budget_bytes:,}; {way_out}"
        )
    names = ("grad_out", *INPUTS, *OUTPUTS) if backward else INPUTS
    return Job(source, names, plan_with(shards), scores, sinks, kernel, device, Counters())


def _one_per_head(sinks: Any, heads: int) -> Tensor:
    """The sinks. Raises unless they are (heads,), floating-point, and need no gradient."""
    if not isinstance(sinks, Tensor):
        raise TypeError(f"sinks is a {type(sinks).__name__}: must be a torch.Tensor")
    if sinks.shape != (heads,):
        raise ValueError(f"sinks has shape {tuple(sinks.shape)}: streaming takes ({heads},), one logit per query head")
    if not sinks.dtype.is_floating_point:
        raise ValueError(f"sinks is {sinks.dtype}: must be floating-point; cast with .to()")
    if torch.is_grad_enabled() and sinks.requires_grad:
        raise ValueError("sinks requires gradients, which streaming does not compute: pass sinks.detach()")
    return sinks.detach()


def fewest_shards(plan_with: Callable[[int], RingPlan], workspace: int, budget_bytes: int, *, backward: bool) -> int:
    """The fewest shards, a power of two, that fit the budget; ``plan_with(shards)`` is the plan of that many.

    A power of two, since the segment lengths of most patterns are: shard boundaries then cut fewer segments.
    """
    rows = plan_with(1).layout.rows
    shards = 1
    while shards < ENOUGH_TO_OVERLAP and rows // (2 * shards) >= MIN_ROWS_TO_OVERLAP:
        shards *= 2
    while (needed := held_bytes(plan_with(shards), workspace, backward=backward)) > budget_bytes:
        if 2 * shards > rows:
            raise ValueError(
                f"budget_bytes={budget_bytes:,}: even {shards:,} shards of a row or two need {needed:,} bytes; "
                "raise the budget to that, or stream fewer heads or a smaller batch"
            )
        shards *= 2
    return shards


def held_bytes(plan: RingPlan, workspace: int, *, backward: bool = False) -> int:
    """The peak memory of a run: one shard being computed, the rows of the next, the results of the previous one.

    Results count twice: as tensors, and as pages of the file that they are written to.
    """
    sizes = plan.sizes
    last = plan.layout.ring_size - 1
    contiguous = plan.layout.name == "contiguous"
    # Contiguous shards differ by a row, and by how many boundaries cut them.
    ranks = sorted({0, last // 2, last}) if contiguous else plan.sample
    computed = max(plan.memory(rank, backward=backward).total for rank in ranks)
    query = sizes.batch * sizes.heads * sizes.head_dim * sizes.number_bytes
    keys_and_values = 2 * sizes.batch * sizes.kv_heads * sizes.head_dim * sizes.number_bytes
    lse = sizes.batch * sizes.heads * sizes.wide_bytes
    if backward:
        row = (3 * query + keys_and_values + lse) + 2 * (query + keys_and_values)
    else:
        row = (query + keys_and_values) + 2 * (query + lse)
    if not contiguous:
        row += max(query, keys_and_values // 2)  # the spans of a tensor are read, then joined
    rows = max(map(plan.layout.rows_of, ranks))
    return computed + row * (rows if last else 0) + workspace + OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class ShardDone:
    """Reported after each shard: its number, how many of all are finished, and how long this one took."""

    shard: int
    finished: int
    shards: int
    rows: int
    seconds: float


@dataclass(frozen=True, slots=True)
class StreamSummary:
    """The totals of a run: its shards, how many of them an earlier run had finished, and their cost.

    ``parcel_bytes`` were read for shards that do not own them; in backward they include the gradients returned to their
    owners. ``peak_bytes`` is the most that computing a shard held in this process, without the rows read ahead and the
    results being written.
    """

    shards: int
    resumed: int
    seconds: float
    parcel_bytes: int
    peak_bytes: int


class RunProgress:
    """The finished steps of a run, stored in a journal; without a path, only in memory.

    Raises ValueError if the file belongs to another run: first ``settings`` are compared with those stored, then the
    fingerprint of the inputs.
    """

    def __init__(
        self, path: Path | None, settings: dict[str, Any], take_fingerprint: Callable[[], Fingerprint]
    ) -> None:
        self._journal: Journal | None = None
        self.inputs: Fingerprint = {}  # empty without a path
        self.finished: dict[str, dict[str, Any]] = {}  # step -> record of the sink
        self.seconds, self.parcel_bytes = 0.0, 0  # of all finished steps, in this process and earlier
        if path is None:
            return
        lines = read_journal(path)
        if lines:
            self._load(path, lines, settings, take_fingerprint)
        elif path.exists() and not _FIRST_BYTES.startswith(path.read_bytes()[: len(_FIRST_BYTES)]):
            raise ValueError(_not_a_progress_file(path))
        self._journal = Journal(path)
        if not lines:
            self.inputs = take_fingerprint()
            self._journal.append({"run": settings, "inputs": self.inputs})

    def _load(
        self, path: Path, lines: list[Any], settings: dict[str, Any], take_fingerprint: Callable[[], Fingerprint]
    ) -> None:
        stored = _settings_of_run(path, lines)
        for name in {**stored, **settings}:
            if stored.get(name) != settings.get(name):
                raise ValueError(
                    f"{path} belongs to a run with {name}={stored.get(name)!r}, but this one has "
                    f"{settings.get(name)!r}: resume with the same settings, or use another file"
                )
        try:
            self.finished = {line["finished"]: line["record"] for line in lines[1:]}
            self.seconds = sum(line["seconds"] for line in lines[1:])
            self.parcel_bytes = sum(line["parcel_bytes"] for line in lines[1:])
            known = dict(lines[0]["inputs"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(_not_a_progress_file(path)) from error
        self.inputs = take_fingerprint()
        differing = [name for name, sums in self.inputs.items() if sums != known.get(name)]
        if differing:
            raise ValueError(
                f"{path} belongs to a run with other inputs: {', '.join(differing)} differ; "
                f"resume with the same inputs, or delete {path} to start over"
            )

    def finish(self, step: str, record: dict[str, Any], seconds: float, parcel_bytes: int) -> None:
        """A step is complete and durable; the sink gets ``record`` back when the run resumes."""
        self.finished[step] = record
        self.seconds += seconds
        self.parcel_bytes += parcel_bytes
        if self._journal is not None:
            line = {"finished": step, "seconds": seconds, "parcel_bytes": parcel_bytes, "record": record}
            self._journal.append(line)


class ShardReporter:
    """Records each finished shard, with the time since the previous one, and calls ``on_shard``."""

    def __init__(
        self, job: Job, progress: RunProgress, steps: int, on_shard: Callable[[ShardDone], None] | None
    ) -> None:
        self.job, self.progress, self.steps, self.on_shard = job, progress, steps, on_shard
        self.resumed = len(progress.finished)
        self._last = time.perf_counter()
        self._parcel_bytes: dict[int, int] = {}  # of shards that are computed but not yet written

    @contextmanager
    def counting_parcels(self, shard: int) -> Iterator[None]:
        """Attribute the parcels received in this context to a shard."""
        before = self.job.counters.bytes_received
        yield
        self._parcel_bytes[shard] = self.job.counters.bytes_received - before

    def done(self, step: str, shard: int, record: dict[str, Any]) -> None:
        """A step is complete and its results are durable; ``record`` is what the sink returned for it."""
        spent, self._last = time.perf_counter() - self._last, time.perf_counter()
        self.progress.finish(step, record, spent, self._parcel_bytes.pop(shard))
        if self.on_shard is not None:
            rows = self.job.plan.layout.rows_of(shard)
            self.on_shard(ShardDone(shard, len(self.progress.finished), self.steps, rows, spent))

    def summary(self) -> StreamSummary:
        done = self.progress
        return StreamSummary(self.steps, self.resumed, done.seconds, done.parcel_bytes, self.job.counters.peak_bytes)


def check_gradients(source: Source) -> None:
    """Raise if the source has a gradient that backward would ignore."""
    if isinstance(source, TensorRows) and "grad_lse" in source.tensors:
        raise ValueError("the source has grad_lse: stream_backward takes the gradient of out only; remove grad_lse")


def check_sink(sink: Sink, *, backward: bool) -> None:
    """Raise if tensors of the sink have names that the run does not write."""
    if isinstance(sink, TensorRows):
        sink.check_names(GRADIENTS if backward else OUTPUTS)


def _shards_of_run(path: Path | None) -> int | None:
    """The number of shards of the run in a progress file; None if there is none."""
    lines = read_journal(path) if path is not None else []
    return int(_settings_of_run(path, lines)["shards"]) if path is not None and lines else None


def _settings_of_run(path: Path, lines: list[Any]) -> dict[str, Any]:
    run = lines[0].get("run") if isinstance(lines[0], dict) else None
    if not isinstance(run, dict) or not isinstance(run.get("shards"), int):
        raise ValueError(_not_a_progress_file(path))
    return run


def _not_a_progress_file(path: Path) -> str:
    return f"{path} is not a progress file: use another path"
