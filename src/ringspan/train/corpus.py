"""The text: bytes of files, memory-mapped, end to end as one long line that any rank can read any part of."""

from __future__ import annotations

import bisect
import sysconfig
from collections.abc import Iterable
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor


class Corpus:
    """Files as one sequence of bytes. Nothing is read before it is asked for.

    >>> corpus = Corpus.of([__file__])
    >>> bytes(corpus.read(0, 3).tolist())
    b'\"\"\"'
    """

    def __init__(self, files: list[Path], first: int = 0, stop: int | None = None) -> None:
        sizes = [path.stat().st_size for path in files]
        self.files = [path for path, size in zip(files, sizes, strict=True) if size]
        self.ends = list(accumulate(size for size in sizes if size))
        if not self.ends:
            raise ValueError("no data: the files are empty, or there are none")
        self.first, self.stop = first, self.ends[-1] if stop is None else stop

    @staticmethod
    def of(paths: Iterable[str | Path]) -> Corpus:
        """All files in these files and folders, in order of their names; without any, Python's own sources."""
        chosen = [Path(path) for path in paths]
        if not chosen:
            library = Path(sysconfig.get_path("stdlib"))
            return Corpus(sorted(p for p in library.rglob("*.py") if "site-packages" not in p.parts))
        files: list[Path] = []
        for path in chosen:
            if not path.exists():
                raise ValueError(f"{path}: no such file or folder")
            files += sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        return Corpus(files)

    def split(self, held_out: float) -> tuple[Corpus, Corpus]:
        """The text to train on, and the last share of it, to test on: neither can read the other's bytes."""
        border = self.first + int(len(self) * (1 - held_out))
        return Corpus(self.files, self.first, border), Corpus(self.files, border, self.stop)

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
            parts.append(_mapped(self.files[number])[start - first : end - first])
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


@lru_cache(maxsize=64)
def _mapped(path: Path) -> Tensor:
    """A file's bytes, mapped into memory, not read."""
    return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
