"""Rank tests of the ring: exact results, counted bytes and equal errors on real gloo processes."""

import gc
import os
import random
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ringspan as rs
from ringspan.oracle import dense_attention
from tests.exactness import assert_ring_equals_oracle, inputs, random_sinks
from tests.ranks import on_ranks

ROUTINGS: list[rs.Routing] = ["relay", "direct", rs.ByNode(1), rs.ByNode(2), rs.ByNode(3)]

NESTED = [[(4, 1), (8, 2), (16, 4)], [(8, 1), (16, 2), (32, 2), (96, 4)], [(12, 1), (24, 3), (48, 6)], [(6, 2), (6, 1)]]


def close(x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def _random_pattern() -> rs.Pattern:
    kind, branches = random.random(), random.randint(1, 3)
    if kind < 0.1:
        return rs.Full()
    if kind < 0.4:
        return rs.Window(random.randint(0, 45), random.choice([0, 0, 3, 20]), random.choice([1, 1, 2, 5]))
    if kind < 0.6:
        lengths, rates = zip(*random.choice(NESTED), strict=True)
        return rs.Dilated(lengths, rates, random.choice(["interleaved", "blocked"]), random.choice([0, 0, 3, 17]))
    dilated = rs.Dilated(
        [random.randint(1, 40) for _ in range(branches)],
        [random.randint(1, 5) for _ in range(branches)],
        random.choice(["interleaved", "blocked"]),
        random.choice([0, 0, 3, 17]),
    )
    return dilated if kind < 0.8 else dilated + rs.Window(random.randint(0, 30))


@on_ranks(2, 3, 4)
def test_random_cases_equal_the_oracle() -> None:
    rings = [rs.Ring(layout=layout, routing=routing) for layout in ("contiguous", "zigzag") for routing in ROUTINGS]  # type: ignore[arg-type]
    for case in range(50):  # five per ring
        pattern = _random_pattern()
        n = random.choice([1, 2, 7, 31, 32, 50, 64, 77])
        cuts = sorted(random.randint(0, n) for _ in range(random.choice([0, 0, 1, 3])))
        sizes = tuple(b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True))
        kv_heads, group = random.randint(1, 4), random.randint(1, 2)
        options = dict(pattern=pattern, causal=random.random() < 0.5, lengths=sizes)
        tensors = inputs(random.randint(1, 2), n, kv_heads, group, 4)
        if case % 3 == 0:
            shape = random.choice([tensors[0].shape[2:3], tensors[0].shape[:3]])
            options |= dict(sinks=random_sinks(tuple(shape)), softcap=random.choice([None, 2.0]))
        optimize = random.choice(["auto", "none", rs.TileCosts(0, 0, 0), rs.TileCosts(0, 0, 0), rs.TileCosts(1, 4, 4)])
        assert_ring_equals_oracle(
            rings[case % len(rings)], tensors, options, n if random.random() < 0.5 else None, optimize
        )


