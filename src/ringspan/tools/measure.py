"""What the tools measure apart from the call itself: the machine, its load, FLOPs, and bytes sent over TCP."""

from __future__ import annotations

import datetime
import os
import platform
import socket
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.autograd.profiler import profile

from ringspan.runtime.device import Cpu, Device

_DISTURBED_CORES = 0.10
_CLOCK_TICKS_SECONDS = 0.05  # the system counts busy time in ticks, so shorter foreign time is noise


def is_disturbed(foreign_cores: float, seconds: float) -> bool:
    """Whether other programs used more than a tenth of a core, which makes a time unreliable.

    >>> is_disturbed(0.2, seconds=10.0), is_disturbed(0.05, seconds=10.0), is_disturbed(0.2, seconds=0.1)
    (True, False, False)
    """
    return foreign_cores > _DISTURBED_CORES and foreign_cores * seconds > _CLOCK_TICKS_SECONDS


def describe_machine() -> dict[str, str | int | float]:
    """The machine as every report names it: processor, cores, memory, versions and the date."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def one_line(machine: dict[str, str | int | float]) -> str:
    return (
        f"{machine['processor']}, {machine['cores']} cores ({machine['cpu_capability']}), {machine['memory_gib']} GiB, "
        f"torch {machine['torch']}, {machine['date']}"
    )


@dataclass
class Stopwatch:
    """Wall time of a block, until the device has finished it, and how many cores other processes kept busy during it.

    Other processes do not slow an accelerator down by using cores, so they count as 0 there.
    """

    seconds: float = 0.0
    foreign_cores: float = 0.0
    device: Device = field(default_factory=Cpu)

    def __enter__(self) -> Stopwatch:
        self.device.synchronize()
        self._busy, self._own = busy_seconds(), _own_seconds()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.device.synchronize()
        self.seconds = time.perf_counter() - self._start
        if self.device.device.type != "cpu":
            return
        foreign = (busy_seconds() - self._busy) - (_own_seconds() - self._own)
        self.foreign_cores = max(0.0, foreign / self.seconds)


def busy_seconds() -> float:
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _own_seconds() -> float:
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)


_FORWARD_PRODUCTS = 2  # scores; weights times values
_BACKWARD_PRODUCTS = 5  # scores again; the gradients of weights, values, queries and keys
_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
)


def count_flops(call: Callable[[], Any]) -> int:
    """FLOPs of a call in this process. A causal attention operator counts as if it were not causal: twice its pairs."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler logs every start and stop to stderr
    with profile(record_shapes=True, use_kineto=False) as profiler:
        call()
    return sum(_flops(event.name, event.input_shapes) for event in profiler.function_events or ())


def _flops(name: str, shapes: list[list[int]]) -> int:
    if name == "aten::mm":
        return _product(shapes[0], shapes[1])
    if name in ("aten::bmm", "aten::matmul_backward"):
        return _product(shapes[0], shapes[1])
    if name in ("aten::addmm", "aten::baddbmm"):
        return _product(shapes[1], shapes[2])
    if name in _ATTENTION:
        return _attention(shapes[0], shapes[1], _FORWARD_PRODUCTS)
    if name.removesuffix("_backward") in _ATTENTION:
        return _attention(shapes[1], shapes[2], _BACKWARD_PRODUCTS)  # shapes[0] is the gradient of the output
    return 0


def _product(left: list[int], right: list[int]) -> int:
    return 2 * torch.Size(left).numel() * right[-1]


def _attention(queries: list[int], keys: list[int], products: int) -> int:
    return products * 2 * torch.Size(queries).numel() * keys[-2]


_TCP_INFO_BYTES = 232  # of struct tcp_info in linux/tcp.h, up to tcpi_bytes_retrans
_TCP_SENT_AT = 200  # tcpi_bytes_sent and tcpi_bytes_retrans


def tcp_bytes_sent() -> int:
    """Payload bytes that the open TCP sockets of this process have sent, by the counters of the kernel (Linux)."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            if not os.readlink(link).startswith("socket:"):
                continue
            copy = os.dup(int(link.name))
        except OSError:  # another thread has closed it
            continue
        with socket.socket(fileno=copy) as sock:
            if sock.type == socket.SOCK_STREAM and sock.family in (socket.AF_INET, socket.AF_INET6):
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                sent, sent_again = struct.unpack_from("=QQ", info, _TCP_SENT_AT)
                total += sent - sent_again
    return total


def why_tcp_is_blind(group: dist.ProcessGroup) -> str:
    """Why the counters of TCP sockets do not see the traffic of a group; empty if they do."""
    if sys.platform != "linux":
        return "this system does not count the bytes of a TCP socket"
    if dist.get_backend(group) != "gloo":
        return f"{dist.get_backend(group)} need not use TCP"
    return ""
