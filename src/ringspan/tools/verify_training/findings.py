"""What all checks of a training step share: their names, which explains which, and what all rings measured.

A wrong label makes the loss wrong, and a wrong loss makes gradients wrong. Such consequences fail as well, but name the
check that they follow from, so that the report leads with causes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from ringspan.tools.verify.check import ByRing, Check
from ringspan.tools.verify_training.batches import TrainingSettings
from ringspan.tools.verify_training.compare import ReachComparison, StepComparison, allowed_error
from ringspan.tools.verify_training.steps import BASE, PACKED

RUNS = "the trainer runs"
LOSS = "the loss is that of one process"
TOKENS = "the loss of each token is that of one process"
GRADIENTS = "the gradients are those of one process"
REPLICAS = "all ranks hold the same gradients"
NORM = "the gradient norm is that of one process"
EVALUATION = "the evaluation loss is that of one process"
REACHES = "a token reaches the same rows"
DOCUMENTS = "documents do not see each other"
LABEL_COUNTS = "every label counts once"
ODD = "any length is exact"
MIXES = "any mix of documents is exact"
PREDICTIONS = "predictions come back whole and in order"
BITS = "two runs give the same bits"
ROUNDING = "rounding does not grow with the ring"
ACCUMULATION = "accumulated gradients are those of one process"
CLIPPING = "clipped gradients are those of one process"
DUPLICATES = "no work is duplicated"
BALANCE = "the work is balanced"
MEMORY = "memory per rank falls with the ring"

# The checks whose failure explains that of another.
EXPLAINED_BY: Mapping[str, tuple[str, ...]] = {
    LOSS: (LABEL_COUNTS, REACHES, DOCUMENTS, TOKENS),
    TOKENS: (REACHES, DOCUMENTS, PREDICTIONS),
    REACHES: (PREDICTIONS,),
    DOCUMENTS: (PREDICTIONS,),
    GRADIENTS: (REACHES, DOCUMENTS, TOKENS, LOSS, REPLICAS),
    NORM: (REACHES, DOCUMENTS, TOKENS, LOSS, GRADIENTS),
    EVALUATION: (LABEL_COUNTS, REACHES, DOCUMENTS, TOKENS, LOSS),
    LABEL_COUNTS: (REACHES, TOKENS),
    ODD: (PREDICTIONS, LABEL_COUNTS, REACHES, TOKENS, LOSS, GRADIENTS, REPLICAS),
    MIXES: (PREDICTIONS, LABEL_COUNTS, REACHES, DOCUMENTS, TOKENS, LOSS, GRADIENTS, REPLICAS, ODD),
    ACCUMULATION: (LABEL_COUNTS, REACHES, TOKENS, LOSS, GRADIENTS, REPLICAS),
    CLIPPING: (LABEL_COUNTS, REACHES, TOKENS, LOSS, GRADIENTS, REPLICAS, NORM),
    MEMORY: (DUPLICATES, BALANCE),
    ROUNDING: (LABEL_COUNTS, REACHES, TOKENS, LOSS, GRADIENTS, REPLICAS),
}


class Found:
    """What all rings measured, as the checks read it: rank 0 compares the steps, every rank has its own cost."""

    def __init__(self, measured: ByRing, settings: TrainingSettings) -> None:
        self.measured, self.settings = measured, settings
        self.rings = {size: ranks for size, ranks in measured.items() if size > 1}
        self.dtype: str = next(iter(measured.values()))[0]["dtype"]["name"]
        self.allowed = allowed_error(self.dtype)
        self.case = f"{settings.tokens} tokens, {self.dtype}"

    def steps(self, wanted: Callable[[str], bool]) -> Iterable[tuple[int, StepComparison]]:
        """Ring size and comparison of some steps."""
        for size, ranks in self.rings.items():
            for step in ranks[0]["steps"]:
                if wanted(step.step):
                    yield size, step

    def plain_steps(self) -> list[tuple[int, StepComparison]]:
        """Ring size and comparison of one document, and of packed documents if one process and the ring took it."""
        steps = self.steps(lambda name: name in (BASE, PACKED))
        return [(size, step) for size, step in steps if not step.refused and not step.refused_alone]

    def reach(self, packed: bool, alone: bool = False) -> Iterable[tuple[int, ReachComparison]]:
        """Ring size and comparison of one document, or of packed documents; with ``alone`` also of one process."""
        for size, ranks in (self.measured if alone else self.rings).items():
            for each in ranks[0]["reach"]:
                if (len(each.lengths) > 1) == packed:
                    yield size, each


def not_supported(name: str, result: str, reason: str, case: str) -> Check:
    return Check(name, "not supported", result, reason, case, essential=False)


def error_text(error: float, allowed: float) -> str:
    return f"error {error:.1e}, allowed {allowed:.0e}"


def scale_cause(ratio: float, size: int) -> str:
    if math.isclose(ratio, size, rel_tol=1e-6):
        return "summed over ranks where the mean was meant"
    if math.isclose(ratio, 1 / size, rel_tol=1e-6):
        return "divided by the number of ranks once too often"
    return ""


def ranges(rows: Iterable[int]) -> str:
    """Positions as ranges.

    >>> ranges([1, 2, 3, 7, 9, 10])
    '1-3, 7, 9-10'
    """
    spans: list[list[int]] = []
    for row in sorted(rows):
        if spans and row == spans[-1][1] + 1:
            spans[-1][1] = row
        else:
            spans.append([row, row])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in spans]
    return ", ".join(texts[:6]) + (", ..." if len(texts) > 6 else "")


def first_line(text: str) -> str:
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= 160 else line[:157] + "..."
