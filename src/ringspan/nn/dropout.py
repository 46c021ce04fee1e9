"""Dropout and stochastic depth whose masks do not depend on how rows are split over devices.

Masks are a hash of a key and of the place of a number: sample, position, feature. There is no random state, so one
device, any ring and a recomputed layer drop the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

_SLICE = 2**19  # hashes at a time: 4 MiB
_LOW = 2**32 - 1
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # the constants of splitmix64, as int64
_FACTORS = (0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64)


@dataclass(frozen=True)
class DropoutKey:
    """What a mask depends on, besides the place of each number.

    Pass the same key on all ranks of a ring, another ``step`` in each forward pass, and another ``seed`` to each
    data-parallel replica. `at` gives the key of a layer, or of a place inside it.

    >>> DropoutKey(seed=7, step=100).at(3)
    DropoutKey(seed=7, step=100, place=(3,))
    """

    seed: int
    step: int = 0
    place: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, value in (("seed", self.seed), ("step", self.step), *(("place", value) for value in self.place)):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
                raise ValueError(f"{name}={value!r}: must be a whole number from 0 to 2 ** 63 - 1")

    def at(self, *place: int) -> DropoutKey:
        """The key of a place inside this one, such as a layer."""
        return replace(self, place=(*self.place, *place))


def row_dropout(x: Tensor, rate: float, *, key: DropoutKey, positions: Tensor, samples: Tensor | None = None) -> Tensor:
    """Dropout: each number of ``x`` is 0 with probability ``rate``, and the others are divided by 1 - ``rate``.

    Args:
        x: (batch, rows, features); over a ring, this rank's rows.
        key: the same on all ranks.
        positions: (rows,) or (batch, rows), int64: the positions of the rows in their samples (`Ring.positions`).
        samples: int64, broadcastable to (batch, rows): the sequence or packed document of each row, from 0; by default
            each entry of the batch is one.

    >>> x = torch.ones(1, 1000, 8)
    >>> whole = row_dropout(x, 0.5, key=DropoutKey(0), positions=torch.arange(1000))
    >>> part = row_dropout(x[:, 600:], 0.5, key=DropoutKey(0), positions=torch.arange(600, 1000))
    >>> torch.equal(part, whole[:, 600:])
    True
    """
    _check_rate(rate)
    batch, rows, features = x.shape
    if positions.shape not in ((rows,), (batch, rows)):
        raise ValueError(
            f"positions has shape {tuple(positions.shape)}: must be ({rows},) or ({batch}, {rows}), one for each row"
        )
    if rate == 0:
        return x
    of_rows = _absorb(_sample_states(x, key, samples), positions).expand(batch, rows)
    kept = _kept_features(of_rows.flatten(), features, rate).view(x.shape)
    return x * kept / (1 - rate)


def drop_path(x: Tensor, rate: float, *, key: DropoutKey, samples: Tensor | None = None) -> Tensor:
    """Stochastic depth: all rows of a sample are 0 with probability ``rate``, or are divided by 1 - ``rate``.

    Arguments are those of `row_dropout`.
    """
    _check_rate(rate)
    if rate == 0:
        return x
    states = _sample_states(x, key, samples)
    kept = _kept_features(states.flatten(), 1, rate).view(*states.shape, 1)
    return x * kept / (1 - rate)


def _check_rate(rate: float) -> None:
    if not 0 <= rate < 1:
        raise ValueError(f"rate={rate}: must be at least 0 and less than 1")


def _sample_states(x: Tensor, key: DropoutKey, samples: Tensor | None) -> Tensor:
    """A hash of the key and the sample of each row, (batch, 1) or (batch, rows)."""
    state = torch.zeros((), dtype=torch.int64, device=x.device)
    for word in (key.seed, key.step, len(key.place), *key.place):
        state = _absorb(state, torch.tensor(word, device=x.device))
    if samples is None:
        samples = torch.arange(x.shape[0], device=x.device)[:, None]
    return _absorb(state, samples)


def _absorb(state: Tensor, word: Tensor) -> Tensor:
    return _mix_((state + _GOLDEN) ^ (word * _FACTORS[0]))


def _mix_(x: Tensor) -> Tensor:
    """The finaliser of splitmix64, in place. Products wrap; shifts of int64 keep the sign, so it is masked."""
    for shift, factor in zip((30, 27), _FACTORS, strict=True):
        x ^= (x >> shift).bitwise_and_(2 ** (64 - shift) - 1)
        x *= factor
    x ^= (x >> 31).bitwise_and_(2**33 - 1)
    return x


def _kept_features(states: Tensor, features: int, rate: float) -> Tensor:
    """Which numbers are kept, (rows, features), bool: one hash of 64 bits for two features."""
    kept = torch.empty(len(states), features, dtype=torch.bool, device=states.device)
    least = round(rate * 2**32)
    counters = torch.arange((features + 1) // 2, device=states.device) * _GOLDEN
    step = max(1, _SLICE // len(counters))
    for first in range(0, len(states), step):
        part = slice(first, first + step)
        hashes = _mix_(states[part, None] + counters)
        kept[part, 0::2] = hashes & _LOW >= least
        kept[part, 1::2] = hashes[:, : features // 2] >> 32 & _LOW >= least
    return kept
