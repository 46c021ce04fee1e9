"""What `ringspan doctor` finds: devices, kernels, backends, packages, and a short self-test of attention.

The self-test runs attention forward and backward on every device and dtype and compares with the dense definition in
fp64.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import psutil
import torch
import torch.distributed as dist

import ringspan as rs
from ringspan import kernels
from ringspan.api import attention
from ringspan.geometry import Dilated
from ringspan.kernels import choose
from ringspan.oracle import dense_attention
from ringspan.runtime.settings import install_command
from ringspan.tools.measure import describe_machine
from ringspan.tools.precision import ClosestResult, closest_to_limit, results_of

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_ROWS, _HEADS, _DIM = 64, 4, 16
_PATTERN = Dilated((16, 64), (1, 4))


@dataclass(frozen=True)
class SelfTest(ClosestResult):
    """One device and dtype; the results are output, lse, dq, dk and dv."""

    device: str
    dtype: str
    kernel: str


def run_self_test(device: str, dtype: torch.dtype) -> SelfTest:
    """Run attention on a device in a dtype; the allowed error is that of `closest_to_limit`."""
    kernel, name = "", str(dtype).removeprefix("torch.")
    try:
        kernel = choose(device, dtype).kernel.name
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(4, 1, _ROWS, _HEADS, _DIM, generator=generator, dtype=torch.float64).to(dtype)
        *inputs, weights = numbers.to(device).unbind()
        options: dict[str, Any] = dict(pattern=_PATTERN, causal=True)
        right = results_of(dense_attention, inputs, weights, torch.float64, **options)
        dense = results_of(dense_attention, inputs, weights, dtype, **options)
        ours = results_of(attention, inputs, weights, dtype, return_lse=True, **options)
        worst, error, allowed = closest_to_limit(ours, dense, right, dtype)
    except Exception as raised:  # a driver or a broken installation may raise anything
        return SelfTest(device, name, kernel, failure=f"{type(raised).__name__}: {raised}")
    return SelfTest(device, name, kernel, result=worst, error=error, allowed=allowed)


# Packages that attention does not need: what each is used for, and how to install it.
_OPTIONAL_PACKAGES = {
    "typer": ("the command line", install_command("cli")),
    "rich": ("the command line", install_command("cli")),
    "psutil": ("measuring memory and load", install_command("cli")),
    "jinja2": ("reports as HTML", install_command("cli")),
    "matplotlib": ("figures", install_command("plot")),
    "ring-attention-pytorch": ("comparison with another ring", install_command("peers")),
    "triton": ("torch.compile on GPUs", "pip install triton"),
    "transformers": ("Hugging Face models", install_command("transformers")),
    "deepspeed": ("sharded optimizers with a ring", "pip install --no-build-isolation deepspeed"),
    "safetensors": ("model weights and checkpoints", install_command("train")),
    "prometheus-client": ("training metrics over HTTP", install_command("train")),
    "h5py": ("tile embeddings in HDF5 files", install_command("slides")),
    "tensorboard": ("training curves", "pip install tensorboard"),
}
_BACKENDS = {
    "gloo": "CPU tensors, one machine or many",
    "nccl": "NVIDIA GPUs",
    "mpi": "CPU tensors, started by mpirun; torch must be built with it",
    "xccl": "Intel GPUs",
}


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """A device and the dtype that suits it for training; ``usable`` is False if it is missing."""

    name: str
    usable: bool
    description: str
    suggested_dtype: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class KernelReport:
    name: str
    usable: bool
    dtypes: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class ChoiceReport:
    """The kernel that attention uses for a device and dtype, and why."""

    device: str
    dtype: str
    kernel: str
    reason: str


@dataclass(frozen=True, slots=True)
class BackendReport:
    name: str
    available: bool
    tensors: str


@dataclass(frozen=True, slots=True)
class PackageReport:
    """A package. Without a version it is missing, and ``install`` is the command that installs it."""

    name: str
    version: str
    purpose: str
    install: str


@dataclass(frozen=True, slots=True)
class HealthReport:
    """Everything that `ringspan doctor` shows."""

    devices: tuple[DeviceReport, ...]
    kernels: tuple[KernelReport, ...]
    choices: tuple[ChoiceReport, ...]
    backends: tuple[BackendReport, ...]
    launch: str
    packages: tuple[PackageReport, ...]
    self_tests: tuple[SelfTest, ...]

    @property
    def is_healthy(self) -> bool:
        return all(test.passed for test in self.self_tests)

    @property
    def missing(self) -> tuple[PackageReport, ...]:
        return tuple(package for package in self.packages if not package.version)

    @property
    def verdict(self) -> str:
        """The result in one sentence."""
        failing = [f"{test.device} {test.dtype}" for test in self.self_tests if not test.passed]
        if failing:
            return f"{len(failing)} of {len(self.self_tests)} self-tests fail: {', '.join(failing)}."
        where = ", ".join(dict.fromkeys(test.device for test in self.self_tests))
        dtypes = ", ".join(dict.fromkeys(test.dtype for test in self.self_tests))
        return f"ringspan works here: all {len(self.self_tests)} self-tests pass, on {where} in {dtypes}."

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "self_tests": [{**asdict(test), "passed": test.passed} for test in self.self_tests],
            "missing": {package.name: package.install for package in self.missing},
            "is_healthy": self.is_healthy,
            "verdict": self.verdict,
        }


def inspect_machine() -> HealthReport:
    """Inspect the machine and run the self-test on every usable device and dtype."""
    devices = _devices()
    pairs = [(device.name, dtype) for device in devices if device.usable for dtype in DTYPES]
    return HealthReport(
        devices=devices,
        kernels=tuple(
            KernelReport(
                status.kernel.name, status.usable, tuple(map(_name, status.kernel.contract.dtypes)), status.reason
            )
            for status in kernels.available()
        ),
        choices=tuple(_choice(name, dtype) for name, dtype in pairs),
        backends=tuple(BackendReport(name, _has_backend(name), tensors) for name, tensors in _BACKENDS.items()),
        launch=_launch(),
        packages=_packages(),
        self_tests=tuple(run_self_test(name, dtype) for name, dtype in pairs),
    )


def _devices() -> tuple[DeviceReport, ...]:
    machine = describe_machine()
    dtype, reason = kernels.suggest_dtype("cpu")
    free = psutil.virtual_memory().available / 2**30
    cpu = DeviceReport(
        "cpu",
        True,
        f"{machine['processor']}, {machine['cores']} cores, {torch.get_num_threads()} threads, "
        f"{machine['cpu_capability']}, {machine['memory_gib']} GiB of memory ({free:.1f} free)",
        _name(dtype),
        reason,
    )
    if not torch.cuda.is_available():
        return cpu, DeviceReport("cuda", False, why_no_cuda(torch.__version__, torch.version.cuda))
    return cpu, *(_cuda_device(i) for i in range(torch.cuda.device_count()))


def why_no_cuda(torch_version: str, built_for: str | None) -> str:
    """Why torch finds no CUDA device, and how to change that."""
    if built_for is None:
        return f"torch {torch_version} is built without CUDA; the PyPI build for Linux has it: pip install torch"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES={hidden!r} hides all devices: unset it"
    return f"torch is built for CUDA {built_for}, but finds no device: check the GPU and its driver with nvidia-smi"


def _cuda_device(i: int) -> DeviceReport:
    properties = torch.cuda.get_device_properties(i)
    dtype, reason = kernels.suggest_dtype(f"cuda:{i}")
    what = f"{properties.name}, capability {properties.major}.{properties.minor}"
    return DeviceReport(f"cuda:{i}", True, f"{what}, {properties.total_memory / 2**30:.1f} GiB", _name(dtype), reason)


def _choice(device: str, dtype: torch.dtype) -> ChoiceReport:
    choice = kernels.choose(device, dtype)
    return ChoiceReport(device, _name(dtype), choice.kernel.name, choice.reason)


def _has_backend(name: str) -> bool:
    return dist.is_available() and dist.is_backend_available(name)


def _launch() -> str:
    if dist.is_available() and dist.is_torchelastic_launched():
        rank, size = os.environ.get("RANK", "?"), os.environ.get("WORLD_SIZE", "?")
        return f"under torchrun: rank {rank} of {size}"
    return "not under torchrun; start a ring of K processes with: torchrun --standalone --nproc-per-node=K PROGRAM"


def _packages() -> tuple[PackageReport, ...]:
    needed = (
        PackageReport("ringspan", rs.__version__, "", ""),
        PackageReport("python", platform.python_version(), "", ""),
        PackageReport("torch", torch.__version__, "attention", "pip install torch"),
    )
    return needed + tuple(
        PackageReport(name, _version(name), purpose, install) for name, (purpose, install) in _OPTIONAL_PACKAGES.items()
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