@on_ranks(2, 3, 4)
def test_folded_orders_equal_the_oracle() -> None:
    size = dist.get_world_size()
    for case in range(16):
        ring = rs.Ring(layout=random.choice(["contiguous", "zigzag"]), routing=random.choice(ROUTINGS))
        fold = random.randint(1, 9)
        n = 2 * size * fold * random.randint(1, 2)
        cut = fold * random.randint(0, n // fold)
        pattern = rs.Dilated([random.randint(1, 30), random.randint(1, 60)], [1, random.randint(1, 4)])
        options = dict(pattern=pattern, causal=case % 2 == 0, lengths=(cut, n - cut), order=rs.Hilbert.folded(fold))
        tensors = inputs(1, n, random.randint(1, 3), random.randint(1, 2), 4)
        assert_ring_equals_oracle(ring, tensors, options)


@on_ranks(2, 3, 4)
def test_orders_that_cross_ranks_are_rejected() -> None:
    ring = rs.Ring(layout="contiguous")
    q, k, v = (ring.split_sequence(x.detach()) for x in inputs(1, 64, 1, 1, 4))
    for order in (rs.Hilbert((8, 8)), rs.Hilbert.folded(60)):
        with pytest.raises(ValueError, match="order the data once, before the model and before the split"):
            rs.attention(q, k, v, pattern=rs.Dilated((16,), (1,)), order=order, ring=ring)
    order = rs.Hilbert.folded(1 + ring.rank)
    with pytest.raises(rs.RingError, match="order"):
        rs.attention(q, k, v, pattern=rs.Dilated((16,), (1,)), order=order, ring=ring)


@on_ranks(2, 3, 4)
def test_ordering_the_data_before_the_split() -> None:
    """The recipe of docs/hilbert.md, for an image and a volume: apply, split, positions, model, gather, undo."""
    for shape in ((8, 12), (4, 4, 6)):
        order, n = rs.Hilbert(shape), rs.Hilbert(shape).period
        rotary, pattern = rs.nn.GridRotary(shape, head_dim=8), rs.Dilated((16, n), (1, 4))
        x = torch.randn(1, n, 2, 8, dtype=torch.float64)
        whole = rotary(x)
        wanted = rs.attention(whole, whole, x, pattern=pattern, order=order)
        ring = rs.Ring(layout="contiguous")
        mine = ring.split_sequence(order.apply(x))
        turned = rotary(mine, order.coordinates[ring.positions(n)])
        out = rs.attention(turned, turned, mine, pattern=pattern, ring=ring, seq_len=n)
        close(order.undo(ring.gather_sequence(out)), wanted)


@on_ranks(2, 3, 4)
def test_lower_precision() -> None:
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 4e-3)):
        q, k, v = inputs(1, 130, 2, 2, 16, dtype=dtype)
        options = dict(pattern=rs.Dilated((32, 130), (1, 2)), causal=True)
        right, _ = dense_attention(*(x.double() for x in (q, k, v)), **options)  # type: ignore[arg-type]
        ring = rs.Ring()
        mine = [ring.split_sequence(x.detach()).requires_grad_() for x in (q, k, v)]
        out = rs.attention(*mine, ring=ring, **options)  # type: ignore[call-overload]
        assert out.dtype == dtype
        assert (out.double() - ring.split_sequence(right)).abs().max() < tolerance
        out.sum().backward()
        assert [x.grad.dtype for x in mine if x.grad is not None] == [dtype] * 3


@on_ranks(2, 3, 4)
def test_split_gather_and_positions() -> None:
    for layout in ("contiguous", "zigzag"):
        ring = rs.Ring(layout=layout)  # type: ignore[arg-type]
        for n in (0, 1, 2, 11, 40):
            whole = torch.randn(2, n, 3, dtype=torch.float64)
            mine = ring.split_sequence(whole)
            positions = ring.positions(n)
            assert torch.equal(mine, whole[:, positions])
            mine = mine.clone().requires_grad_()
            gathered = ring.gather_sequence(mine)
            assert torch.equal(gathered, whole)
            assert torch.equal(ring.gather_sequence(mine.transpose(0, 1), dim=0, seq_len=n), whole.transpose(0, 1))
            weights = torch.randn(ring.size, 2, n, 3, dtype=torch.float64)  # each rank weighs the rows differently
            (gathered * weights[ring.rank]).sum().backward()
            assert mine.grad is not None
            close(mine.grad, weights.sum(0)[:, positions])


@on_ranks(2)
def test_compiles_without_graph_breaks() -> None:
    pattern = rs.Dilated((16, 64), (1, 2))
    for seq_len in (None, 65):
        ring = rs.Ring()

        def layer(q: Tensor, k: Tensor, v: Tensor, ring: rs.Ring = ring, seq_len: int | None = seq_len) -> Tensor:
            return rs.attention(q * 2, k, v, pattern=pattern, causal=True, ring=ring, seq_len=seq_len).sin()

        mine = [ring.split_sequence(x.detach()).requires_grad_() for x in inputs(1, 65, 2, 1, 8)]
        out = torch.compile(layer, fullgraph=True, backend="aot_eager")(*mine)  # the first call over the ring
        grads = torch.autograd.grad(out.sum(), mine)
        eager = layer(*mine)
        close(out, eager)
        for found, wanted in zip(grads, torch.autograd.grad(eager.sum(), mine), strict=True):
            close(found, wanted)


