"""New keys on their way from a Transformers cache to attention, and attention over what that cache keeps.

That library hands new keys and values to the cache, and what the cache returns to attention. Ours returns the new rows
as they came, marked as belonging to it; attention then attends what is kept, and the cache takes the new rows in.
Knows nothing of that library itself, so that attention can be imported without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import ringspan as rs

if TYPE_CHECKING:
    from ringspan.integrations.transformers_cache import RingspanLayer


class CachedRows(Tensor):
    """Keys, marked with the layer of the cache they belong to. Nothing can be computed from them but by `attend`.

    They are the new rows only: attention that took them for all rows would be wrong in silence.
    """

    layer: RingspanLayer
    rows: Tensor  # the keys themselves

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__ == "__get__":  # shape, dtype and the like
            return super().__torch_function__(func, types, args, kwargs)
        raise ValueError(
            f"{func.__name__} of keys that a RingspanCache holds: this cache is for ringspan's attention, which must "
            "get keys as they are; give attn_implementation= the name of register(), or decode with use_cache=False"
        )


def mark(key: Tensor, layer: RingspanLayer) -> CachedRows:
    """The same keys, marked."""
    marked = key.as_subclass(CachedRows)
    marked.layer, marked.rows = layer, key
    return marked


def unmark(key: Tensor) -> tuple[Tensor, RingspanLayer | None]:
    """The keys themselves, and the layer of the cache that holds them, or None if none of ours does."""
    return (key.rows, key.layer) if isinstance(key, CachedRows) else (key, None)


def attend(
    layer: RingspanLayer, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, pattern: rs.Pattern, scale: float | None
) -> Tensor:
    """Attention of new rows (batch, rows, heads, dim) over what a layer keeps; padding gets 0 and is not kept.

    ``mask`` (batch, all rows so far) says which rows count.
    """
    if not layer.is_waiting:
        raise ValueError(
            "a layer that uses the keys of an earlier one: a RingspanCache would take them in twice; call the model "
            "with use_cache=False"
        )
    layer.is_waiting = False
    cache = layer.cache_for(pattern, k)
    with torch.no_grad():
        q, k, v = q.detach(), k.detach(), v.detach()
        counts = None if mask is None else mask[:, -q.shape[1] :]
        if counts is None or bool(counts.all()):
            out = rs.attention_step(q, k, v, cache, scale=scale)
        else:
            lengths = tuple(counts.sum(1).tolist())
            q_rows, k_rows, v_rows = (x[counts][None] for x in (q, k, v))
            packed = rs.attention_step(q_rows, k_rows, v_rows, cache, lengths=lengths, scale=scale)
            out = q.new_zeros(q.shape)
            out[counts] = packed[0]
    layer.seen += q.shape[1]
    return out
