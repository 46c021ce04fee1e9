"""What the steps measure that no other command measures: the machine, one kernel, the share, and one ring size.

    python -m ringspan.tools.acceptance.tasks NAME RESULT SPECIFICATION

runs a task and writes its result as JSON; under torchrun every rank runs it, and rank 0 writes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringspan import kernels
from ringspan.geometry import parse_pattern
from ringspan.runtime.device import Device, local_device
from ringspan.runtime.files import write_atomic
from ringspan.tools.acceptance.tiles import compare_kernel
from ringspan.tools.bench.cases import case_from_json
from ringspan.tools.bench.share import PASSES, share_calls
from ringspan.tools.bench.trials import (
    RankMetrics,
    TrialLimits,
    TurnTimer,
    combine_ranks,
    measure_pass,
    prepare_warm,
    time_passes,
)
from ringspan.tools.doctor import inspect_machine
from ringspan.tools.measure import Stopwatch, describe_machine
from ringspan.tools.verify.run import find_ranks

Specification = dict[str, Any]
_VARIABLES = ("NCCL_", "CUDA_", "TORCH_", "OMP_", "GLOO_")  # prefixes of environment variables that change results
_TOOLS = (("nvidia-smi",), ("nvidia-smi", "topo", "-m"))


def describe(specification: Specification) -> Any:
    """The machine: what `ringspan doctor` finds, versions, variables, and how GPUs are connected."""
    libraries = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    if torch.cuda.is_available():
        libraries["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {
        **inspect_machine().as_json(),
        "machine": describe_machine(),
        "libraries": libraries,
        "variables": {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)},
        "tools": {" ".join(command): _output(command) for command in _TOOLS if shutil.which(command[0])},
    }


def _output(command: tuple[str, ...]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout + done.stderr


def _first_device() -> Device:
    """On the CPU with one thread, as ranks have."""
    device = local_device()
    if device.device.type == "cpu":
        torch.set_num_threads(1)
    return device


def check_kernel(specification: Specification) -> Any:
    """One kernel on the first device; ``unusable`` says why its contract excludes this device."""
    (status,) = (each for each in kernels.available() if each.kernel.name == specification["kernel"])
    if not status.usable:
        return {"unusable": status.reason, "comparisons": []}
    comparisons = compare_kernel(status.kernel, _first_device().device, large=specification["large"])
    return {"unusable": "", "comparisons": [each.as_json() for each in comparisons]}


def measure_share(specification: Specification) -> Any:
    """Times of ringspan and of the bare kernel in turns, on the first device."""
    device = _first_device()
    where = dict(dtype=getattr(torch, specification["dtype"]), device=device.device)
    rows = []
    for text in specification["patterns"]:
        calls = share_calls(parse_pattern(text), specification["tokens"], causal=True, **where)
        for mode in PASSES:
            timer = TurnTimer(lambda: Stopwatch(device=device))
            times = timer.in_turns(calls[mode], specification["rounds"])
            rows.append({"pattern": text, "mode": mode, "seconds": times, "disturbed": timer.disturbed})
    return {"tokens": specification["tokens"], "dtype": specification["dtype"], "rows": rows}


def measure_ring(specification: Specification) -> Any:
    """Trials of one case on one ring: the first pass measures memory, the following ones time."""
    ranks, case = find_ranks(), case_from_json(specification["case"])
    by_rank = ranks.run(case.ranks, _measure_rank, specification["case"], specification["rounds"])
    metrics = [[RankMetrics(**each) for each in rank] for rank in by_rank]
    limits = TrialLimits(0, specification["seconds"])
    rounds = enumerate(zip(*metrics, strict=True))
    trials = [combine_ranks(case, number, limits, list(of_ranks), 0.0).as_json() for number, of_ranks in rounds]
    return {"where": ranks.where, "trials": trials}


def _measure_rank(
    group: dist.ProcessGroup, device: Device, values: dict[str, Any], rounds: int
) -> list[dict[str, Any]]:
    case = case_from_json(values)
    prepare_warm(case, device)
    first = measure_pass(case, device=device)
    measured = [asdict(each) for each in time_passes(case, rounds, device)]
    for each in measured:
        each |= {"peak_bytes": first.peak_bytes, "sent_bytes": first.sent_bytes}
        if device.device.type != "cpu":  # other programs do not slow a GPU down by using cores
            each["busy_cpu_seconds"] = 0.0
    return measured


TASKS: dict[str, Callable[[Specification], Any]] = {
    "describe": describe,
    "check_kernel": check_kernel,
    "measure_share": measure_share,
    "measure_ring": measure_ring,
}


def main() -> None:
    name, path, specification = sys.argv[1:]
    result = TASKS[name](json.loads(specification))
    if int(os.environ.get("RANK", "0")) == 0:
        write_atomic(Path(path), json.dumps(result))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