@on_ranks(2)
def test_selective_checkpointing_does_not_send_again() -> None:
    ring = rs.Ring()
    mine = [ring.split_sequence(x.detach()).requires_grad_() for x in inputs(1, 64, 2, 1, 8)]

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rs.attention(q * 2, k, v, pattern=rs.Full(), ring=ring)

    sent = []
    for kept in ([], [torch.ops.ringspan.attention.default]):
        ring.reset_counters()
        context = lambda kept=kept: create_selective_checkpoint_contexts(kept)  # noqa: E731
        checkpoint(layer, *mine, use_reentrant=False, context_fn=context).sum().backward()
        sent.append(ring.counters.bytes_sent)
    # Forward, again in backward unless kept, and backward: parcels and, as large, their gradients.
    assert sent[0] * 3 == sent[1] * 4


@on_ranks(2, 3, 4)
def test_multihead_module_over_a_ring() -> None:
    ring = rs.Ring()
    torch.manual_seed(1)
    options = dict(segment_lengths=[8, 32], dilation_rates=[1, 2], kv_heads=2, dtype=torch.float64)
    alone = rs.nn.MultiheadDilatedAttention(16, 4, **options)  # type: ignore[arg-type]
    spread = rs.nn.MultiheadDilatedAttention(16, 4, ring=ring, **options)  # type: ignore[arg-type]
    spread.load_state_dict(alone.state_dict())
    x = torch.randn(2, 37, 16, dtype=torch.float64)
    wanted, _ = alone(x, x, x, is_causal=True)
    wanted.square().sum().backward()
    mine = ring.split_sequence(x)
    found, _ = spread(mine, mine, mine, is_causal=True)
    close(found, ring.split_sequence(wanted))
    found.square().sum().backward()
    for a, b in zip(alone.parameters(), spread.parameters(), strict=True):
        assert b.grad is not None
        dist.all_reduce(b.grad)  # weights are replicated: their gradients are summed over the ring
        torch.testing.assert_close(b.grad, a.grad, rtol=1e-12, atol=1e-12)


@on_ranks(2, 3, 4)
def test_a_loss_on_one_rank_only_does_not_hang() -> None:
    ring = rs.Ring()
    q, k, v = inputs(1, 40, 2, 1, 4)
    right, _ = dense_attention(q, k, v, pattern=rs.Full())
    last = ring.size - 1
    rows = torch.cat([torch.arange(s.start, s.stop) for s in ring.layout_of(40).spans(last)])
    wanted = torch.autograd.grad(right[:, rows].sum(), (q, k, v))
    mine = [ring.split_sequence(x.detach()).requires_grad_() for x in (q, k, v)]
    out = rs.attention(*mine, pattern=rs.Full(), ring=ring)
    loss = out.sum() if ring.rank == last else out[:, :0].sum()
    for found, grad in zip(torch.autograd.grad(loss, mine), wanted, strict=True):
        close(found, ring.split_sequence(grad))


