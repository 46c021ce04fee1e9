"""Decoding: time and memory per token of a long text, with a bounded cache and with a full one.

The bounded cache generates every token. The full one, whose time grows with the text, is timed over a few tokens at
each length. Each runs in a fresh process with one thread, and times are CPU times, so that other programs matter less.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import psutil
import torch

from benchmarks.suite import MIB, Measuring, Page, Picture, Results, Rows, Suite, Table, empty_figure
from ringspan.decoding import Sampler
from ringspan.models import Decoder, LongNet, LongNetConfig
from ringspan.runtime.launch import run_local_ranks

SIZES: dict[str, Any] = dict(layers=2, width=64, heads=4, kv_heads=2)
BOUNDED_PATTERN: dict[str, Any] = dict(patterns=("1024x1,4096x4,16384x16", "1024x1,4096x4,16384x16 shift 512"))
FULL_PATTERN: dict[str, Any] = dict(patterns=("full",))
TIMED_TOKENS = 20  # with the full cache, at each length
ALL_BRANCHES_FULL = 16384  # from this token on every branch has been full once, so memory must not grow


def new_decoder(pattern: dict[str, Any]) -> Decoder:
    torch.manual_seed(0)
    return Decoder(LongNet(LongNetConfig.named("nano", **SIZES, **pattern)).eval())


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def write_bounded(tokens: int, window: int, short: int) -> dict[str, Any]:
    """Generate tokens; metrics of each window, and the last logits compared with a full forward pass.

    Short texts of ``short`` tokens are generated in turns with the long one, so that a drift of the machine affects
    both.
    """
    decoder, reference = new_decoder(BOUNDED_PATTERN), ShortTexts(short)
    text = torch.empty(tokens + 1, dtype=torch.int64)
    text[0] = 10
    choose = Sampler(seed=0)
    logits = decoder.read([text[:1]])
    rows, most = [], 0
    for first in range(1, tokens + 1, window):
        start = time.process_time()
        for i in range(first, first + window):
            text[i] = choose(logits)[0]
            logits = decoder.step(text[i : i + 1])
            most = max(most, decoder.rows_held)
        seconds = (time.process_time() - start) / window
        rows.append(
            dict(
                tokens=first + window - 1,
                seconds=seconds,
                short_seconds=reference.write(window // 2),
                cache_bytes=decoder.cache_bytes,
                resident_bytes=resident_bytes(),
                most_rows=most,
            )
        )
    with torch.no_grad():
        whole = decoder.model.logits(decoder.model(text[None])[:, -1])
    apart = (whole - logits).abs().max().item() / whole.abs().max().item()
    return {"windows": rows, "bound": decoder.caches[0].bound, "apart": apart}


class ShortTexts:
    """Generates texts of one length, one after another, a few tokens at a time."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.written, self.choose = tokens, tokens, Sampler(seed=0)
        self.decoder = new_decoder(BOUNDED_PATTERN)

    def write(self, tokens: int) -> float:
        """Generate tokens, and return the seconds per token."""
        start = time.process_time()
        for _ in range(tokens):
            if self.written == self.tokens:
                self.decoder.reset()
                self.written, self.logits = 0, self.decoder.read([torch.tensor([10])])
            self.logits = self.decoder.step(self.choose(self.logits))
            self.written += 1
        return (time.process_time() - start) / tokens


def write_full(tokens: int, every: int) -> list[dict[str, Any]]:
    """The same model with plain attention, timed at each length after reading up to there in blocks."""
    decoder = new_decoder(FULL_PATTERN)
    choose = Sampler(seed=0)
    rows = []
    for length in range(every, tokens + 1, every):
        unread = length - decoder.caches[0].lengths[0] - TIMED_TOKENS
        logits = decoder.read([torch.randint(256, (unread,))])
        start = time.process_time()
        for _ in range(TIMED_TOKENS):
            logits = decoder.step(choose(logits))
        seconds = (time.process_time() - start) / TIMED_TOKENS
        rows.append(
            dict(tokens=length, seconds=seconds, cache_bytes=decoder.cache_bytes, resident_bytes=resident_bytes())
        )
    return rows


def bounded(run: Measuring) -> Any:
    sizes = run.sized((2000, 500, 1000), (40_000, 1000, 10_000), (100_000, 1000, 10_000))
    return run_local_ranks(1, write_bounded, *sizes, timeout_seconds=3600)[0]


