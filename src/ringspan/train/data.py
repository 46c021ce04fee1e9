"""Which files are read as text, and which are skipped and why; the run's folder keeps a record of both. Knows no torch.

A file that is named is read, whatever it holds. In a folder only text is read, decided by content: the first and the
last 64 KiB are UTF-8 without a NUL byte.
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
from ringspan.train.lock import LOCK

RECORD = "data.json"
_BLOCK = 2**16  # bytes
_CONTINUATION = bytes(range(0x80, 0xC0))  # bytes of a character after its first
_NAMES_SHOWN = 8


@dataclass(frozen=True)
class TextFile:
    """A file as it was when it was selected; ``checksum`` is that of its first and last block."""

    path: str
    bytes: int
    checksum: int


@dataclass(frozen=True)
class Skipped:
    """A file or folder that is not read."""

    path: str
    reason: str


@dataclass(frozen=True)
class Selection:
    """The text of a run: the paths that were given, the files that are read, in order, and what was skipped."""

    data: tuple[str, ...]
    files: tuple[TextFile, ...]
    skipped: tuple[Skipped, ...]

    @staticmethod
    def of(paths: Iterable[str | Path]) -> Selection:
        """The text in these files and folders, in order of their names; without any, Python's own sources.

        Raises ValueError if there is none, and says what was found instead.
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
                "A file that is named itself is read, whatever it holds, unless it is empty"
            )
        return selection

    @staticmethod
    def of_run(folder: Path, data: tuple[str, ...]) -> Selection:
        """The text that a run was trained on, by its record, if that is of these paths; otherwise as `of` selects it.

        Files that came later are not read. Raises ValueError if a file is gone or has changed.
        """
        record = folder / RECORD
        if not record.is_file():
            return Selection.of(data)
        try:
            selection = Selection.from_json(record.read_text())
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{record}: not the record of a run's text ({error}); restore it, or remove it") from error
        if selection.data != data:
            return Selection.of(data)
        for file in selection.files:
            now = _read_file(Path(file.path), named=True)
            if now != file:
                size = f"{now.bytes:,} bytes" if isinstance(now, TextFile) else now.reason
                raise ValueError(
                    f"{file.path} has changed since the run in {folder} began ({file.bytes:,} bytes then, {size} now): "
                    "restore it, or train another run on the new text"
                )
        return selection

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def digest(self) -> int:
        """Of order, sizes and checksums of the files: the same where they are mounted elsewhere."""
        return zlib.crc32(json.dumps([(file.bytes, file.checksum) for file in self.files]).encode())

    def write(self, folder: Path) -> None:
        """Record the selection in a run's folder."""
        write_atomic(folder / RECORD, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @staticmethod
    def from_json(text: str) -> Selection:
        values: dict[str, Any] = json.loads(text)
        files = tuple(TextFile(str(v["path"]), int(v["bytes"]), int(v["checksum"])) for v in values["files"])
        skipped = tuple(Skipped(str(v["path"]), str(v["reason"])) for v in values["skipped"])
        return Selection(tuple(map(str, values["data"])), files, skipped)

    def lines(self) -> list[str]:
        """What was read and what was skipped, for people."""
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
    """A file by its first and last block; skipped if it is empty or unreadable or, unless it is named, if not text."""
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
    last_characters = last[:3].lstrip(_CONTINUATION) + last[3:]  # the block may begin inside a character
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
    """Each file once, whatever it is called: read twice, it could be trained on and held out at the same time."""
    seen: set[str] = set()
    kept: list[TextFile | Skipped] = []
    for entry in found:
        real = os.path.realpath(entry.path)
        kept.append(Skipped(entry.path, "repeated") if real in seen and isinstance(entry, TextFile) else entry)
        seen.add(real)
    return kept


def _shown(paths: list[str]) -> str:
    """A few of these paths, relative to the folder that they share."""
    shared = os.path.commonpath([os.path.dirname(path) for path in paths])
    names = [os.path.relpath(path, shared) for path in paths[:_NAMES_SHOWN]]
    more = f" and {len(paths) - _NAMES_SHOWN:,} more" if len(paths) > _NAMES_SHOWN else ""
    return f"{', '.join(names)}{more} in {shared}"


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

    every = run_on_all_ranks(select, device)
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
