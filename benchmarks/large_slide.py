"""A slide of 45,680 tiles in Prov-GigaPath's published size, with random weights: time and memory by ring size."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

import ringspan as rs
from benchmarks.suite import Measuring, Rows, Table, mebibytes
from ringspan.integrations.gigapath import SlideEncoder
from ringspan.runtime.device import Cpu
from ringspan.runtime.launch import run_local_ranks
from ringspan.tools.synthetic_slide import tissue

SIZE, CHANNELS, TILE_SIZE = "gigapath_slide_enc12l768d", 1536, 256
RING_SIZES = (1, 2, 4)
_CHUNK = 1024  # tiles that are created at a time


def large_slide(run: Measuring) -> list[dict[str, Any]]:
    """Each ring in fresh processes, one thread per rank. Four ranks share two cores."""
    tiles, depth = run.sized((600, 2), (45_680, 12), (45_680, 12))
    rows = []
    for size in RING_SIZES:
        run.announce(f"{tiles:,} tiles, {size} processes")
        ranks = run_local_ranks(size, encode, tiles, depth, timeout_seconds=3600)
        embedding = torch.tensor(ranks[0]["embedding"])
        rows.append(
            dict(
                tiles=tiles,
                layers=depth,
                ring_size=size,
                seconds=max(rank["seconds"] for rank in ranks),
                peak_bytes=[rank["peak_bytes"] for rank in ranks],
                weight_bytes=ranks[0]["weight_bytes"],
                input_bytes=max(rank["input_bytes"] for rank in ranks),
                embedding=embedding.tolist(),
            )
        )
    return rows


@torch.no_grad()
def encode(tiles: int, depth: int) -> dict[str, Any]:
    """On each rank: the embedding of the slide, seconds, and peak growth beyond the weights and this rank's tiles."""
    ring = rs.Ring(layout="contiguous", min_size=1)
    torch.manual_seed(0)  # every rank creates the same weights
    encoder = SlideEncoder.named(SIZE, in_chans=CHANNELS, depth=depth).eval()
    mine = encoder.tile_rows(tiles, ring)
    x, coords = tile_embeddings(tiles, mine), TILE_SIZE * tissue(tiles, 3, seed=0)[mine]
    few = encoder.tile_rows(64 * ring.size, ring)  # loads libraries, starts threads and connections
    encoder(tile_embeddings(64 * ring.size, few), coords[: len(few)][None], ring=ring, seq_len=64 * ring.size)
    started = time.perf_counter()
    (embedding,), peak = Cpu().peak_growth(lambda: encoder(x, coords[None], ring=ring, seq_len=tiles))
    return dict(
        embedding=embedding[0].tolist(),
        seconds=time.perf_counter() - started,
        peak_bytes=peak,
        weight_bytes=sum(weight.nbytes for weight in encoder.parameters()),
        input_bytes=x.nbytes,
    )


def tile_embeddings(tiles: int, mine: Tensor) -> Tensor:
    """Random embeddings of some tiles, (1, len(mine), channels): the same for a tile on every ring."""
    held = torch.zeros(tiles, dtype=torch.bool).index_fill_(0, mine, True)
    chunks = []
    for start in range(0, tiles, _CHUNK):
        generator = torch.Generator().manual_seed(start)
        of_chunk = held[start : start + _CHUNK]
        if of_chunk.any():
            chunks.append(torch.randn(len(of_chunk), CHANNELS, generator=generator)[of_chunk])
    return torch.cat(chunks)[None]


def large_slide_table(rows: list[dict[str, Any]]) -> Table:
    one = torch.tensor(rows[0]["embedding"], dtype=torch.float64)
    cells: Rows = [["ranks", "time", "speed-up", "peak of a rank", "x ranks", "its tiles", "embedding differs by"]]
    for row in rows:
        peak, embedding = max(row["peak_bytes"]), torch.tensor(row["embedding"], dtype=torch.float64)
        apart = "" if row is rows[0] else f"{(embedding - one).abs().max().item():.1e}"
        cells.append(
            [
                str(row["ring_size"]),
                f"{row['seconds']:.0f} s",
                "" if row is rows[0] else f"{rows[0]['seconds'] / row['seconds']:.2f} x",
                mebibytes(peak),
                mebibytes(peak * row["ring_size"]),
                mebibytes(row["input_bytes"]),
                apart,
            ]
        )
    text = (
        f"`SlideEncoder.named({SIZE!r})` with random weights: {rows[0]['tiles']:,} tiles and the CLS row, "
        f"{rows[0]['layers']} layers, fp32, one thread per rank, in fresh processes, one run each. The peak is "
        f"that of the forward pass beyond the weights ({mebibytes(rows[0]['weight_bytes'])} on every rank) and the "
        f"rank's own tiles. Entries of the embedding are about {one.abs().mean().item():.1f} in size. Four ranks share "
        "two cores here, so they are no faster than two."
    )
    return Table("A slide of 45,680 tiles", cells, text)
