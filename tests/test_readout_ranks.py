"""Rank tests of `attention_weights` and `Ring.rows_at`: exact results and equal errors on real gloo processes."""

import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringspan as rs
from tests.exactness import inputs, random_sinks
from tests.ranks import on_ranks
from tests.test_readout import dense_weights

PATTERNS: list[rs.Pattern] = [
    rs.Full(),
    rs.Window(9, right=4, dilation=2),
    rs.Dilated((8, 40), (1, 3)),
    rs.Dilated((5, 24), (2, 4), "blocked", shift=3) + rs.Window(6),
]


def close(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def refused_on_every_rank(call: Callable[[], Any], words: str) -> None:
    """All ranks raise the same RingError."""
    with pytest.raises(rs.RingError, match=words) as caught:
        call()
    everybody: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everybody, str(caught.value))
    assert len(set(everybody)) == 1


@on_ranks(2, 3, 4)
def test_random_cases_equal_the_oracle() -> None:
    for case in range(32):
        ring = rs.Ring(layout=random.choice(["contiguous", "zigzag"]))
        n = random.choice([1, 2, 7, 32, 53])
        cut = random.randint(0, n)
        q, k, v = inputs(random.randint(1, 2), n, random.randint(1, 3), random.randint(1, 2), 4)
        rows = [random.randrange(n) for _ in range(3)]
        options: dict[str, Any] = dict(
            pattern=PATTERNS[case % 4], causal=random.random() < 0.5, softcap=random.choice([None, 2.0])
        )
        options |= dict(lengths=random.choice([None, (cut, n - cut)]))
        seq_len = random.choice([None, n])
        logits = random.choice([None, random_sinks(tuple(q.shape[2:3])), random_sinks(tuple(q.shape[:3]))])
        wanted = dense_weights(q, k, sinks=logits, **options)[:, :, rows]
        mine, keys, values = (ring.split_sequence(x) for x in (q, k, v))
        queries = ring.rows_at(mine, rows, seq_len=seq_len)
        assert torch.equal(queries, q[:, rows])

        own = logits if logits is None or logits.dim() == 1 else logits[:, rows]
        found = rs.attention_weights(queries, keys, rows=rows, sinks=own, ring=ring, seq_len=seq_len, **options)
        close(found, ring.split_sequence(wanted, dim=3))
        close(ring.gather_sequence(found, dim=-1), wanted)

        own = logits if logits is None or logits.dim() == 1 else ring.split_sequence(logits)
        _, lse = rs.attention(mine, keys, values, sinks=own, return_lse=True, ring=ring, **options)
        lse = ring.rows_at(lse, rows, dim=2)
        found = rs.attention_weights(queries, keys, rows=rows, lse=lse, ring=ring, seq_len=seq_len, **options)
        close(found, ring.split_sequence(wanted, dim=3))


@on_ranks(2, 3, 4)
def test_folded_orders_equal_the_oracle() -> None:
    size = dist.get_world_size()
    for case in range(8):
        ring = rs.Ring(layout=random.choice(["contiguous", "zigzag"]))
        fold = random.randint(1, 9)
        n = 2 * size * fold
        q, k, _ = inputs(1, n, 2, 2, 4)
        rows = [random.randrange(n) for _ in range(3)]
        options: dict[str, Any] = dict(order=rs.Hilbert.folded(fold), causal=case % 2 == 0)
        options |= dict(pattern=rs.Dilated((random.randint(1, 30), n), (1, random.randint(1, 4))))
        wanted = dense_weights(q, k, **options)[:, :, rows]
        found = rs.attention_weights(q[:, rows], ring.split_sequence(k), rows=rows, ring=ring, **options)
        close(found, ring.split_sequence(wanted, dim=3))


@on_ranks(2, 3, 4)
def test_a_given_lse_and_length_need_no_communication() -> None:
    ring = rs.Ring()
    q, k, _ = inputs(1, 30, 2, 1, 4)
    _, lse = rs.attention(q, k, k, pattern=rs.Full(), return_lse=True)
    with patch.object(dist, "all_gather", side_effect=AssertionError), patch.object(dist, "all_reduce", None):
        found = rs.attention_weights(
            q[:, [4]], ring.split_sequence(k), rows=[4], pattern=rs.Full(), lse=lse[:, :, [4]], ring=ring, seq_len=30
        )
    close(found, ring.split_sequence(dense_weights(q, k, pattern=rs.Full())[:, :, [4]], dim=3))


