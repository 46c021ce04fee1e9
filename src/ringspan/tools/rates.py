"""The rates that the model of time needs: given, measured on this machine, or assumed.

Measuring takes a few seconds: attention on one CPU thread, and messages between two local processes. torch is imported
only to measure.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from ringspan.planning.breakeven import ASSUMED_RATES, FORWARD_FLOPS, DeviceRates

_LARGE_BYTES, _LARGE_ROUNDS = 16 * 2**20, 10
_SMALL_BYTES, _SMALL_ROUNDS = 8, 300
_TILES, _TILE_ROWS = 4, 512
_PATIENCE_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Wire:
    """What two local processes see of one another: bytes/s each way at the same time, and seconds of an empty hop."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class KnownRates:
    """Rates, and where each of them comes from: given, measured here, or assumed."""

    rates: DeviceRates
    sources: dict[str, str]

    def __str__(self) -> str:
        rates = self.rates
        return (
            f"{rates.flops / 1e9:,.4g} GFLOP/s a device ({self.sources['flops']}), "
            f"{rates.bandwidth / 1e9:,.3g} GB/s ({self.sources['bandwidth']}), "
            f"{rates.latency * 1e6:,.3g} µs a hop ({self.sources['latency']})"
        )


def find_rates(
    flops: float | None, bandwidth: float | None, latency: float | None, *, dtype: str, dim: int, measure: bool
) -> KnownRates:
    """The rates that are given; the others are measured if ``measure``, and assumed if not.

    A latency belongs to its bandwidth: if that is given, the latency is not measured but assumed.
    """
    given = (1.0 if rate is None else rate for rate in (flops, bandwidth, latency))
    DeviceRates(*given)  # so that what is wrong is said before anything is measured
    sources = {"flops": "given", "bandwidth": "given", "latency": "given"}
    if flops is None and measure:
        flops, sources["flops"] = measure_flops(dtype, dim), "measured here, one CPU thread"
    if bandwidth is None and measure:
        wire = measure_wire()
        bandwidth, sources["bandwidth"] = wire.bandwidth, "measured here, two local processes"
        if latency is None:
            latency, sources["latency"] = wire.latency, "measured here"
    found = {"flops": flops, "bandwidth": bandwidth, "latency": latency}
    for name, rate in found.items():
        if rate is None:
            found[name], sources[name] = getattr(ASSUMED_RATES, name), "assumed"
    return KnownRates(DeviceRates(**found), sources)  # type: ignore[arg-type]


def measure_flops(dtype: str, dim: int, seconds: float = 0.3) -> float:
    """FLOP/s of one CPU thread in the kernel that attention gets here: full tiles, forward, for about this long."""
    import torch  # noqa: PLC0415

    from ringspan import kernels  # noqa: PLC0415

    kernel = kernels.choose("cpu", getattr(torch, dtype)).kernel
    q, k, v = torch.randn(3, 1, _TILES, _TILE_ROWS, dim).to(getattr(torch, dtype)).unbind()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        kernel.forward(q, k, v, False, dim**-0.5)  # the first call also sets things up
        calls: list[float] = []
        while sum(calls) < seconds:
            start = time.perf_counter()
            kernel.forward(q, k, v, False, dim**-0.5)
            calls.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return FORWARD_FLOPS * dim * _TILES * _TILE_ROWS**2 / statistics.median(calls)


def measure_wire() -> Wire:
    """Two local processes (gloo) exchange large and small messages, both ways at once, as neighbours of a ring do."""
    from ringspan.runtime.launch import run_local_ranks  # noqa: PLC0415

    found = run_local_ranks(2, exchange, timeout_seconds=_PATIENCE_SECONDS)
    large, small = (max(seconds) for seconds in zip(*found, strict=True))
    return Wire(bandwidth=_LARGE_BYTES / max(large - small, 1e-9), latency=small)


def exchange() -> tuple[float, float]:
    """What each of the two does: median seconds of an exchange of large messages, and of small ones."""
    return _seconds_of_exchange(_LARGE_BYTES, _LARGE_ROUNDS), _seconds_of_exchange(_SMALL_BYTES, _SMALL_ROUNDS)


def _seconds_of_exchange(size: int, rounds: int) -> float:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    peer = 1 - dist.get_rank()
    outgoing, incoming = torch.zeros(2, size, dtype=torch.uint8).unbind()
    spent = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        flights = [dist.isend(outgoing, peer), dist.irecv(incoming, peer)]
        for flight in flights:
            if flight is not None:
                flight.wait()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent[1:])  # the first round connects
