"""Durable files: atomic writes, journals of JSON lines, checksums.

A reader sees a complete file or none, and whole lines of a journal, even after the process was killed or power failed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_BLOCK = 2**20


@contextmanager
def atomic_path(path: Path, *, unique: bool = True) -> Iterator[Path]:
    """Yield a temporary path in the same folder; rename it to ``path`` on success, delete it on an exception.

    A killed process leaves its temporary file behind. Pass ``unique=False`` for large files with a single writer: the
    next attempt then reuses the name, and with it the disk space.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid() if unique else 'new'}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace a small file in one step; with ``durable``, its content is on disk before it gets its name."""
    with atomic_path(path) as temporary:
        temporary.write_text(text)
        if durable:
            sync(temporary)


class Journal:
    """An append-only file of JSON lines. Opening it drops a torn last line, which an interrupted write leaves behind.

    With ``durable``, `append` returns when the line is on disk; otherwise, when the system has it. A line is one write,
    so threads may append at the same time.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self.path, self.durable = path, durable
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            content = path.read_bytes()
            whole = content.rfind(b"\n") + 1
            if whole < len(content):
                os.truncate(path, whole)

    def append(self, value: Any) -> None:
        """Add a line; ``value`` must fit JSON."""
        with self.path.open("ab") as file:
            file.write(json.dumps(value).encode() + b"\n")
            file.flush()
            if self.durable:
                os.fsync(file.fileno())


def read_journal(path: Path) -> list[Any]:
    """The whole lines of a journal, without a torn last one; none if there is no such file."""
    content = path.read_bytes() if path.exists() else b""
    lines = content[: content.rfind(b"\n") + 1].decode(errors="replace").splitlines()
    try:
        return [json.loads(line) for line in lines]
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} has a line that is not JSON ({error}): give another file") from error


def sync(path: Path) -> None:
    """Return when a file, or the list of names in a folder, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def checksum(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    total = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            total.update(block)
    return total.hexdigest()
