"""FLOPs of a call, from the operators that torch's profiler saw run, whoever called them: nobody reports his own.

Seen are matrix products and torch's attention operators, also inside custom operators and in backward. Not seen are
kernels that do not go through torch's dispatcher (Triton, CUDA extensions): then the count is 0 or too small.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import profile

_FORWARD_PRODUCTS = 2  # scores, and weights times values
_BACKWARD_PRODUCTS = 5  # scores again, and the gradients of weights, values, queries and keys
_ATTENTION = (
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
)


def count_flops(call: Callable[[], Any]) -> int:
    """FLOPs of a call on this process. A causal attention operator counts as if it were not: it has half the pairs."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler announces every start and stop on stderr otherwise
    with profile(record_shapes=True, use_kineto=False) as profiler:
        call()
    return sum(_flops(event.name, event.input_shapes) for event in profiler.function_events or ())


def _flops(name: str, shapes: list[list[int]]) -> int:
    if name == "aten::mm":
        return _product(shapes[0], shapes[1])
    if name in ("aten::bmm", "aten::matmul_backward"):
        return _product(shapes[0], shapes[1])
    if name in ("aten::addmm", "aten::baddbmm"):
        return _product(shapes[1], shapes[2])
    if name in _ATTENTION:
        return _attention(shapes[0], shapes[1], _FORWARD_PRODUCTS)
    if name.removesuffix("_backward") in _ATTENTION:
        return _attention(shapes[1], shapes[2], _BACKWARD_PRODUCTS)  # shapes[0] is the gradient of the output
    return 0


def _product(left: list[int], right: list[int]) -> int:
    return 2 * torch.Size(left).numel() * right[-1]


def _attention(queries: list[int], keys: list[int], products: int) -> int:
    return products * 2 * torch.Size(queries).numel() * keys[-2]
