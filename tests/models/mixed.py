"""A small model that uses everything at once: a pattern of each kind, sums, sinks, a soft cap and grouped KV heads."""

import torch

from ringspan.models import LongNet, LongNetConfig

MIXED = LongNetConfig.named(
    "nano",
    layers=5,
    heads=4,
    kv_heads=2,
    patterns=("window 9", "window 6 + 16x4,40x8", "full", "10x1,33x3 blocked shift 5"),
    softcap=3.0,
    sinks=True,
)


def mixed_model() -> LongNet:
    """The same on every call, with sinks that differ from 0 and scores that the cap changes."""
    torch.manual_seed(0)
    model = LongNet(MIXED).double()
    for name, weight in model.named_parameters():
        if name.endswith(("sinks", "queries.weight", "keys.weight")):
            torch.nn.init.normal_(weight, std=0.5)
    return model
