"""Streamed attention at any length: synthetic rows in, a SHA-256 of all outputs and a spot check out.

All files of a run are in one folder, so that it can be resumed: progress.jsonl (finished shards), log.jsonl (time and
memory of each shard) and result.json.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ringspan.geometry import Dilated, Pattern
from ringspan.runtime.device import Cpu
from ringspan.runtime.files import Journal, read_journal, write_atomic
from ringspan.streaming import ChecksumSink, RowShape, ShardDone, SyntheticSource, stream_attention
from ringspan.streaming.job import Job, StreamOptions, make_job
from ringspan.tools.measure import describe_machine
from ringspan.tools.spot_check import SpotCheck, draw_strata, spot_check

RESERVE_BYTES = 256 * 2**20  # of the process's budget, for plans, samples and memory that allocators keep


@dataclass(frozen=True, slots=True)
class DemonstrationSettings:
    """What to compute. Rows are uniform with unit variance, and depend on the seed and their position."""

    tokens: int
    pattern: Pattern
    causal: bool = True
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 32
    dtype: str = "float32"
    seed: int = 0
    budget_bytes: int = 8 * 2**30  # of the whole process
    anywhere: int = 1000
    each: int = 30


def whole_sequence_pattern(tokens: int) -> Dilated:
    """Few branches with 256 selected rows per segment each: cheap enough for a billion tokens.

    >>> whole_sequence_pattern(2**30).text
    '256x1,65536x256,16777216x65536,1073741824x4194304'
    """
    return Dilated.spanning(tokens, first=256, growth=256)


@dataclass(frozen=True)
class Demonstration:
    """A finished run and its spot check.

    ``steady_seconds_per_token`` is that of the median shard, the steady cost of a run: the first shards also pay for
    page faults on new memory, and for the first read, which overlaps with nothing.
    """

    settings: DemonstrationSettings
    shards: int
    seconds: float
    steady_seconds_per_token: float
    parcel_bytes: int
    peak_bytes: int
    digest: str
    spot_check: SpotCheck
    machine: dict[str, str | int | float]

    @property
    def within_budget(self) -> bool:
        return self.peak_bytes <= self.settings.budget_bytes

    @property
    def holds(self) -> bool:
        return self.spot_check.holds and self.within_budget

    def as_json(self) -> dict[str, Any]:
        return {
            "settings": {**asdict(self.settings), "pattern": self.settings.pattern.text},
            "shards": self.shards,
            "seconds": self.seconds,
            "seconds_per_token": self.seconds / self.settings.tokens,
            "steady_seconds_per_token": self.steady_seconds_per_token,
            "parcel_bytes": self.parcel_bytes,
            "peak_bytes": self.peak_bytes,
            "within_budget": self.within_budget,
            "digest": self.digest,
            "proof": self.spot_check.as_json(),
            "machine": self.machine,
        }


def demonstrate(
    settings: DemonstrationSettings,
    folder: Path,
    *,
    on_shard: Callable[[ShardDone], None],
    on_spot_check: Callable[[int], None],
    on_position: Callable[[], None],
) -> Demonstration:
    """Stream, checksum and spot-check; resumes the run in the folder, if any.

    ``on_spot_check`` receives the number of positions that will be recomputed; ``on_position`` is called after each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shape = RowShape(settings.heads, settings.kv_heads, settings.head_dim, getattr(torch, settings.dtype))
    source = SyntheticSource(shape, settings.seed)
    job = _job(settings, source, folder)
    strata = draw_strata(job.plan, anywhere=settings.anywhere, each=settings.each, seed=settings.seed)
    sink = ChecksumSink(position for stratum in strata for position in stratum.positions)
    log = Journal(folder / "log.jsonl", durable=False)

    def shard_done(done: ShardDone) -> None:
        log.append({"time": time.time(), **asdict(done), "peak_bytes": Cpu().peak_bytes()})
        on_shard(done)

    streamed = stream_attention(
        source,
        sink,
        settings.tokens,
        settings.pattern,
        causal=settings.causal,
        budget_bytes=settings.budget_bytes,
        shards=job.plan.layout.ring_size,
        progress=folder / "progress.jsonl",
        on_shard=shard_done,
    )
    on_spot_check(len({position for stratum in strata for position in stratum.positions}))
    checked = spot_check(source, sink, job.plan, strata, scale=job.scores.scale, on_position=on_position)
    lines = read_journal(log.path)
    found = Demonstration(
        settings,
        streamed.shards,
        streamed.seconds,
        steady_seconds_per_token(lines) if lines else streamed.seconds / settings.tokens,
        streamed.parcel_bytes,
        max([Cpu().peak_bytes(), *(line["peak_bytes"] for line in lines)]),
        sink.checksum,
        checked,
        describe_machine(),
    )
    write_atomic(folder / "result.json", json.dumps(found.as_json(), indent=1) + "\n")
    return found


def steady_seconds_per_token(log: Sequence[dict[str, Any]]) -> float:
    """The seconds per token of the median shard, from the lines of log.jsonl."""
    return statistics.median(line["seconds"] / line["rows"] for line in log)


def _job(settings: DemonstrationSettings, source: SyntheticSource, folder: Path) -> Job:
    """The job, with shards that fit the budget minus what the process already holds."""
    held = Cpu().peak_bytes() + RESERVE_BYTES
    if settings.budget_bytes <= held:
        raise ValueError(
            f"budget_bytes={settings.budget_bytes:,}: Python, torch and a reserve take {held:,} of it; raise the budget"
        )
    options = StreamOptions(causal=settings.causal, budget_bytes=settings.budget_bytes - held)
    progress = folder / "progress.jsonl"
    return make_job(source, settings.tokens, settings.pattern, options, progress=progress, backward=False)
