"""`ringspan generate`: a trained model goes on with a prompt, byte by byte, as it writes them."""

from __future__ import annotations

import codecs
import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ringspan.cli.console import make_console
from ringspan.cli.options import AsJson, Step, read_as, read_count, trained_model
from ringspan.runtime.settings import RunError
from ringspan.train.config import TrainSettings

if TYPE_CHECKING:
    import ringspan as rs
    from ringspan.models import Decoder

BYTES = 256  # tokens of `ringspan train`; a larger vocabulary has others that no text holds


def generate(
    run: Annotated[
        Path, typer.Argument(help="Folder of a run of `ringspan train`, or of a saved model.", show_default=True)
    ] = Path("ringspan-run"),
    prompt: Annotated[str, typer.Option(help="Text to go on with.", show_default="a line break")] = "\n",
    prompt_file: Annotated[Path | None, typer.Option(help="A file with it instead; - reads standard input.")] = None,
    tokens: Annotated[str, typer.Option(help="Bytes to write, such as 500 or 100k.", metavar="COUNT")] = "500",
    temperature: Annotated[float, typer.Option(help="0 always takes the likeliest byte.")] = 0.8,
    top_k: Annotated[int, typer.Option(help="Draw from so many of the likeliest bytes; 0 is all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest that have this probability together.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Decides the draws.")] = 0,
    cache: Annotated[
        Literal["gathered", "sharded"],
        typer.Option(help="Under torchrun: hold the cache on every rank, or a share of it on each."),
    ] = "gathered",
    step: Step = 0,
    as_json: AsJson = False,
) -> None:
    """Let a trained model write. Text streams to stdout; speed and size of the cache follow on stderr.

    The cache holds the rows that a later byte can still see: its size has a bound, and so has the time for a byte,
    however long the text. Under torchrun the prompt is read by all ranks, each its part.

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
        speaks = ring is None or ring.rank == 0
        written = _write(decoder, text, count, sampling, echo=speaks and not as_json)
    except BrokenPipeError:
        raise  # whoever read the text has had enough
    except (OSError, RunError, ValueError) as error:
        raise typer.BadParameter(str(error)) from error
    if speaks and as_json:
        typer.echo(json.dumps({**dataclasses.asdict(written), "tokens_per_second": written.tokens_per_second}))
    elif speaks:
        make_console(stderr=True).print(f"\n{written}", highlight=False, soft_wrap=True, style="dim")
    if ring is not None:
        import torch.distributed as dist  # noqa: PLC0415

        dist.barrier()
        dist.destroy_process_group()


@dataclass(frozen=True)
class Written:
    """What was written, how fast, and what was kept meanwhile. Sizes are those of one rank, over all layers."""

    prompt_tokens: int
    prompt_seconds: float
    tokens: int
    seconds: float
    cache_bytes: int
    cache_rows: int  # of a KV head in a layer, at the end
    cache_bound: int | None
    text: str

    @property
    def tokens_per_second(self) -> float | None:
        return (self.tokens - 1) / self.seconds if self.tokens > 1 else None  # the first token is the prompt's

    def __str__(self) -> str:
        speed = "" if self.tokens_per_second is None else f" at {self.tokens_per_second:,.0f} tokens/s"
        bound = "every row is kept" if self.cache_bound is None else f"never more than {self.cache_bound:,}"
        return (
            f"{self.prompt_tokens:,} bytes read in {self.prompt_seconds:.2f} s; {self.tokens:,} written{speed}; "
            f"cache {self.cache_bytes / 2**20:,.2f} MiB, {self.cache_rows:,} "
            f"rows a head and layer ({bound})"
        )


def _prompt_bytes(prompt: str, file: Path | None) -> bytes:
    if str(file) == "-" and _under_torchrun():
        raise ValueError("--prompt-file -: ranks have no standard input of their own; give a file")
    text = prompt.encode() if file is None else sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    if not text:
        raise ValueError("the prompt is empty: the model needs a byte to go on from, such as a line break")
    return text


def _under_torchrun() -> bool:
    import torch.distributed as dist  # noqa: PLC0415

    return dist.is_torchelastic_launched()


def _ring_of(run: Path) -> rs.Ring | None:
    """All ranks that torchrun started, as one ring; None in a process of its own."""
    if not _under_torchrun():
        return None
    from ringspan.train.distributed import assemble  # noqa: PLC0415

    stored = run / "settings.json"
    settings = TrainSettings.read(stored) if stored.is_file() else TrainSettings()
    return assemble(dataclasses.replace(settings, ring=0)).ring


def _decoder(run: Path, step: int, ring: rs.Ring | None, sharded: bool) -> Decoder:
    from ringspan.models import Decoder, LongNet  # noqa: PLC0415
    from ringspan.runtime.device import local_device  # noqa: PLC0415

    if sharded and ring is None:
        raise ValueError("--cache sharded: needs ranks to share it; start with torchrun --nproc-per-node=N -m ringspan")
    is_run = (run / "settings.json").is_file()
    model = trained_model(run, step) if is_run or step else LongNet.from_pretrained(run)
    if model.config.vocab_size < BYTES:
        raise ValueError(
            f"{run}: a vocabulary of {model.config.vocab_size}: this command writes bytes, of which there are {BYTES}"
        )
    return Decoder(model.to(local_device().device).eval(), ring=ring, sharded=sharded)


def _write(decoder: Decoder, prompt: bytes, count: int, sampling: dict[str, Any], echo: bool) -> Written:
    import torch  # noqa: PLC0415

    from ringspan.decoding import Sampler  # noqa: PLC0415

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
    return Written(
        prompt_tokens=len(prompt),
        prompt_seconds=read - start,
        tokens=count,
        seconds=time.perf_counter() - read,
        cache_bytes=decoder.cache_bytes,
        cache_rows=decoder.rows_held,
        cache_bound=decoder.caches[0].bound,
        text="".join(pieces),
    )
