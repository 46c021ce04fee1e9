"""`ringspan train` that is struck at a scripted point: a rank kills itself, or its launcher.

    torchrun --nproc-per-node=2 --max-restarts=3 -m benchmarks.fault_points 1:5:hop,0:0:loading train --resume auto

A script has one fault for each attempt of torchrun, rank:step:point, and none for attempts beyond its end. Steps count
from 0, as the loop does. Nothing in ringspan knows of this: the points are wrapped from outside.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from safetensors.torch import save_file

from ringspan.cli import main
from ringspan.ring import transport
from ringspan.train import checkpoint
from ringspan.train.trainer import Trainer

POINTS = {
    "between": "between two steps",
    "hop": "in a hop of forward, with parcels in flight",
    "backward": "in a hop of backward, with gradients in flight",
    "writing": "while a checkpoint is written, half a file on the disk",
    "loading": "while a checkpoint is loaded",
    "launcher": "the launcher, in the middle of the run",
}


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("killed processes do not go on")


def arm(point: str, step: int) -> None:
    """Strike this process when it comes to the point in this step."""
    steps: list[int] = []
    step_as_it_was, send_as_it_was = Trainer._step, transport.GroupTransport.send_receive

    def take_step(trainer: Trainer, number: int) -> Any:
        steps.append(number)
        if number == step and point == "between":
            die()
        if number == step and point == "launcher":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)  # this rank is busy for long, and the others wait in a hop: only their watchdogs can act
        return step_as_it_was(trainer, number)

    def send_receive(own: Any, sends: Any, receives: Any, label: str) -> Any:
        pending = send_as_it_was(own, sends, receives, label)
        wanted = {"hop": "parcels", "backward": "gradients"}.get(point, "nothing")
        if steps and steps[-1] == step and label.startswith(wanted) and (sends or receives):
            die()
        return pending

    def save(tensors: Any, path: Path, header: Any) -> None:
        save_file(tensors, path, header)
        if point == "writing" and f"step-{step:08d}" in str(path):
            os.truncate(path, path.stat().st_size // 2)
            die()

    def no_opening(*_: Any, **__: Any) -> NoReturn:
        die()

    wrapped: list[tuple[Any, str, Callable[..., Any]]] = [
        (Trainer, "_step", take_step),
        (transport.GroupTransport, "send_receive", send_receive),
        (checkpoint, "save_file", save),
    ]
    if point == "loading":
        wrapped.append((checkpoint, "safe_open", no_opening))
    for place, name, wrapper in wrapped:
        setattr(place, name, wrapper)


if __name__ == "__main__":
    script = sys.argv.pop(1).split(",")
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if attempt < len(script):
        rank, at, where = script[attempt].split(":")
        if int(rank) == int(os.environ["RANK"]):
            arm(where, int(at))
    main()
