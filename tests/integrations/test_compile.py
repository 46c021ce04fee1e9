"""Whole models compile around attention, in one graph, and do not compile again from step to step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ringspan as rs
from ringspan.models import LongNet, LongNetConfig
from ringspan.runtime.launch import run_local_ranks
from tests.integrations.models import small_model
from tests.ranks import starts_processes

CONFIG = LongNetConfig.named("nano", patterns=("16x1,64x4", "16x1,64x4 shift 8"))
STEPS, TOKENS = 3, 101


class CountingBackend:
    """Compiles by AOTAutograd without generating code, and counts how often it is asked to."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


def losses(model: nn.Module, loss: Any, ring: rs.Ring | None) -> list[float]:
    """A few steps of SGD; the loss of each."""
    found = []
    for step in range(STEPS):
        text = torch.randint(128, (1, TOKENS + 1), generator=torch.Generator().manual_seed(step))
        tokens, targets = text[:, :-1], text[:, 1:]
        if ring is not None:
            tokens, targets = ring.split_sequence(tokens), ring.split_sequence(targets)
        value = loss(tokens, targets)
        value.backward()
        with torch.no_grad():
            for weight in model.parameters():
                weight.sub_(weight.grad, alpha=0.1)
                weight.grad = None
        found.append(value.item())
    return found


def longnet_losses(ring: rs.Ring | None, backend: CountingBackend | None) -> list[float]:
    torch.manual_seed(0)
    model = LongNet(CONFIG).double()
    compiled = model if backend is None else torch.compile(model, fullgraph=True, backend=backend)

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = compiled(tokens, ring=ring, seq_len=None if ring is None else TOKENS)
        return rs.nn.ring_cross_entropy(hidden, model.head.weight, targets, ring=ring)

    return losses(model, loss, ring)


def transformers_losses(ring: rs.Ring | None, backend: CountingBackend | None) -> list[float]:
    from ringspan.integrations.transformers import register

    register(pattern=rs.Dilated((16, 64), (1, 4)), ring=ring)
    model = small_model("llama", "ringspan")
    compiled = model.base_model if backend is None else torch.compile(model.base_model, fullgraph=True, backend=backend)
    positions = torch.arange(TOKENS)[None]

    def loss(tokens: Tensor, targets: Tensor) -> Tensor:
        place: dict[str, Any] = {}
        if ring is not None:
            place = dict(position_ids=ring.split_sequence(positions), seq_len=TOKENS)
        hidden = compiled(tokens, use_cache=False, **place).last_hidden_state
        return rs.nn.ring_cross_entropy(hidden, model.get_output_embeddings().weight, targets, ring=ring)

    return losses(model, loss, ring)


def compiled_and_eager_over_a_ring(run: Any) -> tuple[list[float], list[float], int]:
    ring, backend = rs.Ring(), CountingBackend()
    return run(ring, backend), run(ring, None), backend.graphs


@pytest.mark.parametrize("run", [longnet_losses, transformers_losses], ids=["longnet", "transformers"])
@pytest.mark.parametrize("ring_size", [0, 2], ids=["alone", "ring"])
@starts_processes
def test_models_compile_whole_and_once(run: Any, ring_size: int) -> None:
    if run is transformers_losses:
        pytest.importorskip("transformers", reason="needs the extra transformers")
    if ring_size:
        ranks = run_local_ranks(ring_size, compiled_and_eager_over_a_ring, run)
    else:
        backend = CountingBackend()
        ranks = [(run(None, backend), run(None, None), backend.graphs)]
    for compiled, eager, graphs in ranks:
        assert compiled == pytest.approx(eager, abs=1e-10)
        assert graphs == 1
