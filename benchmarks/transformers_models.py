"""Every model type of Transformers that can be built small: does ringspan's attention equal eager attention?

    python -m benchmarks.transformers_models               # all, about 15 minutes; writes docs/transformers_models.md
    python -m benchmarks.transformers_models llama bloom   # some, printed only

Each model class is compared in a process of its own, with a limit of CPU time. The command fails if one differs.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import resource
import sys
import warnings
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from transformers import CONFIG_MAPPING

from benchmarks.small_models import PADDED, TOKENS, Found, Verdict, compare, model_classes
from ringspan.tools.measure import describe_machine, one_line
from ringspan.tools.pages import Page, Table, markdown, print_page

ROOT = Path(__file__).parent.parent
CPU_SECONDS = 30  # for a model class; those that take longer are not small
HANGING = 20 * CPU_SECONDS  # seconds
TITLES: dict[Verdict, tuple[str, str]] = {
    "different": ("Different", "A defect. Please report it."),
    "equal": (
        "Equal to eager attention",
        "Within rounding: the largest difference, relative to the largest output, in fp32.",
    ),
    "refused": ("Refused", "The model raises an error, which is given here."),
    "not used": (
        "Not reached",
        "These models never call ringspan: they have no attention, or accept `attn_implementation='ringspan'` and "
        "still compute their own, whatever the pattern. Nothing tells ringspan about them: do not use them with a "
        "pattern or a ring.",
    ),
    "not built": (
        "Not examined",
        "No small configuration or no fitting input was found by general rules, or a package is missing here.",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", help="model types; all of them by default")
    kinds = parser.parse_args().kinds
    console = Console()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    cases = [(kind, model) for kind in kinds or sorted(CONFIG_MAPPING.keys()) for model in model_classes(kind)]
    results = []
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task("", total=len(cases))
        for kind, model in cases:
            bar.update(task, description=model)
            results.append(_compare_apart(kind, model))
            bar.advance(task)
    report = page(results)
    print_page(report, console)
    console.print(report.sentence, markup=False)
    if not kinds:
        (ROOT / "docs/transformers_models.md").write_text(markdown(report, "figures"))
    if any(found.verdict == "different" for found in results):
        sys.exit("Some models differ from eager attention.")


def _compare_apart(kind: str, model: str) -> Found:
    """Compare in a process of its own, so that a crash or a hang concerns this model only."""
    context = multiprocessing.get_context("fork")  # Transformers is imported already, which takes seconds
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_compare_into, args=(sender, kind, model))
    process.start()
    sender.close()
    try:
        if receiver.poll(HANGING):
            found: Found = receiver.recv()
            return found
    except EOFError:
        pass
    finally:
        process.kill()
        process.join()
    return Found(kind, model, "not built", f"crashed, or took more than {CPU_SECONDS} seconds of CPU time")


def _compare_into(sender: Connection, kind: str, model: str) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    sender.send(compare(kind, model))
    sender.close()


def page(results: list[Found]) -> Page:
    counts = collections.Counter(found.verdict for found in results)
    examined = len(results) - counts["not built"]
    kinds = len({found.kind for found in results})
    sentence = (
        f"{len(results)} model classes of {kinds} model types, of which {examined} could be built small: "
        f"**{counts['equal']} equal** eager attention, **{counts['refused']} are refused**, {counts['not used']} never "
        f"reach ringspan, and **{counts['different']} differ**.\n\n"
        f"Each is built with random weights, and run with `eager` attention and with ringspan's `Full()` on the same "
        f"inputs: {TOKENS} tokens, the same with the last token changed (do earlier rows see it?), and a batch with "
        f"{PADDED} tokens of padding on the right and on the left. Models of images and sound get one input of theirs."
    )
    machine = f"{one_line(describe_machine())}, transformers {metadata.version('transformers')}"
    found = Page("Transformers model types, one by one", sentence, "python -m benchmarks.transformers_models", machine)
    for verdict, (title, text) in TITLES.items():
        rows = [[each.kind, each.model, each.reason] for each in results if each.verdict == verdict]
        if rows:
            found.parts.append(Table(f"{title}: {len(rows)}", [["model type", "class", "found"], *rows], text))
    return found


if __name__ == "__main__":
    main()
