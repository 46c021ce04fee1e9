"""What the network interface itself has sent: a count that no attention implementation can embellish."""

from __future__ import annotations

import sys

import psutil
import torch.distributed as dist


def loopback_bytes_sent() -> int:
    """Bytes that the loopback interface has sent so far, of all processes on this machine."""
    return int(psutil.net_io_counters(pernic=True)["lo"].bytes_sent)


def why_not_seen(group: dist.ProcessGroup) -> str:
    """Why the loopback interface does not see a group's messages; empty if it does."""
    if sys.platform != "linux":
        return "no loopback counters on this system"
    if dist.get_backend(group) != "gloo":
        return f"{dist.get_backend(group)} does not go through the loopback interface"
    return ""
