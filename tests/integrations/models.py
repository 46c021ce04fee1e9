"""Small Transformers models in fp64, the same weights each time."""

from __future__ import annotations

from typing import Any

import torch


def small_model(kind: str, attention: str, **changes: Any) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    sizes |= dict(num_key_value_heads=2, head_dim=16, vocab_size=128)
    config = AutoConfig.for_model(kind, **{**sizes, "sliding_window": None, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).double()
