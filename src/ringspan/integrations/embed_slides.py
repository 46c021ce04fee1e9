"""`embed_slides`: a folder of tile embeddings in, slide embeddings out, on one device or over a ring.

Finished slides are recorded in a journal, with the weights, so that a run resumes and never mixes two encoders.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ringspan as rs
from ringspan.integrations.gigapath import SlideEncoder
from ringspan.integrations.slide_files import COORDS, FEATURES, SlideFile, find_slides
from ringspan.integrations.torchscale import MLP_ROWS
from ringspan.runtime.collectives import all_gather_json
from ringspan.runtime.files import Journal, atomic_path, read_journal, sync
from ringspan.runtime.settings import RunError

SLIDES, TABLE, JOURNAL = "slides", "embeddings.safetensors", "journal.jsonl"  # in the output folder
_ALLOCATOR = 1.25  # what allocators keep of freed blocks; 1.06 to 1.31 were measured on CPUs
_COORDINATE_BYTES = 96  # of a tile, while all coordinates are checked


@dataclass(frozen=True)
class EmbeddingPlan:
    """What a run is about to do. Bytes are estimates of the growth of memory, without weights, Python and torch."""

    slides: int
    tiles: int
    finished: int  # slides of an earlier run, which are not computed again
    problems: dict[str, str]  # by slide
    largest: str  # the slide with the most tiles among those to compute; empty if there are none
    largest_tiles: int
    rank_bytes: int  # of the rank with the most rows, for that slide
    process_bytes: int  # if one process computed it


@dataclass(frozen=True)
class EmbeddedSlides:
    """The result of a run: the slides in the table, in its order, how many were computed, and which were skipped."""

    names: tuple[str, ...]
    tiles: int
    computed: int
    skipped: dict[str, str]  # what is wrong, by slide
    seconds: float


def embed_slides(
    encoder: SlideEncoder,
    folder: str | Path,
    output: str | Path,
    *,
    ring: rs.Ring | None = None,
    tile_size: int | None = None,
    features: Sequence[str] = FEATURES,
    coords: str = COORDS,
    all_layers: bool = False,
    on_start: Callable[[EmbeddingPlan], None] = lambda plan: None,
    on_slide: Callable[[SlideFile], None] = lambda slide: None,
) -> EmbeddedSlides:
    """Embed every slide of a folder: a file for each in ``output/slides``, and one for all, ``embeddings.safetensors``.

    A run that was interrupted resumes: slides whose file has not changed are not computed again. A slide that cannot be
    embedded is skipped and reported; the others are computed. Files are written whole or not at all.

    Args:
        encoder: in evaluation mode. Its grid gets the tile size of each slide; its segment lengths do not change.
        folder, tile_size, features, coords: as for `find_slides`.
        ring: splits each slide over its ranks; its layout must be ``"contiguous"``. Each rank reads the embeddings of
            its own tiles, and the coordinates of all. All ranks pass the same weights and need the same folder.
        all_layers: store the embeddings after each layer, (layers + 1, embed_dim), as ``all_layer_embed`` returns them.
        on_start: called on every rank before anything is computed; may raise, for example if memory is short.
        on_slide: called on every rank when a slide is finished or skipped.

    Raises RunError if the output belongs to other weights or settings.
    """
    start, output = time.perf_counter(), Path(output)
    if ring is not None and ring.layout != "contiguous":
        raise ValueError(f"layout {ring.layout!r}: ranks read consecutive tiles; pass Ring(layout='contiguous')")
    first = _FirstRank(ring, encoder.cls_token.device)
    settings = _settings(encoder, all_layers)
    first.check_equal("the encoder", settings)
    options: dict[str, Any] = dict(width=encoder.in_chans, tile_size=tile_size, features=features, coords=coords)
    found = first.run(lambda: asdict(find_slides(folder, **options)))
    slides = [SlideFile(**slide) for slide in found["slides"]]
    skipped: dict[str, str] = found["problems"]
    known = first.run(lambda: _start_journal(output, settings))
    pending = [slide for slide in slides if known.get(slide.name) != slide.identity]
    on_start(_plan(encoder, slides, pending, skipped, first.size))
    first.run(lambda: _delete_outdated(output, known, [*skipped, *(slide.name for slide in pending)]))
    for slide in pending:
        try:
            embedding = _embed(encoder, slide, ring, all_layers)
        except ValueError as error:
            skipped[slide.name] = str(error)
        else:
            first.run(lambda slide=slide, x=embedding: _write(output, slide, x))  # type: ignore[misc]
        on_slide(slide)
    finished = [slide for slide in slides if slide.name not in skipped]
    first.run(lambda: _write_table(output, finished))
    return EmbeddedSlides(
        names=tuple(slide.name for slide in finished),
        tiles=sum(slide.tiles for slide in finished),
        computed=sum(slide.name not in skipped for slide in pending),
        skipped=dict(sorted(skipped.items())),
        seconds=time.perf_counter() - start,
    )


def estimate_bytes(encoder: SlideEncoder, tiles: int, number_bytes: int = 4, ring_size: int = 1) -> int:
    """By how much memory grows on the rank with the most rows while a slide is embedded.

    Counts the tensors of a layer without gradients, at the larger of the peaks of attention and of the MLP, and adds a
    quarter for the allocator. Weights are not included. ``number_bytes`` is the size of a number in the file.
    """
    config, dtype = encoder.encoder.config, encoder.cls_token.dtype
    plan = rs.plan(
        config.pattern,
        tiles + 1,
        ring_size=ring_size,
        layout="contiguous",
        heads=config.heads,
        head_dim=config.width // config.heads,
        dtype=dtype,
    )
    rows = max(plan.layout.rows_of(rank) for rank in plan.sample)
    converted = number_bytes if number_bytes != dtype.itemsize else 0  # held beside its copy
    read = rows * encoder.in_chans * (converted + dtype.itemsize)
    states = rows * dtype.itemsize * (encoder.in_chans + 3 * config.width)  # tiles, embedded tiles, layer input, normed
    attention = max(plan.memory(rank).total for rank in plan.sample)
    # An MLP holds the hidden rows of a slice before and after the activation, in fp32 if narrower, or the norm.
    hidden = min(rows, MLP_ROWS) * config.mlp_width * 2 * max(dtype.itemsize, 4)
    mlp = hidden + 3 * rows * config.width * dtype.itemsize
    return int(_ALLOCATOR * (max(read, states + max(attention, mlp)) + tiles * _COORDINATE_BYTES))


def _plan(
    encoder: SlideEncoder, slides: list[SlideFile], pending: list[SlideFile], problems: dict[str, str], ring_size: int
) -> EmbeddingPlan:
    largest = max(pending, key=lambda slide: slide.tiles, default=None)
    sizes = (0, 0)
    if largest is not None:
        of_rank, of_process = (
            estimate_bytes(encoder, largest.tiles, largest.number_bytes, size) for size in (ring_size, 1)
        )
        sizes = (of_rank, of_process)
    return EmbeddingPlan(
        slides=len(slides),
        tiles=sum(slide.tiles for slide in pending),
        finished=len(slides) - len(pending),
        problems=problems,
        largest=largest.name if largest else "",
        largest_tiles=largest.tiles if largest else 0,
        rank_bytes=sizes[0],
        process_bytes=sizes[1],
    )


@torch.inference_mode()
def _embed(encoder: SlideEncoder, slide: SlideFile, ring: rs.Ring | None, all_layers: bool) -> Tensor:
    """The embedding, (embed_dim,), or those after each layer. Raises ValueError on all ranks if the slide is bad."""
    grid, like = encoder.grid, encoder.cls_token
    encoder.grid = replace(grid, tile_size=slide.tile_size)
    try:
        problem, x, places = "", like.new_empty(1, 0, slide.width), like.new_empty(1, 0, 2)
        try:
            places = slide.read_coords()[None]
            cells = encoder.grid.cells(places)
            encoder.grid.check_shared(cells, places, torch.zeros_like(cells[..., 0]))
            rows = slice(0, slide.tiles)
            if ring is not None:  # consecutive, as the layout is contiguous
                mine = encoder.tile_rows(slide.tiles, ring)
                rows = slice(int(mine[0]), int(mine[-1]) + 1) if len(mine) else slice(0, 0)
            x = slide.read_features(rows.start, rows.stop)[None].to(like)
            places = places[:, rows].to(like.device)
        except ValueError as error:
            problem = str(error)
        if ring is not None:
            problems = all_gather_json(problem, group=ring.group, device=like.device)
            problem = next((each for each in problems if each), "")
        if problem:
            raise ValueError(problem)
        found = encoder(x, places, all_layers, ring=ring)
    finally:
        encoder.grid = grid
    return torch.cat(found) if all_layers else found[0][0]


def _settings(encoder: SlideEncoder, all_layers: bool) -> dict[str, str]:
    """What all embeddings of an output folder have in common: weights, in their dtype, and arguments."""
    if encoder.training:
        raise ValueError("the encoder is in training mode: call eval()")
    total = hashlib.sha256()
    for name, x in sorted(encoder.state_dict().items()):
        total.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        total.update(x.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return {
        "weights": total.hexdigest(),
        "encoder": str(encoder.encoder.config),
        "readout": f"{'average' if encoder.global_pool else 'CLS'}, {encoder.norm}",
        "layers": "all" if all_layers else "last",
    }


def _start_journal(output: Path, settings: dict[str, str]) -> dict[str, Any]:
    """The identities of finished slides, by name. Raises RunError if they were embedded with other settings."""
    try:
        lines = read_journal(output / JOURNAL)
    except ValueError as error:
        raise RunError(str(error)) from error
    if not lines:
        Journal(output / JOURNAL).append({"settings": settings})
        return {}
    stored = lines[0].get("settings", {})
    different = [name for name in settings if stored.get(name) != settings[name]]
    if different:
        raise RunError(
            f"{output} holds embeddings with other {' and '.join(different)}: give another output folder, or delete it"
        )
    Journal(output / JOURNAL)  # drops a torn last line
    slides = {line["slide"]["name"]: line["slide"] for line in lines[1:]}
    return {name: slide for name, slide in slides.items() if _path(output, name).is_file()}


def _path(output: Path, name: str) -> Path:
    return output / SLIDES / f"{name}.safetensors"


def _delete_outdated(output: Path, known: dict[str, Any], names: list[str]) -> None:
    """Delete the table, which is written last, and the embeddings of files that have changed or are bad now."""
    (output / TABLE).unlink(missing_ok=True)
    for name in names:
        if name in known:
            _path(output, name).unlink()


def _write(output: Path, slide: SlideFile, embedding: Tensor) -> None:
    about = {"slide": slide.name, "tiles": str(slide.tiles), "tile_size": str(slide.tile_size)}
    _save(_path(output, slide.name), {"embedding": embedding}, about)
    Journal(output / JOURNAL).append({"slide": slide.identity})


def _write_table(output: Path, slides: list[SlideFile]) -> None:
    """One file with the embeddings of all slides, and their names in its metadata."""
    from safetensors.torch import load_file  # noqa: PLC0415

    rows = [load_file(_path(output, slide.name))["embedding"] for slide in slides]
    names = json.dumps([slide.name for slide in slides])
    if rows:
        _save(output / TABLE, {"embeddings": torch.stack(rows)}, {"names": names})


def _save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    from safetensors.torch import save_file  # noqa: PLC0415

    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as temporary:
        save_file({name: x.cpu().contiguous() for name, x in tensors.items()}, temporary, metadata)
        sync(temporary)


@dataclass(frozen=True)
class _FirstRank:
    """Tasks of rank 0 whose results, or errors, all ranks need."""

    ring: rs.Ring | None
    device: torch.device

    @property
    def size(self) -> int:
        return 1 if self.ring is None else self.ring.size

    def run(self, task: Callable[[], Any]) -> Any:
        """The result of the task, which must fit JSON, on all ranks. OSError and RunError become RunError on all."""
        outcome: dict[str, Any] = {}
        if self.ring is None or self.ring.rank == 0:
            try:
                outcome = {"result": task()}
            except (OSError, RunError) as error:
                outcome = {"error": str(error)}
        if self.ring is not None:
            outcome = all_gather_json(outcome, group=self.ring.group, device=self.device)[0]
        if "error" in outcome:
            raise RunError(outcome["error"])
        return outcome["result"]

    def check_equal(self, what: str, value: Any) -> None:
        if self.ring is not None:
            by_rank = all_gather_json(value, group=self.ring.group, device=self.device)
            different = [rank for rank, each in enumerate(by_rank) if each != by_rank[0]]
            if different:
                raise rs.RingError(f"{what} of ranks {different} is not that of rank 0: load the same weights on all")
