"""Where the ranks of one start meet: torchrun's store, in a part of it that no earlier start has written to.

torchrun keeps one store over all its restarts, and gloo's addresses of dead ranks are still in it: a rank that comes
early would read them, and wait for nobody. How often torchrun has restarted does not tell starts apart, since every
machine counts for itself. So rank 0 draws a name for the start, and tells it to each rank in answer to a word that the
rank has drawn itself: an old answer answers nobody who is alive.
"""

from __future__ import annotations

import datetime
import secrets
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.rendezvous import rendezvous

import ringspan as rs
from ringspan.models import LongNet
from ringspan.runtime.device import Device, this_ranks_device
from ringspan.runtime.settings import RunError
from ringspan.train.config import TrainSettings

_LOOK = 0.02  # seconds between two looks for ranks that have not come yet


def meet(patience: float) -> tuple[Store, int, int]:
    """A store that only the ranks of this start write to, this rank, and how many there are."""
    timeout = datetime.timedelta(seconds=patience)
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    return PrefixStore(agree_on_name(store, rank, world, patience), store), rank, world


def agree_on_name(store: Store, rank: int, world: int, patience: float) -> str:
    """A name for this start that all its ranks know, and no earlier start has known."""
    mine = secrets.token_hex(8)
    if rank == 0:
        _tell_all(store, mine, set(range(1, world)), patience)
        return mine
    store.set(f"ringspan/comes/{rank}", mine)
    name: str = store.get(f"ringspan/name/{mine}").decode()  # waits
    store.set(f"ringspan/heard/{name}/{rank}", "yes")
    return name


def _tell_all(store: Store, name: str, missing: set[int], patience: float) -> None:
    start = time.monotonic()
    while missing:
        for rank in sorted(missing):
            if store.check([f"ringspan/heard/{name}/{rank}"]):
                missing.remove(rank)
            elif store.check([f"ringspan/comes/{rank}"]):  # perhaps of an earlier start: then nobody listens
                store.set(f"ringspan/name/{store.get(f'ringspan/comes/{rank}').decode()}", name)
        if missing and time.monotonic() - start > patience:
            raise RunError(f"ranks {sorted(missing)} did not come within {patience:g} s (--patience)")
        time.sleep(_LOOK)


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
