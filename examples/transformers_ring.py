"""A Transformers model over a ring: every sequence is split over two ranks.

    torchrun --nproc-per-node=2 examples/transformers_ring.py
    torchrun --nproc-per-node=2 examples/transformers_ring.py --model qwen3 --gradient-checkpointing

Pattern and ring are registered once; the model is an unmodified Transformers model. Afterwards every rank computes the
same alone, on whole sequences, and compares loss and gradients.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import ringspan as rs
from ringspan.integrations.transformers import causal_lm_loss, register, shard

SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
PATTERN = rs.Dilated((64, 256), (1, 4))
TOKENS = 501


def new_model(kind: str, attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=256, head_dim=16, sliding_window=None, **SIZES)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama", help="llama, qwen3, mistral or another causal model")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ring = rs.Ring()
    text = torch.randint(256, (2, TOKENS), generator=torch.Generator().manual_seed(1))

    register(pattern=PATTERN, ring=ring)
    model = new_model(arguments.model, "ringspan")
    if arguments.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    loss = causal_lm_loss(model, shard(text, labels=text, ring=ring), ring=ring)
    loss.backward()

    register(pattern=PATTERN, name="alone")
    alone = new_model(arguments.model, "alone")
    logits = alone(text, use_cache=False).logits[:, :-1]
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    wanted.backward()

    total = loss.detach().clone()
    dist.all_reduce(total)  # the shares of a ring add up to the loss
    apart = (total - wanted).abs().item()
    for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
        dist.all_reduce(mine.grad)  # and so do their gradients
        apart = max(apart, (mine.grad - whole.grad).abs().max().item())
    if dist.get_rank() == 0:
        print(f"{arguments.model} over {ring.size} ranks: loss and gradients differ from one process by {apart:.1e}")
    dist.barrier()  # gloo aborts if a rank leaves while another still communicates
    dist.destroy_process_group()
    if not apart <= 1e-10:
        raise SystemExit("more than 1e-10")


if __name__ == "__main__":
    main()
