"""What models get from the mask interface of Transformers in place of a mask: a description that only ringspan reads.

Some models ask for a mask and then compute attention themselves. With None they would run without any mask, in silence;
with this object, everything that they could do with a mask raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor

REFUSAL = (
    "this model works with an attention mask itself, and ringspan builds none: its attention cannot be replaced; use "
    "attn_implementation='eager'"
)


@dataclass(frozen=True, eq=False)
class MaskDescription:
    """A mask that is never built. No tensor, and of no use as one."""

    causal: bool
    kv_length: int  # keys, those in a cache included
    padding: Tensor | None  # (batch, kv_length), bool, True for rows that count; None if all do
    lengths: Tensor | None  # of packed documents, int64; None if there is only one, or under torch.compile
    window: int | None  # farthest distance that the model's own mask lets through; None for any

    def _refuse(self, *_: object) -> NoReturn:
        raise ValueError(REFUSAL)

    # Python would answer these without an error, or with one that says nothing. The others end in __torch_function__.
    __bool__ = __len__ = __iter__ = __getitem__ = __invert__ = __neg__ = __float__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> NoReturn:
        # An AttributeError, so that code which only looks for a method of a tensor (hasattr) may pass this on.
        raise AttributeError(f"attention_mask.{name}: {REFUSAL}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise ValueError(f"{getattr(func, '__name__', func)} of an attention mask: {REFUSAL}")
