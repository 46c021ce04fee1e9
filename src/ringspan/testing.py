"""Prove a training step over a ring, in your own tests: a ring of k processes must be a ring of one.

    import ringspan.testing as rt

    class MyTrainer:
        def __init__(self, group, dtype): ...  # the model, with the same weights on every rank
        def step(self, batches, *, max_norm=None):
            ...  # split each batch over the ranks of the group; forward and backward
            return rt.StepResult(loss, gradients, token_losses=..., positions=...)

    def test_the_ring_is_exact():
        rt.assert_training_is_exact(MyTrainer)

`verify_training` returns the checks instead; `ringspan verify --training package.module:MyTrainer` writes a report.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringspan.runtime.settings import missing_package

try:
    from ringspan.tools.verify.check import Check
    from ringspan.tools.verify_training import findings
    from ringspan.tools.verify_training.adapter import (
        AdapterFactory,
        Batch,
        StepResult,
        TrainingAdapter,
        UnsupportedError,
    )
    from ringspan.tools.verify_training.rings import TrainingReport, verify_training
except ModuleNotFoundError as error:
    if (error.name or "").startswith("ringspan"):
        raise
    raise ImportError(missing_package("ringspan.testing", error.name, "cli")) from error

__all__ = [
    "Batch",
    "Check",
    "StepResult",
    "TrainingAdapter",
    "TrainingReport",
    "UnsupportedError",
    "assert_training_is_exact",
    "verify_training",
]


def assert_training_is_exact(
    adapter: str | AdapterFactory, *, ranks: Sequence[int] = (1, 2), skip: Sequence[str] = (), timeout: float = 600.0
) -> TrainingReport:
    """Raise AssertionError if a check of the training step fails; the message names each cause.

    Args:
        adapter: a class or function (group, dtype) -> adapter, or its name ``package.module:name``. It must be
            importable in another process: define it in a module, not in a function.
        ranks: ring sizes to compare with one process.
        skip: names of checks that may fail. Checks that follow from them are skipped only if they are named too.
    """
    known = [value for name, value in vars(findings).items() if name.isupper()]
    for name in skip:
        if name not in known:
            raise ValueError(f"skip={name!r}: must be the name of a check, such as {findings.BITS!r}")
    report = verify_training(adapter, ranks=ranks, timeout=timeout)
    failing = [check for check in report.checks if check.verdict == "FAIL" and check.name not in skip]
    if failing:
        lines = [f"{check.name}: {check.result}: {check.reason}" for check in (*report.causes, *failing)]
        raise AssertionError(
            "\n".join([f"{report.settings.target}: {len(failing)} checks fail", *dict.fromkeys(lines)])
        )
    return report
