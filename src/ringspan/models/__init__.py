"""Models built on the public surface: `LongNet`, a transformer for long sequences. Its configuration needs no torch."""

from typing import TYPE_CHECKING, Any

from ringspan.models.config import LongNetConfig

if TYPE_CHECKING:
    from ringspan.models.longnet import LongNet

__all__ = ["LongNet", "LongNetConfig"]


def __getattr__(name: str) -> Any:
    if name != "LongNet":
        raise AttributeError(f"module 'ringspan.models' has no attribute {name!r}")
    from ringspan.models.longnet import LongNet  # noqa: PLC0415

    return LongNet
