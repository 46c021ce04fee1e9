"""Compares four orders of one grid: the same small transformer, trained at the same cost.

    python examples/grid_orders.py              # a few minutes on two cores; writes docs/figures/hilbert_learning.png
    python examples/grid_orders.py --side 32    # a narrow grid, where row-major order suffices: a segment is two rows

The task needs two-dimensional neighbourhoods: the model fills in smooth random fields with most cells hidden. A cell
that sees a compact patch around it can do that; one that sees a strip of its row cannot. Weights, data, segments and
therefore the cost are the same for all orders.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ringspan as rs

ORDERS = {"row-major": rs.RowMajor, "snake": rs.Snake, "Morton": rs.Morton, "Hilbert": rs.Hilbert}
SEGMENT, CELLS_A_STEP = 64, 2**13
WIDTH, HEADS, LAYERS = 64, 4, 2
HIDDEN_SHARE, SMOOTHNESS = 0.75, 1.5
ROOT = Path(__file__).parent.parent


def random_fields(side: int, generator: torch.Generator) -> Tensor:
    """Smooth fields of unit variance, (batch, cells, 1), in row-major order; as many cells on any grid."""
    reach = torch.arange(-4.0, 5.0)
    bell = torch.exp(-(reach**2) / (2 * SMOOTHNESS**2))
    kernel = bell[:, None] * bell
    noise = torch.randn(CELLS_A_STEP // side**2, 1, side + 8, side + 8, generator=generator)
    fields = F.conv2d(noise, (kernel / kernel.norm())[None, None])
    return fields.flatten(2).transpose(1, 2)


class Layer(nn.Module):
    """Attention over segments of the curve, with rotary positions on the grid; then an MLP."""

    def __init__(self, grid: tuple[int, ...], shift: int) -> None:
        super().__init__()
        self.pattern = rs.Dilated((SEGMENT,), (1,), shift=shift)
        self.norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.rotary = rs.nn.GridRotary(grid, WIDTH // HEADS)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: Tensor, coordinates: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
        q, k = self.rotary(q, coordinates), self.rotary(k, coordinates)
        x = x + self.out(rs.attention(q, k, v, pattern=self.pattern).flatten(-2))
        return x + self.mlp(self.mlp_norm(x))


class FillIn(nn.Module):
    """Predicts all cells from the visible ones. Rows stay in the order of ``order`` throughout."""

    def __init__(self, order: rs.Hilbert | rs.RowMajor | rs.Snake | rs.Morton) -> None:
        super().__init__()
        self.order = order
        self.enter, self.leave = nn.Linear(2, WIDTH), nn.Linear(WIDTH, 1)
        # The second layer shifts segments, so that borders of the first are in the middle.
        self.layers = nn.ModuleList(Layer(order.shape, shift=i % 2 * (SEGMENT // 2)) for i in range(LAYERS))

    def forward(self, shown: Tensor, mask: Tensor) -> Tensor:
        x = self.enter(self.order.apply(torch.cat([shown, mask], dim=-1)))
        for layer in self.layers:
            x = layer(x, self.order.coordinates)
        return self.order.undo(self.leave(x))


def train(order: rs.Hilbert | rs.RowMajor | rs.Snake | rs.Morton, seed: int, steps: int) -> list[float]:
    """Loss at each step on fresh data: the mean squared error at hidden cells (variance 1)."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)  # the same data for every order
    model = FillIn(order)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=max(steps, 2), pct_start=0.1)
    losses = []
    for _ in range(steps):
        fields = random_fields(order.shape[0], generator)
        mask = (torch.rand(fields.shape, generator=generator) >= HIDDEN_SHARE).float()
        loss = ((model(fields * mask, mask) - fields) ** 2 * (1 - mask)).sum() / (1 - mask).sum()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def draw(curves: dict[str, Tensor], side: int, path: Path) -> None:
    """Loss over steps: mean and range over seeds. ``curves`` are (seeds, steps)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axis = figure.subplots()
    styles = {
        "row-major": ("#B35806", "-"),
        "snake": ("#F1A340", "--"),
        "Morton": ("#998EC3", "-"),
        "Hilbert": ("#542788", "-"),
    }
    for name, losses in curves.items():
        window = max(1, losses.shape[1] // 40)
        smooth = losses.unfold(1, window, 1).mean(-1)
        steps = torch.arange(window, losses.shape[1] + 1)
        colour, dash = styles[name]
        axis.plot(steps, smooth.mean(0), dash, color=colour, label=f"{name}: {smooth[:, -1].mean():.3f}")
        axis.fill_between(steps, smooth.amin(0), smooth.amax(0), color=colour, alpha=0.2, linewidth=0)
    axis.set(xlabel="step", ylabel="error at hidden cells (variance 1)", yscale="log")
    axis.legend(title=f"order: error at the end, mean of {len(losses)} seeds", frameon=False)
    axis.set_title(
        f"Filling in {side} x {side} fields, segments of {SEGMENT}: the same model at the same cost", fontsize=11
    )
    axis.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", type=int, default=64, help="of the square grid")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/figures/hilbert_learning.png")
    options = parser.parse_args()
    curves = {}
    for name, order in ORDERS.items():
        grid = order((options.side, options.side))
        found = torch.tensor([train(grid, seed, options.steps) for seed in range(options.seeds)])
        curves[name] = found
        last = found[:, -max(1, options.steps // 10) :].mean(1)
        print(f"{name:10} error {last.mean():.4f} (seeds: {last.min():.4f} - {last.max():.4f})", flush=True)
    draw(curves, options.side, options.out)
    print(f"Loss curves: {options.out}")


if __name__ == "__main__":
    main()
