"""Every Transformers model type that can be built small: does ringspan's attention equal eager attention?

Each model class is compared in a separate process with a limit on CPU time. By default only causal language models are
compared, with --long all models. The suite fails if one differs.
"""

from __future__ import annotations

import collections
import multiprocessing
import resource
import warnings
from dataclasses import asdict
from functools import partial
from importlib import metadata
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING

from benchmarks.small_models import PADDED, SOFT_CAP, TOKENS, WINDOW, ModelComparison, Verdict, compare, model_classes
from benchmarks.suite import Measuring, Page, Results, Suite, Table

CPU_SECONDS = 30  # per model class; those that take longer are not small
TIMEOUT_SECONDS = 20 * CPU_SECONDS
TITLES: dict[Verdict, tuple[str, str]] = {
    "different": ("Different", "A defect. Please report it."),
    "equal": (
        "Equal to eager attention",
        "Within rounding: the largest difference relative to the largest output, in fp32, and the attention that the "
        "model's layers have. A causal window of 8 tokens is `window 7`, because it includes the query's own. Chunks "
        "of 8 tokens are `8x1`.",
    ),
    "refused": ("Refused", "The model raises this error."),
    "not used": (
        "Not reached",
        "These models never call ringspan: they have no attention, or accept `attn_implementation='ringspan'` but "
        "compute their own attention, whatever the pattern. `causal_lm_loss` refuses them, but `model(**batch)` "
        "cannot: do not use them with a pattern or a ring.",
    ),
    "not built": (
        "Not examined",
        "General rules found no small configuration or no valid input, or a package is not installed.",
    ),
}


def versions(run: Measuring) -> dict[str, str]:
    return {"transformers": metadata.version("transformers")}


def compare_models(run: Measuring, *, causal: bool) -> None:
    """Compare the causal language models, or all others."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    wanted = run.options["kinds"].split(",") if run.options["kinds"] else sorted(CONFIG_MAPPING.keys())
    kinds = ["llama", "bloom", "bert"] if run.size == "quick" else wanted
    classes = [(kind, model) for kind in kinds for model in model_classes(kind)]
    names = [f"{kind} {model}" for kind, model in classes if model.endswith("ForCausalLM") == causal]
    run.each(names, lambda name: asdict(_compare_in_process(*name.split(" "))))


def _compare_in_process(kind: str, model: str) -> ModelComparison:
    """Compare in a separate process, so that a crash or a hang affects this model only."""
    context = multiprocessing.get_context("fork")  # importing Transformers again would take seconds
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_compare_into, args=(sender, kind, model))
    process.start()
    sender.close()
    try:
        if receiver.poll(TIMEOUT_SECONDS):
            found: ModelComparison = receiver.recv()
            return found
    except EOFError:
        pass
    finally:
        process.kill()
        process.join()
    return ModelComparison(kind, model, "not built", f"crashed or took more than {CPU_SECONDS} seconds of CPU time")


def _compare_into(sender: Connection, kind: str, model: str) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    sender.send(compare(kind, model))
    sender.close()


def comparisons(results: Results) -> list[dict[str, Any]]:
    """All stored comparisons, by model type."""
    found = [*results["causal_models"].values(), *results.get("other_models", {}).values()]
    return sorted(found, key=lambda each: (each["kind"], each["model"]))


def broken(results: Results) -> str:
    different = [found["model"] for found in comparisons(results) if found["verdict"] == "different"]
    return f"{', '.join(different)}: differ from eager attention." if different else ""


def report(results: Results) -> Page:
    found = comparisons(results)
    counts = collections.Counter(each["verdict"] for each in found)
    sentence = (
        f"{len(found)} model classes of {len({each['kind'] for each in found})} model types, of which "
        f"{len(found) - counts['not built']} can be built small: **{counts['equal']} equal** eager attention, "
        f"**{counts['refused']} are refused**, {counts['not used']} never call ringspan, and **{counts['different']} "
        "differ**.\n\n"
        "Each model is built with random weights and run with `eager` attention and with `register()`, which computes "
        f"what the model's configuration says. Sliding windows and chunks are set to {WINDOW} tokens, so that they are "
        f"shorter than the text, and soft caps to {SOFT_CAP:.0f}. The inputs are {TOKENS} tokens, the same with the "
        f"last token changed (which shows whether earlier rows see it), and a batch with {PADDED} tokens of padding on "
        "the right and on the left. Image and audio models get one input of their own kind. All runs use one process."
    )
    used = [results.get(part, {}).get("transformers") for part in ("causal_versions", "other_versions")]
    machine = f"Machine: {results.machine}, transformers {', '.join(dict.fromkeys(filter(None, used)))}"
    page = Page("Transformers model types, one by one", sentence, "python -m benchmarks transformers_models", machine)
    for verdict, (title, text) in TITLES.items():
        rows = [[each["kind"], each["model"], each["reason"]] for each in found if each["verdict"] == verdict]
        if rows:
            page.parts.append(
                Table(f"{title}: {len(rows)}", [["model type", "class", "result"], *rows], text, details=True)
            )
    return page


SUITE = Suite(
    "docs/transformers_models.md",
    {
        "causal_versions": versions,
        "causal_models": partial(compare_models, causal=True),
        "other_versions": versions,
        "other_models": partial(compare_models, causal=False),
    },
    report,
    broken=broken,
    options={"kinds": ""},
    long_parts=("other_versions", "other_models"),
)
