"""Rows from a counter: numbers that look random, made from nothing but the position, so that any row can be made again.

A row's position is hashed once; each four numbers of it are one more short hash of that, done in 64-bit integers. Rows
come as fast as memory takes them, in any order, on any thread, and no file holds them.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from ringspan.streaming.memory import rows_memory
from ringspan.streaming.rows import RowShape

# Multipliers of splitmix64 (Steele, Lea and Flood, 2014).
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_NUMBERS_PER_WORD = 4  # of 16 bits
_WORDS_AT_A_TIME = 2**15  # stays in cache, and is too little for torch to spread over threads that others need
_TO_UNIT_VARIANCE = math.sqrt(3) / 2**15  # of whole numbers that are uniform in -2**15 .. 2**15 - 1


@dataclass(frozen=True)
class CountedRows:
    """A source without end: uniform numbers of mean 0 and variance 1, for ``"q"``, ``"k"``, ``"v"`` and any other name.

    >>> rows = CountedRows(RowShape(heads=2, kv_heads=2, dim=8), seed=1)
    >>> every_fifth = rows.read("k", range(0, 1000, 5), range(2))
    >>> torch.equal(every_fifth, rows.read("k", range(1000), range(2))[:, ::5])
    True
    """

    shape: RowShape
    seed: int = 0

    def read(self, name: str, rows: range, heads: range) -> Tensor:
        shape = self.shape
        made = rows_memory((shape.batch, len(rows), len(heads), shape.dim), shape.dtype)
        words_per_head = -(-shape.dim // _NUMBERS_PER_WORD)
        words = torch.arange(heads.start * words_per_head, heads.stop * words_per_head)
        steps = _mix(words + 1)  # one constant for each word of a row
        at_a_time = max(1, _WORDS_AT_A_TIME // len(words))
        for batch in range(shape.batch):
            salt = _signed(zlib.crc32(f"{self.seed} {name} {batch}".encode()) << 32)
            for first in range(0, len(rows), at_a_time):
                some = rows[first : first + at_a_time]
                row = _mix(torch.arange(some.start, some.stop, some.step) + salt)
                numbers = _mix_once(row[:, None] + steps).view(torch.int16)
                numbers = numbers.view(len(some), len(heads), words_per_head * _NUMBERS_PER_WORD)[..., : shape.dim]
                torch.mul(numbers, _TO_UNIT_VARIANCE, out=made[batch, first : first + len(some)])
        return made


def _mix(x: Tensor) -> Tensor:
    """splitmix64 of each number: neighbours become unlike in every bit."""
    return _mix_once(x * _signed(_GOLDEN))


def _mix_once(x: Tensor) -> Tensor:
    """Multiply, and fold high bits into low ones, twice; in place."""
    x.mul_(_signed(_FIRST)).bitwise_xor_(_shifted(x, 32))
    return x.mul_(_signed(_SECOND)).bitwise_xor_(_shifted(x, 29))


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shifted right as if there were no sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The same 64 bits, read as a signed number."""
    return x - (1 << 64) if x >> 63 else x
