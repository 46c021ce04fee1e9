"""The balanced layout on real ranks: exact results, counted bytes, losses, decoding, and equal errors everywhere."""

import random
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ringspan as rs
from ringspan.models import Decoder, LongNet, LongNetConfig
from ringspan.oracle import dense_attention
from tests.exactness import assert_ring_equals_oracle, inputs, random_sinks
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


def _packed() -> tuple[int, ...]:
    """Lengths of documents; all ranks draw the same."""
    few = [random.choice([0, 1, 3, 7, 20, 45]) for _ in range(random.randint(1, 7))]
    most_empty = [random.choice([0, 1]) for _ in range(random.randint(0, 6))]
    one_long = random.sample([150, *[1] * 12, *[2] * 6, 0], 20)
    return (*random.choice([few, few, most_empty, one_long, [random.randint(40, 80)]]), random.randint(1, 60))


def _layout(pattern: rs.Pattern, causal: bool) -> rs.LayoutName | rs.Balanced:
    others = (rs.Balanced(pattern, causal, slack) for slack in (0.01, 0.2, 1))
    return random.choice(["balanced", *others, rs.Balanced(rs.Window(2), not causal)])  # type: ignore[return-value]


def check_attention(group: DeviceMesh | None = None) -> None:
    pattern, causal, lengths = random.choice(PATTERNS), random.random() < 0.6, _packed()
    n, batch, (kv_heads, per_kv_head) = sum(lengths), random.randint(1, 2), random.choice([(2, 2), (1, 4), (4, 1)])
    shape = random.choice([None, (4,), (batch, n, 4)])
    options = dict(pattern=pattern, causal=causal, lengths=lengths, softcap=random.choice([None, None, 3.0]))
    options |= {} if shape is None else {"sinks": random_sinks(shape)}
    routing: rs.Routing = random.choice(["relay", "direct", rs.ByNode(2)])
    ring = rs.Ring(group, layout=_layout(pattern, causal), routing=routing)
    tensors = inputs(batch, n, kv_heads, per_kv_head, 4)
    seq_len, optimize = random.choice([None, n]), random.choice(["auto", "none", rs.TileCosts(0, 0, 0)])
    assert_ring_equals_oracle(ring, tensors, options, seq_len, optimize)  # type: ignore[arg-type]


@on_ranks(2, 3, 4)
def test_attention_equals_the_oracle() -> None:
    for _ in range(16):
        check_attention()


@on_ranks(4)
def test_head_ranks_equal_the_oracle() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "heads"))
    for _ in range(8):
        check_attention(mesh)


@on_ranks(2, 3)
def test_folded_orders_and_weights_of_a_few_queries() -> None:
    """An order that moves no rows fits any cut; one that moves rows fits documents that stay whole."""
    order, whole = rs.Hilbert.folded(16), rs.Dilated((32, 64), (1, 1))
    for pattern, lengths in ((whole, _packed()), (rs.Dilated((8, 32), (1, 2)), (16,) * 12)):
        ring, n, causal = rs.Ring(layout="balanced"), sum(lengths), random.random() < 0.5
        options = dict(pattern=pattern, causal=causal, order=order, lengths=lengths)
        q, k, v = (x.detach() for x in inputs(1, n, 2, 1, 4))
        mine = [ring.split_sequence(x, lengths=lengths) for x in (q, k, v)]
        out = rs.attention(*mine, ring=ring, **options)  # type: ignore[call-overload]
        wanted, _ = dense_attention(q, k, v, **options)  # type: ignore[arg-type]
        close(out, ring.split_sequence(wanted, lengths=lengths))
        rows = random.sample(range(n), min(n, 5))
        chosen = ring.rows_at(mine[0], rows, lengths=lengths)
        found = rs.attention_weights(chosen, mine[1], rows=rows, ring=ring, **options)  # type: ignore[arg-type]
        found = ring.gather_sequence(found, dim=3, lengths=lengths)
        close(found, rs.attention_weights(q[:, rows], k, rows=rows, **options))  # type: ignore[arg-type]


