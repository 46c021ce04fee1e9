"""Whole numbers as people write them: 32k, 4M, 1e9, and lists of lengths."""

from __future__ import annotations

_UNITS = {"k": 2**10, "m": 2**20, "g": 2**30}


def parse_count(text: str, least: int = 1) -> int:
    """A whole number, also written as 32k (x 1024), 4M, 1G or 1e9.

    >>> parse_count("32k"), parse_count("1e9"), parse_count("131_072")
    (32768, 1000000000, 131072)
    """
    digits, unit = (text[:-1], _UNITS[text[-1].lower()]) if text[-1:].lower() in _UNITS else (text, 1)
    try:
        value = float(digits) * unit
        whole = int(value)
    except (OverflowError, ValueError):
        raise ValueError(f"{text!r}: must be a whole number, such as 131072, 128k or 1e9") from None
    if value != whole or whole < least:
        raise ValueError(f"{text!r}: must be a whole number of at least {least}")
    return whole


def parse_documents(text: str) -> tuple[int, ...]:
    """Lengths of packed documents, in order, separated by commas; LENGTH*COUNT repeats one.

    >>> parse_documents("4k, 100*3")
    (4096, 100, 100, 100)
    """
    lengths: list[int] = []
    for word in text.split(","):
        length, times, count = word.strip().partition("*")
        lengths += [parse_count(length)] * (parse_count(count) if times else 1)
    return tuple(lengths)
