"""`ringspan embed`: slide embeddings of a folder of tile embeddings, alone or under torchrun."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import ringspan as rs
from ringspan.cli.options import AsJson, make_console, read_as, read_dtype, writing_to
from ringspan.integrations.embed_slides import TABLE, EmbeddedSlides, EmbeddingPlan, embed_slides
from ringspan.integrations.gigapath import SIZES, SlideEncoder
from ringspan.integrations.slide_files import COORDS, FEATURES, SlideFile
from ringspan.runtime.device import local_device
from ringspan.train.distributed import rendezvous_store

_TIMEOUT = 1800.0  # seconds; rank 0 looks at all files while the others wait


def embed(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder of tile embeddings: .h5, .safetensors, .npz or .npy files.")
    ],
    weights: Annotated[Path, typer.Option(help="Weights of the slide encoder: .pth or .safetensors.")] = Path(
        "slide_encoder.pth"
    ),
    size: Annotated[
        str, typer.Option(help="A published size, or arguments of SlideEncoder: embed_dim=256,depth=6,in_chans=1024.")
    ] = "gigapath_slide_enc12l768d",
    output: Annotated[Path, typer.Option(help="Folder of the embeddings; an interrupted run in it resumes.")] = Path(
        "embeddings"
    ),
    tile_size: Annotated[
        int | None,
        typer.Option(
            help="Side of a tile, in the unit of the coordinates.", min=1, show_default="the size stored in each file"
        ),
    ] = None,
    features: Annotated[
        str, typer.Option(help="Name of the tile embeddings in a file.", show_default=" or ".join(FEATURES))
    ] = "",
    coords: Annotated[str, typer.Option(help="Name of the coordinates in a file.")] = COORDS,
    global_pool: Annotated[bool, typer.Option("--global-pool", help="Average the tiles, instead of CLS.")] = False,
    all_layers: Annotated[bool, typer.Option("--all-layers", help="Store the embedding after each layer.")] = False,
    slide_ngrids: Annotated[int, typer.Option(help="Side of the grid, in tiles.", min=1)] = 1000,
    allow_shared_cells: Annotated[
        bool, typer.Option("--allow-shared-cells", help="Accept tiles that overlap.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32",
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Exit with status 0 even if slides were skipped.")
    ] = False,
    check_memory: Annotated[bool, typer.Option(help="Refuse to start if a slide is unlikely to fit in memory.")] = True,
    as_json: AsJson = False,
) -> None:
    """Embed the slides of a folder with Prov-GigaPath's slide encoder, each split over all ranks.

    Reads files of TRIDENT, CLAM, STAMP and Prov-GigaPath. Every slide gets a file, and all are in one table. Bad files
    are skipped and listed at the end; then the exit status is 1, unless --skip-bad is given. An interrupted run resumes
    after the last finished slide. A changed file is computed again; other weights need another --output.

    **Examples**

    `ringspan embed features_gigapath --weights slide_encoder.pth`

    `ringspan embed h5_files --weights slide_encoder.pth --tile-size 512 --global-pool --output runs/slides`

    `torchrun --nproc-per-node=8 -m ringspan embed features --weights slide_encoder.pth --dtype bfloat16`
    """
    if not folder.is_dir():
        raise typer.BadParameter(f"{folder}: no such folder", param_hint="FOLDER")
    device = local_device().device
    encoder = _load(weights, size, global_pool, slide_ngrids, allow_shared_cells)
    encoder = encoder.to(device, getattr(torch, read_as("--dtype", read_dtype, dtype)))
    with writing_to("--output", output):
        output.mkdir(parents=True, exist_ok=True)
    if output.samefile(folder):
        raise typer.BadParameter(f"{output}: must not be the folder of tile embeddings", param_hint="--output")
    console = make_console(stderr=as_json, quiet=int(os.environ.get("RANK", "0")) > 0)
    options: dict[str, Any] = dict(tile_size=tile_size, coords=coords, all_layers=all_layers)
    options["features"] = (features,) if features else FEATURES
    try:
        with _ring(device) as ring:
            done = _run(encoder, folder, output, ring, check_memory, console, options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"Interrupted. Finished slides are kept in {output}: run the same command to continue."
        ) from None
    if not console.quiet:
        _report(console, done, output, as_json)
    raise typer.Exit(1 if done.skipped and not skip_bad else 0)


def _load(weights: Path, size: str, global_pool: bool, slide_ngrids: int, allow_shared_cells: bool) -> SlideEncoder:
    arguments: dict[str, Any] = {}
    if size not in SIZES:
        try:
            arguments = {name.strip(): int(value) for name, value in (each.split("=") for each in size.split(","))}
        except ValueError:
            raise typer.BadParameter(
                f"{size!r}: must be one of {', '.join(SIZES)}, or arguments such as embed_dim=256,depth=6",
                param_hint="--size",
            ) from None
    arguments |= dict(global_pool=global_pool, slide_ngrids=slide_ngrids, allow_shared_cells=allow_shared_cells)
    try:
        return SlideEncoder.load(weights, size if size in SIZES else None, **arguments)
    except TypeError as error:  # an unknown argument
        raise typer.BadParameter(f"{size!r}: {error}", param_hint="--size") from error
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error), param_hint="--weights") from error
    except RuntimeError as error:  # of load_state_dict
        first = " ".join(str(error).split())[:200]
        raise typer.BadParameter(
            f"{weights}: is not the state dict of a slide encoder of size {size} ({first} ..): give its --size",
            param_hint="--weights",
        ) from error


@contextmanager
def _ring(device: torch.device) -> Iterator[rs.Ring | None]:
    """A ring over the ranks that torchrun started, or None."""
    if not dist.is_torchelastic_launched():
        yield None
        return
    store, rank, world = rendezvous_store(_TIMEOUT)
    options: dict[str, Any] = {} if device.type == "cpu" else {"device_id": device}
    dist.init_process_group(local_device().backend, store=store, rank=rank, world_size=world, **options)
    yield rs.Ring(layout="contiguous", min_size=1)
    dist.destroy_process_group()


def _run(
    encoder: SlideEncoder,
    folder: Path,
    output: Path,
    ring: rs.Ring | None,
    check_memory: bool,
    console: Console,
    options: dict[str, Any],
) -> EmbeddedSlides:
    """Embed with a progress bar over the tiles."""
    columns = (TextColumn("{task.fields[text]}", markup=False), BarColumn(20), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task("", total=None, text="looking at files")
        slides = {"done": 0, "all": 0}

        def show(tiles: int) -> None:
            bars.update(bar, advance=tiles, text=f"{slides['done']:,} of {slides['all']:,} slides")

        def on_start(plan: EmbeddingPlan) -> None:
            slides["all"] = plan.slides - plan.finished
            bars.update(bar, total=plan.tiles)
            show(0)
            free = _free_bytes(encoder.cls_token.device)
            console.print(_plan_sentence(plan, 1 if ring is None else ring.size, free), soft_wrap=True)
            ranks_here = 1 if encoder.cls_token.is_cuda else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
            if check_memory and plan.rank_bytes * ranks_here > free:
                raise typer.BadParameter(
                    f"{plan.largest} has {plan.largest_tiles:,} tiles and needs about "
                    f"{plan.rank_bytes * ranks_here / 2**30:.1f} GiB, but {free / 2**30:.1f} GiB are free here: use "
                    "more machines or devices (torchrun), a narrower --dtype, or --no-check-memory"
                )

        def on_slide(slide: SlideFile) -> None:
            slides["done"] += 1
            show(slide.tiles)

        return embed_slides(encoder, folder, output, ring=ring, on_start=on_start, on_slide=on_slide, **options)


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def _plan_sentence(plan: EmbeddingPlan, ranks: int, free: int) -> str:
    about = f"{plan.slides:,} slides, {plan.finished:,} of them finished before, {len(plan.problems):,} bad files."
    if not plan.largest:
        return about
    one = f" on each of {ranks} ranks, {plan.process_bytes / 2**30:.2f} GiB in one process" if ranks > 1 else ""
    return (
        f"{about} The largest, {plan.largest}, has {plan.largest_tiles:,} tiles: about "
        f"{plan.rank_bytes / 2**30:.2f} GiB{one}, besides the weights; {free / 2**30:.1f} GiB are free."
    )


def _report(console: Console, done: EmbeddedSlides, output: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({**dataclasses.asdict(done), "output": str(output)}))
        return
    for name, problem in done.skipped.items():
        console.print(f"Skipped {name}: {problem}", style="yellow", soft_wrap=True)
    console.print(
        f"{len(done.names):,} slides ({done.computed:,} computed now), {done.tiles:,} tiles, "
        f"{len(done.skipped):,} skipped, {done.seconds:,.1f} s.",
        soft_wrap=True,
    )
    if done.names:
        console.print(f"The embeddings are in {output / TABLE}.", soft_wrap=True)
