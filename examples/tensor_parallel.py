"""Tensor parallelism with the ring: the sequence is split over two ranks, the heads over two.

    torchrun --nproc-per-node=4 examples/tensor_parallel.py

`parallelize_module` splits projections and MLP by columns and rows, so a rank holds some of the heads. The rows that a
head sees depend on its global index: `pattern.for_heads(first, total)` states which heads these are. Afterwards every
rank computes the same alone and compares loss and gradients.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ringspan as rs

CONFIG = rs.models.LongNetConfig.named("nano", heads=4, kv_heads=2, patterns=("64x1,256x4", "64x1,256x4 shift 32"))
TOKENS, TENSOR = 501, 2
SPLIT = {
    "attention.queries": ColwiseParallel(),
    "attention.keys": ColwiseParallel(),
    "attention.values": ColwiseParallel(),
    "attention.output": RowwiseParallel(),
    "mlp.gate": ColwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
}


def new_model() -> rs.models.LongNet:
    torch.manual_seed(0)
    return rs.models.LongNet(CONFIG).double()


def split_heads(model: rs.models.LongNet, mesh: DeviceMesh) -> None:
    """Split every layer over the mesh, and tell its pattern which heads it holds."""
    held = CONFIG.kv_heads // mesh.size()
    for layer in model.layers:
        parallelize_module(layer, mesh, dict(SPLIT))
        attention = layer.attention
        attention.pattern = attention.pattern.for_heads(mesh.get_local_rank() * held, CONFIG.kv_heads)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // TENSOR, TENSOR), mesh_dim_names=("ring", "tensor"))
    ring = rs.Ring(mesh["ring"])
    text = torch.randint(256, (1, TOKENS + 1), generator=torch.Generator().manual_seed(1))

    alone = new_model()
    wanted = alone.loss(text[:, :-1], text[:, 1:])
    wanted.backward()

    model = new_model()
    split_heads(model, mesh["tensor"])
    tokens, targets = ring.split_sequence(text[:, :-1]), ring.split_sequence(text[:, 1:])
    loss = model.loss(tokens, targets, ring=ring, seq_len=TOKENS)
    loss.backward()

    total = loss.detach().clone()
    dist.all_reduce(total, group=ring.group)  # the shares of a ring add up to the loss
    apart = (total - wanted).abs().item()
    for weight, whole in zip(model.parameters(), alone.parameters(), strict=True):
        grad = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else weight.grad
        dist.all_reduce(grad, group=ring.group)  # and so do their gradients
        apart = max(apart, (grad - whole.grad).abs().max().item())
    if dist.get_rank() == 0:
        print(f"ring of {ring.size} x {TENSOR} for heads: loss and gradients differ from one process by {apart:.1e}")
    dist.barrier()  # gloo aborts if a rank leaves while another still communicates
    dist.destroy_process_group()
    if not apart <= 1e-12:
        raise SystemExit("more than 1e-12")


if __name__ == "__main__":
    main()
