"""Rank tests of rings with head ranks: 2-D meshes of real gloo processes."""

import random
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import ringspan as rs
from ringspan.oracle import dense_attention
from tests.exactness import assert_ring_equals_oracle, inputs, random_sinks
from tests.ranks import on_ranks

NAMES = ("ring", "heads")
close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)


def _meshes() -> list[DeviceMesh]:
    """All 2-D meshes of the world: 1x2 and 2x1, or 1x4, 2x2 and 4x1."""
    world = dist.get_world_size()
    return [
        init_device_mesh("cpu", (world // u, u), mesh_dim_names=NAMES) for u in range(1, world + 1) if world % u == 0
    ]


@on_ranks(2, 4)
def test_random_cases_equal_the_oracle() -> None:
    rings = [
        rs.Ring(mesh, layout=layout, routing=routing)  # type: ignore[arg-type]
        for mesh in _meshes()
        for layout in ("contiguous", "zigzag")
        for routing in ("relay", "direct", rs.ByNode(mesh.size(1)))
    ]
    for case in range(4 * len(rings)):
        ring = rings[case % len(rings)]
        u, n = ring.head_ranks, random.choice([1, 2, 7, 31, 50, 77])
        cuts = sorted(random.randint(0, n) for _ in range(random.choice([0, 0, 1, 3])))
        sizes = tuple(b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True))
        kv_heads = random.choice([1, u, 2 * u])
        pattern = random.choice(
            [
                rs.Full(),
                rs.Window(random.randint(0, 40), random.choice([0, 3])),
                rs.Dilated(
                    (random.randint(1, 40), 60), (1, random.randint(1, 5)), random.choice(["interleaved", "blocked"])
                ),
                rs.Dilated((random.randint(1, 40),), (random.randint(1, 5),), shift=3) + rs.Window(5),
            ]
        )
        options = dict(pattern=pattern, causal=random.random() < 0.5, lengths=sizes)
        tensors = inputs(random.randint(1, 2), n, kv_heads, 2 * max(1, u // kv_heads), 4)
        if case % 3 == 0:
            shape = random.choice([tensors[0].shape[2:3], tensors[0].shape[:3]])
            options |= dict(sinks=random_sinks(tuple(shape)), softcap=random.choice([None, 2.0]))
        assert_ring_equals_oracle(ring, tensors, options, n if random.random() < 0.5 else None)


@on_ranks(2, 4)
def test_rows_of_ranks() -> None:
    """Splitting, positions, gathering and single rows follow one layout; losses sum over all ranks."""
    x = torch.randn(2, 31, 3, dtype=torch.float64)
    for mesh in _meshes():
        ring = rs.Ring(mesh)
        assert (ring.size, ring.head_ranks) == (dist.get_world_size(), mesh.size(1))
        mine = ring.split_sequence(x)
        close(mine, x[:, ring.positions(31)])
        close(ring.gather_sequence(mine), x)
        close(ring.rows_at(mine, (30, 0, 7)), x[:, [30, 0, 7]])
        labels = torch.arange(31)[None].expand(2, -1) % 3
        whole = torch.nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())
        share = rs.nn.ring_cross_entropy(mine, torch.eye(3, dtype=x.dtype), ring.split_sequence(labels), ring=ring)
        dist.all_reduce(share)
        close(share, whole)
        q = torch.randn(2, 2, 4, 4, dtype=torch.float64)
        k = torch.randn(2, 31, 4, 4, dtype=torch.float64)
        dist.broadcast(q, 0), dist.broadcast(k, 0)
        options = dict(pattern=rs.Dilated((8, 31), (1, 2)), rows=(4, 20), causal=True)
        found = rs.attention_weights(q, ring.split_sequence(k), ring=ring, **options)  # type: ignore[arg-type]
        close(ring.gather_sequence(found, dim=3), rs.attention_weights(q, k, **options))  # type: ignore[arg-type]


@on_ranks(4)
def test_part_of_a_mesh() -> None:
    """Two sequences, each over the head ranks of its own 1x2 or 2x1 mesh."""
    for shape in ((2, 1, 2), (2, 2, 1)):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", *NAMES))
        ring = rs.Ring(mesh[NAMES])
        assert (ring.size, ring.rank) == (2, dist.get_rank() % 2)
        torch.manual_seed(dist.get_rank() // 2)  # each pair of ranks has its own sequence
        tensors = inputs(1, 31, 2, 2, 4)
        assert_ring_equals_oracle(ring, tensors, dict(pattern=rs.Full(), causal=True, lengths=(31,)), None)
        with pytest.raises(rs.RingError, match="a mesh with 3 dimensions"):
            rs.Ring(mesh)


@on_ranks(4)
def test_losses_that_use_different_outputs() -> None:
    """Of out and lse, ranks use one, the other, or both: the gradients are those of the sum of all losses."""
    used = [(1, 0), (0, 1), (1, 1), (0, 0)]
    ring = rs.Ring(init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES))
    whole = inputs(1, 31, 2, 1, 4)
    mine = [ring.split_sequence(x.detach()).requires_grad_() for x in whole]
    out, lse = rs.attention(*mine, pattern=rs.Full(), causal=True, ring=ring, return_lse=True)
    with_out, with_lse = used[ring.rank]
    (lse.sum() if not with_out and with_lse else with_out * out.sum() + (lse.sum() if with_lse else 0)).backward()
    right, right_lse = dense_attention(*whole, pattern=rs.Full(), causal=True)
    loss = right.new_zeros(())
    for rank in range(4):
        rows = [row for s in ring.layout_of(31).spans(rank) for row in range(s.start, s.stop)]
        loss = loss + used[rank][0] * right[:, rows].sum() + used[rank][1] * right_lse[:, :, rows].sum()
    loss.backward()
    for x, y in zip(mine, whole, strict=True):
        close(x.grad, ring.split_sequence(y.grad))  # type: ignore[arg-type]


@on_ranks(4)
def test_prefill_and_decoding() -> None:
    ring, pattern, n = (
        rs.Ring(init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)),
        rs.Window(7) + rs.Dilated((16,), (2,)),
        37,
    )
    whole = [x.detach() for x in inputs(1, n + 3, 2, 1, 4)]
    right = rs.attention(*whole, pattern=pattern, causal=True)
    for shared in (None, ring):  # the cache holds all rows, or this rank's
        cache = rs.Cache(pattern, kv_heads=2, head_dim=4, dtype=torch.float64, ring=shared)
        prompt = (ring.split_sequence(x[:, :n]) for x in whole)
        close(rs.attention_prefill(*prompt, cache, ring=ring), ring.split_sequence(right[:, :n]))
        for t in range(n, n + 3):
            close(rs.attention_step(*(x[:, t : t + 1] for x in whole), cache), right[:, t : t + 1])


@on_ranks(4)
def test_compiled() -> None:
    ring = rs.Ring(init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES))
    q, k, v = (ring.split_sequence(x.detach()).requires_grad_() for x in inputs(1, 40, 2, 1, 4))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return rs.attention(q, k, v, pattern=rs.Full(), ring=ring, seq_len=40).square()

    found, wanted = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v), attend(q, k, v)
    close(found, wanted)
    grads = [torch.autograd.grad(x.sum(), (q, k, v)) for x in (found, wanted)]
    for x, y in zip(*grads, strict=True):
        close(x, y)


@on_ranks(4)
def test_refusals() -> None:
    for names in (None, ("data", "ring")):
        with pytest.raises(rs.RingError, match="a mesh with 2 dimensions, named"):
            rs.Ring(init_device_mesh("cpu", (2, 2), mesh_dim_names=names))
    with pytest.raises(rs.RingError, match="ranks must ascend"):
        rs.Ring(DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=NAMES))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    with pytest.raises(ValueError, match=r"ByNode\(3\) with head_ranks=2"):
        rs.Ring(mesh, routing=rs.ByNode(3))
    ring = rs.Ring(mesh)
    q, k, v = (ring.split_sequence(x.detach()) for x in inputs(1, 32, 3, 1, 4))
    with pytest.raises(ValueError, match="3 query heads over 2 head ranks"):
        rs.attention(q, k, v, pattern=rs.Full(), ring=ring)
    mixed = ring if ring.rank else rs.Ring()
    with pytest.raises(rs.RingError, match="ranks disagree on head_ranks: 1 on rank 0; 2 on ranks 1, 2, 3"):
        rs.attention(q, k, v, pattern=rs.Full(), ring=mixed)
