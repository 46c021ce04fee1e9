"""Rings for `ringspan verify --attention`: correct ones, and faulty ones that are each wrong in one way.

Most run ringspan's own ring and break one thing in it, so that no other difference reveals them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringspan as rs
from ringspan.layout import Layout
from ringspan.oracle import dense_attention
from ringspan.ring.transport import Counters, Messages, PendingWork, Transport
from ringspan.tools.peers import all_gather

TWELVE = (
    "averages",
    "sends_16_bits",
    "detaches_remote_rows",
    "loses_an_odd_row",
    "rank_0_computes_all",
    "gathers_all_keys",
    "wrong_in_batches",
    "wrong_past_512",
    "wrong_past_4096",
    "wrong_with_gqa",
    "wrong_every_tenth_call",
    "swaps_heads",
)


def honest(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup, lengths: tuple[int, ...] = ()
) -> Tensor:
    """No fault: full attention by ringspan, contiguous shards."""
    return _over(rs.Ring(group, layout="contiguous", min_size=1), q, k, v, causal, lengths)


def equal_shards_only(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """No fault, but no packed documents, and raises for grouped KV heads and uneven shards, on every rank."""
    rows = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, torch.tensor([q.shape[1]]), group=group)
    if len({int(count) for count in rows}) > 1:
        raise ValueError("all ranks must hold equally many rows")
    if k.shape[2] != q.shape[2]:
        raise NotImplementedError("no grouped KV heads")
    return honest(q, k, v, causal=causal, group=group)


# The twelve faults of docs/verify.md.


def averages(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Averages local and remote results instead of merging them by their log-sum-exp."""
    ring = rs.Ring(group, layout="contiguous", min_size=1)
    out, lse = rs.attention(q, k, v, pattern=rs.Full(), causal=causal, ring=ring, return_lse=True)
    own, own_lse = rs.attention(q, k, v, pattern=rs.Full(), causal=causal, return_lse=True)
    share = (own_lse - lse).exp().transpose(1, 2)[..., None].clamp(max=1.0)  # of the local part in the correct result
    has_remote = share < 1 - 1e-6
    remote = (out - own * share) / torch.where(has_remote, 1 - share, 1.0)
    return torch.where(has_remote, (own + remote) / 2, out)


