"""The process group, ring and sharding of a run: `init_distributed` and `shard_model`.

torchrun keeps one store over all its restarts, and that store still holds the gloo addresses of dead ranks. A restarted
rank that reads them waits for a peer that no longer exists. torchrun's restart count cannot tell the starts apart,
because each machine counts on its own. So rank 0 draws a random name for every start and publishes it under a token
that each rank has drawn for this start; `rendezvous_store` returns the part of the store under that name.
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
from ringspan.runtime.device import Device, local_device
from ringspan.runtime.settings import RunError
from ringspan.train.config import TrainSettings
from ringspan.train.lost import FIND_SECONDS, Peers

_POLL_SECONDS = 0.02  # while rank 0 waits for the other ranks


@dataclass(frozen=True)
class DistributedContext:
    """This rank's device, its ring, and all ranks. Consecutive ranks form a ring."""

    device: Device
    ring: rs.Ring
    peers: Peers
    owns_group: bool  # whether `init_distributed` created the process group

    @property
    def rank(self) -> int:
        return dist.get_rank()

    @property
    def world_size(self) -> int:
        return dist.get_world_size()

    @property
    def data_rank(self) -> int:
        return self.rank // self.ring.size

    @property
    def data_size(self) -> int:
        return self.world_size // self.ring.size

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def init_distributed(settings: TrainSettings) -> DistributedContext:
    """Join the process group and create the ring.

    Uses the current process group if there is one; otherwise joins the group that torchrun started, or creates a group
    of one rank.
    """
    device = local_device()
    kind = device.device.type
    options: dict[str, Any] = {} if kind == "cpu" else {"device_id": device.device}
    options["timeout"] = datetime.timedelta(seconds=collective_seconds(settings.timeout))
    owns_group = not dist.is_initialized()
    if owns_group:
        if dist.is_torchelastic_launched():
            if kind == "cpu":
                torch.set_num_threads(1)
            store, rank, world = rendezvous_store(settings.timeout)
            dist.init_process_group(device.backend, store=store, rank=rank, world_size=world, **options)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group(device.backend, store=store, rank=0, world_size=1, **options)
    world = dist.get_world_size()
    mesh = _ring_mesh(settings.ring_size(world), world, kind, options["timeout"])
    ring = rs.Ring(mesh, layout=settings.ring_layout(), min_size=1)
    peers = Peers.meet(device.device)
    ring.hosts = tuple(peers.hosts[rank] for rank in dist.get_process_group_ranks(ring.group))
    return DistributedContext(device, ring, peers, owns_group)


def collective_seconds(timeout: float) -> float:
    """The timeout of a transfer or collective: what is left of the run's timeout is for naming the lost ranks.

    >>> collective_seconds(60.0), collective_seconds(6.0)
    (56.0, 3.0)
    """
    return max(timeout - FIND_SECONDS, timeout / 2)


def _ring_mesh(ring_size: int, world: int, kind: str, timeout: datetime.timedelta) -> DeviceMesh | None:
    """The ranks of this rank's ring; None if these are all ranks.

    Not by `init_device_mesh`: its groups have torch's default timeout, 30 minutes with gloo.
    """
    if ring_size == world:
        return None
    rings = [list(range(first, first + ring_size)) for first in range(0, world, ring_size)]
    group, _ = dist.new_subgroups_by_enumeration(rings, timeout=timeout)
    return DeviceMesh.from_group(group, kind, mesh_dim_names=("ring",))


def shard_model(model: LongNet, context: DistributedContext, settings: TrainSettings) -> None:
    """Wrap each layer with FSDP2; weights are sharded over all ranks, or replicated on each.

    Data parallelism and the ring share one reduction: gradients are averaged over the whole mesh, and the loss of
    `LongNet.loss` is scaled for that (``gradients="averaged"``).
    """
    shape = (context.world_size,) if settings.weights == "sharded" else (context.world_size, 1)
    names = ("shard",) if settings.weights == "sharded" else ("replicate", "shard")
    mesh = init_device_mesh(context.device.device.type, shape, mesh_dim_names=names)
    modules: list[nn.Module] = [*model.layers, model]
    for module in modules:
        fully_shard(module, mesh=mesh)
    register_fsdp_forward_method(model, "loss")


def rendezvous_store(timeout: float) -> tuple[Store, int, int]:
    """A store that only the ranks of this start write to, this rank, and the number of ranks."""
    store, rank, world = next(rendezvous("env://", timeout=datetime.timedelta(seconds=timeout)))
    return PrefixStore(agree_on_start(store, rank, world, timeout), store), rank, world


def agree_on_start(store: Store, rank: int, world: int, timeout: float) -> str:
    """A random name for this start that all its ranks agree on and that no earlier start has used."""
    token = secrets.token_hex(8)
    if rank == 0:
        _publish_start(store, token, set(range(1, world)), timeout)
        return token
    store.set(f"ringspan/joined/{rank}", token)
    start: str = store.get(f"ringspan/start/{token}").decode()  # blocks
    store.set(f"ringspan/acknowledged/{start}/{rank}", "yes")
    return start


def _publish_start(store: Store, start: str, missing: set[int], timeout: float) -> None:
    began = time.monotonic()
    while missing:
        for rank in sorted(missing):
            if store.check([f"ringspan/acknowledged/{start}/{rank}"]):
                missing.remove(rank)
            elif store.check([f"ringspan/joined/{rank}"]):  # may be the token of an earlier start, which no rank reads
                store.set(f"ringspan/start/{store.get(f'ringspan/joined/{rank}').decode()}", start)
        if missing and time.monotonic() - began > timeout:
            raise RunError(
                f"ranks {sorted(missing)} did not join within {timeout:g} s: check that they run and reach rank 0, or "
                "raise --timeout"
            )
        time.sleep(_POLL_SECONDS)
