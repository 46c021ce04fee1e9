"""Atomic files and journals: a file is complete or absent, even when the process is killed or the power fails."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_BLOCK = 2**20


def write_whole(path: Path, text: str, *, synced: bool = True) -> None:
    """Write a small file under another name, and give it its own when all of it is there (and on the disk)."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text)
        if synced:
            sync(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Return when a file, or the list of names in a folder, is on the disk."""
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