@on_ranks(2, 3, 4)
def test_disagreements_raise_on_every_rank() -> None:
    ring = rs.Ring(layout="contiguous")
    odd = ring.rank == ring.size - 1
    good = [torch.randn(1, 6, 2, 4) for _ in range(3)]
    cases = {
        "causal": (good, dict(causal=odd)),
        "pattern": (good, dict(pattern=rs.Dilated((4,), (1,)) if odd else rs.Full())),
        "scale": (good, dict(scale=0.5 if odd else 0.25)),
        "dtype": ([x.double() if odd else x for x in good], {}),
        "batch, heads, kv_heads, head_dim": ([x[..., :2] if odd else x for x in good], {}),
        "who needs gradients": ([x.clone().requires_grad_(odd) for x in good], {}),
        "lengths": (good, dict(lengths=(6 * ring.size,) if odd else (1, 6 * ring.size - 1))),
        "rows per rank": ([x[:, : 3 if odd else 6] for x in good], {}),
    }
    for name, (tensors, change) in cases.items():
        options = {"pattern": rs.Full(), **change}
        with pytest.raises(rs.RingError) as caught:
            rs.attention(*tensors, ring=ring, **options)  # type: ignore[call-overload]
        message = str(caught.value)
        assert name in message, message
        assert f"rank {ring.size - 1}" in message or name == "rows per rank", message
        everybody: list[str] = [""] * ring.size
        dist.all_gather_object(everybody, message)
        assert len(set(everybody)) == 1


@on_ranks(2, 3, 4)
def test_different_calls_raise_on_every_rank() -> None:
    ring = rs.Ring(layout="contiguous")
    x = torch.randn(1, 6, 2, 4)
    calls = [lambda: ring.gather_sequence(x), lambda: rs.attention(x, x, x, pattern=rs.Full(), ring=ring)]
    with pytest.raises(rs.RingError, match=r"ranks disagree on call: gather_sequence on rank 0; attention on rank"):
        calls[min(ring.rank, 1)]()


@on_ranks(2, 3, 4)
def test_unsplit_tensors_are_rejected() -> None:
    """Every rank has all rows and forgets to split them: k copies of the sequence, one after the other."""
    ring = rs.Ring()
    whole = [x.detach() for x in inputs(2, 24, 2, 1, 4)]
    cache = rs.Cache(rs.Full(), batch=2, kv_heads=2, head_dim=4, dtype=torch.float64)
    layer = rs.nn.MultiheadDilatedAttention(8, 2, segment_lengths=[8], dilation_rates=[1], ring=ring)
    for call in (
        lambda: rs.attention(*whole, pattern=rs.Full(), ring=ring),
        lambda: rs.attention_prefill(*whole, cache, ring=ring),
        lambda: layer(*(x.flatten(2).float() for x in whole)),
    ):
        with pytest.raises(rs.RingError, match=r"hold the same 24 rows.*split whole tensors with ring.split_sequence"):
            call()
    with pytest.raises(rs.RingError, match="holds 24 rows, but has"):
        rs.attention(*whole, pattern=rs.Full(), ring=ring, seq_len=24)
    n = 24 * ring.size
    for equal in (torch.ones(1, 24, 1, 4), torch.full((1, 24, 1, 4), torch.nan)):  # may be meant: it says nothing
        rs.attention(equal, equal, equal, pattern=rs.Full(), ring=ring)
    rs.attention(*whole, pattern=rs.Full(), ring=ring, seq_len=n)  # as stated


@on_ranks(2, 3, 4)
def test_non_members_of_the_group_are_rejected() -> None:
    group = dist.new_group([0])
    if dist.get_rank():
        with pytest.raises(rs.RingError, match="not a member of the group"):
            rs.Ring(group)


@on_ranks(2, 3, 4)
def test_seq_len_is_checked_before_anything_is_sent() -> None:
    ring = rs.Ring()
    x = torch.randn(1, 5, 2, 4)
    with pytest.raises(rs.RingError, match=re.escape(f"rank {ring.rank} holds 5 rows, but has")):
        rs.attention(x, x, x, pattern=rs.Full(), ring=ring, seq_len=1000)


