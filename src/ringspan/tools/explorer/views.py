"""The data of each view, as plain lists and dicts that JSON can carry; the page only draws them.

`answer` is what the page calls. Large rings are sampled, as `rs.plan` samples them.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from ringspan.geometry import SegmentBranch, keys_seen, unselected_warning
from ringspan.geometry.density import Rows, pairs_in_cells
from ringspan.planning import ByNode, Hop, Parcel, RingPlan, packing_from_sequence
from ringspan.planning.heads import heads_of, inside_ring
from ringspan.planning.routes import node_of
from ringspan.tools.explorer.baselines import all_gather, plain_ring
from ringspan.tools.explorer.settings import ExplorerSettings

_MOST_SPANS = 4096
_MOST_CELLS = 128 * 128
_MOST_PARCELS = 16  # of one message, whose rows are listed
_FEW_RANKS = 8  # of a large ring are shown in the ring view


def answer(question: str) -> str:
    """Answer a question of the page, both JSON: ``{"view": name, "settings": {...}, ...}`` with the view's arguments.

    Invalid settings are answered by ``{"error": ...}``, the text of the library's own error.

    >>> print(answer('{"view": "overview", "settings": {"pattern": "8x0"}}'))
    {"error": "pattern '8x0': dilation_rates[0]=0: a rate must be at least 1"}
    """
    asked = json.loads(question)
    try:
        settings = ExplorerSettings.of(asked.pop("settings"))
        return json.dumps(VIEWS[asked.pop("view")](settings, **asked))
    except (ValueError, TypeError) as error:
        return json.dumps({"error": str(error)})
    except (MemoryError, RecursionError, OverflowError) as error:
        return json.dumps({"error": f"{type(error).__name__}: these settings are too large for the page"})


def overview(settings: ExplorerSettings) -> dict[str, Any]:
    """The inputs as the library understands them, what it warns of, and the lines of Python."""
    plan = settings.ring
    sizes, size = plan.sizes, plan.layout.ring_size
    return {
        "pattern": plan.pattern.text,
        "rows": plan.layout.rows,
        "documents": len(plan.documents.lengths),
        "ranks": size,
        "layout": str(plan.layout.name).split(" ")[0],
        "routing": str(plan.routing),
        "causal": plan.causal,
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "head_ranks": plan.head_ranks,
        "ranks_per_node": plan.routing.ranks_per_node if isinstance(plan.routing, ByNode) else 0,
        "branches": [_branch_text(branch) for branch in plan.pattern.branches(plan.layout.rows, sizes.kv_heads)],
        "sample": list(plan.sample),
        "shown": list(_ranks_shown(plan)),
        "reach": str(plan.reach) if size <= _MOST_SPANS else "",
        "warning": unselected_warning(plan.pattern, plan.layout.rows, sizes.kv_heads),
        "python": settings.python,
        "shape": list(settings.shape) if settings.order else [],
    }


def _branch_text(branch: Any) -> str:
    if isinstance(branch, SegmentBranch):
        return f"{branch.segment_length}x{branch.rate}"
    right = f" right {branch.right}" if branch.right else ""
    return f"window {branch.left}{right}" + (f" dilation {branch.rate}" if branch.rate > 1 else "")


def matrix(
    settings: ExplorerSettings, *, top: int, left: int, cell: int, count: int, head: int, branch: int = -1
) -> dict[str, Any]:
    """Pairs in ``count`` x ``count`` cells of ``cell`` x ``cell`` rows, from cell (``top``, ``left``) on.

    ``head`` is a KV head; ``branch`` is -1 for all. Counts have the multiplicity; with ``cell=1`` they are m(p, t).
    """
    plan = settings.ring
    rows = plan.layout.rows
    _check_head(plan, head)
    lines, columns = (_cells_from(first, cell, count, rows) for first in (top, left))
    counts = [[0] * len(columns) for _ in lines]
    for start, stop in plan.documents.spans():
        own_lines, own_columns = (_inside(cells, start, stop) for cells in (lines, columns))
        if not own_lines or not own_columns:
            continue
        branches = plan.pattern.branches(stop - start, plan.sizes.kv_heads)
        for number, one in enumerate(branches):
            if branch in (-1, number):
                queries, keys = ([rows for _, rows in cells] for cells in (own_lines, own_columns))
                found = pairs_in_cells(one, queries, keys, [head], causal=plan.causal)
                for (i, _), line in zip(own_lines, found, strict=True):
                    for (j, _), pairs in zip(own_columns, line, strict=True):
                        counts[i][j] += pairs
    return {"counts": counts, "lines": [list(x) for x in lines], "columns": [list(x) for x in columns], "rows": rows}


def _check_head(plan: RingPlan, head: int) -> None:
    if not 0 <= head < plan.sizes.kv_heads:
        raise ValueError(f"head={head}: must be in 0 .. {plan.sizes.kv_heads - 1}, a KV head")


def _cells_from(first: int, cell: int, count: int, rows: int) -> list[Rows]:
    """The ranges of rows of the cells ``first``, ``first + 1``, .., as far as there are rows."""
    starts = range(first * cell, min((first + count) * cell, rows), cell)
    return [(start, min(start + cell, rows)) for start in starts]


def _inside(cells: Sequence[Rows], start: int, stop: int) -> list[tuple[int, Rows]]:
    """The cells that hold rows of a document, by number, as positions in the document."""
    return [
        (number, (max(first, start) - start, min(last, stop) - start))
        for number, (first, last) in enumerate(cells)
        if max(first, start) < min(last, stop)
    ]


def keys(settings: ExplorerSettings, *, query: int, head: int) -> dict[str, Any]:
    """The keys that a query sees, as ranges (start, stop, step) of each branch that selects it, and who holds them."""
    plan = settings.ring
    if not 0 <= query < plan.layout.rows:
        raise ValueError(f"query={query}: the sequence has {plan.layout.rows} rows; positions count from 0")
    _check_head(plan, head)
    found = keys_seen(
        plan.pattern, plan.documents, query, kv_head=head, kv_heads=plan.sizes.kv_heads, causal=plan.causal
    )
    (owner,) = (part.rank for part in plan.layout.rank_spans(query, query + 1))
    held: dict[int, int] = defaultdict(int)
    for seen in found:
        for part in plan.layout.rank_spans(seen[0], seen[-1] + 1) if seen else ():
            first = part.start + (seen.start - part.start) % seen.step
            if here := len(range(first, min(part.stop, seen.stop), seen.step)):
                held[part.rank] += here
    ranges = [[seen.start, seen.stop, seen.step] for seen in found if seen]
    return {"query": query, "rank": owner, "keys": ranges, "held": sorted(held.items())}


def holdings(settings: ExplorerSettings) -> dict[str, Any]:
    """Which rank holds which rows: spans (rank, start, stop) in order; sampled if there are very many."""
    layout = settings.ring.layout
    if layout.ring_size <= _MOST_SPANS:
        shown = [[part.rank, part.start, part.stop] for part in layout.rank_spans(0, layout.rows)]
    else:  # the owner of the first row of equal parts
        cuts = [layout.rows * i // _MOST_SPANS for i in range(_MOST_SPANS + 1)]
        shown = [[next(layout.rank_spans(a, a + 1)).rank, a, b] for a, b in pairwise(cuts) if a < b]
    documents = [] if len(settings.ring.documents.lengths) > _MOST_SPANS else list(settings.ring.documents.lengths)
    sample = settings.ring.sample
    return {
        "spans": shown,
        "documents": documents,
        "rows": {rank: layout.rows_of(rank) for rank in sample},
    }


def hop(settings: ExplorerSettings, *, number: int, ranks: Sequence[int] = (), head: int = 0) -> dict[str, Any]:
    """What some ranks, by default all of a small ring and a few of a large one, send, receive and compute at a hop.

    While hop ``number`` is computed, the parcels of the next hop are transferred; these are ``moves``. ``heads`` are
    the rows that head ranks exchange for heads: before the first hop, and after the last. ``places`` are the rows that
    a message holds for the KV head ``head``.
    """
    plan = settings.ring
    ranks = ranks or _ranks_shown(plan)
    hops = max(len(plan.rank(rank).hops) for rank in ranks)
    if not 0 <= number < hops:
        raise ValueError(f"hop={number}: the plan has hops 0 to {hops - 1}")
    computed: dict[int, Any] = {}
    moves: list[Any] = []
    heads: list[Any] = []
    for rank in ranks:
        now, following = plan.rank(rank).hop(number), plan.rank(rank).hop(number + 1)
        computed[rank] = {"pairs": _pairs(now) * plan.queries_per_kv_head, "keys_of": _keys_of(plan, now, rank)}
        moves += _moves(plan, rank, following, head)
        heads += _exchanged(plan, rank, first=number == 0, last=number == hops - 1)
    return dict(hops=hops, number=number, ranks=list(ranks), computed=computed, moves=moves, heads=heads)


def _ranks_shown(plan: RingPlan) -> Sequence[int]:
    """The ranks of the ring view: every rank of a small ring, a few of a large one."""
    sample = plan.sample
    if plan.layout.ring_size <= len(sample):
        return sample
    return [sample[round(i * (len(sample) - 1) / (_FEW_RANKS - 1))] for i in range(_FEW_RANKS)]


def _pairs(now: Hop) -> int:
    return sum(tile.pairs for tile in now.tiles)


def _keys_of(plan: RingPlan, now: Hop, rank: int) -> list[list[int]]:
    """(owner of the keys, pairs computed against them) at a hop."""
    found: dict[int, int] = defaultdict(int)
    for tile in now.tiles:
        found[rank if tile.parcel is None else _in_ring(plan, tile.parcel.owner, rank)] += tile.pairs
    return [[owner, pairs * plan.queries_per_kv_head] for owner, pairs in sorted(found.items())]


def _in_ring(plan: RingPlan, peer: int, rank: int) -> int:
    """The number, in the whole ring, of a peer in the ring of the ranks that compute the same heads as ``rank``."""
    return peer * plan.head_ranks + rank % plan.head_ranks


def _moves(plan: RingPlan, rank: int, following: Hop, head: int) -> list[dict[str, Any]]:
    """The messages that a rank sends for the next hop, those of one owner to one peer together."""
    parcels: dict[tuple[int, int], list[Parcel]] = defaultdict(list)
    for message in following.sends:
        peer, owner = (_in_ring(plan, one, rank) for one in (message.peer, message.parcel.owner))
        parcels[peer, owner].append(message.parcel)
    found = []
    for (peer, owner), sent in sorted(parcels.items()):
        rows = sum(parcel.rows for parcel in sent)
        places = [place for parcel in sent[:_MOST_PARCELS] for place in _places(plan, rank, parcel, head)]
        move = {"from": rank, "to": peer, "owner": owner, "rows": rows, "bytes": rows * plan.sizes.parcel_row_bytes}
        found.append({**move, "places": places, **_across(plan, rank, peer)})
    return found


@lru_cache(maxsize=4096)
def _places(plan: RingPlan, rank: int, parcel: Parcel, head: int) -> tuple[tuple[int, int, int], ...]:
    """The rows of the sequence that a parcel holds for a KV head, as ranges (start, stop, step)."""
    pattern, layout, _, kv_heads, _ = inside_ring(plan.pattern, plan.layout, rank, plan.sizes.kv_heads, plan.routing)
    packing = packing_from_sequence(parcel, pattern, plan.documents, layout, kv_heads, plan.causal, plan.costs)
    own = head - heads_of(rank % plan.head_ranks, plan.sizes.kv_heads, plan.head_ranks).start
    found = []
    for rows in (comb for comb, _ in packing.combs if own in comb.head_range):
        first = rows.start + rows.head_range.index(own) * rows.head_step
        found += [(first + i * rows.stride, rows.rows, rows.step) for i in range(rows.segments)]
    return tuple(sorted((first, first + (count - 1) * step + 1, step) for first, count, step in found))


def _across(plan: RingPlan, rank: int, peer: int) -> dict[str, bool]:
    """Whether a message goes to another node, if the routing has nodes."""
    if not isinstance(plan.routing, ByNode):
        return {}
    here, there = (node_of(one, plan.routing.ranks_per_node) for one in (rank, peer))
    return {"across": here != there}


def _exchanged(plan: RingPlan, rank: int, *, first: bool, last: bool) -> Iterator[dict[str, Any]]:
    """What a rank sends to the other head ranks of its shard: its rows of q, k and v, and their rows of the output."""
    start = rank - rank % plan.head_ranks
    peers = [peer for peer in range(start, start + plan.head_ranks) if peer != rank]
    for what, wanted, exchange in zip(("q, k and v", "out and lse"), (first, last), plan.exchanges(rank), strict=False):
        rows = {peer: plan.layout.rows_of(rank if what == "q, k and v" else peer) for peer in peers}
        total = sum(rows.values())
        for peer, count in rows.items():
            if wanted and count:
                size = exchange.sent * count // total
                yield {"from": rank, "to": peer, "what": what, "rows": count, "bytes": size}


def costs(settings: ExplorerSettings, *, ranks: Sequence[int] = ()) -> dict[str, Any]:
    """Work, bytes and memory of ranks, by default of the sample, next to a plain ring and an all-gather."""
    plan = settings.ring
    found = []
    for rank in ranks or plan.sample:
        ring, gathered, held = plain_ring(plan, rank), all_gather(plan, rank), plan.memory(rank)
        found.append(
            {
                "rank": rank,
                "rows": plan.layout.rows_of(rank),
                "tiles": len(plan.rank(rank).tiles),
                "hops": len(plan.rank(rank).hops) - 1,
                "work": plan.work(rank),
                "sent": plan.bytes_sent(rank),
                "received": plan.bytes_received(rank),
                "sent_backward": plan.bytes_sent(rank, backward=True),
                "memory": held.total,
                "memory_rows": held.rows,
                "memory_parcels": held.parcels,
                "memory_backward": plan.memory(rank, backward=True).total,
                "plain": {"work": ring.work, "sent": ring.sent, "memory": held.rows + ring.parcels},
                "gather": {"work": gathered.work, "sent": gathered.sent, "memory": held.rows + gathered.parcels},
            }
        )
    return {"ranks": found}


def grid(settings: ExplorerSettings, *, query: int, head: int) -> dict[str, Any]:
    """The grid: the cell at each place of the sequence, its rank, and the segments of the query's cell."""
    if not settings.order:
        return {"shape": []}
    shape, plan = settings.shape, settings.ring
    if len(shape) != 2 or settings.rows > _MOST_CELLS:
        raise ValueError(f"grid={settings.grid}: the page draws two dimensions and at most {_MOST_CELLS} cells")
    owners = [0] * plan.layout.rows
    for part in plan.layout.rank_spans(0, plan.layout.rows):
        owners[part.start : part.stop] = [part.rank] * (part.stop - part.start)
    segments = []
    for branch in plan.pattern.branches(plan.layout.rows, plan.sizes.kv_heads):
        if isinstance(branch, SegmentBranch):
            first = query - (query + branch.shift) % branch.segment_length
            segments.append([max(0, first), min(plan.layout.rows, first + branch.segment_length)])
        else:
            segments.append([max(0, query - branch.left), min(plan.layout.rows, query + branch.right + 1)])
    return {"shape": list(shape), "cells": settings.cells, "ranks": owners, "segments": segments} | keys(
        settings, query=query, head=head
    )


VIEWS: dict[str, Callable[..., dict[str, Any]]] = {
    view.__name__: view for view in (overview, matrix, keys, holdings, hop, costs, grid)
}
