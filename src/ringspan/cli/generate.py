"""`ringspan generate`: a trained model continues a prompt, streamed byte by byte."""

from __future__ import annotations

import codecs
import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import typer

import ringspan as rs
from ringspan.cli.options import AsJson, Step, make_console, read_as, read_count, trained_model
from ringspan.decoding import Sampler
from ringspan.models import Decoder, LongNet
from ringspan.runtime.device import local_device
from ringspan.runtime.settings import RunError
from ringspan.train.checkpoint import SETTINGS
from ringspan.train.config import TrainSettings
from ringspan.train.distributed import init_distributed

BYTES = 256  # tokens of `ringspan train`; a larger vocabulary has tokens that never occur


def generate(
    run: Annotated[
        Path, typer.Argument(help="Folder of a run of `ringspan train`, or a saved model.", show_default=True)
    ] = Path("ringspan-run"),
    prompt: Annotated[str, typer.Option(help="Text to continue.", show_default="a line break")] = "\n",
    prompt_file: Annotated[
        Path | None, typer.Option(help="Read the prompt from a file; - reads standard input.")
    ] = None,
    tokens: Annotated[str, typer.Option(help="Bytes to generate, such as 500 or 100k.", metavar="COUNT")] = "500",
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0 always takes the most likely byte.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(help="Sample from this many of the most likely bytes; 0 means all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Sample from the most likely bytes whose probabilities add up to this.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    cache: Annotated[
        Literal["gathered", "sharded"],
        typer.Option(help="Under torchrun: keep the whole cache on every rank, or shard it over the ranks."),
    ] = "gathered",
    step: Step = 0,
    as_json: AsJson = False,
) -> None:
    """Generate text with a trained model. Text streams to stdout; speed and cache size follow on stderr.

    The cache keeps only the rows that a later byte can attend to, so its size and the time per byte are bounded,
    regardless of the length of the text. Under torchrun the ranks share the work of reading the prompt.

    **Examples**

    `ringspan generate runs/books --prompt "It was "`

    `ringspan generate runs/books --prompt-file chapter.txt --tokens 100k --temperature 0.7 --top-p 0.9 --seed 3`

    `torchrun --nproc-per-node=2 -m ringspan generate runs/long --prompt-file book.txt --cache sharded`
    """
    count = read_as("--tokens", read_count, tokens)
    try:
        text = _prompt_bytes(prompt, prompt_file)
        sampling = dict(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        ring = _ring_of(run)
        decoder = _decoder(run, step, ring, cache == "sharded")
        is_main = ring is None or ring.rank == 0
        generated = _generate(decoder, text, count, sampling, echo=is_main and not as_json)
    except BrokenPipeError:
        raise  # the reader closed the pipe
    except (OSError, RunError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    if is_main and as_json:
        typer.echo(json.dumps({**dataclasses.asdict(generated), "tokens_per_second": generated.tokens_per_second}))
    elif is_main:
        make_console(stderr=True).print(f"\n{generated}", highlight=False, soft_wrap=True, style="dim")
    if ring is not None:
        dist.barrier()
        dist.destroy_process_group()


@dataclass(frozen=True)
class Generation:
    """The generated text, its speed, and the size of the cache of one rank, over all layers."""

    prompt_tokens: int
    prompt_seconds: float
    tokens: int
    seconds: float
    cache_bytes: int
    cache_rows: int  # per KV head and layer, at the end
    cache_bound: int | None
    text: str

    @property
    def tokens_per_second(self) -> float | None:
        return (
            (self.tokens - 1) / self.seconds if self.tokens > 1 else None
        )  # the first one belongs to the prompt's time

    def __str__(self) -> str:
        speed = "" if self.tokens_per_second is None else f" at {self.tokens_per_second:,.0f} tokens/s"
        bound = "unbounded" if self.cache_bound is None else f"at most {self.cache_bound:,}"
        return (
            f"{self.prompt_tokens:,} bytes read in {self.prompt_seconds:.2f} s; {self.tokens:,} generated{speed}; "
            f"cache {self.cache_bytes / 2**20:,.2f} MiB, {self.cache_rows:,} "
            f"rows per head and layer ({bound})"
        )


def _prompt_bytes(prompt: str, file: Path | None) -> bytes:
    if str(file) == "-" and dist.is_torchelastic_launched():
        raise ValueError("--prompt-file -: ranks under torchrun have no standard input; give a file")
    text = prompt.encode() if file is None else sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    if not text:
        raise ValueError("the prompt is empty: give at least one byte, such as a line break")
    return text


def _ring_of(run: Path) -> rs.Ring | None:
    """A ring of all ranks of torchrun; None without torchrun."""
    if not dist.is_torchelastic_launched():
        return None
    stored = run / SETTINGS
    settings = TrainSettings.read(stored) if stored.is_file() else TrainSettings()
    return init_distributed(dataclasses.replace(settings, ring=0)).ring


def _decoder(run: Path, step: int, ring: rs.Ring | None, sharded: bool) -> Decoder:
    if sharded and ring is None:
        raise ValueError("--cache sharded: needs several ranks: start with torchrun --nproc-per-node=N -m ringspan")
    is_run = (run / SETTINGS).is_file()
    model = trained_model(run, step) if is_run or step else LongNet.from_pretrained(run)
    if model.config.vocab_size < BYTES:
        raise ValueError(
            f"{run}: a vocabulary of {model.config.vocab_size}: this command generates bytes, which need {BYTES}"
        )
    return Decoder(model.to(local_device().device).eval(), ring=ring, sharded=sharded)


def _generate(decoder: Decoder, prompt: bytes, count: int, sampling: dict[str, Any], echo: bool) -> Generation:
    readable = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a character may take several bytes
    choose = Sampler(**sampling)
    stream = decoder.stream([torch.tensor([*prompt])], lambda logits: choose(logits[:, :BYTES]))
    pieces: list[str] = []

    def show(piece: str) -> None:
        pieces.append(piece)
        if echo:
            sys.stdout.write(piece)
            sys.stdout.flush()

    start = time.perf_counter()
    first = next(stream)
    read = time.perf_counter()
    show(readable.decode(bytes([int(first)])))
    for _ in range(count - 1):
        show(readable.decode(bytes([int(next(stream))])))
    show(readable.decode(b"", final=True))
    return Generation(
        prompt_tokens=len(prompt),
        prompt_seconds=read - start,
        tokens=count,
        seconds=time.perf_counter() - read,
        cache_bytes=decoder.cache_bytes,
        cache_rows=decoder.rows_held,
        cache_bound=decoder.bound,
        text="".join(pieces),
    )