@on_ranks(2, 3)
def test_layers() -> None:
    ring, lengths = rs.Ring(layout="balanced"), (50, 9, 0, 1, 17, 12, 4)
    layer = rs.nn.MultiheadAttention(16, 4, pattern=rs.Window(7), sinks=True, kv_heads=2, ring=ring).double()
    x = torch.randn(2, 93, 16, dtype=torch.float64)
    mine = ring.split_sequence(x, lengths=lengths)
    found, _ = layer(mine, mine, mine, is_causal=True, lengths=lengths)
    layer.attention.ring = None
    close(found, ring.split_sequence(layer(x, x, x, is_causal=True, lengths=lengths)[0], lengths=lengths))
    key, positions = rs.nn.DropoutKey(3), torch.arange(93)
    dropped = rs.nn.row_dropout(mine, 0.5, key=key, positions=ring.positions(93, lengths=lengths))
    close(dropped, ring.split_sequence(rs.nn.row_dropout(x, 0.5, key=key, positions=positions), lengths=lengths))


@pytest.mark.slow
@on_ranks(2)
def test_attention_compiles_with_lengths_as_a_tensor() -> None:
    ring = rs.Ring(layout="balanced")
    torch.compiler.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, seq_len: int | None) -> Tensor:
        return rs.attention(q, k, v, pattern=rs.Window(9), lengths=lengths, ring=ring, seq_len=seq_len)

    tensors = inputs(1, 96, 2, 1, 4)
    for documents in ([40, 30, 26], [26, 40, 30], [90, 3, 3]):
        lengths = torch.tensor(documents)
        mine = [ring.split_sequence(x.detach(), lengths=lengths).requires_grad_() for x in tensors]
        for seq_len in (None, 96):
            found = attend(*mine, lengths, seq_len)
            wanted = rs.attention(*tensors, pattern=rs.Window(9), lengths=lengths)
            close(found, ring.split_sequence(wanted, lengths=lengths))
            grads = torch.autograd.grad((found * found.detach()).sum(), mine)
            right = torch.autograd.grad((wanted * wanted.detach()).sum(), tensors)
            for x, y in zip(grads, right, strict=True):
                close(x, ring.split_sequence(y, lengths=lengths))


@on_ranks(2, 3, 4)
def test_split_gather_positions_and_rows() -> None:
    ring, lengths = rs.Ring(layout="balanced"), (5, 40, 0, 3, 3, 21, 1)
    x = torch.randn(2, sum(lengths), 3, dtype=torch.float64)
    mine = ring.split_sequence(x, lengths=lengths).requires_grad_()
    assert torch.equal(mine, x[:, ring.positions(73, lengths=lengths)])
    for seq_len in (None, 73):
        whole = ring.gather_sequence(mine, lengths=torch.tensor(lengths), seq_len=seq_len)
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
    own, query = lengths if ring.rank else (10, 30, 8), torch.ones(1, 1, 1, 4, dtype=torch.float64)
    for call in (
        lambda: rs.attention(q, k, v, pattern=rs.Full(), ring=ring, lengths=own),
        lambda: ring.gather_sequence(q, lengths=own),
        lambda: ring.gather_sequence(q, lengths=own if ring.rank else None),
        lambda: ring.rows_at(q, [3], lengths=own),
    ):
        with pytest.raises(rs.RingError, match="ranks disagree on lengths"):
            call()
    full: dict[str, Any] = dict(pattern=rs.Full(), ring=ring)
    without_lengths: tuple[Callable[..., Any], ...] = (
        partial(rs.attention, q, k, v, **full),
        partial(rs.attention_weights, query, k, rows=[0], **full),
        partial(ring.gather_sequence, q),
        partial(ring.gather_sequence, q, lengths=()),
        partial(ring.rows_at, q, [3]),
    )
    for refused, seq_len in product(without_lengths, (None, 48)):  # also where zigzag gives each rank as many rows
        with pytest.raises(rs.RingError, match="pass their lengths= in every call"):
            refused(seq_len=seq_len)
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
    texts = list(tokens[0].split(lengths))
    for prompts in (texts, texts[:1], [*tokens.view(3, 31)]):  # of different lengths, one, and of one length
        for sharded in (False, True):
            alone = Decoder(model, batch=len(prompts))
            over_ring = Decoder(model, batch=len(prompts), ring=ring, sharded=sharded)
            close(over_ring.read(prompts), alone.read(prompts))
            step = torch.arange(len(prompts))
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
