"""The proof that ranks cannot hang: the sends and receives of all ranks pair up, and no rank waits in a cycle.

From plans alone, under NCCL's rules, which are stricter than gloo's: messages between two ranks match in the order in
which they are posted, a batch completes as a whole, and a rank's batches run one after another (docs/nccl.md).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ringspan.planning.heads import HeadLayout, heads_of
from ringspan.planning.rank import RankPlan
from ringspan.planning.tiles import Message, Parcel


class PlanError(RuntimeError):
    """The plans of two ranks do not fit each other. A defect of ringspan, whatever the arguments."""


@dataclass(frozen=True, slots=True)
class SizedMessage:
    """One message of a batch: ``content`` is the parcel, or the name of the tensor that head ranks exchange."""

    peer: int
    content: Parcel | str
    bytes: int

    def __str__(self) -> str:
        what = self.content
        if isinstance(what, Parcel):
            what = f"a parcel of rank {what.owner}, {what.rows} rows from row {what.start} on"
        return f"{what} ({self.bytes:,} bytes)"


@dataclass(frozen=True, slots=True)
class MessageBatch:
    """The messages that a rank posts at once."""

    label: str
    sends: tuple[SizedMessage, ...]
    receives: tuple[SizedMessage, ...]


@dataclass(frozen=True, slots=True)
class Proof:
    """What was checked. ``largest`` is the most messages, sent and received, of a batch of one rank."""

    ranks: int
    batches: int
    messages: int
    largest: int

    def __str__(self) -> str:
        if not self.messages:
            return "Nothing is sent."
        return (
            f"Sends and receives pair up in order and size, and no rank waits in a cycle: {self.messages:,} messages "
            f"of {self.ranks} ranks in {self.batches:,} batches, at most {self.largest} in one."
        )


def hop_batches(
    plan: RankPlan, ranks: Sequence[int], row_bytes: int, gradient_row_bytes: int, *, backward: bool
) -> Iterator[MessageBatch]:
    """The batches of a rank's hops, in the order in which `ringspan.schedule.run_schedule` posts them.

    ``ranks`` are the ranks of the group that hold the shards which the plan counts.
    """

    def sized(messages: Iterable[Message], size: int) -> tuple[SizedMessage, ...]:
        return tuple(SizedMessage(ranks[m.peer], m.parcel, m.parcel.rows * size) for m in messages)

    for number, hop in enumerate(plan.hops):
        coming = plan.hop(number + 1)
        sends, receives = (sized(messages, row_bytes) for messages in (coming.sends, coming.receives))
        yield MessageBatch(f"parcels of hop {number + 1}", sends, receives)
        if backward:
            out, into = (sized(each, gradient_row_bytes) for each in (hop.gradients_out, hop.gradients_in))
            yield MessageBatch(f"gradients of hop {number}", out, into)


def exchange_batch(
    layout: HeadLayout, rank: int, tensors: Iterable[tuple[str, int, int]], *, to_heads: bool
) -> MessageBatch:
    """The batch in which the head ranks of a shard exchange tensors: (name, heads in all, bytes of a row of one head).

    ``to_heads``: before a pass, rows for heads; otherwise after it, heads for rows.
    """
    count, own = layout.head_ranks, layout.rows_of(rank)
    first = rank - rank % count
    sends, receives = [], []
    for name, heads, row_bytes in tensors:
        size = len(heads_of(0, heads, count)) * row_bytes
        for peer in range(first, first + count):
            theirs = layout.rows_of(peer)
            out, into = (own, theirs) if to_heads else (theirs, own)
            if peer != rank and out:
                sends.append(SizedMessage(peer, name, out * size))
            if peer != rank and into:
                receives.append(SizedMessage(peer, name, into * size))
    label = "exchange of rows for heads" if to_heads else "exchange of heads for rows"
    return MessageBatch(label, tuple(sends), tuple(receives))


def pair_up(by_rank: Sequence[Sequence[MessageBatch]]) -> Proof:
    """Check the batches that each rank posts, in its order. Raises PlanError, which names rank, peer and hop."""
    posted = [[batch for batch in batches if batch.sends or batch.receives] for batches in by_rank]
    groups = _groups(posted)
    _check_order(posted, groups)
    sizes = [len(batch.sends) + len(batch.receives) for batches in posted for batch in batches]
    sent = sum(len(batch.sends) for batches in posted for batch in batches)
    return Proof(len(posted), len(sizes), sent, max(sizes, default=0))


Place = tuple[int, int]  # a rank, and the number of one of its batches


def _groups(posted: Sequence[Sequence[MessageBatch]]) -> dict[Place, list[Place]]:
    """For each batch, all batches that must complete together with it: those that its messages pair it with."""
    sent: defaultdict[tuple[int, int], list[tuple[Place, SizedMessage]]] = defaultdict(list)
    received: defaultdict[tuple[int, int], list[tuple[Place, SizedMessage]]] = defaultdict(list)
    groups: dict[Place, list[Place]] = {}
    for rank, batches in enumerate(posted):
        for number, batch in enumerate(batches):
            groups[rank, number] = [(rank, number)]
            for each in batch.sends:
                sent[rank, each.peer].append(((rank, number), each))
            for each in batch.receives:
                received[each.peer, rank].append(((rank, number), each))
    for sender, receiver in sorted({*sent, *received}):
        # Not by parcel or tag: the n-th send meets the n-th receive.
        pairs = zip_longest(sent[sender, receiver], received[sender, receiver])
        for out, into in pairs:
            if into is None:
                (_, number), message = out
                raise PlanError(
                    f"rank {sender}, {posted[sender][number].label}: sends {message} to rank {receiver}, which has no "
                    "receive left for it"
                )
            (_, number), wanted = into
            if out is None:
                raise PlanError(
                    f"rank {receiver}, {posted[receiver][number].label}: receives {wanted} from rank {sender}, which "
                    "has no send left for it"
                )
            (_, sent_in), message = out
            if (message.content, message.bytes) != (wanted.content, wanted.bytes):
                raise PlanError(
                    f"rank {receiver}, {posted[receiver][number].label}: receives {wanted} from rank {sender}, which "
                    f"sends {message} in {posted[sender][sent_in].label}"
                )
            one, other = groups[sender, sent_in], groups[receiver, number]
            if one is not other:
                one += other
                for place in other:
                    groups[place] = one
    return groups


def _check_order(posted: Sequence[Sequence[MessageBatch]], groups: dict[Place, list[Place]]) -> None:
    """Let every group complete whose batches are all next on their ranks, until nothing is left or nothing can."""
    following = [0] * len(posted)
    ready = deque(range(len(posted)))
    while ready:
        rank = ready.popleft()
        group = groups.get((rank, following[rank]), [])
        if all(following[member] == number for member, number in group):
            for member, _ in group:
                following[member] += 1
                ready.append(member)
    stuck = [rank for rank, batches in enumerate(posted) if following[rank] < len(batches)]
    if stuck:
        raise PlanError("ranks wait in a cycle: " + "; ".join(_cycle(posted, groups, following, stuck[0])))


def _cycle(
    posted: Sequence[Sequence[MessageBatch]], groups: dict[Place, list[Place]], following: list[int], rank: int
) -> Iterator[str]:
    """What each rank of a cycle waits for, from some rank of it on."""
    path: list[int] = []
    waits: dict[int, str] = {}
    while rank not in waits:
        path.append(rank)
        member, number = next(each for each in groups[rank, following[rank]] if each[1] != following[each[0]])
        waits[rank] = (
            f"rank {rank}, {posted[rank][following[rank]].label}, waits for rank {member}, "
            f"{posted[member][number].label}, which comes after {posted[member][following[member]].label}"
        )
        rank = member
    yield from (waits[each] for each in path[path.index(rank) :])