def sends_16_bits(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Rounds keys and values to 16 bits before sending them."""
    return _over(_TamperedRing(group, "parcels", lambda x: x.copy_(x.bfloat16())), q, k, v, causal)


def detaches_remote_rows(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Returns zeros as the gradients of parcels, so that the contribution of other ranks to dK and dV is lost."""
    return _over(_TamperedRing(group, "gradients", Tensor.zero_), q, k, v, causal)


def loses_an_odd_row(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Skips the last row of a rank that holds an odd number of rows."""
    out = honest(q, k, v, causal=causal, group=group)
    keep = torch.ones(q.shape[1]).index_fill(0, torch.tensor([-1 + q.shape[1]]), float(q.shape[1] % 2 == 0))
    return out * keep.to(out)[:, None, None]


def rank_0_computes_all(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Rank 0 gathers all rows, computes everything, and scatters the results."""
    return _OnRank0.apply(q, k, v, causal, group)


def gathers_all_keys(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Correct, but every rank gathers all keys and values."""
    return all_gather(q, k, v, causal=causal, group=group)


gathers_all_keys.equal_shards = True  # type: ignore[attr-defined]


def wrong_in_batches(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Every sequence of a batch attends to the keys of the first one."""
    return honest(q, k[:1].expand_as(k), v[:1].expand_as(v), causal=causal, group=group)


def wrong_past_512(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Rows from 512 on are 1 % too large."""
    return _scaled_past(512, q, honest(q, k, v, causal=causal, group=group), group)


def wrong_past_4096(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Rows from 4,096 on are 1 % too large."""
    return _scaled_past(4096, q, honest(q, k, v, causal=causal, group=group), group)


def wrong_with_gqa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Query head j reads KV head j mod kv_heads."""
    heads = torch.arange(q.shape[2]) % k.shape[2]
    return honest(q, k[:, :, heads], v[:, :, heads], causal=causal, group=group)


def wrong_every_tenth_call(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Every tenth result is 1 % too large."""
    out = honest(q, k, v, causal=causal, group=group)
    return out * 1.01 if next(_CALLS) % 10 == 0 else out


def swaps_heads(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """With an odd number of heads, the first two heads swap their keys and values."""
    order = list(range(k.shape[2]))
    if q.shape[2] % 2 and k.shape[2] > 1:
        order[:2] = [1, 0]
    return honest(q, k[:, :, order], v[:, :, order], causal=causal, group=group)


# More faults.


def flips_a_byte(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Flips seven bits in the last byte of every parcel."""

    def flip(buffer: Tensor) -> None:
        buffer.view(-1)[-1:].view(torch.uint8)[-1] ^= 0x7F

    return _over(_TamperedRing(group, "parcels", flip), q, k, v, causal)


def computes_the_whole(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Correct, but every rank gathers the sequence, computes all of it, and keeps its own rows."""
    ring = rs.Ring(group, layout="contiguous", min_size=1)
    whole = [ring.gather_sequence(x) for x in (q, k, v)]
    return ring.split_sequence(rs.attention(*whole, pattern=rs.Full(), causal=causal))


def sees_one_too_far(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Causal mask off by one: row p sees token p + 1."""
    if not causal:
        return honest(q, k, v, causal=False, group=group)
    return _where(lambda p, t: t <= p + 1, q, k, v, group)


# Faults with packed documents.


def leaks_across_ranks(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup, lengths: tuple[int, ...] = ()
) -> Tensor:
    """Masks other documents among a rank's own rows only, not among the rows of other ranks."""
    if not lengths:
        return honest(q, k, v, causal=causal, group=group)
    document, rows = torch.repeat_interleave(torch.tensor(lengths)), q.shape[1]

    def sees(p: Tensor, t: Tensor) -> Tensor:
        return ((document[p] == document[t]) | (p // rows != t // rows)) & ((t <= p) if causal else True)

    return _where(sees, q, k, v, group)


def cuts_documents(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup, lengths: tuple[int, ...] = ()
) -> Tensor:
    """Documents end where the rank's rows end."""
    cuts = {*itertools.accumulate(lengths), *range(0, sum(lengths), q.shape[1])}
    return honest(q, k, v, causal=causal, group=group, lengths=_between(cuts))


def joins_documents(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup, lengths: tuple[int, ...] = ()
) -> Tensor:
    """A document that begins with a rank's first row continues the previous one."""
    cuts = {0, *itertools.accumulate(lengths)} - {*range(q.shape[1], sum(lengths), q.shape[1])}
    return honest(q, k, v, causal=causal, group=group, lengths=_between(cuts))


WINDOW = rs.Window(40, right=8)


def windowed(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """No fault: sliding windows by ringspan, contiguous shards."""
    ring = rs.Ring(group, layout="contiguous", min_size=1)
    return rs.attention(q, k, v, pattern=WINDOW, causal=causal, ring=ring)


def ignores_the_window(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Computes full attention instead of the window."""
    return honest(q, k, v, causal=causal, group=group)


def ignores_the_halo(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """No communication: the window of a row ends where its rank's rows end."""
    return rs.attention(q, k, v, pattern=WINDOW, causal=causal)


def window_one_too_long(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """The left edge of the window is off by one, as from a width that does not count the query's own row."""
    ring = rs.Ring(group, layout="contiguous", min_size=1)
    longer = rs.Window(WINDOW.left + 1, WINDOW.right)
    return rs.attention(q, k, v, pattern=longer, causal=causal, ring=ring)


for _function in (windowed, ignores_the_window, ignores_the_halo, window_one_too_long):
    _function.pattern = WINDOW  # type: ignore[attr-defined]


def attends_alone(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """No communication: each rank attends to its own rows only."""
    return rs.attention(q, k, v, pattern=rs.Full(), causal=causal)


def mixes_heads(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Attention over heads instead of tokens, as from a transposed kernel."""
    out, _ = dense_attention(*(x.transpose(1, 2) for x in (q, k, v)), pattern=rs.Full())
    return out.transpose(1, 2)


def drops_a_row(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Returns one row fewer than it gets."""
    return honest(q, k, v, causal=causal, group=group)[:, 1:]


def raises(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    raise NotImplementedError("not on this device")


_CALLS = itertools.count(1)


def _over(ring: rs.Ring, q: Tensor, k: Tensor, v: Tensor, causal: bool, lengths: tuple[int, ...] = ()) -> Tensor:
    return rs.attention(q, k, v, pattern=rs.Full(), causal=causal, ring=ring, lengths=lengths or None)


def _where(
    sees: Callable[[Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """Attention of each query to the keys that it sees, by their positions."""
    ring = rs.Ring(group, layout="contiguous", min_size=1)
    groups = q.shape[2] // k.shape[2]
    keys, values = (ring.gather_sequence(x).repeat_interleave(groups, dim=2) for x in (k, v))
    scores = torch.einsum("bphd,bthd->bhpt", q, keys) * q.shape[-1] ** -0.5
    visible = sees(ring.positions(keys.shape[1])[:, None], torch.arange(keys.shape[1]))
    return torch.einsum("bhpt,bthd->bphd", scores.masked_fill(~visible, -torch.inf).softmax(-1), values)


def _between(cuts: set[int]) -> tuple[int, ...]:
    """The lengths of the documents between these rows."""
    return tuple(stop - start for start, stop in itertools.pairwise(sorted(cuts)))


def _scaled_past(row: int, q: Tensor, out: Tensor, group: dist.ProcessGroup) -> Tensor:
    ring = rs.Ring(group, layout="contiguous", min_size=1)
    total = torch.tensor([q.shape[1]])
    dist.all_reduce(total, group=group)
    late = ring.positions(int(total)) >= row
    return out * torch.where(late, 1.01, 1.0).to(out)[:, None, None]


@dataclass(frozen=True)
class _TamperedTransport:
    """A ring's transport that applies ``change`` to some messages before it sends them."""

    transport: Transport
    label: str
    change: Callable[[Tensor], Any]

    @property
    def counters(self) -> Counters:
        return self.transport.counters

    def send_receive(self, sends: Messages, receives: Messages, label: str) -> PendingWork:
        for _, buffer in sends if label.startswith(self.label) else ():
            self.change(buffer)
        return self.transport.send_receive(sends, receives, label)


class _TamperedRing(rs.Ring):
    def __init__(self, group: dist.ProcessGroup, label: str, change: Callable[[Tensor], Any]) -> None:
        super().__init__(group, layout="contiguous", min_size=1)
        self.label, self.change = label, change

    def shard(
        self, layout: Layout, tensors: Sequence[tuple[Tensor | None, int]]
    ) -> list[tuple[int, Transport, list[Any]]]:
        sharded = super().shard(layout, tensors)
        return [
            (rank, _TamperedTransport(transport, self.label, self.change), mine) for rank, transport, mine in sharded
        ]


class _OnRank0(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.causal, ctx.group = causal, group
        whole = [_to_rank_0(x, group) for x in (q, k, v)]
        out = rs.attention(*whole, pattern=rs.Full(), causal=causal) if dist.get_rank(group) == 0 else None
        return _from_rank_0(out, q, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        own = ctx.saved_tensors
        whole = [_to_rank_0(x, ctx.group) for x in own]
        grad = _to_rank_0(grads[0].contiguous(), ctx.group)
        found: Iterator[Tensor | None] = iter((None, None, None))
        if dist.get_rank(ctx.group) == 0:
            leaves = [x.requires_grad_() for x in whole]
            with torch.enable_grad():
                out = rs.attention(*leaves, pattern=rs.Full(), causal=ctx.causal)
            found = iter(torch.autograd.grad(out, leaves, grad))
        return *(_from_rank_0(x, mine, ctx.group) for x, mine in zip(found, own, strict=True)), None, None


def _rows_of_all(x: Tensor, group: dist.ProcessGroup) -> list[int]:
    rows = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, torch.tensor([x.shape[1]]), group=group)
    return [int(count) for count in rows]


def _to_rank_0(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    rows = _rows_of_all(x, group)
    if dist.get_rank(group):
        dist.send(x.detach().contiguous(), dist.get_global_rank(group, 0), group)
        return x.new_empty(0)
    parts = [x.detach()]
    for rank in range(1, len(rows)):
        parts.append(x.new_zeros(x.shape[0], rows[rank], *x.shape[2:]))
        dist.recv(parts[-1], dist.get_global_rank(group, rank), group)
    return torch.cat(parts, dim=1)


def _from_rank_0(whole: Tensor | None, like: Tensor, group: dist.ProcessGroup) -> Tensor:
    rows = _rows_of_all(like, group)
    if whole is None:
        mine = torch.zeros_like(like, memory_format=torch.contiguous_format)
        dist.recv(mine, dist.get_global_rank(group, 0), group)
        return mine
    first, *others = whole.split(rows, dim=1)
    for rank, part in enumerate(others, 1):
        dist.send(part.contiguous(), dist.get_global_rank(group, rank), group)
    return first.contiguous()
