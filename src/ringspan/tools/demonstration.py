"""A demonstration at any length: rows from a counter, streamed through exact attention, digested, proven by samples.

Everything about a run lies in one folder, so that it can be interrupted, gone on with, and shown in the docs:
progress.jsonl (finished shards), log.jsonl (when, how fast, how much memory) and result.json.
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

RESERVE_BYTES = 256 * 2**20  # of a process's budget: plans, samples, and what allocators hold on to


@dataclass(frozen=True, slots=True)
class Settings:
    """What is computed: uniform random rows of unit variance, made from the seed and the position."""

    tokens: int
    pattern: Pattern
    causal: bool = True
    heads: int = 2
    kv_heads: int = 2
    dim: int = 32
    dtype: str = "float32"
    seed: int = 0
    budget_bytes: int = 8 * 2**30  # of the whole process
    anywhere: int = 1000
    each: int = 30


def whole_sequence_pattern(tokens: int) -> Dilated:
    """Few branches, each with 256 selected rows per segment: cheap enough for a billion tokens.

    >>> whole_sequence_pattern(2**30).text
    '256x1,65536x256,16777216x65536,1073741824x4194304'
    """
    return Dilated.spanning(tokens, first=256, growth=256)


@dataclass(frozen=True)
class Demonstration:
    """A finished run and its proof.

    ``steady_seconds_per_token`` is that of the median shard: what a run costs when it has begun, since the first shards
    also pay for memory that the system gives page by page, and for the first read, which has nothing beside it.
    """

    settings: Settings
    shards: int
    seconds: float
    steady_seconds_per_token: float
    parcel_bytes: int
    peak_bytes: int
    digest: str
    proof: SpotCheck
    machine: dict[str, str | int | float]

    @property
    def within_budget(self) -> bool:
        return self.peak_bytes <= self.settings.budget_bytes

    @property
    def holds(self) -> bool:
        return self.proof.holds and self.within_budget

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
            "proof": self.proof.as_json(),
            "machine": self.machine,
        }


def demonstrate(
    settings: Settings,
    folder: Path,
    *,
    on_shard: Callable[[ShardDone], None],
    on_proof: Callable[[int], None],
    on_place: Callable[[], None],
) -> Demonstration:
    """Stream, digest and spot_check; goes on with what is in the folder.

    ``on_proof`` is told how many places will be computed anew, ``on_place`` is called after each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shape = RowShape(settings.heads, settings.kv_heads, settings.dim, getattr(torch, settings.dtype))
    source = SyntheticSource(shape, settings.seed)
    job = _job(settings, source, folder)
    strata = draw_strata(job.plan, anywhere=settings.anywhere, each=settings.each, seed=settings.seed)
    sink = ChecksumSink(place for stratum in strata for place in stratum.places)
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
    on_proof(len({place for stratum in strata for place in stratum.places}))
    proof = spot_check(source, sink, job.plan, strata, scale=job.scale, on_place=on_place)
    lines = read_journal(log.path)
    found = Demonstration(
        settings,
        streamed.shards,
        streamed.seconds,
        steady_seconds_per_token(lines) if lines else streamed.seconds / settings.tokens,
        streamed.parcel_bytes,
        max([Cpu().peak_bytes(), *(line["peak_bytes"] for line in lines)]),
        sink.checksum,
        proof,
        describe_machine(),
    )
    write_atomic(folder / "result.json", json.dumps(found.as_json(), indent=1) + "\n")
    return found


def steady_seconds_per_token(log: Sequence[dict[str, Any]]) -> float:
    """That of the median shard, from the lines of a run's log."""
    return statistics.median(line["seconds"] / line["rows"] for line in log)


def _job(settings: Settings, source: SyntheticSource, folder: Path) -> Job:
    """The shards that leave room for what the process holds already."""
    held = Cpu().peak_bytes() + RESERVE_BYTES
    if settings.budget_bytes <= held:
        raise ValueError(
            f"budget_bytes={settings.budget_bytes:,}: Python, torch and a reserve take {held:,} of it; give more"
        )
    options = StreamOptions(causal=settings.causal, budget_bytes=settings.budget_bytes - held)
    progress = folder / "progress.jsonl"
    return make_job(source, settings.tokens, settings.pattern, options, progress=progress, backward=False)
