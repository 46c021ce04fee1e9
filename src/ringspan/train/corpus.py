"""The text: bytes of files, memory-mapped, end to end as one long line that any rank can read any part of."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringspan.train.selection import Selection
from ringspan.train.settings import TrainSettings
from ringspan.train.together import together


class Corpus:
    """Files as one sequence of bytes. Nothing is read before it is asked for.

    >>> corpus = Corpus.of([__file__])
    >>> bytes(corpus.read(0, 3).tolist())
    b'\"\"\"'
    """

    def __init__(self, selection: Selection, first: int = 0, stop: int | None = None) -> None:
        self.selection = selection
        self.ends = list(accumulate(file.bytes for file in selection.files))
        self.first, self.stop = first, self.ends[-1] if stop is None else stop

    @staticmethod
    def of(paths: Iterable[str | Path]) -> Corpus:
        """The text in these files and folders; without any, Python's own sources. See `Selection.of`."""
        return Corpus(Selection.of(paths))

    def split(self, held_out: float) -> tuple[Corpus, Corpus]:
        """The text to train on, and the last share of it, to test on: neither can read the other's bytes."""
        border = self.first + int(len(self) * (1 - held_out))
        return Corpus(self.selection, self.first, border), Corpus(self.selection, border, self.stop)

    def __len__(self) -> int:
        return self.stop - self.first

    def read(self, start: int, stop: int) -> Tensor:
        """Bytes start .. stop as uint8."""
        if not 0 <= start <= stop <= len(self):
            raise ValueError(f"bytes {start} .. {stop}: the text has {len(self)}")
        start, stop = self.first + start, self.first + stop
        parts = []
        number = bisect.bisect_right(self.ends, start)
        while start < stop:
            first = self.ends[number - 1] if number else 0
            end = min(stop, self.ends[number])
            file = self.selection.files[number]
            parts.append(_mapped(file.path, file.bytes)[start - first : end - first])
            start, number = end, number + 1
        return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)

    def start_of(self, seed: int, number: int, tokens: int) -> int:
        """Where sequence ``number`` begins: the seed alone decides, so that a resumed run reads on as it would have."""
        room = len(self) - tokens
        if room < 1:
            raise ValueError(
                f"tokens={tokens}: the text has {len(self)} bytes, and a sequence needs one more than tokens"
            )
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        return int(torch.randint(room, (1,), generator=generator))


def select_together(settings: TrainSettings, resumes: bool, device: torch.device) -> Selection:
    """The text of a run, on every rank; a run that resumes reads the files that it began with.

    Raises the same ValueError on all ranks if one of them finds no text, or other text than the rest.
    """
    found: list[Selection] = []

    def select() -> dict[str, Any]:
        try:
            data = settings.data
            found.append(Selection.of_run(Path(settings.out), data) if resumes else Selection.of(data))
        except ValueError as error:
            return {"refusal": str(error)}
        return {"files": len(found[0].files), "bytes": found[0].bytes, "digest": found[0].digest}

    every = together(select, device)
    refusals = [theirs["refusal"] for theirs in every if "refusal" in theirs]
    if refusals:
        raise ValueError(refusals[0])
    for rank, theirs in enumerate(every):
        if theirs != every[0]:
            raise ValueError(
                f"rank {rank} reads {theirs['files']:,} files of {theirs['bytes']:,} bytes, but rank 0 "
                f"{every[0]['files']:,} of {every[0]['bytes']:,}, or other content: all ranks need the same text"
            )
    return found[0]


@lru_cache(maxsize=64)
def _mapped(path: str, size: int) -> Tensor:
    """A file's bytes, mapped into memory, not read."""
    return torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
