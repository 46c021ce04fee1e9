"""Transformers' Trainer over a ring, with packed documents and evaluation.

    torchrun --nproc-per-node=2 examples/transformers_trainer.py

The data loaders give all ranks of the ring the same documents, packed into one row, and keep this rank's rows
(`shard`). Trainer does the rest with its default `average_tokens_across_devices=True`: it counts the targets of all
ranks and of all accumulated batches, and multiplies the loss by the number of ranks, because DDP averages gradients. It
logs the mean over ranks, which is then the loss of the whole sequence. The results are compared with a plain Trainer in
one process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorWithFlattening,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

import ringspan as rs
from ringspan.integrations.transformers import register, shard

PATTERN = rs.Dilated((64, 256), (1, 4))
LOGGED = ("loss", "grad_norm")
# For Trainer and for TRL's SFTTrainer. Gradients are accumulated over two batches and clipped.
SETTINGS: dict[str, Any] = dict(
    use_cpu=True,
    max_steps=4,
    gradient_accumulation_steps=2,
    optim="sgd",
    learning_rate=0.1,
    lr_scheduler_type="constant",
    max_grad_norm=0.5,
    train_sampling_strategy="sequential",
    logging_steps=1,
    prediction_loss_only=True,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)


class OverRing:
    """Makes a Trainer, listed after it among the bases, split every packed row over the ranks of a ring."""

    def __init__(self, ring: rs.Ring, **options: Any) -> None:
        super().__init__(**options)
        self.ring = ring

    def get_train_dataloader(self) -> DataLoader:
        return self._same_on_all_ranks(self.train_dataset, self.args.per_device_train_batch_size)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        return self._same_on_all_ranks(data, self.args.per_device_eval_batch_size, count_samples=True)

    def prediction_step(self, model: Any, inputs: dict[str, Any], *options: Any, **more: Any) -> Any:
        samples = inputs.pop("samples")
        loss, *rest = super().prediction_step(model, inputs, *options, **more)
        return loss.repeat(samples), *rest  # the last batch may hold fewer samples, and counts for less

    def _same_on_all_ranks(self, data: Any, batch_size: int, count_samples: bool = False) -> DataLoader:
        def collate(documents: list[Any]) -> dict[str, Any]:
            packed = self.data_collator(documents)
            rows = (packed[name].to(self.args.device) for name in ("input_ids", "labels"))
            mine = shard(*rows, ring=self.ring, cu_seqlens=packed["cu_seq_lens_q"])
            return mine | ({"samples": len(documents)} if count_samples else {})

        # Keeps the order of the dataset. To shuffle, pass a generator with the same seed on all ranks. No worker
        # processes: shard communicates.
        return DataLoader(data, batch_size, collate_fn=collate)


class RingTrainer(OverRing, Trainer):
    pass


def new_model(pattern: rs.Pattern, ring: rs.Ring | None) -> PreTrainedModel:
    register(pattern=pattern, ring=ring)
    torch.manual_seed(0)
    sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    config = AutoConfig.for_model("llama", vocab_size=256, num_key_value_heads=2, **sizes)
    return AutoModelForCausalLM.from_config(config, attn_implementation="ringspan")


def new_documents(count: int, seed: int) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(20, 150, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, 256, (n,), generator=generator).tolist()} for n in lengths]


def train(folder: str) -> tuple[Trainer, rs.Ring | None]:
    arguments = TrainingArguments(folder, per_device_train_batch_size=3, per_device_eval_batch_size=3, **SETTINGS)
    ring = rs.Ring() if dist.is_initialized() else None  # TrainingArguments has initialised the process group
    options = dict(
        model=new_model(PATTERN, ring),
        args=arguments,
        data_collator=DataCollatorWithFlattening(return_flash_attn_kwargs=True),  # packs the documents of a batch
        train_dataset=new_documents(24, seed=1),
        eval_dataset=new_documents(7, seed=2),
    )
    trainer = Trainer(**options) if ring is None else RingTrainer(ring, **options)
    trainer.train()
    return trainer, ring


def numbers(trainer: Trainer, logged: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """What is compared: the logged numbers of every step, those of an evaluation, and the weights afterwards."""
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    evaluated = trainer.evaluate()
    found = {name: [step[name] for step in steps] for name in logged}
    found |= {f"eval_{name}": evaluated[f"eval_{name}"] for name in logged if name != "grad_norm"}
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in found.items()}
    return tensors | {"weights": torch.cat([x.detach().flatten() for x in trainer.model.parameters()])}


def compare_with_one_process(name: str, script: str, found: dict[str, torch.Tensor], ring: rs.Ring) -> None:
    """Rank 0 runs the script once more, in a single process, and every rank compares its numbers with it."""
    received: list[Any] = [None]
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "numbers.pt"
            torchrun = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
            settings = {key: value for key, value in os.environ.items() if not key.startswith(torchrun)}
            subprocess.run([sys.executable, script, str(file)], env=settings, stdout=subprocess.DEVNULL, check=True)
            received = [torch.load(file)]
    dist.broadcast_object_list(received)
    apart = {key: (value - received[0][key]).abs().max().item() for key, value in found.items()}
    if dist.get_rank() == 0:
        listed = ", ".join(f"{key} {difference:.1e}" for key, difference in apart.items())
        print(f"{name} over {ring.size} ranks differs from one process by: {listed}")
    dist.barrier()  # gloo aborts if a rank leaves while another still communicates
    dist.destroy_process_group()
    different = not all(difference <= 2e-6 for difference in apart.values())
    print("more than 2e-6" if different else "", end="", flush=True)
    os._exit(different)  # DDP keeps the process group alive, and gloo may abort a process that exits with one


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trainer, ring = train(folder)
        found = numbers(trainer, LOGGED)
    if ring is None:
        torch.save(found, sys.argv[1])
    else:
        compare_with_one_process("Trainer", __file__, found, ring)


if __name__ == "__main__":
    main()
