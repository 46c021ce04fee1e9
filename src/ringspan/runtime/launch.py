"""Local ranks: processes on this machine that form a gloo group, for demonstrations, tests and benchmarks.

Use torchrun for real work. This is torch.multiprocessing with a rendezvous in a file, and it returns results.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_local_ranks(
    size: int, task: Callable[..., Any], *arguments: Any, threads: int = 1, timeout_seconds: float = 600.0
) -> list[Any]:
    """Run ``task(*arguments)`` on ``size`` processes of one group; returns their results in order of rank.

    The first rank that raises stops the others, and its traceback is raised here.
    """
    with tempfile.TemporaryDirectory(prefix="ringspan-") as folder:
        context = _start_context()
        results = context.SimpleQueue()
        workers = [
            context.Process(
                target=_rank,
                args=(rank, size, folder, dict(os.environ), threads, timeout_seconds, results, task, arguments),
                daemon=True,
            )
            for rank in range(size)
        ]
        try:
            with _interrupts_deferred():
                for worker in workers:
                    worker.start()
            return _collect(workers, results, timeout_seconds)
        finally:
            for worker in (worker for worker in workers if worker.pid is not None):
                worker.kill()
                worker.join()


def _start_context() -> Any:
    """Ranks are forked from a server with all modules imported, since importing torch takes seconds.

    That includes torch._dynamo, which the first call of a custom operator imports.
    On Windows, which has no such server, ranks are spawned.
    """
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo", "ringspan.api", "ringspan.streaming"])
    return context


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Inside, Ctrl-C is deferred, so that processes start completely and inherit a mask that blocks it."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "pthread_sigmask"):
        yield  # only the main thread receives interrupts; Windows has no signal masks
        return
    interrupts: list[bool] = []
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # child processes inherit it
    handler = signal.signal(
        signal.SIGINT, lambda *_: interrupts.append(True)
    )  # another thread may still receive the signal
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if interrupts:
        raise KeyboardInterrupt


def _collect(workers: list[Any], results: Any, timeout: float) -> list[Any]:
    found: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    while len(found) < len(workers):
        if results.empty():
            for rank, worker in enumerate(workers):
                if worker.exitcode is not None and rank not in found and results.empty():
                    raise RuntimeError(f"rank {rank} died with exit code {worker.exitcode}")
            if time.monotonic() > deadline:
                missing = sorted(set(range(len(workers))) - set(found))
                raise TimeoutError(f"ranks {missing} did not finish within {timeout:g} s: use a longer timeout")
            time.sleep(0.01)
            continue
        rank, value, failure = results.get()
        if failure:
            raised = RuntimeError(f"rank {rank} raised:\n{failure}")
            for other, worker in enumerate(workers):
                if (worker.exitcode or 0) < 0:  # it was killed, and the errors of the others follow from that
                    raise RuntimeError(f"rank {other} died with exit code {worker.exitcode}") from raised
            raise raised
        found[rank] = value
    return [found[rank] for rank in range(len(workers))]


def _rank(
    rank: int,
    size: int,
    folder: str,
    environment: dict[str, str],
    threads: int,
    timeout: float,
    results: Any,
    task: Callable[..., Any],
    arguments: Any,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the caller handles Ctrl-C
    os.environ.clear()  # the server has the environment of its own start
    os.environ.update(environment)
    torch.set_num_threads(threads)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(folder) / 'rendezvous'}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
    )
    try:
        value = task(*arguments)
        dist.barrier()
    except Exception:
        results.put((rank, None, traceback.format_exc()))
        raise SystemExit(1) from None
    results.put((rank, value, ""))
    dist.destroy_process_group()
