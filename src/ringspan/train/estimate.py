"""What a run needs, before it starts: memory per rank, computed from the settings, and time, from small timed steps.

Each sequence counts as one document. With ``documents`` that is a bound: shorter documents have less work and traffic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import ceil

import torch

from ringspan.balance import Balanced
from ringspan.geometry import Documents, Pattern
from ringspan.layout import Layout
from ringspan.models import LongNet, LongNetConfig
from ringspan.planning import Reach, RingPlan, TensorSizes, find_reach
from ringspan.runtime.device import local_device
from ringspan.runtime.settings import setting
from ringspan.train.config import TrainSettings

_LOGIT_ROWS = 4096  # rows whose logits exist at a time (`rs.nn.ring_cross_entropy`)
_MIN_TIMED_SECONDS = 0.4  # of a timed step
_MIN_TIMED_TOKENS = 128


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank at the peak of a step."""

    weights: int = setting(0, "shard of this rank, plus one gathered layer")
    gradients: int = setting(0, "shard of this rank")
    optimizer: int = setting(0, "two moments per weight")
    activations: int = setting(0, "of the layers up to the one that backward is in")
    layer: int = setting(0, "inside that layer")
    parcels: int = setting(0, "K and V rows in transfer")
    logits: int = setting(0, "of one slice of rows")

    @property
    def total(self) -> int:
        return sum(getattr(self, entry.name) for entry in fields(self))


def reach_of(settings: TrainSettings, pattern: Pattern, ring_size: int) -> Reach:
    """How far a token attends in a layer with this pattern, and which of its branches cross ranks."""
    layout = Layout(settings.layout, settings.tokens, ring_size)
    return find_reach(pattern, Documents((settings.tokens,)), layout, settings.model.kv_heads, causal=True)


def estimate_memory(settings: TrainSettings, world: int) -> MemoryEstimate:
    """Memory of the rank with the most rows, without kernel workspaces (16 MiB), Python and torch."""
    model, ring_size = settings.model, settings.ring_size(world)
    wide = 8 if settings.dtype == "float64" else 4
    short = 2 if settings.dtype == "bfloat16" else wide
    shards = world if settings.weights == "sharded" else 1
    layout = Layout(settings.layout, settings.tokens, ring_size)
    rank = max(range(ring_size), key=layout.rows_of)
    rows = layout.rows_of(rank) * settings.batch
    if isinstance(rule := settings.ring_layout(), Balanced):
        rows = ceil(rows * (1 + rule.slack))
    kv_width = model.head_dim * model.kv_heads
    sizes = TensorSizes(settings.batch, model.heads, model.kv_heads, model.head_dim, short, wide)
    # A recomputed layer keeps its input and the output and lse of attention; otherwise, all its activations.
    kept = rows * (model.width * (wide + short) + model.heads * wide)
    inside = rows * (3 * model.width * wide + (model.width + 2 * kv_width) * short + 4 * model.mlp_width * short)
    kept += 0 if settings.recompute else inside
    # Backward frees the activations of each layer that it leaves. So the peak is in the last layer, or in an earlier
    # one whose pattern sends more.
    documents = Documents((settings.tokens,))
    peaks = [
        (layers[-1] + 1, RingPlan(pattern, documents, layout, True, "relay", sizes).memory(rank, backward=True))
        for pattern, layers in model.layers_by_pattern.items()
    ]
    live_layers, attention = max(peaks, key=lambda peak: peak[0] * kept + peak[1].total)
    mlp_gradients = rows * 3 * model.mlp_width * short  # of the gate, the gated values and their product
    layer = (inside if settings.recompute else 0) + max(mlp_gradients, attention.rows)
    one_layer_whole = model.parameters // model.layers * wide if shards > 1 else 0
    return MemoryEstimate(
        weights=model.parameters * wide // shards + one_layer_whole,
        gradients=model.parameters * wide // shards,
        optimizer=2 * model.parameters * wide // shards,
        activations=live_layers * kept,
        layer=layer,
        parcels=attention.parcels,
        logits=2 * min(rows, _LOGIT_ROWS) * model.vocab_size * wide,
    )


@dataclass(frozen=True)
class TimeEstimate:
    """Estimated times, without transfers between ranks, checkpoints and optimizer updates."""

    flops: float  # of one step, on the busiest rank
    flops_per_second: float  # of one rank, measured on this machine
    steps: int

    @property
    def step_seconds(self) -> float:
        return self.flops / self.flops_per_second

    @property
    def run_seconds(self) -> float:
        return self.steps * self.step_seconds


def estimate_time(settings: TrainSettings, world: int) -> TimeEstimate:
    """Time small steps on this machine, for about a second, and scale by FLOPs."""
    with _rank_threads(world):
        return TimeEstimate(step_flops(settings, world), _measure_flops_per_second(settings), settings.steps)


def step_flops(settings: TrainSettings, world: int) -> float:
    """FLOPs of one step on the busiest rank: matrix products and attention, forward and backward."""
    model, ring_size = settings.model, settings.ring_size(world)
    layout = Layout(settings.layout, settings.tokens, ring_size)
    sizes = TensorSizes(settings.batch, model.heads, model.kv_heads, model.head_dim, 4, 4)
    attention = 0
    for pattern, layers in model.layers_by_pattern.items():
        plan = RingPlan(pattern, Documents((settings.tokens,)), layout, True, "relay", sizes)
        attention += len(layers) * max(plan.work(rank) for rank in plan.sample) * model.head_dim
    rows = max(layout.rows_of(rank) for rank in range(ring_size))
    head = model.vocab_size * model.width
    in_layers = model.parameters - head * (1 if model.tie_embeddings else 2)
    passes = 4 if settings.recompute else 3  # forward, twice as much in backward, and recomputation
    products = rows * (passes * in_layers + 3 * head)
    # Attention: two products in forward and five in backward; its forward is not recomputed.
    return 2.0 * settings.accumulate * settings.batch * (products + 7 * attention)


def _measure_flops_per_second(settings: TrainSettings) -> float:
    """FLOP/s of one sequence through a few layers; its length doubles until the step is long enough to time."""
    every_pattern = max(2, len(settings.model.patterns))
    few = dataclasses.replace(settings.model, layers=min(every_pattern, settings.model.layers))
    device = local_device()
    model = LongNet(few).to(device.device, torch.float64 if settings.dtype == "float64" else torch.float32)
    model.checkpoint_layers(settings.recompute)
    tokens = min(_MIN_TIMED_TOKENS, settings.tokens)
    _step_seconds(model, few, tokens, settings.dtype)  # warm-up
    while True:
        seconds = _step_seconds(model, few, tokens, settings.dtype)
        if seconds >= _MIN_TIMED_SECONDS or tokens == settings.tokens:
            small = dataclasses.replace(settings, model=few, tokens=tokens, batch=1, accumulate=1, ring=0)
            return step_flops(small, 1) / seconds
        tokens = min(2 * tokens, settings.tokens)


def _step_seconds(model: LongNet, config: LongNetConfig, tokens: int, dtype: str) -> float:
    device = local_device()
    text = torch.randint(config.vocab_size, (1, tokens), device=device.device)

    def step() -> None:
        with torch.autocast(device.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model.loss(text, text)
        loss.backward()

    return device.seconds(step)


@contextmanager
def _rank_threads(world: int) -> Iterator[None]:
    """Several ranks use one CPU thread each (`ringspan.train.distributed`); a single process uses all."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if world > 1 else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
