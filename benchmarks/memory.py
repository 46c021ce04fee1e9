"""Peak memory of one call, measured in a fresh process: what the system says, not what we claim."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil


@dataclass(frozen=True)
class Measured:
    """One call in a process of its own; ``failure`` says why there is no figure."""

    seconds: float = 0.0
    peak_bytes: int = 0
    checksum: float = 0.0
    failure: str = ""


def in_fresh_process(
    task: Callable[..., Measured], *arguments: Any, memory_share: float = 0.85, timeout: float = 900.0
) -> Measured:
    """Run a task in a process of its own, with a limit on its memory; running out of it is a result, not a crash."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    limit = int(psutil.virtual_memory().available * memory_share)
    process = context.Process(target=_child, args=(sender, task, arguments, limit))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            return Measured(failure=f"no result within {timeout:.0f} s")
        return receiver.recv()
    except EOFError:
        return Measured(failure="the process was killed")
    finally:
        process.kill()
        process.join()


def _child(
    sender: multiprocessing.connection.Connection, task: Callable[..., Measured], arguments: Any, limit: int
) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        sender.send(task(*arguments))
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        sender.send(Measured(failure=f"does not fit in {limit / 2**30:.0f} GiB"))


def median_time(call: Callable[[], Any], trials: int) -> float:
    """Median wall time of a call that is already warm."""
    times = []
    for _ in range(trials):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]
