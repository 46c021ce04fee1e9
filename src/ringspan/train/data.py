"""The training text: which files are read (`Selection`), and their bytes as one sequence (`Corpus`).

A file given by name is read regardless of its content. In a folder only text files are read, recognized by content: the
first and last 64 KiB are UTF-8 without a NUL byte. The run's folder keeps a record of what was read and skipped.
"""

from __future__ import annotations

import bisect
import codecs
import dataclasses
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringspan.runtime.collectives import run_on_all_ranks
from ringspan.runtime.files import write_atomic
from ringspan.train.config import TrainSettings
from ringspan.train.watchdog import LOCK

RECORD = "data.json"
_BLOCK = 2**16  # bytes
_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of a character after its first
_NAMES_SHOWN = 8


@dataclass(frozen=True)
class TextFile:
    """A file at the time it was selected; ``checksum`` covers its first and last 64 KiB."""

    path: str
    bytes: int
    checksum: int


@dataclass(frozen=True)
class Skipped:
    """A file or folder that is not read, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class Selection:
    """The text of a run: the paths given by the user, the files that are read, in order, and those skipped."""

    data: tuple[str, ...]
    files: tuple[TextFile, ...]
    skipped: tuple[Skipped, ...]

    @staticmethod
    def of(paths: Iterable[str | Path]) -> Selection:
        """Select the text in files and folders, sorted by name; by default, the sources of Python's standard library.

        Raises ValueError, which lists what was found, if there is no text.
        """
        data = tuple(os.path.abspath(path) for path in paths)
        found: list[TextFile | Skipped] = []
        for path in map(Path, data):
            if not path.exists():
                raise ValueError(f"{path}: no such file or folder")
            here = list(_in_folder(path)) if path.is_dir() else [_read_file(path, named=True)]
            for entry in here:
                if isinstance(entry, Skipped) and entry.path == str(path) and entry.reason != "empty":
                    raise ValueError(f"{path}: {entry.reason}")
            found += here
        if not data:
            library = Path(sysconfig.get_path("stdlib"))
            sources = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
            found = [_read_file(path, named=True) for path in sources]
        found = _without_repeats(found)
        files = tuple(entry for entry in found if isinstance(entry, TextFile))
        selection = Selection(data, files, tuple(entry for entry in found if isinstance(entry, Skipped)))
        if not files:
            raise ValueError(
                f"no text in {', '.join(data)}: {selection.skipped_line() or 'there are no files'}. "
                "To read a file regardless of its content, give its own path"
            )
        return selection

    @staticmethod
    def of_run(folder: Path, data: tuple[str, ...]) -> Selection:
        """The text in the record of a run, if the record is for the same paths; otherwise select as `of` does.

        Files that were added later are not read. Raises ValueError if a file is missing or has changed.
        """
        record = folder / RECORD
        if not record.is_file():
            return Selection.of(data)
        try:
            selection = Selection.from_json(record.read_text())
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{record}: not a record of a run's text ({error}): restore it, or delete it") from error
        if selection.data != data:
            return Selection.of(data)
        for file in selection.files:
            now = _read_file(Path(file.path), named=True)
            if now != file:
                size = f"{now.bytes:,} bytes" if isinstance(now, TextFile) else now.reason
                raise ValueError(
                    f"{file.path} has changed since the run in {folder} started ({file.bytes:,} bytes then, {size} "
                    "now): restore it, or start another run with the new text"
                )
        return selection

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def digest(self) -> int:
        """A checksum of the order, sizes and checksums of the files; it does not depend on their paths."""
        return zlib.crc32(json.dumps([(file.bytes, file.checksum) for file in self.files]).encode())

    def write(self, folder: Path) -> None:
        """Write the record into a run's folder."""
        write_atomic(folder / RECORD, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @staticmethod
    def from_json(text: str) -> Selection:
        values: dict[str, Any] = json.loads(text)
        files = tuple(TextFile(str(v["path"]), int(v["bytes"]), int(v["checksum"])) for v in values["files"])
        skipped = tuple(Skipped(str(v["path"]), str(v["reason"])) for v in values["skipped"])
        return Selection(tuple(map(str, values["data"])), files, skipped)

    def lines(self) -> list[str]:
        """A summary of what is read and what is skipped, to print."""
        names = _shown([file.path for file in self.files])
        read = f"Text: {len(self.files):,} file(s), {self.bytes:,} bytes: {names}"
        return [read, f"Skipped: {self.skipped_line()}"] if self.skipped else [read]

    def skipped_line(self) -> str:
        reasons = sorted({entry.reason for entry in self.skipped})
        by_reason = {reason: [entry.path for entry in self.skipped if entry.reason == reason] for reason in reasons}
        return "; ".join(f"{len(paths):,} {reason} ({_shown(paths)})" for reason, paths in by_reason.items())


def _in_folder(folder: Path) -> Iterator[TextFile | Skipped]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        yield Skipped(str(folder), f"unreadable: {error.strerror}")
        return
    for path in entries:
        if path.name.startswith("."):
            yield Skipped(str(path), "hidden")
        elif path.is_dir():
            if path.is_symlink():
                yield Skipped(str(path), "linked folder")
            elif (path / LOCK).exists():
                yield Skipped(str(path), "run of ringspan train")
            else:
                yield from _in_folder(path)
        else:
            yield _read_file(path, named=False)


def _read_file(path: Path, *, named: bool) -> TextFile | Skipped:
    """Check a file by its first and last block; unless ``named`` by the user, it must be text."""
    if not path.is_file():
        return Skipped(str(path), "not a regular file" if path.exists() else "missing")
    try:
        with path.open("rb") as file:
            first = file.read(_BLOCK)
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _BLOCK))
            last = file.read(_BLOCK)
    except OSError as error:
        return Skipped(str(path), f"unreadable: {error.strerror}")
    if not size:
        return Skipped(str(path), "empty")
    last_characters = last[:3].lstrip(_CONTINUATION) + last[3:]  # the block may start inside a character
    if not (named or (_is_text(first) and _is_text(last_characters))):
        return Skipped(str(path), "binary or not UTF-8")
    return TextFile(str(path), size, zlib.crc32(last, zlib.crc32(first)))


