"""Decoding, measured: time and memory for each token over a long text, with a bounded cache and with a full one.

    python -m benchmarks.decoding           # about seven minutes on one core
    python -m benchmarks.decoding --quick   # a short text: does it run? Nothing is written.

The bounded cache writes every token. The full one, whose time grows with the text, is brought to each length by reading
blocks of tokens, and timed over a few there. Writes benchmarks/results/decoding.json, the table in docs/decoding.md and
its figure.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from rich.console import Console

from benchmarks.decoding_report import write_report
from ringspan.decoding import Sampler
from ringspan.models import Decoder, LongNet, LongNetConfig
from ringspan.runtime.launch import run_local_ranks
from ringspan.tools.measure import describe_machine, one_line

ROOT = Path(__file__).parent.parent
SIZES: dict[str, Any] = dict(layers=2, width=64, heads=4, kv_heads=2)
BOUNDED: dict[str, Any] = dict(segment_lengths=(1024, 4096, 16384), dilation_rates=(1, 4, 16))
FULL: dict[str, Any] = dict(segment_lengths=(), dilation_rates=())
TIMED_TOKENS = 20  # of the full cache, at each length

Rows = list[dict[str, Any]]


def new_decoder(pattern: dict[str, Any]) -> Decoder:
    torch.manual_seed(0)
    return Decoder(LongNet(LongNetConfig.named("nano", **SIZES, **pattern)).eval())


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def write_bounded(tokens: int, window: int, short: int) -> dict[str, Any]:
    """Write so many tokens; figures of each window, and the last logits against a full forward pass.

    In turns with it a short text is written that begins anew after so many tokens: a machine that is slower for a while
    is slower for both.
    """
    decoder, beside = new_decoder(BOUNDED), ShortTexts(short)
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
                short_seconds=beside.write(window // 2),
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
    """Texts of one length, one after another, written a piece at a time."""

    def __init__(self, tokens: int) -> None:
        self.tokens, self.written, self.choose = tokens, tokens, Sampler(seed=0)
        self.decoder = new_decoder(BOUNDED)

    def write(self, tokens: int) -> float:
        """Seconds a token."""
        start = time.process_time()
        for _ in range(tokens):
            if self.written == self.tokens:
                self.decoder.reset()
                self.written, self.logits = 0, self.decoder.read([torch.tensor([10])])
            self.logits = self.decoder.step(self.choose(self.logits))
            self.written += 1
        return (time.process_time() - start) / tokens


def write_full(tokens: int, every: int) -> Rows:
    """The same model with plain attention, timed at each length."""
    decoder = new_decoder(FULL)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a short text; nothing is written")
    arguments = parser.parse_args()
    tokens, window, every = (2000, 500, 1000) if arguments.quick else (100_000, 1000, 10_000)
    console = Console()
    with console.status("writing with a bounded cache, then with a full one"):
        # Each in a process of its own, with one thread: memory is what the one cache needs.
        (bounded,) = run_local_ranks(1, write_bounded, tokens, window, every, timeout_seconds=3600)
        (full,) = run_local_ranks(1, write_full, tokens, every, timeout_seconds=3600)
    results = {"machine": describe_machine(), "bounded": bounded, "full": full}
    if arguments.quick:
        console.print_json(json.dumps(results))
        return
    (ROOT / "benchmarks/results/decoding.json").write_text(json.dumps(results) + "\n")
    write_report(results, one_line(results["machine"]), ROOT, console)


if __name__ == "__main__":
    main()
