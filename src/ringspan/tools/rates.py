"""The rates of the time model: given by the user, measured on this machine, or assumed.

Measuring takes a few seconds: attention on one CPU thread, and messages between two local processes. torch is imported
only for that.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from ringspan.planning.breakeven import ASSUMED_RATES, FORWARD_FLOPS, DeviceRates

_LARGE_BYTES, _LARGE_ROUNDS = 16 * 2**20, 10
_SMALL_BYTES, _SMALL_ROUNDS = 8, 300
_TILES, _TILE_ROWS = 4, 512
_TIMEOUT_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class LinkRates:
    """The link between two local processes: bytes/s each way at the same time, and the latency of a hop in seconds."""

    bandwidth: float
    latency: float


@dataclass(frozen=True, slots=True)
class KnownRates:
    """Rates, and the source of each: given, measured here, or assumed."""

    rates: DeviceRates
    sources: dict[str, str]

    def __str__(self) -> str:
        rates = self.rates
        return (
            f"{rates.flops / 1e9:,.4g} GFLOP/s per device ({self.sources['flops']}), "
            f"{rates.bandwidth / 1e9:,.3g} GB/s ({self.sources['bandwidth']}), "
            f"{rates.latency * 1e6:,.3g} µs per hop ({self.sources['latency']})"
        )


def find_rates(
    flops: float | None, bandwidth: float | None, latency: float | None, *, dtype: str, dim: int, measure: bool
) -> KnownRates:
    """The given rates; the others are measured with ``measure``, otherwise assumed.

    Latency goes with bandwidth: if the bandwidth is given and the latency is not, the latency is assumed.
    """
    given = (1.0 if rate is None else rate for rate in (flops, bandwidth, latency))
    DeviceRates(*given)  # raises for invalid values before anything is measured
    sources = {"flops": "given", "bandwidth": "given", "latency": "given"}
    if flops is None and measure:
        flops, sources["flops"] = measure_flop_rate(dtype, dim), "measured here, one CPU thread"
    if bandwidth is None and measure:
        link = measure_link()
        bandwidth, sources["bandwidth"] = link.bandwidth, "measured here, two local processes"
        if latency is None:
            latency, sources["latency"] = link.latency, "measured here"
    found = {"flops": flops, "bandwidth": bandwidth, "latency": latency}
    for name, rate in found.items():
        if rate is None:
            found[name], sources[name] = getattr(ASSUMED_RATES, name), "assumed"
    return KnownRates(DeviceRates(**found), sources)  # type: ignore[arg-type]


def measure_flop_rate(dtype: str, dim: int, seconds: float = 0.3) -> float:
    """FLOP/s of one CPU thread in the kernel that attention uses here: full tiles, forward, for about ``seconds``."""
    import torch  # noqa: PLC0415

    from ringspan import kernels  # noqa: PLC0415

    kernel = kernels.choose("cpu", getattr(torch, dtype)).kernel
    q, k, v = torch.randn(3, 1, _TILES, _TILE_ROWS, dim).to(getattr(torch, dtype)).unbind()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        kernel.forward(q, k, v, False, dim**-0.5)  # warm-up
        calls: list[float] = []
        while sum(calls) < seconds:
            start = time.perf_counter()
            kernel.forward(q, k, v, False, dim**-0.5)
            calls.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return FORWARD_FLOPS * dim * _TILES * _TILE_ROWS**2 / statistics.median(calls)


def measure_link() -> LinkRates:
    """Two local processes (gloo) exchange large and small messages in both directions, like neighbours in a ring."""
    from ringspan.runtime.launch import run_local_ranks  # noqa: PLC0415

    found = run_local_ranks(2, exchange_messages, timeout_seconds=_TIMEOUT_SECONDS)
    large, small = (max(seconds) for seconds in zip(*found, strict=True))
    return LinkRates(bandwidth=_LARGE_BYTES / max(large - small, 1e-9), latency=small)


def exchange_messages() -> tuple[float, float]:
    """Runs on both processes: median seconds of exchanging large messages, and small ones."""
    return _seconds_of_exchange(_LARGE_BYTES, _LARGE_ROUNDS), _seconds_of_exchange(_SMALL_BYTES, _SMALL_ROUNDS)


def _seconds_of_exchange(size: int, rounds: int) -> float:
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    peer = 1 - dist.get_rank()
    outgoing, incoming = torch.zeros(2, size, dtype=torch.uint8).unbind()
    spent = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        pending = [dist.isend(outgoing, peer), dist.irecv(incoming, peer)]
        for work in pending:
            if work is not None:
                work.wait()
        spent.append(time.perf_counter() - start)
    return statistics.median(spent[1:])  # the first round sets up the connection
