"""How large the examined sequences are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    """A sequence: how many tokens, and how many heads of ``dim`` numbers each."""

    tokens: int
    heads: int
    dim: int


@dataclass(frozen=True)
class Settings:
    """Lengths for each kind of question, and the dtype of the exact ones."""

    exact: Size  # compared with a dense oracle, and perturbed token by token
    counted: Size  # bytes and FLOPs
    memory: Size
    speed: Size
    memory_backward: bool = True
    memory_alone_counts: bool = True  # whether parcels are so small that a ring of one, without any, is comparable
    exact_dtype: str = "float64"
    trials: int = 3  # of speed; 0 where ranks share a core

    @staticmethod
    def for_dilated(tokens: int = 65536, exact_dtype: str = "float64") -> Settings:
        """An odd length for exactness; long ones for memory and speed."""
        return Settings(
            exact=Size(1001, 4, 16),
            counted=Size(8192, 4, 64),
            memory=Size(tokens, 4, 64),
            speed=Size(min(tokens, 32768), 4, 64),
            exact_dtype=exact_dtype,
        )

    @staticmethod
    def for_plain(tokens: int = 2048, exact_dtype: str = "float64") -> Settings:
        """Plain attention is quadratic: shorter sequences with more heads show memory as well, and in less time.

        Its parcels are as large as its rows, and backward has more of them in flight the larger the ring, up to three
        hops: memory is fitted over the forward pass, which has two hops of them in flight on every ring.
        """
        return Settings(
            exact=Size(512, 4, 16),
            counted=Size(1024, 4, 64),
            memory=Size(tokens, 64, 64),
            speed=Size(2 * tokens, 8, 64),
            memory_backward=False,
            memory_alone_counts=False,
            exact_dtype=exact_dtype,
        )
