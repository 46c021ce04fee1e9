"""Rings with one fault each, behind the signature of `ringspan verify --attention`. Each looks like a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringspan as rs
from ringspan.evidence.peers import all_gather
from ringspan.layout import Layout
from ringspan.oracle import dense_attention
from ringspan.ring.mail import Counters, Flight, Letters, Mail


def honest(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """No fault: plain attention by ringspan."""
    return _over(rs.Ring(group, layout="contiguous", min_size=1), q, k, v, causal)


def flips_a_byte(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """The last byte of every parcel arrives with its lowest exponent bits turned over."""
    return _over(_TamperedRing(group, layout="contiguous", min_size=1), q, k, v, causal)


def drops_gradients(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """The gradients of parcels come home as zeros: what other ranks know about my keys is lost."""
    return _over(_ForgetfulRing(group, layout="contiguous", min_size=1), q, k, v, causal)


def computes_the_whole(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Right, but every rank gathers the sequence, computes all of it, and keeps its own rows."""
    ring = rs.Ring(group, layout="contiguous", min_size=1)
    whole = [ring.gather_sequence(x) for x in (q, k, v)]
    out = rs.attention(*whole, pattern=rs.Full(), causal=causal)
    return ring.split_sequence(out)


def sees_one_too_far(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Causality off by one: row p sees token p + 1."""
    if not causal:
        return all_gather(q, k, v, causal=False, group=group)
    ring = rs.Ring(group, layout="contiguous", min_size=1)
    keys, values = ring.gather_sequence(k), ring.gather_sequence(v)
    positions = ring.positions(keys.shape[1])
    scores = torch.einsum("bphd,bthd->bhpt", q, keys) * q.shape[-1] ** -0.5
    hidden = torch.arange(keys.shape[1]) > positions[:, None] + 1
    return torch.einsum("bhpt,bthd->bphd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def attends_alone(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """A ring in name only: each rank attends to its own rows, and sends nothing."""
    return rs.attention(q, k, v, pattern=rs.Full(), causal=causal)


def mixes_heads(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    """Attention over heads instead of tokens: the mistake of a transposed kernel."""
    out, _ = dense_attention(*(x.transpose(1, 2) for x in (q, k, v)), pattern=rs.Full())
    return out.transpose(1, 2)


def raises(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, group: dist.ProcessGroup) -> Tensor:
    raise NotImplementedError("not on this device")


def _over(ring: rs.Ring, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return rs.attention(q, k, v, pattern=rs.Full(), causal=causal, ring=ring)


@dataclass(frozen=True)
class _TamperedMail:
    """Somebody else's mail, whose letters are changed as they are posted."""

    mail: Mail
    flips: bool

    @property
    def counters(self) -> Counters:
        return self.mail.counters

    def post(self, sends: Letters, receives: Letters, label: str) -> Flight:
        for _, buffer in sends:
            if self.flips and label.startswith("parcels"):
                buffer.view(-1)[-1:].view(torch.uint8)[-1] ^= 0x7F
            elif not self.flips and label.startswith("gradients"):
                buffer.zero_()
        return self.mail.post(sends, receives, label)


class _TamperedRing(rs.Ring):
    flips = True

    def deal(self, layout: Layout, tensors: Sequence[tuple[Tensor | None, int]]) -> list[tuple[int, Mail, list[Any]]]:
        return [(rank, _TamperedMail(mail, self.flips), mine) for rank, mail, mine in super().deal(layout, tensors)]


class _ForgetfulRing(_TamperedRing):
    flips = False
