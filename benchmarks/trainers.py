"""`ringspan verify --training` on ringspan's own trainers and on the context parallelism of other projects.

The page shows what was seen with the installed versions. The suite fails only if a trainer of ringspan does.
"""

from __future__ import annotations

import collections
import dataclasses
import random
from functools import partial
from importlib import import_module, metadata
from typing import Any

from benchmarks.suite import Measuring, Page, Results, Rows, Suite, Table
from ringspan.testing import verify_training
from ringspan.tools.verify_training.batches import TrainingSettings, lengths_text, odd_lengths
from ringspan.tools.verify_training.judge import roots
from tests.tools.verify_training.subjects import FAULTS, checks_of_all, options_of, random_subject

PREFIX = "ringspan.tools.verify_training."
OURS: dict[str, tuple[str, ...]] = {"own_trainers:longnet": (), "own_trainers:transformers": ("transformers",)}
PEERS: dict[str, tuple[str, ...]] = {
    "other_trainers:torch_context_parallel": ("transformers",),
    "other_trainers:torch_context_parallel_window": ("transformers",),
    "other_trainers:accelerate_context_parallel": ("accelerate", "transformers"),
    "other_trainers:accelerate_context_parallel_window": ("accelerate", "transformers"),
    "other_trainers:ring_attention_pytorch_transformer": ("ring-attention-pytorch",),
}
PACKAGES = OURS | PEERS  # whose versions matter, besides torch's
TIMEOUT_SECONDS = 300  # of each ring
FEW_HONEST = {2: 30, 3: 6, 4: 4}  # trainers by ring size
HONEST = {2: 120, 3: 50, 4: 30}  # with --long
HONEST_PER_LAUNCH = 30


def examine(trainer: str, ranks: tuple[int, ...]) -> dict[str, Any]:
    """All checks of one trainer, and the versions that ran."""
    report = verify_training(PREFIX + trainer, ranks=ranks, timeout=TIMEOUT_SECONDS)
    return {
        "sentence": report.sentence,
        "checks": [dataclasses.asdict(check) for check in report.checks],
        "settings": dataclasses.asdict(report.settings),
        "versions": {package: metadata.version(package) for package in ("torch", *PACKAGES[trainer])},
    }


def verify_each(run: Measuring, trainers: dict[str, tuple[str, ...]]) -> None:
    run.each(trainers, partial(examine, ranks=run.sized((1, 2), (1, 2, 4), (1, 2, 4))))


def faults(run: Measuring) -> dict[str, Any]:
    """Trainers with one fault each, on rings of 1 and 2: which checks are reported as causes."""
    names = list(FAULTS)[: run.sized(2, len(FAULTS), len(FAULTS))]
    found = checks_of_all([options_of(name) for name in names], (1, 2))
    return {
        name: {"expected": FAULTS[name][1], "causes": [dataclasses.asdict(check) for check in roots(checks)]}
        for name, checks in zip(names, found, strict=True)
    }


def honest(run: Measuring) -> dict[str, Any]:
    """Random trainers without a fault, on rings of 2, 3 and 4: checks that fail are false alarms."""
    alarms: list[str] = []
    counts = run.sized({2: 2}, FEW_HONEST, HONEST)
    for size, count in counts.items():
        rng = random.Random(size)
        for first in range(0, count, HONEST_PER_LAUNCH):
            subjects = [random_subject(rng) for _ in range(min(HONEST_PER_LAUNCH, count - first))]
            for subject, checks in zip(subjects, checks_of_all(subjects, (1, size), seed=first), strict=True):
                alarms += [f"{check.name}: {check.result} ({subject})" for check in checks if check.verdict == "FAIL"]
    return {"configurations": {str(size): count for size, count in counts.items()}, "alarms": alarms}


def fault_table(found: dict[str, Any], honest: dict[str, Any]) -> Table:
    """One row for each fault, and in the text how often it was found alone, and false alarms."""
    rows: Rows = [["fault", "reported as the cause", "result", "explanation"]]
    for name, each in found.items():
        columns = ("name", "result", "reason")
        rows.append([f"`{name}`", *("; ".join(check[column] for check in each["causes"]) for column in columns)])
    counts = honest["configurations"]
    rings = ", ".join(f"{count} on rings of {size}" for size, count in counts.items())
    text = (
        f"{len(found) - len(missed(found))} of {len(found)} faults are found on rings of 1 and 2, each by its own "
        f"check, and no other check is reported as a cause. {sum(counts.values())} random trainers without a fault "
        f"({rings}: contiguous and zigzag shards, windows, sinks, one to three layers, with and without token losses): "
        f"{len(honest['alarms'])} false alarms. All are those of `tests/tools/verify_training/subjects.py`."
    )
    return Table("Faulty and honest trainers", rows, text)