def _is_text(block: bytes) -> bool:
    """UTF-8 without NUL; the last character may be cut off.

    >>> text = "naïve".encode()
    >>> _is_text(text), _is_text(text[:3]), _is_text("naïve".encode("latin-1")), _is_text(b"MZ\\0")
    (True, True, False, False)
    """
    try:
        codecs.getincrementaldecoder("utf-8")().decode(block)
    except UnicodeDecodeError:
        return False
    return b"\0" not in block


def _without_repeats(found: Iterable[TextFile | Skipped]) -> list[TextFile | Skipped]:
    """Drop repeated files, also under other names: a file read twice could be trained on and held out."""
    seen: set[str] = set()
    kept: list[TextFile | Skipped] = []
    for entry in found:
        real = os.path.realpath(entry.path)
        kept.append(Skipped(entry.path, "repeated") if real in seen and isinstance(entry, TextFile) else entry)
        seen.add(real)
    return kept


def _shown(paths: list[str]) -> str:
    """The first few paths, relative to their common folder."""
    shared = os.path.commonpath([os.path.dirname(path) for path in paths])
    names = [os.path.relpath(path, shared) for path in paths[:_NAMES_SHOWN]]
    more = f" and {len(paths) - _NAMES_SHOWN:,} more" if len(paths) > _NAMES_SHOWN else ""
    return f"{', '.join(names)}{more} in {shared}"


class Corpus:
    """Files as one sequence of bytes, memory-mapped on demand.

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
        """The text in files and folders, selected by `Selection.of`."""
        return Corpus(Selection.of(paths))

    def split(self, held_out: float) -> tuple[Corpus, Corpus]:
        """Split into text to train on and the last fraction, to evaluate on; neither can read the other's bytes."""
        border = self.first + int(len(self) * (1 - held_out))
        return Corpus(self.selection, self.first, border), Corpus(self.selection, border, self.stop)

    def __len__(self) -> int:
        return self.stop - self.first

    def read(self, start: int, stop: int) -> Tensor:
        """Bytes ``start`` to ``stop`` (exclusive), as uint8."""
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

    def file_starts(self, start: int, stop: int) -> list[int]:
        """Those of the bytes ``start`` to ``stop`` (exclusive) that are the first of a file, without the first file."""
        first, last = (bisect.bisect_left(self.ends, self.first + border) for border in (start, stop))
        return [end - self.first for end in self.ends[first:last]]

    def start_of(self, seed: int, number: int, tokens: int) -> int:
        """The start of sequence ``number``; it follows from the seed alone, so a resumed run reads the same data."""
        room = len(self) - tokens
        if room < 1:
            raise ValueError(
                f"tokens={tokens}: the text has {len(self)} bytes, and a sequence needs one more than its tokens"
            )
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
        return int(torch.randint(room, (1,), generator=generator))


def select_on_all_ranks(settings: TrainSettings, resume: bool, device: torch.device) -> Selection:
    """Select the text of a run; a resumed run reads the files it started with. A collective.

    Raises the same ValueError on all ranks if a rank finds no text, or different text than the others.
    """
    found: list[Selection] = []

    def select() -> dict[str, Any]:
        try:
            data = settings.data
            found.append(Selection.of_run(Path(settings.out), data) if resume else Selection.of(data))
        except ValueError as error:
            return {"error": str(error)}
        return {"files": len(found[0].files), "bytes": found[0].bytes, "digest": found[0].digest}

    by_rank = run_on_all_ranks(select, device)
    errors = [summary["error"] for summary in by_rank if "error" in summary]
    if errors:
        raise ValueError(errors[0])
    for rank, summary in enumerate(by_rank):
        if summary != by_rank[0]:
            raise ValueError(
                f"rank {rank} reads {summary['files']:,} files of {summary['bytes']:,} bytes, but rank 0 "
                f"{by_rank[0]['files']:,} of {by_rank[0]['bytes']:,}, or other content: give all ranks the same text"
            )
    return found[0]


@lru_cache(maxsize=64)
def _mapped(path: str, size: int) -> Tensor:
    """The bytes of a file, memory-mapped."""
    return torch.from_file(path, shared=False, size=size, dtype=torch.uint8)
