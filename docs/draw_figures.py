"""Draw the pictures of the docs again: `make figures`."""

from pathlib import Path

import ringspan as rs
from draw_concepts import draw_balance, draw_hops, draw_merge, draw_needs, draw_split
from draw_ring import draw_ring
from draw_slide import draw_slide
from draw_traces import draw_layout
from ringspan.draw import draw_pattern, draw_schedule, draw_work, scaled_down

FIGURES = Path(__file__).parent / "figures"


def main() -> None:
    FIGURES.mkdir(exist_ok=True)
    example = rs.Dilated((4, 8), (1, 2))
    longnet = rs.Dilated((8, 16, 32), (1, 2, 4))
    spread = rs.Dilated((2048, 8192, 32768), (1, 4, 16))
    contiguous = rs.plan(spread, 32768, ring_size=4, layout="contiguous", causal=True)
    zigzag = rs.plan(spread, 32768, ring_size=4, layout="zigzag", causal=True)
    small_contiguous, note = scaled_down(contiguous)
    small_zigzag, _ = scaled_down(zigzag)
    halo = rs.plan(rs.Window(6), 64, ring_size=4, layout="contiguous", causal=True, heads=1)
    pictures = {
        "ring": draw_ring(),
        "concept_split": draw_split(),
        "concept_needs": draw_needs(),
        "concept_hops": draw_hops(),
        "concept_merge": draw_merge(),
        "concept_balance": draw_balance(),
        "worked_example": draw_pattern(example, 16, 2),
        "worked_example_causal": draw_pattern(example, 16, 2, causal=True),
        "longnet_causal": draw_pattern(longnet, 32, 3, causal=True),
        "shifted": draw_pattern(rs.Dilated((8, 16), (1, 2), shift=4), 32, 2),
        "window_sum": draw_pattern(rs.Window(3) + rs.Dilated((32,), (4,)), 32, 2, causal=True),
        "schedule_contiguous": draw_schedule(contiguous),
        "schedule_zigzag": draw_schedule(zigzag),
        "work_contiguous": draw_work(small_contiguous, note=note),
        "work_zigzag": draw_work(small_zigzag, note=note),
        "work_window": draw_work(halo),
        "heat_map": draw_slide(),
        "trace_contiguous": draw_layout("contiguous"),
        "trace_zigzag": draw_layout("zigzag"),
    }
    for name, figure in pictures.items():
        figure.savefig(FIGURES / f"{name}.png", dpi=130)
        print(f"docs/figures/{name}.png")


if __name__ == "__main__":
    main()
