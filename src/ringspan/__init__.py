"""ringspan: exact dilated (LongNet) attention over sequences that no single device can hold.

>>> import torch, ringspan as rs
>>> q, k, v = torch.randn(3, 1, 4096, 8, 64).unbind()
>>> out = rs.attention(q, k, v, pattern=rs.Dilated((1024, 4096), (1, 4)), causal=True)

The public names live in `ringspan.public` and arrive together when the first of them is used: `ringspan --help` and the
pure-integer parts need no torch, and do not wait for it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringspan import kernels, models, nn, streaming
    from ringspan.public import (
        Cache,
        Dilated,
        Full,
        Hilbert,
        Morton,
        Order,
        Pattern,
        Ring,
        RingError,
        RowMajor,
        SimulatedRing,
        Snake,
        attention,
        attention_prefill,
        attention_step,
        best_layout,
        plan,
        stream_attention,
        stream_backward,
    )

__version__ = "0.1.0"

__all__ = [
    "Cache",
    "Dilated",
    "Full",
    "Hilbert",
    "Morton",
    "Order",
    "Pattern",
    "Ring",
    "RingError",
    "RowMajor",
    "SimulatedRing",
    "Snake",
    "__version__",
    "attention",
    "attention_prefill",
    "attention_step",
    "best_layout",
    "kernels",
    "models",
    "nn",
    "plan",
    "stream_attention",
    "stream_backward",
    "streaming",
]

_ROOMS = ("kernels", "models", "nn", "streaming")  # modules, found without asking the others


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'ringspan' has no attribute {name!r}")
    if name in _ROOMS:
        return import_module(f"ringspan.{name}")
    from ringspan import public  # noqa: PLC0415

    globals().update({each: getattr(public, each) for each in public.__all__})
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)
