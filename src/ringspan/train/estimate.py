"""What a run will need, before it starts: weights, optimiser, activations, parcels, from integers alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch

from ringspan.geometry import Documents, Pattern
from ringspan.layout import Layout
from ringspan.models import LongNet, LongNetConfig
from ringspan.planning import Reach, RingPlan, TensorSizes, find_reach
from ringspan.runtime.device import local_device
from ringspan.runtime.settings import setting
from ringspan.train.config import TrainSettings

_SLICE_ROWS = 4096  # rows whose logits exist at a time (`rs.nn.ring_cross_entropy`)


@dataclass(frozen=True)
class Needs:
    """Bytes of one rank at the peak of a step."""

    weights: int = setting(0, "this rank's share, and one layer whole while it is used")
    gradients: int = setting(0, "of this rank's share")
    optimizer: int = setting(0, "two moments of each weight")
    activations: int = setting(0, "kept from forward to backward, all layers")
    layer: int = setting(0, "inside the layer that is being differentiated")
    parcels: int = setting(0, "K and V rows in flight")
    logits: int = setting(0, "of one slice of rows")

    @property
    def total(self) -> int:
        return sum(getattr(self, entry.name) for entry in fields(self))


def reach_of(settings: TrainSettings, ring_size: int) -> Reach:
    """How far a token sees in one layer, and which segments cross ranks: of the layer that sees and sends the most."""
    model, documents = settings.model, Documents((settings.tokens,))
    layout = Layout(settings.layout, settings.tokens, ring_size)
    layers = {model.pattern_of(layer) for layer in range(model.layers)}
    found = [find_reach(pattern, documents, layout, model.kv_heads) for pattern in layers]
    return max(found, key=lambda reach: (len(reach.crossing), reach.longest_segment))


def needs_of(settings: TrainSettings, world: int) -> Needs:
    """What the rank with the most rows needs; workspaces of kernels (16 MiB) and Python itself come on top."""
    model, ring_size = settings.model, settings.ring_size(world)
    wide = 8 if settings.dtype == "float64" else 4
    short = 2 if settings.dtype == "bfloat16" else wide
    shards = world if settings.weights == "sharded" else 1
    layout = Layout(settings.layout, settings.tokens, ring_size)
    rank = max(range(ring_size), key=layout.rows_of)
    rows = layout.rows_of(rank) * settings.batch
    kv_width = model.head_dim * model.kv_heads
    sizes = TensorSizes(settings.batch, model.heads, model.kv_heads, model.head_dim, short, wide)
    documents, patterns = Documents((settings.tokens,)), {model.pattern_of(layer) for layer in range(model.layers)}
    plans = [RingPlan(pattern, documents, layout, True, "relay", sizes) for pattern in patterns]
    attention = max((plan.memory(rank, backward=True) for plan in plans), key=lambda memory: memory.total)
    # A layer that is computed again keeps its input, attention's output and lse; otherwise all that is inside, too.
    kept = rows * (model.width * (wide + short) + model.heads * wide)
    inside = rows * (3 * model.width * wide + (model.width + 2 * kv_width) * short + 4 * model.mlp_width * short)
    mlp_gradients = rows * 3 * model.mlp_width * short  # of the gate, of what it gates, and of their product
    layer = (inside if settings.recompute else 0) + max(mlp_gradients, attention.rows)
    one_layer_whole = model.parameters // model.layers * wide if shards > 1 else 0
    return Needs(
        weights=model.parameters * wide // shards + one_layer_whole,
        gradients=model.parameters * wide // shards,
        optimizer=2 * model.parameters * wide // shards,
        activations=model.layers * (kept if settings.recompute else kept + inside),
        layer=layer,
        parcels=attention.parcels,
        logits=2 * min(rows, _SLICE_ROWS) * model.vocab_size * wide,
    )


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
    sizes = TensorSizes(settings.batch, model.heads, model.kv_heads, model.head_dim, 4, 4)
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
    device = local_device()
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
    device = local_device()
    text = torch.randint(config.vocab_size, (1, tokens), device=device.device)

    def step() -> None:
        with torch.autocast(device.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = model.loss(text, text)
        loss.backward()

    return device.seconds(step)


@contextmanager
def _threads_of_a_rank(world: int) -> Iterator[None]:
    """A rank of several has one CPU thread (`ringspan.train.distributed`); a process alone has all."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if world > 1 else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
