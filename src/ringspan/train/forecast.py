"""How long a run will take: the FLOPs of a step, and how fast this machine does a small one like it. An estimate."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ringspan.evidence.device import this_ranks_device
from ringspan.geometry import Documents, Pattern
from ringspan.layout import Layout
from ringspan.models import LongNet, LongNetConfig
from ringspan.planning import RingPlan, Sizes
from ringspan.train.settings import TrainSettings

_LONG_ENOUGH = 0.4  # seconds of a measured step
_SHORTEST = 128  # tokens


@dataclass(frozen=True)
class Forecast:
    """Estimated times. Transfers between ranks, checkpoints and the optimiser's update are not included."""

    flops: float  # of one step, on the rank with the most work
    flops_per_second: float  # of one rank, measured here
    steps: int

    @property
    def step_seconds(self) -> float:
        return self.flops / self.flops_per_second

    @property
    def run_seconds(self) -> float:
        return self.steps * self.step_seconds


def forecast(settings: TrainSettings, world: int) -> Forecast:
    """Time a few small steps on this machine, for about a second, and scale them by their FLOPs."""
    with _threads_of_a_rank(world):
        return Forecast(step_flops(settings, world), _measured_rate(settings), settings.steps)


def step_flops(settings: TrainSettings, world: int) -> float:
    """FLOPs of one step on the rank with the most work: matrix products and attention, forward and backward."""
    model, ring_size = settings.model, settings.ring_size(world)
    layout = Layout(settings.layout, settings.tokens, ring_size)
    sizes = Sizes(settings.batch, model.heads, model.kv_heads, model.head_dim, 4, 4)
    pairs: dict[Pattern, int] = {}
    for pattern in {model.pattern_of(layer) for layer in range(model.layers)}:
        plan = RingPlan(pattern, Documents((settings.tokens,)), layout, True, "relay", sizes)
        pairs[pattern] = max(plan.work(rank) for rank in plan.sample)
    attention = sum(pairs[model.pattern_of(layer)] for layer in range(model.layers)) * model.head_dim
    rows = max(layout.rows_of(rank) for rank in range(ring_size))
    head = model.vocab_size * model.width
    in_layers = model.parameters - head * (1 if model.tie_embeddings else 2)
    passes = 4 if settings.recompute else 3  # forward, twice as much backward, and the layers' forward again
    products = rows * (passes * in_layers + 3 * head)
    # Attention: two products forward and five backward; its forward is not computed again.
    return 2.0 * settings.accumulate * settings.batch * (products + 7 * attention)


def _measured_rate(settings: TrainSettings) -> float:
    """FLOP/s of growing steps of one sequence through at most two layers, until one takes long enough to be timed."""
    few = dataclasses.replace(settings.model, layers=min(2, settings.model.layers))
    device = this_ranks_device()
    model = LongNet(few).to(device.device, torch.float64 if settings.dtype == "float64" else torch.float32)
    model.checkpoint_layers(settings.recompute)
    tokens = min(_SHORTEST, settings.tokens)
    _step_seconds(model, few, tokens, settings.dtype)  # warm-up
    while True:
        seconds = _step_seconds(model, few, tokens, settings.dtype)
        if seconds >= _LONG_ENOUGH or tokens == settings.tokens:
            small = dataclasses.replace(settings, model=few, tokens=tokens, batch=1, accumulate=1, ring=0)
            return step_flops(small, 1) / seconds
        tokens = min(2 * tokens, settings.tokens)


def _step_seconds(model: LongNet, config: LongNetConfig, tokens: int, dtype: str) -> float:
    device = this_ranks_device()
    text = torch.randint(config.vocab_size, (1, tokens), device=device.device)

    def step() -> None:
        with torch.autocast(device.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model.loss(text, text)
        loss.backward()

    return device.seconds(step)


@contextmanager
def _threads_of_a_rank(world: int) -> Iterator[None]:
    """A rank of several has one CPU thread (`ringspan.train.mesh`); a process alone has all."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if world > 1 else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
