"""Transformers' Trainer over a ring: every rank reads the same sequences and keeps its own rows.

    torchrun --nproc-per-node=2 examples/transformers_trainer.py

It differs from a plain Trainer in two ways. The data loader gives all ranks of a ring the same sequences, and the
collator keeps this rank's rows (`shard`). The loss is this rank's share of the mean times the number of ranks, because
DDP averages gradients. Afterwards every rank trains the same model alone, with a plain loop, and compares.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

import ringspan as rs
from ringspan.integrations.transformers import register, shard

PATTERN = rs.Dilated((64, 256), (1, 4))
TOKENS, STEPS, BATCH, RATE = 301, 4, 2, 0.1


class RingTrainer(Trainer):
    """A Trainer that splits every sequence over the ranks."""

    def __init__(self, ring: rs.Ring, **options: Any) -> None:
        super().__init__(**options)
        self.ring = ring

    def get_train_dataloader(self) -> DataLoader:
        def collate(rows: list[tuple[Tensor]]) -> dict[str, Any]:
            tokens = torch.stack([row[0] for row in rows])
            return shard(tokens, labels=tokens, ring=self.ring)

        # Trainer would give each rank other sequences; here all ranks need the same.
        return DataLoader(self.train_dataset, batch_size=self.args.per_device_train_batch_size, collate_fn=collate)

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        loss = outputs.loss * self.ring.size  # DDP averages
        return (loss, outputs) if return_outputs else loss


def new_model(attention: str) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    config = AutoConfig.for_model("llama", vocab_size=256, num_key_value_heads=2, **sizes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def train_alone(data: Dataset[Any]) -> PreTrainedModel:
    register(pattern=PATTERN, name="alone")
    model = new_model("alone")
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for (tokens,) in DataLoader(data, batch_size=BATCH):
        model(tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def main() -> None:
    torch.set_num_threads(1)
    data = TensorDataset(torch.randint(256, (STEPS * BATCH, TOKENS), generator=torch.Generator().manual_seed(1)))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            optim="sgd",
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        ring = rs.Ring()  # TrainingArguments has initialised the process group
        register(pattern=PATTERN, ring=ring)
        model = new_model("ringspan")
        RingTrainer(ring, model=model, args=arguments, train_dataset=data).train()
    alone = train_alone(data)
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    apart = max((mine - whole).abs().max().item() for mine, whole in pairs)
    if dist.get_rank() == 0:
        print(f"Trainer over {ring.size} ranks: weights differ from one process by {apart:.1e}")
    dist.barrier()  # gloo aborts if a rank leaves while another still communicates
    dist.destroy_process_group()
    if not apart <= 1e-5:
        raise SystemExit("more than 1e-5")


if __name__ == "__main__":
    main()
