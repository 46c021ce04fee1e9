"""FSDP2 on a (data, ring) mesh: two sequences at a time, each split over two ranks.

    torchrun --nproc-per-node=4 examples/fsdp2.py
    torchrun --nproc-per-node=4 examples/fsdp2.py --mixed-precision

`fully_shard` shards the weights over all four ranks and averages gradients over the whole mesh. With
`gradients="averaged"` the loss accounts for that, and the ring needs no second reduction. Afterwards every rank trains
the same model alone, on whole sequences, and compares the weights.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

import ringspan as rs

CONFIG = rs.models.LongNetConfig.named("nano", patterns=("64x1,256x4", "64x1,256x4 shift 32"))
TOKENS, STEPS, RING = 500, 3, 2

Weights = dict[str, torch.Tensor]


def sequences(step: int, count: int) -> torch.Tensor:
    """The text of a step: one byte more than tokens, because targets are shifted by one."""
    return torch.randint(256, (count, TOKENS + 1), generator=torch.Generator().manual_seed(step))


def new_model(dtype: torch.dtype) -> rs.models.LongNet:
    torch.manual_seed(0)
    return rs.models.LongNet(CONFIG).to(dtype)


def train_with_fsdp(mesh: DeviceMesh, ring: rs.Ring | None, mine: slice, total: int, mixed: bool) -> Weights:
    """Train on this rank's rows of its sequences (``mine`` of ``total``); weights are sharded over the mesh."""
    model = new_model(torch.float32 if mixed else torch.float64)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if mixed else MixedPrecisionPolicy()
    for part in (*model.layers, model):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(model, "loss")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        text = sequences(step, total)[mine]
        tokens, targets = text[:, :-1], text[:, 1:]
        if ring is not None:
            tokens, targets = ring.split_sequence(tokens), ring.split_sequence(targets)
        loss = model.loss(tokens, targets, ring=ring, seq_len=TOKENS, group=mesh.get_group(), gradients="averaged")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.full_tensor().double() for name, weight in model.state_dict().items()}


def train_plainly(total: int) -> Weights:
    """The same training in one process and in fp64, without a ring and without FSDP."""
    model = new_model(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        text = sequences(step, total)
        model.loss(text[:, :-1], text[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def apart(a: Weights, b: Weights) -> float:
    """Relative difference (2-norm) over all weights."""
    squares = sum((a[name] - b[name]).square().sum() for name in b)
    return float((squares / sum(weight.square().sum() for weight in b.values())) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixed-precision", action="store_true", help="compute in bf16, keep weights in fp32")
    mixed = parser.parse_args().mixed_precision
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world // RING, RING), mesh_dim_names=("data", "ring"))
    everyone = init_device_mesh("cpu", (world,), mesh_dim_names=("all",))
    total, number = mesh["data"].size(), mesh.get_local_rank("data")
    found = train_with_fsdp(everyone, rs.Ring(mesh["ring"]), slice(number, number + 1), total, mixed)
    exact = train_plainly(total)
    difference, allowed = apart(found, exact), 1e-10
    if mixed:  # at most twice as far from fp64 as a single process in bf16
        myself = DeviceMesh.from_group(dist.new_subgroups(1)[0], "cpu")
        allowed = 2 * apart(train_with_fsdp(myself, None, slice(total), total, mixed), exact)
    if dist.get_rank() == 0:
        print(f"{world} ranks, rings of {RING}: weights differ from plain training by {difference:.1e}")
        print(f"allowed: {allowed:.1e}" + (", twice what bf16 costs one process" if mixed else ""))
    dist.barrier()  # gloo aborts if a rank leaves while another still communicates
    dist.destroy_process_group()
    if not difference <= allowed:
        raise SystemExit(f"{difference:.1e} is more than {allowed:.1e}")


if __name__ == "__main__":
    main()
