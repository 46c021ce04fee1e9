"""Named settings: a place to start from."""

from __future__ import annotations

from dataclasses import dataclass

from ringspan.models.config import LongNetConfig
from ringspan.train.settings import TrainSettings


@dataclass(frozen=True)
class Preset:
    """Settings, and what they are for."""

    purpose: str
    settings: TrainSettings

    def __str__(self) -> str:
        run = self.settings
        reach = " ".join(map(str, run.model.segment_lengths))
        return (
            f"{self.purpose} {run.model.parameters:,} parameters, sequences of {run.tokens:,} tokens, "
            f"{run.steps:,} steps, segments {reach}, {run.dtype}."
        )


PRESETS: dict[str, Preset] = {
    "quick": Preset(
        "Does it learn? About a minute on two cores.",
        TrainSettings(model=LongNetConfig.named("nano"), tokens=8192, steps=60),
    ),
    "laptop": Preset(
        "Many short sequences, long ones later (docs/training.md). About ten minutes on two cores.",
        TrainSettings(
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
    ),
    "long": Preset(
        "One long sequence a step. About four minutes on two cores, with two ranks.",
        TrainSettings(
            model=LongNetConfig.named("nano", segment_lengths=(512, 8192, 262144), dilation_rates=(1, 16, 512)),
            tokens=262144,
            steps=20,
            warmup=5,
            learning_rate=3e-3,
            save_every=20,
        ),
    ),
    "node": Preset(
        "A node of GPUs. Not measured: no GPU has run it yet.",
        TrainSettings(
            model=LongNetConfig.named(
                "base",
                segment_lengths=(2048, 8192, 32768, 131072, 1048576),
                dilation_rates=(1, 4, 16, 64, 512),
            ),
            tokens=1048576,
            steps=10000,
            learning_rate=3e-4,
            warmup=500,
            dtype="bfloat16",
            save_every=420,
        ),
    ),
}
