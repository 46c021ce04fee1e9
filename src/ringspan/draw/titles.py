"""What stands above every picture: the pattern in words, and lines that fit the picture's width."""

from __future__ import annotations

import re
import textwrap

from ringspan.geometry import Full, Pattern

_LETTERS_PER_INCH = 10.5  # of a title


def pattern_title(pattern: Pattern, n: int, causal: bool) -> str:
    """The pattern, causality and length.

    >>> pattern_title(Full(), 16, causal=True)
    'Full(), causal, n = 16'
    """
    if isinstance(pattern, Full):
        name = "Full()"
    else:
        name = f"segments x rates: {pattern_pairs(pattern)}" + (f", shift {pattern.shift}" if pattern.shift else "")
    return f"{name}{', causal' if causal else ''}, n = {n:,}"


def pattern_pairs(pattern: Pattern) -> str:
    """Segments and rates, pair by pair."""
    if isinstance(pattern, Full):
        return "full"
    return ", ".join(f"{w} x {r}" for w, r in zip(pattern.segment_lengths, pattern.dilation_rates, strict=True))


def fitted(*lines: str, inches: float) -> str:
    """Lines, broken where they are wider than the picture, but not inside "4 x 1" or "n = 16"; empty ones are left out.

    >>> print(fitted("segments x rates: 2048 x 1, 8192 x 4", "", "causal", inches=3))
    segments x rates: 2048 x 1,
    8192 x 4
    causal
    """
    letters = max(24, int(inches * _LETTERS_PER_INCH))
    whole = [
        re.sub(r"(\w) ([x=]) (\d)", "\\1\N{NO-BREAK SPACE}\\2\N{NO-BREAK SPACE}\\3", line) for line in lines if line
    ]
    return "\n".join(textwrap.fill(line, letters) for line in whole).replace("\N{NO-BREAK SPACE}", " ")
