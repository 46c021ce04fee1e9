"""A call of attention that the ranks agree on: who holds which rows, and in which passes they are walked.

Most calls are one pass over rows as they lie. An order makes rows lie otherwise meanwhile, and with causality it can
take a pass for each branch (`ringspan.order.passes`); the engine sees rows, and nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ringspan.geometry import Documents, parse_pattern
from ringspan.layout import Layout
from ringspan.order import Pass, check_fits, parse_order, passes
from ringspan.planning import Hop, RankPlan, plan_rank
from ringspan.ring.backend import Players
from ringspan.ring.transport import Flight, Mail
from ringspan.validation import without_autocast

Results = tuple[Tensor | None, ...]
StartWalk = Callable[..., Generator[Flight, None, Results]]  # of a rank's plan, its mail and its rows of the tensors


@dataclass(frozen=True)
class Call:
    """What is computed, by whom, and in which passes."""

    players: Players
    layout: Layout
    documents: Documents
    causal: bool
    batch: int
    kv_heads: int
    passes: tuple[Pass, ...]

    @staticmethod
    def of(
        players: Players, layout: Layout, k: Tensor, lengths: Tensor | None, pattern: str, order: str, causal: bool
    ) -> Call:
        """The call with these arguments of the operator; raises if documents or order do not fit the rows."""
        documents = Documents((layout.rows,) if lengths is None else tuple(lengths.tolist()))
        documents.check_rows(layout.rows)
        wanted = parse_order(order) if order else None
        found = passes(parse_pattern(pattern), wanted, causal)
        if wanted is not None:
            check_fits(wanted, documents, layout, moves=any(one.order is not None for one in found))
        return Call(players, layout, documents, causal, k.shape[0], k.shape[2], found)

    def walk(
        self, one: Pass, tensors: Sequence[tuple[Tensor | None, int]], start: StartWalk, row_dims: Sequence[int]
    ) -> list[list[Any]]:
        """Walk a pass: what each rank played here finds, with its rows as they were before.

        ``tensors`` come with the dimension of their rows; ``row_dims`` are those of the results.
        """
        walks, arrangements = [], []
        for rank, mail, parts in self.players.deal(self.layout, tensors):
            device = next(x.device for x in parts if x is not None)
            arranged = one.arrangement(self.documents, self.layout, rank, device)
            rows = [
                x if arranged is None else arranged.arrange(x, dim) for x, (_, dim) in zip(parts, tensors, strict=True)
            ]
            walks.append(self._start(one, rank, mail, rows, start))
            arrangements.append(arranged)
        del rows, parts  # copies in another order are as large as the rows: they go as soon as their walk is over
        with without_autocast(device):
            found = [list(results) for results in self.players.run(walks)]
        for results, lay in zip(found, arrangements, strict=True):
            for i, (x, dim) in enumerate(zip(results, row_dims, strict=True)):
                results[i] = x if lay is None or x is None else lay.restore(x, dim)
        return found

    def _start(
        self, one: Pass, rank: int, mail: Mail, parts: list[Any], start: StartWalk
    ) -> Generator[Flight, None, Results]:
        if self.batch == 0:  # nothing to compute and nothing to send
            plan = RankPlan(rank, self.layout.rows_of(rank), self.kv_heads, (Hop(),), ())
        else:
            passing = self.players.passing
            plan = plan_rank(one.pattern, self.documents, self.layout, rank, self.kv_heads, self.causal, passing)
        return start(plan, mail, *parts)
