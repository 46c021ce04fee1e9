"""Kernels, each of which computes one tile: the list of them, and the choice for a device and dtype with its reason.

>>> import ringspan as rs
>>> choice = rs.kernels.choose("cpu", torch.float32)
>>> choice.kernel.name, choice.reason
('cpu_flash', 'cpu: the fused flash kernel takes every float dtype')
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringspan.kernels import cpu, cuda, reference
from ringspan.kernels.kernel import Contract, Kernel, ScoreOptions, accumulation_dtype

__all__ = [
    "Choice",
    "Contract",
    "Kernel",
    "ScoreOptions",
    "Status",
    "accumulation_dtype",
    "available",
    "choose",
    "get",
    "names",
    "suggest_dtype",
]

_KERNELS = {kernel.name: kernel for kernel in (reference.KERNEL, cpu.FLASH, cuda.FLASH, cuda.EFFICIENT, cuda.CUDNN)}

Capability = tuple[int, int]


@dataclass(frozen=True)
class Choice:
    """A kernel and the reason why it was chosen."""

    kernel: Kernel
    reason: str


@dataclass(frozen=True)
class Status:
    """Whether a kernel can run on this machine, and the reason."""

    kernel: Kernel
    usable: bool
    reason: str


def names() -> tuple[str, ...]:
    """The names of all kernels, including those that cannot run on this machine."""
    return tuple(_KERNELS)


def get(name: str) -> Kernel:
    """The kernel with this name."""
    if not isinstance(name, str):
        raise TypeError(f"kernel is a {type(name).__name__}: must be the name of a kernel, such as 'reference'")
    if name not in _KERNELS:
        raise ValueError(f"kernel={name!r}: must be one of {', '.join(map(repr, _KERNELS))}, or None for the best")
    return _KERNELS[name]


def available() -> list[Status]:
    """Every kernel, whether it can run on this machine, and the reason."""
    found = []
    for kernel in _KERNELS.values():
        wanted = kernel.contract.device
        if wanted == "any":
            status = Status(kernel, True, "plain PyTorch, any device")
        elif wanted == "cpu":
            status = Status(kernel, True, "the CPU is always available")
        elif not torch.cuda.is_available():
            status = Status(kernel, False, "no CUDA device is visible to PyTorch")
        else:
            status = _cuda_status(kernel, torch.cuda.get_device_capability())
        found.append(status)
    return found


def choose(
    device: torch.device | str, dtype: torch.dtype, capability: Capability | None = None, *, softcap: float = 0.0
) -> Choice:
    """The default kernel for a device and dtype, and the reason.

    Args:
        capability: the compute capability of a CUDA device; queried from the device if not given.
        softcap: the soft cap of the scores, 0 for none. PyTorch's fused kernels have no soft cap.

    >>> choose("cpu", torch.float32, softcap=50.0).reason
    "softcap=50.0: PyTorch's fused kernels cannot cap scores"
    """
    device = torch.device(device)
    if softcap:
        return Choice(reference.KERNEL, f"softcap={softcap}: PyTorch's fused kernels cannot cap scores")
    if device.type == "cpu" and dtype in cpu.FLASH.contract.dtypes:
        return Choice(cpu.FLASH, "cpu: the fused flash kernel takes every float dtype")
    if device.type == "cuda" and dtype in cuda.EFFICIENT.contract.dtypes:
        major, minor = capability or torch.cuda.get_device_capability(device)
        if dtype in cuda.FLASH.contract.dtypes and (major, minor) >= (8, 0):
            return Choice(cuda.FLASH, f"cuda: {dtype} on capability {major}.{minor} (8.0 or newer)")
        if dtype == torch.bfloat16:
            return Choice(
                reference.KERNEL,
                f"cuda: no fused kernel takes bf16 on capability {major}.{minor}, below 8.0; fp16 and fp32 get one",
            )
        why = f"capability {major}.{minor} is below 8.0" if (major, minor) < (8, 0) else f"flash takes no {dtype}"
        return Choice(cuda.EFFICIENT, f"cuda: {why}")
    return Choice(reference.KERNEL, f"no fused kernel for {dtype} on {device.type}")


def suggest_dtype(device: torch.device | str, capability: Capability | None = None) -> tuple[torch.dtype, str]:
    """The recommended dtype for training on a device, and the reason.

    >>> suggest_dtype("cuda", capability=(6, 1))
    (torch.float32, 'capability 6.1: 16-bit arithmetic is slow before 7.0')
    """
    device = torch.device(device)
    if device.type != "cuda":
        return torch.float32, f"{device.type}: fp32 is fast on every such device"
    major, minor = capability or torch.cuda.get_device_capability(device)
    if major >= 8:
        return torch.bfloat16, f"capability {major}.{minor}: bf16 tensor cores, and the range of fp32"
    if major == 7:
        return torch.float16, f"capability {major}.{minor}: fp16 tensor cores, no bf16; scale the loss"
    return torch.float32, f"capability {major}.{minor}: 16-bit arithmetic is slow before 7.0"


def _cuda_status(kernel: Kernel, capability: Capability) -> Status:
    needed = kernel.contract.min_capability or (0, 0)
    usable = capability >= needed
    relation = "is at least" if usable else "is below"
    return Status(kernel, usable, f"capability {capability[0]}.{capability[1]} {relation} {needed[0]}.{needed[1]}")
