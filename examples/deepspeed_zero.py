"""DeepSpeed ZeRO with the ring: all ranks share a sequence, and ZeRO shards optimiser (2) and weights (3) over them.

    torchrun --nproc-per-node=2 examples/deepspeed_zero.py --stage 2
    torchrun --nproc-per-node=2 examples/deepspeed_zero.py --stage 3

Or with DeepSpeed's launcher: `deepspeed --num_gpus 8 examples/deepspeed_zero.py`. ZeRO averages gradients over its
ranks; `gradients="averaged"` accounts for that. Afterwards every rank trains the same model alone, on whole sequences
and without DeepSpeed, and compares the weights.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ringspan as rs

CONFIG = rs.models.LongNetConfig.named("nano", patterns=("64x1,256x4", "64x1,256x4 shift 32"))
TOKENS, STEPS, RATE = 501, 3, 1e-2


class LossOverTheRing(nn.Module):
    """A module that returns this rank's share of the loss: DeepSpeed differentiates what a module returns."""

    def __init__(self, ring: rs.Ring | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model, self.ring = rs.models.LongNet(CONFIG), ring

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return self.model.loss(tokens, targets, ring=self.ring, seq_len=TOKENS, gradients="averaged")


def sequence(step: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(256, (1, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    return text[:, :-1], text[:, 1:]


def train_with_zero(stage: int, ring: rs.Ring) -> dict[str, Tensor]:
    import deepspeed

    module = LossOverTheRing(ring)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        },
    )
    for step in range(STEPS):
        tokens, targets = (ring.split_sequence(x) for x in sequence(step))
        engine.backward(engine(tokens, targets))
        engine.step()
    found = {}
    for name, weight in module.named_parameters():
        with deepspeed.zero.GatheredParameters([weight], enabled=stage == 3):
            found[name] = weight.detach().clone()
    return found


def train_alone() -> dict[str, Tensor]:
    module = LossOverTheRing(None)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE, momentum=0.9)
    for step in range(STEPS):
        module(*sequence(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach() for name, weight in module.named_parameters()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", type=int, default=2, choices=(1, 2, 3), help="of ZeRO")
    stage = parser.parse_args().stage
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ring = rs.Ring()
    mine, alone = train_with_zero(stage, ring), train_alone()
    apart = max((mine[name] - weight).abs().max().item() for name, weight in alone.items())
    if dist.get_rank() == 0:
        print(f"ZeRO {stage} over a ring of {ring.size}: weights differ from plain training by {apart:.1e}")
    dist.barrier()  # gloo aborts if a rank leaves while another still communicates
    dist.destroy_process_group()
    if not apart <= 1e-6:  # ZeRO keeps optimiser states in fp32
        raise SystemExit("more than 1e-6")


if __name__ == "__main__":
    main()
