"""Damage the files that runs read, and see what is said: a sentence each, no hang, no traceback, no code run.

python -m benchmarks.fuzz                # 500 of each kind, a few minutes; writes its part of docs/faults.md
python -m benchmarks.fuzz --rounds 20    # fewer; nothing is written
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from benchmarks.fuzz_files import LONGEST, Found, fuzz
from benchmarks.tables import Cells, markdown_table, rich_table
from ringspan.models.config import LongNetConfig
from ringspan.runtime.launch import run_local_ranks
from ringspan.tools.measure import describe_machine, one_line
from ringspan.tools.pages import write_into
from ringspan.train.config import TrainSettings

ROOT = Path(__file__).parent.parent
MARKER = "benchmarks.fuzz"
ROUNDS = 500


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="damaged files of each kind")
    rounds, console = parser.parse_args().rounds, Console()
    with tempfile.TemporaryDirectory() as folder:
        model = LongNetConfig.named("nano", segment_lengths=(16, 128), dilation_rates=(1, 4))
        settings = TrainSettings(model=model, data=(str(ROOT / "src"),), tokens=256, steps=2, out=folder)
        (found,) = run_local_ranks(1, fuzz, settings, rounds, timeout_seconds=60.0 + 6 * rounds * LONGEST)
    cells = table(found)
    console.print(rich_table("Damaged files", cells))
    for defect in [defect for each in found for defect in each.defects]:
        console.print(defect, style="red", markup=False)
    if rounds >= ROUNDS:
        write_into(ROOT / "docs/faults.md", MARKER, page(found, cells))
    if any(each.defects for each in found):
        sys.exit("Not every damaged file was answered with a sentence.")


def table(found: list[Found]) -> Cells:
    head = ["damaged", "files", "refused with a sentence", "still whole, and read", "hangs, tracebacks, code run"]
    return [head] + [
        [each.kind, str(each.tried), str(len(each.sentences)), str(each.whole), str(len(each.defects))]
        for each in found
    ]


def page(found: list[Found], cells: Cells) -> list[str]:
    total, defects = sum(each.tried for each in found), sum(len(each.defects) for each in found)
    text = (
        f"{total} damaged files: bytes cut off, left out, put in, flipped or doubled, and in JSON also values that "
        "have no business there. A file may survive that: a digit of a learning rate is changed, or a space is "
        f"doubled. Each case had {LONGEST} seconds, and unpickling by name, forks and new processes were watched by an "
        f"audit hook. Hangs, tracebacks and code that was run: **{defects}**."
    )
    machine = one_line(describe_machine())
    return ["", text, "", *markdown_table(cells), "", f"Written by `python -m {MARKER}`. {machine}.", ""]


if __name__ == "__main__":
    main()
