"""Tasks that every rank of a ring runs, one after the other; pytest gets the tracebacks."""

import importlib
import random
import traceback
import warnings

import torch
import torch.distributed as dist


def run_tasks(module: str, names: list[str]) -> dict[str, str]:
    """Run tasks of a module; for each, the traceback if it failed: the test of that name raises it."""
    tasks = importlib.import_module(module)
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*selects row")
    failures = {}
    for name in names:
        torch.manual_seed(0)
        random.seed(0)
        try:
            getattr(tasks, name)()
            failures[name] = ""
        except Exception:  # whatever it is, it reaches the test, and the other ranks go on to the barrier
            failures[name] = traceback.format_exc()
        dist.barrier()
    return failures
