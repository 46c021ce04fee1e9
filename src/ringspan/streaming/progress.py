"""The progress of a run, in a file: one line for what the run is and reads, then one for each finished shard.

A line is added when a shard's results last. So a run that was killed finds all that is finished, and a line that was
cut off in mid-write counts as not there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ringspan.streaming.fingerprint import Fingerprint

_BEGINNING = '{"run": '


class Progress:
    """What a run has finished; without a path, nothing is remembered beyond this process.

    Raises if the file belongs to another run: ``settings`` are compared with those that it was begun with, and then its
    inputs, by the fingerprint that is taken of them.
    """

    def __init__(
        self, path: Path | None, settings: dict[str, Any], take_fingerprint: Callable[[], Fingerprint]
    ) -> None:
        self._path = path
        self.inputs: Fingerprint = {}  # empty without a path
        self.finished: dict[str, dict[str, Any]] = {}
        self.seconds, self.parcel_bytes = 0.0, 0  # of all finished steps, in this process and before
        if path is None:
            return
        lines = read_lines(path)
        if not lines:
            text = _text(path)[: len(_BEGINNING)]  # of a line that was cut off, if of a run
            if not _BEGINNING.startswith(text):
                raise ValueError(_foreign(path))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
            self.inputs = take_fingerprint()
            self._append({"run": settings, "inputs": self.inputs})
            return
        _check_same_run(path, _begun_with(path, lines), settings)
        try:
            self.finished = {line["finished"]: line["note"] for line in lines[1:]}
            self.seconds = sum(line["seconds"] for line in lines[1:])
            self.parcel_bytes = sum(line["parcel_bytes"] for line in lines[1:])
            known = dict(lines[0]["inputs"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(_foreign(path)) from error
        self.inputs = take_fingerprint()
        differing = [name for name, sums in self.inputs.items() if sums != known.get(name)]
        if differing:
            raise ValueError(
                f"{path} belongs to a run with other inputs: {', '.join(differing)} differ; "
                f"resume with the same inputs, or delete {path} to start over"
            )
        rewrite_lines(path, lines)  # without a line that was cut off

    def finish(self, step: str, note: dict[str, Any], seconds: float, parcel_bytes: int) -> None:
        """A step is done for good; ``note`` is what the sink wants to know of it when the run goes on."""
        self.finished[step] = note
        self.seconds += seconds
        self.parcel_bytes += parcel_bytes
        self._append({"finished": step, "seconds": seconds, "parcel_bytes": parcel_bytes, "note": note})

    def _append(self, line: dict[str, Any]) -> None:
        if self._path is None:
            return
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())


def rewrite_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """All at once: killed at any moment, the file is the old one or the new one."""
    new = path.with_name(path.name + ".new")
    with new.open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines; none if there is no such file."""
    text = _text(path)
    try:
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} has a line that is not JSON ({error}): give another file") from error


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def shards_begun_with(path: Path | None) -> int | None:
    """Into how many shards the run in this file is cut, or None if there is none."""
    lines = read_lines(path) if path is not None else []
    return int(_begun_with(path, lines)["shards"]) if path is not None and lines else None


def _begun_with(path: Path, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The settings of the run in a file."""
    run = lines[0].get("run") if isinstance(lines[0], dict) else None
    if not isinstance(run, dict) or not isinstance(run.get("shards"), int):
        raise ValueError(_foreign(path))
    return run


def _foreign(path: Path) -> str:
    return f"{path} is not the progress of a run: give another file"


def _check_same_run(path: Path, begun: dict[str, Any], settings: dict[str, Any]) -> None:
    for name in {**begun, **settings}:
        if begun.get(name) != settings.get(name):
            raise ValueError(
                f"{path} belongs to a run with {name}={begun.get(name)!r}, but this one has {settings.get(name)!r}: "
                "go on with the same, or give another file"
            )
