"""`ringspan train` with scripted faults: a rank kills itself or its launcher at a given point.

    torchrun --nproc-per-node=2 --max-restarts=3 -m benchmarks.fault_points 1:5:hop,0:0:loading train --resume auto

A script has one fault, rank:step:point, for each attempt of torchrun; later attempts have none. Steps count from 0. The
points are wrapped from outside: ringspan contains no code for this.
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
    "hop": "in a hop of the forward pass, while parcels are being sent",
    "backward": "in a hop of the backward pass, while gradients are being sent",
    "writing": "while a checkpoint is written, with half a file on disk",
    "loading": "while a checkpoint is loaded",
    "launcher": "the launcher, during the run",
}


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL cannot return")


def arm(point: str, step: int) -> None:
    """Kill this process when it reaches the point in this step."""
    steps: list[int] = []
    original_step, original_send_receive = Trainer._step, transport.GroupTransport.send_receive

    def take_step(trainer: Trainer, number: int) -> Any:
        steps.append(number)
        if number == step and point == "between":
            die()
        if number == step and point == "launcher":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)  # the others wait for this rank in a hop: only their watchdogs can act
        return original_step(trainer, number)

    def send_receive(own: Any, sends: Any, receives: Any, label: str) -> Any:
        pending = original_send_receive(own, sends, receives, label)
        wanted = {"hop": "parcels", "backward": "gradients"}.get(point, "nothing")
        if steps and steps[-1] == step and label.startswith(wanted) and (sends or receives):
            die()
        return pending

    def save(tensors: Any, path: Path, header: Any) -> None:
        save_file(tensors, path, header)
        if point == "writing" and f"step-{step:08d}" in str(path):
            os.truncate(path, path.stat().st_size // 2)
            die()

    def die_on_open(*_: Any, **__: Any) -> NoReturn:
        die()

    wrapped: list[tuple[Any, str, Callable[..., Any]]] = [
        (Trainer, "_step", take_step),
        (transport.GroupTransport, "send_receive", send_receive),
        (checkpoint, "save_file", save),
    ]
    if point == "loading":
        wrapped.append((checkpoint, "safe_open", die_on_open))
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