@on_ranks(4)
def test_two_rings_in_a_mesh() -> None:
    """(data, ring): two rings of half the ranks each, with sequences of their own."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "ring"))
    ring = rs.Ring(mesh["ring"])
    assert ring.size == dist.get_world_size() // 2
    torch.manual_seed(mesh["data"].get_local_rank())
    options = dict(pattern=rs.Dilated((8, 40), (1, 2)), causal=True, lengths=None)
    assert_ring_equals_oracle(ring, inputs(1, 41, 2, 1, 4), options)


@on_ranks(4)
def test_a_ring_with_tensor_parallel_heads() -> None:
    """(ring, tensor): the sequence over one axis, the heads over the other; offsets follow the global head."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("ring", "tensor"))
    ring, part = rs.Ring(mesh["ring"]), mesh["tensor"].get_local_rank()
    for head_offsets in ("interleaved", "blocked"):
        pattern = rs.Dilated((8, 40), (1, 4), head_offsets)  # type: ignore[arg-type]
        q, k, v = inputs(1, 41, 6, 2, 4)
        right, _ = dense_attention(q, k, v, pattern=pattern, causal=True)
        mine = [ring.split_sequence(x.detach().chunk(2, dim=2)[part]) for x in (q, k, v)]
        out = rs.attention(*mine, pattern=pattern.for_heads(3 * part, 6), causal=True, ring=ring)
        close(out, ring.split_sequence(right.chunk(2, dim=2)[part]))


@on_ranks(2, 3, 4)
def test_a_mesh_of_two_dimensions_is_rejected() -> None:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()))
    with pytest.raises(rs.RingError, match=re.escape("a mesh with 2 dimensions")):
        rs.Ring(mesh)


@on_ranks(2, 3, 4)
def test_a_group_below_min_size_is_rejected() -> None:
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    with pytest.raises(rs.RingError, match=re.escape("the group has 1 rank(s), but min_size=2")):
        rs.Ring(alone)
    ring = rs.Ring(alone, min_size=1)
    assert_ring_equals_oracle(ring, inputs(1, 20, 2, 1, 4), dict(pattern=rs.Full(), causal=True, lengths=None))


@on_ranks(2)
def test_nothing_leaks() -> None:
    """Hundreds of calls with changing shapes: memory, file descriptors and threads stay as they were."""
    ring = rs.Ring()

    def calls(count: int) -> None:
        for i in range(count):
            n = 64 + (i * 37) % 200
            mine = [ring.split_sequence(x.detach()).requires_grad_() for x in inputs(1, n, 2, 1, 32, torch.float32)]
            rs.attention(*mine, pattern=rs.Dilated((32, n), (1, 2)), causal=True, ring=ring).sum().backward()

    def footprint() -> tuple[int, int, int]:
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return resident, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    calls(200)  # every shape once, all threads and caches warm
    before = footprint()
    calls(300)
    after = footprint()
    assert after[0] - before[0] < 8 * 2**20, f"memory grew by {after[0] - before[0]} bytes"
    assert after[1:] == before[1:], f"descriptors and threads: {before[1:]} before, {after[1:]} after"


@on_ranks(2)
def test_calls_with_the_longest_descriptions() -> None:
    """Long texts are shortened to fixed sizes before ranks compare them, and all of them fit."""
    ring, n = rs.Ring(layout="contiguous"), 256
    pattern: rs.Pattern = rs.Window(n)
    for i in range(1, 40):
        pattern += rs.Dilated((8 * i, 128), (1, 2), "blocked", shift=i)
    order = rs.Hilbert.folded(16)
    generator = torch.Generator().manual_seed(ring.rank)
    q, k, v = (torch.randn(1, n // 2, 64, 2, generator=generator, dtype=torch.float64) for _ in range(3))
    sinks = torch.arange(64, dtype=torch.float64) / 7
    out = rs.attention(q, k, v, pattern=pattern, order=order, lengths=(16,) * 16, sinks=sinks, scale=1 / 3, ring=ring)
    assert out.isfinite().all()
    with pytest.raises(rs.RingError, match="disagree on pattern"):
        rs.attention(q, k, v, pattern=pattern + rs.Window(ring.rank), order=order, lengths=(16,) * 16, ring=ring)
