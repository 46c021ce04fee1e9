"""The heat map of docs/readout.md: a synthetic slide, and the weights with which a CLS token sees its tiles."""

import torch
from matplotlib.figure import Figure
from torch import Tensor

import ringspan as rs
from ringspan.draw import draw_heat_map

TILE = 256  # pixels
HEADS, HEAD_DIM = 8, 32


def draw_slide() -> Figure:
    """The mean over heads. Each head looks for one kind of tissue, and sees some of the tiles."""
    torch.manual_seed(0)
    coordinates, kinds = tissue(64, 96)
    n = 1 + len(coordinates)
    order = rs.Hilbert.from_points(coordinates)
    directions = torch.randn(3, HEADS, HEAD_DIM)
    k = torch.einsum("tc,chd->thd", kinds, directions) + 0.5 * torch.randn(n - 1, HEADS, HEAD_DIM)
    k = torch.cat((torch.randn(1, HEADS, HEAD_DIM), order.apply(k, dim=0)))[None]
    q = 0.6 * directions[torch.arange(HEADS) % 3, torch.arange(HEADS)][None, None]  # of the CLS token, row 0
    pattern = rs.Dilated((1024, n), (1, 2))
    weights = rs.attention_weights(q, k, rows=[0], pattern=pattern)
    tiles = order.undo(weights[0, :, 0, 1:], dim=1)
    title = f"What a CLS token sees of {n - 1:,} tiles; segment x rate: 1024x1, {n}x2"
    return draw_heat_map(TILE * coordinates, tiles, TILE, title=title)


def tissue(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """x and y of the tiles of two pieces of tissue with holes, and how much of each of three kinds a tile has."""
    y, x = torch.meshgrid(torch.arange(rows) / rows, torch.arange(columns) / columns, indexing="ij")
    waves = (0.07 * torch.sin(9 * a * x + 7 * b * y + a) for a, b in ((1, 2), (2, -1), (3, 2)))
    rough = sum(waves, start=torch.zeros_like(x))

    def blob(cx: float, cy: float, rx: float, ry: float) -> Tensor:
        return ((x - cx) / rx) ** 2 + ((y - cy) / ry) ** 2 + rough

    pieces = (blob(0.28, 0.5, 0.24, 0.4) < 1) | (blob(0.77, 0.52, 0.17, 0.34) < 1)
    holes = [(0.22, 0.36, 0.06, 0.07), (0.38, 0.66, 0.05, 0.1), (0.75, 0.42, 0.04, 0.08), (0.3, 0.82, 0.03, 0.04)]
    for hole in holes:
        pieces &= blob(*hole) > 1
    spots = [(0.37, 0.36, 0.11, 0.12), (0.17, 0.62, 0.08, 0.12), (0.81, 0.68, 0.09, 0.1)]
    kinds = torch.stack([torch.exp(-blob(*spot)) for spot in spots], dim=-1)
    found = pieces.nonzero()
    return found.flip(1), kinds[pieces]