def missed(found: dict[str, Any]) -> list[str]:
    """The faults that are not found, or for which other checks are blamed."""
    return [name for name, each in found.items() if [c["name"] for c in each["causes"]] != [each["expected"]]]


def error_of(found: dict[str, Any]) -> str:
    """What was raised before anything could be compared, or an empty string."""
    return next(
        (
            " ".join(check["reason"].split()).replace("](", "] (")
            for check in found["checks"]
            if check["result"] == "not measured"
        ),
        "",
    )


def broken(results: Results) -> str:
    failing = [name for name, found in results["ours"].items() if any(c["verdict"] == "FAIL" for c in found["checks"])]
    problems = {
        "Checks of ringspan's own trainers fail": failing,
        "Faults are not found, or other checks are blamed": missed(results["faults"]),
        "False alarms": results["honest"]["alarms"],
    }
    return " ".join(f"{what}: {', '.join(names)}." for what, names in problems.items() if names)


def what_ran(settings: TrainingSettings) -> str:
    """Lengths and data of all steps."""
    n, sizes = settings.tokens, ", ".join(map(str, settings.sizes))
    odd = "; ".join(lengths_text(lengths) for lengths in odd_lengths(settings))
    return (
        f"Rings of {sizes} local processes, gloo, CPU, one thread each. Every step of a ring is compared with the same "
        f"step of one process. All models are small and have random weights: two or three layers, a width of 32 or "
        f"64, and 64 kinds of tokens. The data are random tokens (seed {settings.seed}) in batches of "
        f"{settings.batch} sequences: {n} tokens as one document, and as packed documents of "
        f"{lengths_text(settings.documents)}; labels in few of the {n} rows; one token changed; three accumulated "
        f"batches of {n} tokens; and other lengths: {odd}. Memory and FLOPs are measured with one sequence of "
        f"{settings.long_tokens:,} tokens."
    )


def _summary(trainer: str) -> str:
    module, _, name = (PREFIX + trainer).partition(":")
    return str(getattr(import_module(module), name).__doc__).splitlines()[0]


def _versions(found: dict[str, Any]) -> str:
    return ", ".join(f"{package} {version}" for package, version in found["versions"].items())


def checks_table(trainer: str, found: dict[str, Any]) -> Table:
    error = error_of(found)
    rows: Rows = [["check", "verdict", "result", "explanation"]]
    for check in found["checks"]:
        rows.append([check["name"], check["verdict"], check["result"], " ".join(check["reason"].split())])
    text = f"{_summary(trainer)} {_versions(found)}. Run it with `ringspan verify --training {PREFIX}{trainer}`.\n\n"
    text += "It raised an error before anything could be compared." if error else found["sentence"]
    return Table(trainer.partition(":")[2], [["error"], [error]] if error else rows, text)


def report(results: Results) -> Page:
    found = {**results["ours"], **results["peers"]}
    settings = next(iter(found.values()))["settings"]
    rows: Rows = [["trainer", "versions", "checks"]]
    for trainer, each in found.items():
        counts = collections.Counter(check["verdict"] for check in each["checks"])
        result = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
        result = "did not run on this machine" if error_of(each) else result
        rows.append([f"`{trainer.partition(':')[2]}`", _versions(each), result])
    sentence = (
        "What was seen on this machine with these versions; not a verdict on a project.\n\n"
        "Each adapter of another project does what its documentation or an example of it shows, and nothing more; "
        "other settings may behave differently. The context parallelism of torch and of Accelerate is documented "
        "for GPUs, and this machine has none: that they did not run here says nothing about their results on GPUs. "
        "A check that fails may follow from another; its explanation then names one, but may have causes of its own."
    )
    stored = TrainingSettings(**{**settings, "sizes": tuple(settings["sizes"])})
    return Page(
        "Trainers, verified",
        sentence,
        "python -m benchmarks trainers",
        f"Machine: {results.machine}",
        [
            Table("What ran", rows, what_ran(stored)),
            fault_table(results["faults"], results["honest"]),
            *(checks_table(*item) for item in found.items()),
        ],
    )


SUITE = Suite(
    "docs/trainers.md",
    {
        "ours": partial(verify_each, trainers=OURS),
        "peers": partial(verify_each, trainers=PEERS),
        "faults": faults,
        "honest": honest,
    },
    report,
    broken=broken,
)
