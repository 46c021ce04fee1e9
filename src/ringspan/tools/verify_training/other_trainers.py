"""Adapters for the context parallelism of other projects: what their documentation shows, around small models.

ringspan verify --training ringspan.tools.verify_training.other_trainers:ring_attention_pytorch_transformer

No peer is repaired or changed here. On one process, each adapter runs the same model without a ring.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grad_norm_

from ringspan.nn.cross_entropy import IGNORED
from ringspan.runtime.device import local_device
from ringspan.runtime.settings import missing_package
from ringspan.tools.verify_training.adapter import Batch, StepResult, UnsupportedError
from ringspan.tools.verify_training.own_trainers import VOCAB_SIZE, token_losses

_MISTRAL = dict(model_type="mistral", sliding_window=16)


def torch_context_parallel(group: dist.ProcessGroup, dtype: torch.dtype) -> TransformersTrainer:
    """A Llama of two layers in `torch.distributed.tensor.experimental.context_parallel`."""
    return TorchContextParallel(group, dtype, model_type="llama")


def torch_context_parallel_window(group: dist.ProcessGroup, dtype: torch.dtype) -> TransformersTrainer:
    """A Mistral of two layers, with a window of 16 tokens, in torch's `context_parallel`."""
    return TorchContextParallel(group, dtype, **_MISTRAL)


def accelerate_context_parallel(group: dist.ProcessGroup, dtype: torch.dtype) -> TransformersTrainer:
    """A Llama of two layers in Accelerate's `maybe_context_parallel`, with FSDP2."""
    return AccelerateContextParallel(group, dtype, model_type="llama")


def accelerate_context_parallel_window(group: dist.ProcessGroup, dtype: torch.dtype) -> TransformersTrainer:
    """A Mistral of two layers, with a window of 16 tokens, in Accelerate's `maybe_context_parallel`, with FSDP2."""
    return AccelerateContextParallel(group, dtype, **_MISTRAL)


def ring_attention_pytorch_transformer(group: dist.ProcessGroup, dtype: torch.dtype) -> RingTransformerTrainer:
    """`RingTransformer` of ring-attention-pytorch: two layers, `auto_shard_seq`, its own loss; its code for CPUs."""
    return RingTransformerTrainer(group, dtype)


class TransformersTrainer:
    """A Transformers model on one process. Subclasses split its inputs over ranks, and reduce its gradients.

    Packed documents have position ids that start again at 0, and no mask.
    """

    vocab_size = VOCAB_SIZE

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, **config: Any) -> None:
        if dtype == torch.float64:
            raise UnsupportedError("float64: Transformers computes the loss in float32")
        transformers = _import("transformers", "Transformers 5", "transformers")
        self.group, self.size = group, dist.get_world_size(group)
        self.device = local_device().device if dist.get_backend(group) == "nccl" else torch.device("cpu")
        sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=VOCAB_SIZE)
        sizes |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096)
        torch.manual_seed(0)
        # Larger weights than a model starts with, so that every row depends clearly on all that it attends to.
        config |= dict(initializer_range=0.3, use_cache=False)
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(**config, **sizes), attn_implementation="sdpa"
        )
        self.model: nn.Module = model.to(self.device, dtype).train()

    def split(self, buffers: list[Tensor]) -> AbstractContextManager[None]:
        """Inside, each buffer (batch, n) holds this rank's rows only."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def finish(self, max_norm: float) -> Any:
        """Reduce the gradients after the last batch and clip them; returns their norm before that."""
        return clip_grad_norm_(self.model.parameters(), max_norm)

    def forward(self, tokens: Tensor, position_ids: Tensor, labels: Tensor, shift_labels: Tensor) -> Any:
        """Labels are shifted before they are split; the model wants both kinds, and uses the shifted ones."""
        return self.model(input_ids=tokens, position_ids=position_ids, labels=labels, shift_labels=shift_labels)

    def step(self, batches: Sequence[Batch], *, max_norm: float | None = None) -> StepResult:
        self.model.zero_grad()
        loss = 0.0
        for batch in batches:
            buffers = self.buffers(batch)
            with self.split(buffers):
                found = self.forward(*buffers[:-1])
                self.backward(found.loss / len(batches))
                targets, positions = (x.clone() for x in buffers[-2:])
            loss += _mean(found.loss, self.group) / len(batches)
        norm = self.finish(math.inf if max_norm is None else max_norm)
        logits = found.logits.detach()
        return StepResult(
            loss,
            {name: w.grad for name, w in self.model.named_parameters() if w.grad is not None},
            token_losses=token_losses(logits, targets),
            logits=logits,
            positions=positions[0],
            gradient_norm=norm,
        )

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        buffers = self.buffers(batch)
        with self.split(buffers):
            loss = self.forward(*buffers[:-1]).loss
        return _mean(loss, self.group)

    def buffers(self, batch: Batch) -> list[Tensor]:
        """All that is split: the arguments of `forward`, and the position of each row. Splitting changes them."""
        if batch.n % self.size:
            raise UnsupportedError(f"{batch.n} tokens on {self.size} ranks: torch's ring needs shards of equal size")
        rows = torch.arange(batch.n).expand(batch.tokens.shape)
        whole = (batch.tokens, batch.position_ids, batch.labels, batch.targets, rows)
        return [x.to(self.device, copy=True, memory_format=torch.contiguous_format) for x in whole]


class TorchContextParallel(TransformersTrainer):
    """As in examples/3D_parallel.py of Transformers: gradients and loss are means over ranks, and load balancing is
    off, because Transformers takes position ids that are not consecutive for packed documents.
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, **config: Any) -> None:
        super().__init__(group, dtype, **config)
        self.mesh = DeviceMesh.from_group(group, self.device.type, mesh_dim_names=("cp",))

    def split(self, buffers: list[Tensor]) -> AbstractContextManager[None]:
        if self.size == 1:
            return nullcontext()
        from torch.distributed.tensor.experimental import context_parallel  # noqa: PLC0415
        from torch.distributed.tensor.experimental._context_parallel._attention import _cp_options  # noqa: PLC0415

        _cp_options.enable_load_balance = False
        return context_parallel(self.mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers))

    def finish(self, max_norm: float) -> Any:
        _average_gradients(self.model, self.group)
        return super().finish(max_norm)


