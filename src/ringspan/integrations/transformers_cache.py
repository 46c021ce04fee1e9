"""`RingspanCache`: a bounded cache for `generate()` of Transformers models that use ringspan's attention.

    register(pattern=rs.Dilated((2048, 8192), (1, 4)))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="ringspan")
    model.generate(input_ids, past_key_values=RingspanCache(), max_new_tokens=1000)

New rows reach attention as `ringspan.integrations.transformers_attention.CachedRows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

import ringspan as rs
from ringspan.integrations.transformers_attention import mark


class RingspanLayer(CacheLayerMixin):
    """The cache of one layer: a `rs.Cache`, which attention creates, because it knows the pattern."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, **others: Any) -> None:
        super().__init__(**others)
        self.cache: rs.Cache | None = None
        self.seen = 0  # tokens appended by attention, padding included, as the library counts them
        self.is_waiting = False  # whether attention has yet to append the rows of the last update

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The new rows (batch, heads, rows, head_dim), with marked keys."""
        self.lazy_initialization(key_states, value_states)
        self.is_waiting = True
        return mark(key_states, self), value_states

    def cache_for(self, pattern: rs.Pattern, k: Tensor) -> rs.Cache:
        """The `rs.Cache` of this layer, created on first use; ``k`` is (batch, rows, heads, head_dim)."""
        if self.cache is None:
            sizes: dict[str, Any] = dict(batch=k.shape[0], kv_heads=k.shape[2], head_dim=k.shape[3])
            self.cache = rs.Cache(pattern, dtype=k.dtype, device=k.device, **sizes)
        if self.cache.pattern != pattern:
            raise ValueError(
                f"the cache was filled under {self.cache.pattern}, attention has {pattern}: create a new one"
            )
        return self.cache

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.seen

    def get_max_length(self) -> int:
        return -1  # the text may have any length

    def reset(self) -> None:
        self.cache, self.seen, self.is_waiting = None, 0, False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.cache is not None:
            self._select([i for i in range(self.cache.batch) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices)

    def _select(self, sequences: Tensor | Sequence[int]) -> None:
        if self.cache is not None:
            self.cache.select(sequences)

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise ValueError(
                f"{tokens_to_remove} tokens to remove: this cache has already dropped rows that earlier tokens need; "
                "generate without assistants, or use a DynamicCache and another attention"
            )

    def offload(self) -> None:
        raise ValueError("offloading is not supported: this cache stays on its device; turn offloading off")


class RingspanCache(Cache):
    """For ``generate(past_key_values=RingspanCache())``. Create one per text or batch of texts.

    Each layer is a `rs.Cache`: under `rs.Dilated` it keeps at most the sum over branches of ceil(w / r) rows per KV
    head, under `rs.Full` every row.
    """

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=RingspanLayer)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new rows of a layer, with marked keys. Raises if the layer before it has not appended as many."""
        found = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        before, layer = self.layers[max(0, layer_idx - 1)], self.layers[layer_idx]
        if before is layer or not (isinstance(before, RingspanLayer) and isinstance(layer, RingspanLayer)):
            return found
        wanted = layer.seen + key_states.shape[-2]
        if before.cache is not None and before.seen != wanted:
            raise ValueError(
                f"layer {layer_idx - 1} has {before.seen} tokens, layer {layer_idx} would have {wanted}: an "
                "interrupted call advanced only some layers; read the text again with a new RingspanCache()"
            )
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of the caches of all layers."""
        caches = [layer.cache for layer in self.layers if isinstance(layer, RingspanLayer)]
        return sum(cache.nbytes for cache in caches if cache is not None)
