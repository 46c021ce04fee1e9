"""Processes and their mesh: data x ring, on CPUs (gloo) or GPUs (NCCL), started by torchrun or alone."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import ringspan as rs
from ringspan.evidence.device import Device, this_ranks_device
from ringspan.models import LongNet
from ringspan.train.meeting import meet
from ringspan.train.settings import TrainSettings


@dataclass(frozen=True)
class Crew:
    """This rank's place in the run."""

    device: Device
    mesh: DeviceMesh  # data x ring
    ring: rs.Ring

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world(self) -> int:
        return dist.get_world_size()

    @property
    def data_rank(self) -> int:
        return self.mesh.get_local_rank("data")

    @property
    def data_size(self) -> int:
        return self.mesh["data"].size()

    @property
    def is_speaker(self) -> bool:
        return self.rank == 0


def assemble(settings: TrainSettings) -> Crew:
    """Join the group that torchrun started, or be a group of one; then lay out the mesh."""
    device = this_ranks_device()
    kind = device.device.type
    how: dict[str, Any] = {} if kind == "cpu" else {"device_id": device.device}
    how["timeout"] = datetime.timedelta(seconds=settings.patience)
    if not dist.is_initialized():
        if dist.is_torchelastic_launched():
            if kind == "cpu":
                torch.set_num_threads(1)
            store, rank, world = meet(settings.patience)
            dist.init_process_group(device.backend, store=store, rank=rank, world_size=world, **how)
        else:
            alone = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(device.backend, store=alone, rank=0, world_size=1, **how)
    world = dist.get_world_size()
    ring_size = settings.ring_size(world)
    mesh = init_device_mesh(kind, (world // ring_size, ring_size), mesh_dim_names=("data", "ring"))
    return Crew(device, mesh, rs.Ring(mesh["ring"], layout=settings.layout, min_size=1))


def spread(model: LongNet, crew: Crew, settings: TrainSettings) -> None:
    """Hand the model to FSDP2, layer by layer: weights sharded over all ranks, or replicated on each.

    One reduction path for data and ring alike: gradients are averaged over the whole mesh, and the loss allows for it.
    """
    kind = crew.device.device.type
    shape = (crew.world,) if settings.weights == "sharded" else (crew.world, 1)
    names = ("shard",) if settings.weights == "sharded" else ("replicate", "shard")
    mesh = init_device_mesh(kind, shape, mesh_dim_names=names)
    parts: list[nn.Module] = [*model.layers, model]
    for part in parts:
        fully_shard(part, mesh=mesh)
    register_fsdp_forward_method(model, "loss")
