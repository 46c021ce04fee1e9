"""What a run will need, before it starts: weights, optimiser, activations, parcels, from integers alone."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ringspan.described import described
from ringspan.geometry import Documents
from ringspan.layout import Layout
from ringspan.planning import Reach, RingPlan, Sizes, find_reach
from ringspan.train.settings import TrainSettings

_SLICE_ROWS = 4096  # rows whose logits exist at a time (`rs.nn.ring_cross_entropy`)


@dataclass(frozen=True)
class Needs:
    """Bytes of one rank at the peak of a step."""

    weights: int = described(0, "this rank's share, and one layer whole while it is used")
    gradients: int = described(0, "of this rank's share")
    optimizer: int = described(0, "two moments of each weight")
    activations: int = described(0, "kept from forward to backward, all layers")
    layer: int = described(0, "inside the layer that is being differentiated")
    parcels: int = described(0, "K and V rows in flight")
    logits: int = described(0, "of one slice of rows")

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
    sizes = Sizes(settings.batch, model.heads, model.kv_heads, model.head_dim, short, wide)
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
