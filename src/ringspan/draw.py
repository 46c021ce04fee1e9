"""Pictures: who sees what, and which rank does what when. Needs matplotlib (``pip install 'ringspan[plot]'``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringspan.geometry import Full, Pattern
from ringspan.oracle import multiplicity
from ringspan.planning import Hop, RingPlan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# One hue, darker where a key counts more often: it survives colour blindness and print.
_COLOURS = ("#F5F5F5", "#A6CEE3", "#3787C0", "#084594", "#000000")


def draw_pattern(pattern: Pattern, n: int, kv_heads: int = 1, *, causal: bool = False) -> Figure:
    """For each KV head, a grid of queries (down) against keys (across), coloured by how often a key counts.

    >>> from ringspan import Dilated
    >>> draw_pattern(Dilated((4, 8), (1, 2)), n=16, kv_heads=2).savefig("/dev/null", format="png")
    """
    from matplotlib.colors import BoundaryNorm, ListedColormap  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.patches import Patch  # noqa: PLC0415

    count = multiplicity(pattern, n, kv_heads, causal=causal)
    most = min(int(count.max()), len(_COLOURS) - 1)
    colours = _COLOURS[: most + 1]
    figure = Figure(figsize=(3.1 * kv_heads + 1.7, 3.6), layout="constrained")
    axes = figure.subplots(1, kv_heads, squeeze=False)[0]
    for head, axis in enumerate(axes):
        grid = count[head].clamp(max=most).numpy()
        norm = BoundaryNorm([i - 0.5 for i in range(most + 2)], most + 1)
        axis.pcolormesh(grid, cmap=ListedColormap(colours), norm=norm, edgecolors="white", linewidth=min(0.7, 16 / n))
        axis.set_aspect("equal")
        axis.invert_yaxis()
        axis.set_title(f"KV head {head}", fontsize=10)
        axis.set_xlabel("key t")
        axis.tick_params(length=0)
        axis.set_xticks(_ticks(n), [str(i) for i in _places(n)], fontsize=8)
        axis.set_yticks(_ticks(n), [str(i) for i in _places(n)], fontsize=8)
        axis.spines[:].set_visible(False)
    axes[0].set_ylabel("query p")
    names = ["not seen", "counts once", "counts twice", *(f"counts {m} times" for m in range(3, most + 1))]
    figure.legend(
        handles=[Patch(facecolor=c, edgecolor="#BBBBBB", label=name) for c, name in zip(colours, names, strict=False)],
        loc="outside right upper",
        frameon=False,
        fontsize=9,
    )
    figure.suptitle(_title(pattern, n, causal), fontsize=11)
    return figure


def draw_schedule(plan: RingPlan) -> Figure:
    """Ranks (down) against hops (across): whose rows each rank works on, how much work that is, and what arrives.

    >>> import ringspan as rs
    >>> ring = rs.plan(rs.Dilated((64, 256), (1, 4)), 256, ring_size=4, causal=True)
    >>> draw_schedule(ring).savefig("/dev/null", format="png")
    """
    from matplotlib import colormaps  # noqa: PLC0415
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.patches import Rectangle  # noqa: PLC0415

    ranks = [plan.rank(rank) for rank in range(plan.layout.ring_size)]
    hops = max(len(rank.hops) for rank in ranks)
    pairs = [[sum(tile.pairs for tile in hop.tiles) for hop in rank.hops] for rank in ranks]
    most, total = max(max(row) for row in pairs) or 1, sum(map(sum, pairs)) or 1
    figure = Figure(figsize=(2.1 * hops + 1.2, 0.85 * len(ranks) + 1.6), layout="constrained")
    axis = figure.subplots()
    colours = colormaps["Blues"]
    for rank in ranks:
        for number, hop in enumerate(rank.hops):
            share = pairs[rank.rank][number] / most
            fill = colours(0.1 + 0.8 * share) if hop.tiles else "#F5F5F5"
            axis.add_patch(Rectangle((number + 0.04, rank.rank + 0.06), 0.92, 0.88, color=fill))
            text = _hop_text(hop, number, plan.sizes.parcel_row_bytes)
            text += f"\n{pairs[rank.rank][number] / total:.1%} of all work" if hop.tiles else ""
            colour = "white" if share > 0.6 else "black"
            axis.text(number + 0.5, rank.rank + 0.5, text, ha="center", va="center", fontsize=8, color=colour)
    axis.set(xlim=(0, hops), ylim=(len(ranks), 0), ylabel="rank")
    axis.set_xticks([i + 0.5 for i in range(hops)], ["own rows", *(f"hop {i}" for i in range(1, hops))])
    axis.set_yticks([i + 0.5 for i in range(len(ranks))], [str(i) for i in range(len(ranks))])
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    title = f"{_title(plan.pattern, plan.layout.rows, plan.causal)}, {plan.layout.name}"
    axis.set_title(f"{title}\ndarker: more work; imbalance {plan.imbalance:.2f}", fontsize=10)
    return figure


def _hop_text(hop: Hop, number: int, row_bytes: int) -> str:
    """What a rank does at a hop: whose parcels it computes, and how many bytes they are."""
    if number == 0:
        return f"{len(hop.tiles)} tiles"
    if not hop.receives:
        return "nothing to compute"
    owners = ", ".join(str(owner) for owner in sorted({message.parcel.owner for message in hop.receives}))
    received = sum(message.parcel.rows for message in hop.receives) * row_bytes
    return f"rows of rank {owners}\n{received / 2**20:.2g} MiB"


def _places(n: int) -> range:
    return range(0, n, max(1, n // 8))


def _ticks(n: int) -> list[float]:
    return [i + 0.5 for i in _places(n)]


def _title(pattern: Pattern, n: int, causal: bool) -> str:
    if isinstance(pattern, Full):
        name = "Full()"
    else:
        pairs = zip(pattern.segment_lengths, pattern.dilation_rates, strict=True)
        name = "segments x rates: " + ", ".join(f"{w} x {r}" for w, r in pairs)
        name += f", shift {pattern.shift}" if pattern.shift else ""
    return f"{name}{', causal' if causal else ''}, n = {n}"
