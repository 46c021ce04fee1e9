"""One rank, rehearsed: its own plan, its own rows, its tiles computed for real by the ring's own engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ringspan import kernels
from ringspan.engine import walk_backward, walk_forward
from ringspan.evidence.device import Device, this_ranks_device
from ringspan.evidence.machine import Stopwatch, is_disturbed
from ringspan.planning import RingPlan
from ringspan.rehearse.mail import StandInMail
from ringspan.rehearse.network import Network
from ringspan.ring.players import drive


@dataclass(frozen=True, slots=True)
class PassFigures:
    """One pass of a rank: seconds of work are measured, seconds of waiting computed, bytes and messages counted."""

    working: float
    waiting: float
    bytes_sent: int
    bytes_received: int
    messages_sent: int
    peak_parcel_bytes: int

    @property
    def seconds(self) -> float:
        return self.working + self.waiting


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What one rank did. ``peak_growth`` is by how much the process grew, as the system reports it, rows included.

    ``foreign_cores`` are those that other programs kept busy meanwhile; ``disturbed`` if seconds of work say little.
    """

    rank: int
    rows: int
    tiles: int
    hops: int
    work: int
    forward: PassFigures
    backward: PassFigures | None
    peak_growth: int
    bytes_as_planned: bool
    foreign_cores: float
    disturbed: bool

    @property
    def seconds(self) -> float:
        """Of a whole step: measured work and computed waiting."""
        return self.forward.seconds + (self.backward.seconds if self.backward else 0.0)

    @property
    def working(self) -> float:
        return self.forward.working + (self.backward.working if self.backward else 0.0)

    @property
    def waiting(self) -> float:
        return self.forward.waiting + (self.backward.waiting if self.backward else 0.0)


def rehearse_rank(plan: RingPlan, rank: int, network: Network, dtype: torch.dtype, *, backward: bool) -> Rehearsed:
    """Run one rank's plan; best in a process of its own (`ringspan.processes`), so that its memory is its own.

    Raises nothing that a real rank would not raise; a rank that does not fit runs out of memory here as well.
    """
    device = this_ranks_device()
    _warm_up(device, dtype, plan.sizes.dim)
    figures: list[PassFigures] = []
    with Stopwatch() as watch:
        growth = device.peak_growth(lambda: figures.extend(_run(plan, rank, network, dtype, backward, device)))
    own = plan.rank(rank)
    wanted = [plan.bytes_sent(rank), plan.bytes_sent(rank, backward=True)]
    return Rehearsed(
        rank=rank,
        rows=own.rows,
        tiles=len(own.tiles),
        hops=len(own.hops) - 1,
        work=plan.work(rank),
        forward=figures[0],
        backward=figures[1] if backward else None,
        peak_growth=growth,
        bytes_as_planned=[figure.bytes_sent for figure in figures] == wanted[: len(figures)],
        foreign_cores=watch.foreign_cores,
        disturbed=is_disturbed(watch.foreign_cores, watch.seconds),
    )


def _run(
    plan: RingPlan, rank: int, network: Network, dtype: torch.dtype, backward: bool, device: Device
) -> list[PassFigures]:
    own, sizes = plan.rank(rank), plan.sizes
    kernel = kernels.choose(device.device, dtype).kernel
    scale = sizes.dim**-0.5

    def rows(heads: int) -> Tensor:
        shape = (sizes.batch, own.rows, heads, sizes.dim)
        return torch.empty(shape, dtype=dtype, device=device.device).normal_()

    def new_mail() -> StandInMail:
        return StandInMail(rank, network, device.device, _synchronize_for(device))

    q, k, v = rows(sizes.heads), rows(sizes.kv_heads), rows(sizes.kv_heads)
    with torch.no_grad():
        mail = new_mail()
        wide_out, lse = drive(walk_forward(own, mail, q, k, v, scale=scale, kernel=kernel))
        out = wide_out.to(dtype)  # as the operator hands it out
        del wide_out
        figures = [_figures(mail)]
        if backward:
            grad_out = torch.ones_like(out)
            mail = new_mail()
            needs = (True, True, True)
            walk = walk_backward(own, mail, grad_out, None, q, k, v, out, lse, scale=scale, kernel=kernel, needs=needs)
            wide = drive(walk)
            _ = [x.to(dtype) for x in wide if x is not None]
            figures.append(_figures(mail))
    return figures


def _figures(mail: StandInMail) -> PassFigures:
    mail.synchronize()
    with mail.clock.aside():
        counted = mail.counters
    return PassFigures(
        mail.clock.working,
        mail.clock.waiting,
        counted.bytes_sent,
        counted.bytes_received,
        counted.messages_sent,
        counted.peak_parcel_bytes,
    )


def _warm_up(device: Device, dtype: torch.dtype, dim: int) -> None:
    """The first call of a kernel also sets things up: not the rank's work."""
    kernel = kernels.choose(device.device, dtype).kernel
    x = torch.ones(1, 1, 64, dim, dtype=dtype, device=device.device)
    out, lse = kernel.forward(x, x, x, False, 1.0)
    kernel.backward(torch.ones_like(out), x, x, x, out, lse, False, 1.0, (True, True, True))
    torch.empty(2**20).normal_()


def _synchronize_for(device: Device) -> Callable[[], None]:
    if device.device.type == "cpu":
        return lambda: None
    return lambda: torch.cuda.synchronize(device.device)
