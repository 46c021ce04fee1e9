"""Whether a cache can take in what it is given: checked before anything is computed or written."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ringspan.decoding.cache import Cache
from ringspan.geometry import Documents


def check_cache(cache: Cache, k: Tensor) -> None:
    """Raise unless the cache is one for keys like these."""
    if not isinstance(cache, Cache):
        raise TypeError(f"cache is a {type(cache).__name__}: must be a ringspan.Cache")
    for name, found, wanted in (
        ("KV heads", k.shape[2], cache.kv_heads),
        ("numbers in a head", k.shape[3], cache.dim),
        ("dtype", k.dtype, cache.dtype),
        ("device", k.device, cache.device),
    ):
        if found != wanted:
            raise ValueError(f"{name}: {found} in k, {wanted} in the cache: make the cache for what it will hold")


def check_sequences(cache: Cache, k: Tensor, lengths: tuple[int, ...] | None, rows: int) -> None:
    """Raise unless ``rows`` rows, packed or not, are new rows of each of the cache's sequences."""
    if lengths is None:
        if k.shape[0] != cache.batch:
            raise ValueError(f"k has a batch of {k.shape[0]}, the cache one of {cache.batch}: they must be equal")
        return
    if not isinstance(lengths, Sequence):
        raise TypeError(f"lengths={lengths!r}: must be a sequence of ints, one for each of the cache's sequences")
    if k.shape[0] != 1 or len(lengths) != cache.batch:
        raise ValueError(
            f"{len(lengths)} lengths and a batch of {k.shape[0]}: packed rows have a batch of 1, and one length for "
            f"each of the cache's {cache.batch} sequences"
        )
    Documents(tuple(lengths)).check_rows(rows)
