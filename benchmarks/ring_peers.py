"""Other rings for plain attention: torch's own, and ring-attention-pytorch from PyPI. Each on a rank's rows."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class TorchRing:
    """torch's context-parallel ring (a private function) over the CPU flash operator, load-balanced under causality."""

    def __init__(self, tensors: list[Tensor], causal: bool) -> None:
        from torch.distributed.tensor.experimental._context_parallel import _attention  # noqa: PLC0415

        self.module: Any = _attention
        self.causal = causal
        self.q, self.k, self.v = (x.detach().transpose(1, 2).contiguous() for x in tensors)

    def run(self, mode: str) -> None:
        self.module._cp_options.enable_load_balance = self.causal
        aten = torch.ops.aten
        out, lse, *_ = self.module._templated_ring_attention(
            dist.group.WORLD,
            2,
            aten._scaled_dot_product_flash_attention_for_cpu,
            self.q,
            self.k,
            self.v,
            is_causal=self.causal,
        )
        if mode == "both":
            self.module._templated_ring_attention_backward(
                dist.group.WORLD,
                2,
                aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
                grad_out=out,
                grad_out_name="grad_out",
                query=self.q,
                key=self.k,
                value=self.v,
                out=out,
                logsumexp=lse,
                is_causal=self.causal,
                dropout_p=0.0,
            )


class RingAttentionPytorch:
    """ring_flash_attn of ring-attention-pytorch; under causality striped, which balances its work."""

    def __init__(self, tensors: list[Tensor], causal: bool) -> None:
        from ring_attention_pytorch.ring_flash_attention import ring_flash_attn  # noqa: PLC0415

        self.attend: Any = ring_flash_attn
        self.causal = causal
        self.tensors = [x.detach().clone().requires_grad_() for x in tensors]

    def run(self, mode: str) -> None:
        with torch.set_grad_enabled(mode == "both"):
            out = self.attend(
                *self.tensors, causal=self.causal, bucket_size=512, ring_reduce_col=True, striped_ring_attn=self.causal
            )
        if mode == "both":
            torch.autograd.grad(out, self.tensors, out.detach())


def has_ring_attention_pytorch() -> bool:
    return importlib.util.find_spec("ring_attention_pytorch") is not None
