"""Bytes of an element by the name of its dtype, so that plans need no tensors."""

from __future__ import annotations

NUMBER_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def bytes_of(dtype: object) -> tuple[int, int]:
    """Bytes of an element in a dtype, given by name or as a dtype object, and in its accumulation dtype.

    >>> bytes_of("bfloat16"), bytes_of("float64")
    ((2, 4), (8, 8))
    """
    name = str(dtype).rpartition(".")[2]
    if name not in NUMBER_BYTES:
        raise ValueError(f"dtype={dtype!r}: must be one of {', '.join(NUMBER_BYTES)}")
    return NUMBER_BYTES[name], NUMBER_BYTES["float64" if name == "float64" else "float32"]
