"""Trials on disk: a line of JSON for each, written as soon as it ends, so that an interrupted run can go on."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import ringspan as rs
from ringspan.bench.cases import Case
from ringspan.bench.trials import Limits, Trial, trial_from_json
from ringspan.evidence.machine import describe_machine


def conditions(threads: int) -> dict[str, Any]:
    """What must be equal for two trials to be comparable: the machine, the versions, the threads of a rank."""
    machine = describe_machine()
    same = ("processor", "cores", "torch", "cpu_capability", "python")
    return {"ringspan": rs.__version__, "threads": threads, **{name: machine[name] for name in same}}


class Store:
    """The trials of one file that were run under the same conditions. Others in it are left alone, and counted.

    With ``repeat_disturbed``, trials that other programs disturbed do not count: they are run again.
    """

    def __init__(self, path: Path, threads: int, *, fresh: bool = False, repeat_disturbed: bool = False) -> None:
        self.path, self.conditions, self.repeat_disturbed = path, conditions(threads), repeat_disturbed
        self.fingerprint = hashlib.sha256(json.dumps(self.conditions, sort_keys=True).encode()).hexdigest()[:12]
        self.others = 0
        self._trials: dict[tuple[Case, int], Trial] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            path.unlink(missing_ok=True)
        elif path.exists():
            self._load()

    def __len__(self) -> int:
        return len(self._trials)

    def find(self, case: Case, number: int, limits: Limits) -> Trial | None:
        """The trial of a case in a round, if it is there and still holds under these limits."""
        trial = self._trials.get((case, number))
        return trial if trial is not None and trial.holds_under(limits) else None

    def append(self, trial: Trial) -> None:
        """Add a line in one write, and have it on the disk before going on."""
        line = json.dumps({"fingerprint": self.fingerprint, "conditions": self.conditions, **trial.as_json()}) + "\n"
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode())
            os.fsync(file.fileno())
        self._trials[trial.case, trial.round] = trial

    def _load(self) -> None:
        text = self.path.read_bytes()
        whole = text[: text.rfind(b"\n") + 1]
        if whole != text:  # the end of a line that a power cut or a kill left unfinished
            os.truncate(self.path, len(whole))
        for line in whole.splitlines():
            found = json.loads(line)
            del found["conditions"]
            if found.pop("fingerprint") == self.fingerprint:
                trial = trial_from_json(found)
                self._trials[trial.case, trial.round] = trial  # a later trial replaces an earlier one
            else:
                self.others += 1
        if self.repeat_disturbed:
            self._trials = {key: trial for key, trial in self._trials.items() if not trial.disturbed}
