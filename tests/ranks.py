"""Tests that run on every rank of a ring of local processes.

``@on_ranks(2, 3, 4)`` on a test function of a file runs it on rings of 2, 3 and 4 processes. The rank tests of one file
share one launch for each ring size, and each is a pytest test of its own for each size. ``@job_on_ranks`` does the same
for functions whose results are compared over ring sizes by tests elsewhere.
"""

import importlib
import random
import traceback
import warnings
from collections.abc import Callable
from functools import lru_cache
from inspect import signature
from types import FunctionType, ModuleType
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist

from ringspan.runtime.launch import run_local_ranks

# Tests that interrupt, kill or time processes: with pytest-xdist, one worker runs them all, one after the other.
starts_processes = pytest.mark.xdist_group("processes")


def shares_processes(name: str) -> pytest.MarkDecorator:
    """Tests that share the results of processes: one worker runs all of this name, beside any others."""
    return pytest.mark.xdist_group(name)


def on_ranks(*sizes: int) -> Callable[[Callable[[], None]], Callable[..., None]]:
    """Run a test function on every rank of rings of these sizes. It takes no arguments; every rank must pass."""

    def decorate(function: Callable[[], None]) -> Callable[..., None]:
        name = function.__name__
        if not name.startswith("test_"):
            raise ValueError(f"{name}: a rank test is a pytest test, and its name starts with test_")

        launches = [pytest.param(k, marks=shares_processes(f"{function.__module__} on {k}")) for k in sizes]

        @pytest.mark.parametrize("ring_size", launches)
        def test(ring_size: int, request: pytest.FixtureRequest) -> None:
            selected = tuple(
                item.originalname
                for item in request.session.items
                if isinstance(item, pytest.Function)
                and item.module is request.module
                and item.callspec.params["ring_size"] == ring_size
            )
            failures = _failures(request.module.__name__, ring_size, selected)
            failed = [f"rank {rank}:\n{of_rank[name]}" for rank, of_rank in enumerate(failures) if of_rank[name]]
            assert not failed, "\n".join(failed)

        test.__name__, test.__qualname__ = name, name
        test.__module__, test.__doc__ = function.__module__, function.__doc__
        test.on_each_rank = function  # type: ignore[attr-defined]
        test.ring_sizes = sizes  # type: ignore[attr-defined]
        return test

    return decorate


Job = TypeVar("Job", bound=Callable[..., Any])


def job_on_ranks(*sizes: int) -> Callable[[Job], Job]:
    """Let ``run_jobs`` run a function on every rank of rings of these sizes."""

    def decorate(function: Job) -> Job:
        function.ring_sizes = sizes  # type: ignore[attr-defined]
        return function

    return decorate


def run_jobs(module: ModuleType, ring_size: int, *arguments: Any) -> list[dict[str, Any]]:
    """For each rank, the results of all jobs of a module for one ring size, by name: one launch."""
    reject_forgotten(module)
    names = [name for name, sizes in _ring_sizes(module).items() if ring_size in sizes]
    return run_local_ranks(ring_size, _run_jobs, module.__name__, names, arguments)


def ring_sizes(module: ModuleType) -> list[int]:
    """All ring sizes that functions of a module run on."""
    return sorted({size for sizes in _ring_sizes(module).values() for size in sizes})


def reject_forgotten(module: ModuleType) -> None:
    """Raise if a function looks like a rank test or a job, but does not say on which ring sizes it runs.

    Looks like one: public, defined in the module, and a test or with the parameters of a job. Helpers of rank tests
    take arguments or start with ``_``.
    """
    own = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, FunctionType) and value.__module__ == module.__name__ and not name.startswith("_")
    }
    decorated = [own[name] for name in _ring_sizes(module)]
    parameters = [list(signature(getattr(value, "on_each_rank", value)).parameters) for value in decorated]
    for name, value in own.items():
        if value not in decorated and (name.startswith("test_") or list(signature(value).parameters) in parameters):
            raise pytest.UsageError(
                f"{module.__name__}.{name}: on which ring sizes does it run? Decorate it like the others in this file, "
                "start the name of a helper with _, or move a test that needs no ranks to another file"
            )


def _ring_sizes(module: ModuleType) -> dict[str, tuple[int, ...]]:
    return {name: value.ring_sizes for name, value in vars(module).items() if hasattr(value, "ring_sizes")}


@lru_cache
def _failures(module: str, ring_size: int, names: tuple[str, ...]) -> list[dict[str, str]]:
    """For each rank, the traceback of each test, empty if it passed: one launch for all tests of one ring size."""
    return run_local_ranks(ring_size, _run_tests, module, names)


def _run_tests(module: str, names: tuple[str, ...]) -> dict[str, str]:
    tests: Any = importlib.import_module(module)
    torch.use_deterministic_algorithms(True)  # fills uninitialised memory with NaN
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*selects row")
    failures = {}
    for name in names:
        torch.manual_seed(0)
        random.seed(0)
        try:
            getattr(tests, name).on_each_rank()
            failures[name] = ""
        except Exception:  # whatever it is, the pytest test of that name reports it; this rank continues with the next
            failures[name] = traceback.format_exc()
        dist.barrier()
    return failures


def _run_jobs(module: str, names: list[str], arguments: tuple[Any, ...]) -> dict[str, Any]:
    jobs = importlib.import_module(module)
    return {name: getattr(jobs, name)(*arguments) for name in names}
