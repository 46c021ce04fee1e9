"""The balanced layout on real ranks: exact results, counted bytes, losses, decoding, and equal errors everywhere."""

import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import ringspan as rs
from ringspan.models import Decoder, LongNet, LongNetConfig
from ringspan.oracle import dense_attention
from tests.exactness import inputs, loss_weights, weighted_loss
from tests.ranks import on_ranks

PATTERNS = [
    rs.Full(),
    rs.Window(5),
    rs.Window(6, 4, 2),
    rs.Dilated((4, 8), (1, 2)),
    rs.Dilated((8, 32), (1, 4), shift=3),
    rs.Window(3) + rs.Dilated((16,), (4,)),
]
MODEL = LongNetConfig(64, layers=2, width=32, heads=2, kv_heads=1, mlp_width=32, patterns=("8x1,32x2", "window 6"))


def close(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def cases(count: int) -> Iterator[tuple[rs.Pattern, bool, tuple[int, ...]]]:
    """Random patterns and documents; all ranks draw the same."""
    for _ in range(count):
        lengths = tuple(random.choice([0, 1, 3, 7, 20, 45]) for _ in range(random.randint(1, 7)))
        yield random.choice(PATTERNS), random.random() < 0.6, (*lengths, random.randint(1, 60))


@on_ranks(2, 3, 4)
def test_attention_equals_the_oracle() -> None:
    for pattern, causal, lengths in cases(12):
        layout = random.choice(["balanced", rs.Balanced(pattern, causal, 0.2)])
        ring = rs.Ring(layout=layout, routing=random.choice(["relay", "direct", rs.ByNode(2)]))  # type: ignore[arg-type]
        tensors, n = inputs(1, sum(lengths), 2, 2, 4), sum(lengths)
        options = dict(pattern=pattern, causal=causal, lengths=lengths)
        right, right_lse = dense_attention(*tensors, **options)  # type: ignore[arg-type]
        weights = loss_weights(right, right_lse)
        wanted = torch.autograd.grad(weighted_loss(right, right_lse, weights), tensors)
        mine = [ring.split_sequence(x.detach(), lengths=lengths).requires_grad_() for x in tensors]
        ring.reset_counters()
        seq_len = random.choice([None, n])
        out, lse = rs.attention(*mine, return_lse=True, ring=ring, seq_len=seq_len, **options)  # type: ignore[call-overload]
        sizes: dict[str, object] = dict(
            heads=tensors[0].shape[2], kv_heads=tensors[1].shape[2], head_dim=4, dtype=torch.float64
        )
        sizes |= dict(ring_size=ring.size, layout=ring.layout, routing=ring.routing)
        plan = rs.plan(pattern, n, causal=causal, lengths=lengths, **sizes)  # type: ignore[arg-type]
        assert ring.counters.bytes_sent == plan.bytes_sent(ring.rank)
        close(out, ring.split_sequence(right, lengths=lengths))
        close(lse, ring.split_sequence(right_lse, dim=2, lengths=torch.tensor(lengths)))
        local = (ring.split_sequence(weights[0], lengths=lengths), ring.split_sequence(weights[1], 2, lengths))
        for x, grad in zip(torch.autograd.grad(weighted_loss(out, lse, local), mine), wanted, strict=True):
            close(x, ring.split_sequence(grad, lengths=lengths))


@on_ranks(2, 3, 4)
def test_split_gather_positions_and_rows() -> None:
    ring, lengths = rs.Ring(layout="balanced"), (5, 40, 0, 3, 3, 21, 1)
    x = torch.randn(2, sum(lengths), 3, dtype=torch.float64)
    mine = ring.split_sequence(x, lengths=lengths).requires_grad_()
    assert torch.equal(mine, x[:, ring.positions(73, lengths=lengths)])
    for seq_len in (None, 73):
        whole = ring.gather_sequence(mine, lengths=lengths, seq_len=seq_len)
        assert torch.equal(whole, x)
        (grad,) = torch.autograd.grad((whole * x).sum() / ring.size, mine)
        close(grad, mine)
        rows = [72, 0, 44, 45, 6]
        assert torch.equal(ring.rows_at(mine, rows, lengths=lengths, seq_len=seq_len), x[:, rows])
    assert sum(ring.layout_of(73, lengths).rows_of(rank) for rank in range(ring.size)) == 73


@on_ranks(2, 3)
def test_disagreements_raise_on_every_rank() -> None:
    ring, lengths = rs.Ring(layout="balanced"), (30, 10, 8)
    q, k, v = (ring.split_sequence(x.detach(), lengths=lengths) for x in inputs(1, 48, 1, 1, 4))
    own = lengths if ring.rank else (10, 30, 8)
    for call in (
        lambda: rs.attention(q, k, v, pattern=rs.Full(), ring=ring, lengths=own),
        lambda: ring.gather_sequence(q, lengths=own),
        lambda: ring.gather_sequence(q, lengths=own if ring.rank else None),
        lambda: ring.rows_at(q, [3], lengths=own),
    ):
        with pytest.raises(rs.RingError, match="ranks disagree on lengths"):
            call()
    with pytest.raises(rs.RingError, match="pass the same lengths to it and to this call"):
        rs.attention(q[:, 1:], k[:, 1:], v[:, 1:], pattern=rs.Full(), ring=ring, lengths=lengths, seq_len=48)
    with pytest.raises(ValueError, match="lengths add up to 40, but the sequence has 48 rows"):
        ring.gather_sequence(q, lengths=(30, 10))
    other = rs.Ring(layout=rs.Balanced(slack=0.1 + 0.1 * ring.rank))
    with pytest.raises(rs.RingError, match="ranks disagree on layout"):
        rs.attention(q, k, v, pattern=rs.Full(), ring=other, lengths=lengths)


@on_ranks(2, 3)
def test_models_losses_and_decoding() -> None:
    torch.manual_seed(0)
    model, ring, lengths = LongNet(MODEL).double(), rs.Ring(layout="balanced"), (50, 9, 1, 17, 12, 4)
    tokens = torch.randint(64, (1, sum(lengths)))
    targets = tokens.roll(-1, 1)
    mine, aims = (ring.split_sequence(x, lengths=lengths) for x in (tokens, targets))
    hidden = model(mine, ring=ring, seq_len=93, lengths=lengths)
    close(hidden, ring.split_sequence(model(tokens, lengths=lengths), lengths=lengths))
    share = model.loss(mine, aims, ring=ring, seq_len=93, lengths=lengths)
    dist.all_reduce(share)
    close(share, model.loss(tokens, targets, lengths=lengths))
    prompts = list(tokens[0].split(lengths))
    for sharded in (False, True):
        alone = Decoder(model, batch=len(lengths))
        over_ring = Decoder(model, batch=len(lengths), ring=ring, sharded=sharded)
        close(over_ring.read(prompts), alone.read(prompts))
        step = torch.arange(len(lengths))
        close(over_ring.step(step), alone.step(step))


@on_ranks(2)
def test_models_compile_with_balanced_documents() -> None:
    model, ring = LongNet(MODEL).double(), rs.Ring(layout="balanced")
    tokens = torch.randint(64, (1, 96))
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for packed in ([40, 30, 26], [26, 40, 30]):
        lengths = torch.tensor(packed)
        mine = ring.split_sequence(tokens, lengths=lengths)
        options = dict(ring=ring, seq_len=96, lengths=lengths)
        torch.testing.assert_close(compiled(mine, **options), model(mine, **options), rtol=0, atol=1e-10)
