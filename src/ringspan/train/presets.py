"""Named settings: a place to start from."""

from __future__ import annotations

from ringspan.models.config import LongNetConfig
from ringspan.train.settings import TrainSettings

PRESETS: dict[str, TrainSettings] = {
    # A minute or two on a laptop: does it learn?
    "quick": TrainSettings(model=LongNetConfig.named("nano"), tokens=8192, steps=60),
    # Ten minutes on two cores: many short sequences first, and long ones at the end (docs/training.md).
    "laptop": TrainSettings(
        model=LongNetConfig.named(
            "nano",
            width=96,
            heads=4,
            kv_heads=4,
            mlp_width=256,
            segment_lengths=(256, 1024, 4096, 65536),
            dilation_rates=(1, 2, 4, 16),
        ),
        tokens=4096,
        steps=1500,
        learning_rate=5e-3,
        warmup=50,
        recompute=False,
        save_every=500,
    ),
    # A quarter of a million tokens in one sequence, on a small machine.
    "long": TrainSettings(
        model=LongNetConfig.named("nano", segment_lengths=(512, 8192, 262144), dilation_rates=(1, 16, 512)),
        tokens=262144,
        steps=20,
        warmup=5,
        learning_rate=3e-3,
        save_every=20,
    ),
    # A node of GPUs.
    "node": TrainSettings(
        model=LongNetConfig.named("base"),
        tokens=1048576,
        steps=10000,
        learning_rate=3e-4,
        warmup=500,
        dtype="bfloat16",
        save_every=420,
    ),
}