@on_ranks(2, 3, 4)
def test_rows_of_every_dtype_and_dimension() -> None:
    for layout in ("contiguous", "zigzag"):
        ring = rs.Ring(layout=layout)  # type: ignore[arg-type]
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64):
            whole = (torch.randn(3, 11, 2) * 100).to(dtype)
            mine = ring.split_sequence(whole)
            assert torch.equal(ring.rows_at(mine, (10, 0, 10)), whole[:, [10, 0, 10]])
            turned = ring.rows_at(mine.transpose(1, 2), torch.tensor([7, 3]), dim=-1, seq_len=11)
            assert torch.equal(turned, whole[:, [7, 3]].transpose(1, 2))
        lse = torch.tensor([[-torch.inf, 1.0, -torch.inf, torch.nan]])
        found = ring.rows_at(ring.split_sequence(lse), [0, 3])
        torch.testing.assert_close(found, lse[:, [0, 3]], equal_nan=True)
        needs_grad = torch.ones(1, ring.layout_of(9).rows_of(ring.rank), requires_grad=True)
        assert not ring.rows_at(needs_grad, [0], seq_len=9).requires_grad


@on_ranks(2, 3, 4)
def test_disagreements_raise_on_every_rank() -> None:
    ring = rs.Ring(layout="contiguous")
    odd = ring.rank == ring.size - 1
    q, k = torch.ones(1, 2, 2, 4), torch.randn(1, 6, 2, 4) + ring.rank
    lse = torch.zeros(1, 2, 2)
    good: dict[str, Any] = dict(q=q, k=k, rows=(0, 1), pattern=rs.Full(), lse=lse)
    changes: dict[str, dict[str, Any]] = {
        "positions of the queries": dict(rows=(0, 2)),
        r"q \(see ring.rows_at\)": dict(q=q + 1),
        r"lse \(see ring.rows_at\)": dict(lse=None),
        "pattern": dict(pattern=rs.Window(3)),
        "causal, scale, softcap": dict(causal=True),
        "lengths": dict(lengths=(6 * ring.size,)),
        "order": dict(order=rs.Hilbert.folded(3)),
        "dtype": dict(q=q.double(), k=k.double()),
        "batch, heads, kv_heads, head_dim": dict(k=k[:, :, :1]),
        "rows per rank": dict(k=k[:, :3]),
    }
    for name, change in changes.items():
        arguments = {**good, **change} if odd else dict(good)
        tensors = arguments.pop("q"), arguments.pop("k")
        refused_on_every_rank(lambda t=tensors, a=arguments: rs.attention_weights(*t, ring=ring, **a), name)  # type: ignore[misc]
    sinks = torch.full((2,), float(odd))
    refused_on_every_rank(
        lambda: rs.attention_weights(q, k, rows=(0, 1), pattern=rs.Full(), sinks=sinks, ring=ring), "sinks"
    )
    refused_on_every_rank(lambda: ring.rows_at(k, (0, 1 + odd)), "positions")
    refused_on_every_rank(lambda: ring.rows_at(k[..., : 1 + odd], (0,)), "shape")


@on_ranks(2, 3, 4)
def test_tensors_that_are_not_split_are_rejected() -> None:
    ring = rs.Ring()
    q, k, _ = (x.detach() for x in inputs(1, 24, 2, 1, 4))
    refused_on_every_rank(lambda: ring.rows_at(q, [0]), "hold the same 24 rows")
    refused_on_every_rank(
        lambda: rs.attention_weights(q[:, [0]], k, rows=[0], pattern=rs.Full(), ring=ring), "hold the same 24 rows"
    )
    for call in (
        lambda: ring.rows_at(q, [0], seq_len=24),
        lambda: rs.attention_weights(q[:, [0]], k, rows=[0], pattern=rs.Full(), ring=ring, seq_len=24),
    ):
        with pytest.raises(rs.RingError, match="holds 24 rows, but has"):
            call()


@on_ranks(2, 3, 4)
def test_positions_outside_the_sequence_are_rejected() -> None:
    ring = rs.Ring()
    x = ring.split_sequence(torch.randn(1, 10, 2, 4))
    for position in (-1, 10):
        with pytest.raises(ValueError, match=rf"positions\[0\]={position}: the sequence has 10 rows"):
            ring.rows_at(x, [position])
        with pytest.raises(ValueError, match=rf"rows\[0\]={position}: the sequence has 10 rows"):
            rs.attention_weights(torch.ones(1, 1, 2, 4), x, rows=[position], pattern=rs.Full(), ring=ring)


@on_ranks(2, 3, 4)
def test_long_options_fit_the_metadata() -> None:
    """Long patterns, orders and documents are compared by digests."""
    ring = rs.Ring(layout="contiguous")
    fold, size = 5, dist.get_world_size()
    n, heads = 40 * fold * size, 64
    q, k = torch.ones(1, 30, heads, 2), ring.split_sequence(torch.randn(1, n, heads, 2))
    weights = rs.attention_weights(
        q,
        k,
        rows=range(100, 130),
        pattern=rs.Dilated(tuple(range(100, 160)), (1,) * 60, shift=12345).for_heads(1000, 2000),
        sinks=torch.randn(heads, generator=torch.Generator().manual_seed(0)),
        lengths=(fold,) * (n // fold),
        order=rs.Hilbert.folded(fold),
        scale=1 / 3,
        softcap=1 / 3,
        ring=ring,
    )
    assert weights.shape == (1, heads, 30, n // size)
