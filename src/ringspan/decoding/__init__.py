"""Autoregressive decoding with a cache that holds the rows that later tokens can still see."""

from ringspan.decoding.cache import Cache
from ringspan.decoding.prefill import attention_prefill
from ringspan.decoding.sampling import Sampler
from ringspan.decoding.step import attention_step

__all__ = ["Cache", "Sampler", "attention_prefill", "attention_step"]