class AccelerateContextParallel(TransformersTrainer):
    """As in examples/torch_native_parallelism/nd_parallel.py of Accelerate: FSDP2 averages the gradients, and the loss
    is a mean over ranks.
    """

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype, **config: Any) -> None:
        super().__init__(group, dtype, **config)
        self.accelerator = self.prepare() if self.size > 1 else None

    def prepare(self) -> Any:
        accelerate = _import("accelerate", "Accelerate", "transformers")
        rank = dist.get_rank(self.group)
        launched = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=self.size, LOCAL_WORLD_SIZE=self.size)
        for name, value in launched.items():  # as `accelerate launch` and torchrun set them
            os.environ.setdefault(name, str(value))
        accelerator = accelerate.Accelerator(
            cpu=self.device.type == "cpu",
            parallelism_config=accelerate.utils.ParallelismConfig(cp_size=self.size),
            fsdp_plugin=accelerate.utils.FullyShardedDataParallelPlugin(
                fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
            ),
        )
        optimizer = torch.optim.SGD(self.model.parameters())  # FSDP2 is prepared with an optimizer; it takes no step
        self.model, _ = accelerator.prepare(self.model, optimizer)
        return accelerator

    def split(self, buffers: list[Tensor]) -> AbstractContextManager[None]:
        if self.accelerator is None:
            return nullcontext()
        dims = [1] * len(buffers)
        context: AbstractContextManager[None] = self.accelerator.maybe_context_parallel(
            buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=set(buffers)
        )
        return context

    def backward(self, loss: Tensor) -> None:
        loss.backward() if self.accelerator is None else self.accelerator.backward(loss)

    def finish(self, max_norm: float) -> Any:
        if self.accelerator is None:
            return super().finish(max_norm)
        return self.accelerator.clip_grad_norm_(self.model.parameters(), max_norm)


class RingTransformerTrainer:
    """As in assert.py of the project: each rank passes its sequences of the batch, and gradients are means over ranks,
    as DDP computes them.

    The model splits the sequences; its sizes depend on their length, so there is a model for each length.
    """

    vocab_size = VOCAB_SIZE

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype) -> None:
        if dtype == torch.float64:
            raise UnsupportedError("float64: ring-attention-pytorch keeps the sums of softmax in float32")
        self.package = _import("ring_attention_pytorch", "ring-attention-pytorch", "peers")
        self.group, self.dtype = group, dtype
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.models: dict[int, nn.Module] = {}

    def model_of(self, n: int) -> nn.Module:
        """The model for sequences of n tokens; all have the same weights."""
        if n not in self.models:
            rows = -(-n // self.size)
            torch.manual_seed(0)
            options = dict(num_tokens=VOCAB_SIZE, dim=32, depth=2, heads=4, dim_head=8, num_grouped_query_heads=2)
            options |= dict(ring_seq_size=rows, bucket_size=rows, ignore_index=IGNORED)
            self.models[n] = self.package.RingTransformer(causal=True, ring_attn=True, **options).to(self.dtype)
        return self.models[n]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The model's own, of this rank's rows. As the model does itself without labels, the last token is left out."""
        if batch.is_packed:
            raise UnsupportedError("packed documents: RingTransformer has no mask for them")
        tokens, labels = (x[:, :-1].tensor_split(self.size)[self.rank].clone() for x in (batch.tokens, batch.targets))
        found: Tensor = model(tokens, labels=labels)
        return found

    def step(self, batches: Sequence[Batch], *, max_norm: float | None = None) -> StepResult:
        model = self.model_of(batches[0].n)
        model.zero_grad()
        total = 0.0
        for batch in batches:
            loss = self.loss(model, batch)
            (loss / len(batches)).backward()
            total += _mean(loss, self.group) / len(batches)
        _average_gradients(model, self.group)
        norm = clip_grad_norm_(model.parameters(), math.inf if max_norm is None else max_norm)
        logits, positions = self.logits(model, batch)
        return StepResult(
            total,
            {name: w.grad for name, w in model.named_parameters() if w.grad is not None},
            token_losses=token_losses(logits, batch.targets[:, positions]),
            logits=logits,
            positions=positions,
            gradient_norm=norm,
        )

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> float:
        return _mean(self.loss(self.model_of(batch.n), batch), self.group)

    @torch.no_grad()
    def logits(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Of some rows of all sequences, and their positions. Without labels, the model returns all rows of this rank's
        sequences, in order.
        """
        mine = model(batch.tokens.tensor_split(self.size)[self.rank])
        parts: list[Any] = [None] * self.size
        dist.all_gather_object(parts, mine, group=self.group)
        positions = torch.arange(batch.n).tensor_split(self.size)[self.rank]
        return torch.cat(parts)[:, positions], positions


def _mean(loss: Tensor, group: dist.ProcessGroup) -> float:
    """Over ranks, as trainers log it."""
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    return float(total) / dist.get_world_size(group)


def _average_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    for weight in model.parameters():
        if weight.grad is not None:
            dist.all_reduce(weight.grad, group=group)
            weight.grad /= dist.get_world_size(group)


def _import(module: str, package: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        adapter = "this adapter"
        raise ImportError(missing_package(adapter, package, extra)) from error
