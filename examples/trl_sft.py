"""TRL's SFTTrainer over a ring, with TRL's packing.

    torchrun --nproc-per-node=2 examples/trl_sft.py

The data loaders are those of transformers_trainer.py. In addition, SFTTrainer divides the loss of an evaluation by the
number of targets on each rank, so `compute_loss` passes it the number on all ranks, which `shard` has counted. The
results are compared with a plain SFTTrainer in one process.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast
from transformers_trainer import (
    LOGGED,
    PATTERN,
    SETTINGS,
    OverRing,
    compare_with_one_process,
    new_documents,
    new_model,
    numbers,
)
from trl import SFTConfig, SFTTrainer

import ringspan as rs


class RingSFTTrainer(OverRing, SFTTrainer):
    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        counted = inputs["num_items_in_batch"] if num_items_in_batch is None else num_items_in_batch
        return super().compute_loss(model, inputs, return_outputs, counted)


def new_tokenizer() -> PreTrainedTokenizerFast:
    words = {"<eos>": 0} | {f"w{i}": i for i in range(1, 256)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "<eos>")), eos_token="<eos>")


def new_data(count: int, seed: int) -> Dataset:
    return Dataset.from_dict({"input_ids": [document["input_ids"] for document in new_documents(count, seed)]})


def train(folder: str) -> tuple[SFTTrainer, rs.Ring | None]:
    batches = dict(per_device_train_batch_size=1, per_device_eval_batch_size=2)
    # SFTConfig's default is bf16, whose rounding would hide other differences.
    arguments = SFTConfig(folder, packing=True, max_length=300, bf16=False, **batches, **SETTINGS)
    ring = rs.Ring() if dist.is_initialized() else None  # SFTConfig has initialised the process group
    options = dict(
        model=new_model(PATTERN, ring),
        args=arguments,
        processing_class=new_tokenizer(),
        train_dataset=new_data(40, seed=1),
        eval_dataset=new_data(10, seed=2),
    )
    trainer = SFTTrainer(**options) if ring is None else RingSFTTrainer(ring, **options)
    trainer.train()
    return trainer, ring


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer, ring = train(folder)
        found = numbers(trainer, (*LOGGED, "mean_token_accuracy", "entropy", "num_tokens"))
    if ring is None:
        torch.save(found, sys.argv[1])
    else:
        compare_with_one_process("SFTTrainer", __file__, found, ring)


if __name__ == "__main__":
    main()