def full(run: Measuring) -> Any:
    sizes = run.sized((2000, 1000), (40_000, 10_000), (100_000, 10_000))
    return run_local_ranks(1, write_full, *sizes, timeout_seconds=3600)[0]


def report(results: Results) -> Page:
    bounded, full = results["bounded"], results["full"]
    windows = bounded["windows"]
    by_clock, by_short_texts, growth = flatness(windows)
    most = max(row["most_rows"] for row in windows)
    sentence = (
        f"{windows[-1]['tokens']:,} tokens, generated one by one. The time per token of each tenth of the text is "
        f"within **{by_short_texts:.1%}** of the mean, relative to short texts that are generated in turns with it "
        f"(required: 10 %), and within {by_clock:.1%} by the clock alone, which includes drifts of the machine. "
        f"From token {first_full(windows):,} on, the memory of the process grew by {growth / MIB:.1f} MiB. A KV head "
        f"held at most {most:,} rows in a layer; the bound is {bounded['bound']:,}. The last logits differ from those "
        f"of one forward pass over the whole text by {bounded['apart']:.0e} of the largest (fp32). Times are CPU times "
        "on one thread."
    )
    text = "Bounded: the mean time over the last 10,000 tokens. Full: the time at that length."
    return Page(
        "Measured",
        sentence,
        "python -m benchmarks decoding",
        f"Machine: {results.machine}",
        [token_table(windows, full, text), decoding_picture(windows, full)],
    )


def first_full(windows: list[dict[str, Any]]) -> int:
    """The token from which memory must not grow; in a quick run, which is shorter, half of the text."""
    return min(ALL_BRANCHES_FULL, int(windows[-1]["tokens"]) // 2)


def flatness(windows: list[dict[str, Any]]) -> tuple[float, float, int]:
    """Largest deviation of a tenth of the text from the mean time: by the clock, and relative to the short texts.

    Also the growth of resident memory once every branch is full.
    """
    tenth = max(1, len(windows) // 10)
    tenths = [windows[i : i + tenth] for i in range(0, len(windows), tenth)]
    times = [statistics.fmean(row["seconds"] for row in rows) for rows in tenths]
    ratios = [
        time / statistics.fmean(row["short_seconds"] for row in rows) for time, rows in zip(times, tenths, strict=True)
    ]
    later = [row["resident_bytes"] for row in windows if row["tokens"] > first_full(windows)]
    return _deviation(times), _deviation(ratios), max(later) - later[0]


def _deviation(numbers: list[float]) -> float:
    mean = statistics.fmean(numbers)
    return max(abs(x / mean - 1) for x in numbers)


def token_table(windows: list[dict[str, Any]], full: list[dict[str, Any]], text: str) -> Table:
    cells: Rows = [["token", "bounded: time", "relative to a short text", "cache", "full: time", "cache"]]
    for at in full:
        window = [row for row in windows if at["tokens"] - 10_000 < row["tokens"] <= at["tokens"]]
        time, short = (statistics.fmean(row[name] for row in window) for name in ("seconds", "short_seconds"))
        cells.append(
            [
                f"{at['tokens']:,}",
                f"{time * 1e3:.2f} ms",
                f"{time / short:.3f}",
                f"{window[-1]['cache_bytes'] / MIB:.1f} MiB",
                f"{at['seconds'] * 1e3:.2f} ms",
                f"{at['cache_bytes'] / MIB:.1f} MiB",
            ]
        )
    return Table("Time and memory per token", cells, text)


def decoding_picture(windows: list[dict[str, Any]], full: list[dict[str, Any]]) -> Picture:
    figure, (speed, memory) = empty_figure(1, 2, (11, 4))
    for axes, name, unit, scale in ((speed, "seconds", "ms", 1e3), (memory, "cache_bytes", "MiB", 1 / MIB)):
        for label, rows, style in (("full cache", full, "o--"), ("bounded cache", windows, "-")):
            axes.plot([row["tokens"] for row in rows], [row[name] * scale for row in rows], style, label=label)
        axes.set(xlabel="tokens generated", ylabel=unit)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    speed.set_title("Time per token")
    memory.set_title("Memory of the cache")
    return Picture("decoding", figure, "Time per token (left) and memory of the cache (right) by tokens generated.")


SUITE = Suite("docs/decoding.md", {"bounded": bounded, "full": full}, report, marker="benchmarks.decoding")
