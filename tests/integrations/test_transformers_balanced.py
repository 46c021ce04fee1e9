"""Packed documents in the balanced layout: losses of a Transformers model."""

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import ringspan as rs
from ringspan.integrations.transformers import causal_lm_loss, register, shard
from tests.ranks import on_ranks


@on_ranks(2, 3)
def test_losses_equal_those_of_zigzag() -> None:
    lengths = (50, 9, 1, 17, 12, 4)
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=64)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes)).double()
    tokens, losses = torch.randint(64, (1, sum(lengths))), []
    for layout in ("balanced", "zigzag"):  # other tests compare zigzag with eager attention, which rounds to fp32
        ring = rs.Ring(layout=layout)  # type: ignore[arg-type]
        register(name=f"ringspan_{layout}", ring=ring)
        model.set_attn_implementation(f"ringspan_{layout}")
        batch = shard(tokens, tokens, ring=ring, lengths=lengths)
        losses.append(causal_lm_loss(model, batch, ring=ring).detach())
        dist.all_reduce(losses[-1])
        assert batch["num_items_in_batch"] == sum(lengths) - len(lengths)
    torch.testing.assert_close(*losses, rtol=0, atol=1e-12)
