"""The proof itself: every drawn place is computed anew and compared, and what that says about all the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ringspan.planning import RingPlan
from ringspan.proof.recompute import Exact, Results, recompute
from ringspan.proof.strata import EVERYWHERE, Stratum
from ringspan.streaming import Place, Source


@dataclass(frozen=True, slots=True)
class Finding:
    """One stratum: how many places, how many of them wrong, and the largest errors, also over what is allowed."""

    name: str
    population: int
    samples: int
    covered: bool
    wrong: int
    worst_out: float
    worst_lse: float
    worst_ratio: float


@dataclass(frozen=True, slots=True)
class Proof:
    """What the samples showed. ``samples`` and ``wrong`` count different places; one may belong to several strata."""

    findings: tuple[Finding, ...]
    samples: int
    wrong: int
    most_keys: int

    @property
    def worst_out(self) -> float:
        return max(finding.worst_out for finding in self.findings)

    @property
    def worst_ratio(self) -> float:
        return max(finding.worst_ratio for finding in self.findings)

    @property
    def holds(self) -> bool:
        """Nothing is wrong, and every stratum has its samples."""
        return self.wrong == 0 and all(finding.covered for finding in self.findings)

    @property
    def wrong_share_bound(self) -> float:
        """With 95 % confidence, at most this share of all places is wrong: 3/m for m uniform samples without a fault.

        If a share f of all places were wrong, m samples would all be right with a probability of (1 - f) ** m, which is
        below 5 % from f = 3/m on ("rule of three"). With a fault among them nothing is promised: 1.
        """
        (uniform,) = (finding for finding in self.findings if finding.name == EVERYWHERE)
        return 1.0 if self.wrong else min(1.0, 3 / uniform.samples)

    def as_json(self) -> dict[str, Any]:
        return {
            "holds": self.holds,
            "samples": self.samples,
            "wrong": self.wrong,
            "worst_out": self.worst_out,
            "worst_ratio": self.worst_ratio,
            "wrong_share_bound": self.wrong_share_bound,
            "most_keys": self.most_keys,
            "strata": [asdict(finding) for finding in self.findings],
        }


def prove(
    source: Source,
    results: Results,
    plan: RingPlan,
    strata: Sequence[Stratum],
    *,
    scale: float,
    on_place: Callable[[], None] | None = None,
) -> Proof:
    """Compare what was computed with fp64, at every place of every stratum."""
    found: dict[Place, tuple[float, float, float]] = {}
    most_keys = 0
    for place in sorted({place for stratum in strata for place in stratum.places}):
        exact = recompute(source, place, plan.pattern, plan.documents, causal=plan.causal, scale=scale)
        found[place] = _errors(results, place, exact)
        most_keys = max(most_keys, exact.keys)
        if on_place is not None:
            on_place()
    findings = []
    for stratum in strata:
        errors = [found[place] for place in stratum.places]
        findings.append(
            Finding(
                stratum.name,
                stratum.population,
                len(errors),
                stratum.is_covered,
                sum(ratio > 1 for _, _, ratio in errors),
                *(max((error[i] for error in errors), default=0.0) for i in range(3)),
            )
        )
    wrong = sum(ratio > 1 for _, _, ratio in found.values())
    return Proof(tuple(findings), len(found), wrong, most_keys)


def _errors(results: Results, place: Place, exact: Exact) -> tuple[float, float, float]:
    """Errors of output and lse, and the larger one over what is allowed; a NaN is as wrong as can be."""
    rows, heads = range(place.row, place.row + 1), range(place.head, place.head + 1)
    out = _off_by(results.read("out", rows, heads)[:, 0, 0].double(), exact.out)
    lse = _off_by(results.read("lse", rows, heads)[:, 0, 0].double(), exact.lse)
    # A row that sees nothing is 0, and its lse -inf: exactly.
    allowed_lse = torch.full_like(lse, exact.allowed_lse if exact.keys else 0.0)
    ratio = max(_largest_ratio(out, exact.allowed_out), _largest_ratio(lse, allowed_lse))
    return float(out.max()), float(lse.max()), ratio


def _off_by(found: Tensor, right: Tensor) -> Tensor:
    difference = torch.where(found == right, 0.0, (found - right).abs())  # -inf equals -inf
    return difference.nan_to_num(nan=math.inf, posinf=math.inf)


def _largest_ratio(error: Tensor, allowed: Tensor) -> float:
    """Where nothing is off, nothing need be allowed; where nothing is allowed, or no number, anything is too much."""
    return float(torch.where(error == 0, 0.0, (error / allowed).nan_to_num(nan=math.inf, posinf=math.inf)).max())
