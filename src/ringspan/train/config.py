"""Named settings: a place to start from."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ringspan.models.config import LongNetConfig
from ringspan.runtime.settings import check_kinds, described, known_values


@dataclass(frozen=True)
class TrainSettings:
    """A run, whole: the same settings on the same ring give the same run, bit for bit."""

    model: LongNetConfig = field(default_factory=LongNetConfig)
    data: tuple[str, ...] = ()  # files and folders; none means the sources of Python's standard library

    tokens: int = described(16384, "Length of a sequence, over the whole ring, such as 256k.", "Data")
    batch: int = described(1, "Sequences in a micro-step of one data rank.", "Data")
    accumulate: int = described(1, "Micro-steps whose gradients are added up for one step.", "Data")
    held_out: float = described(0.05, "The last share of the text, which is not trained on.", "Data")
    seed: int = described(0, "Decides the first weights and the order of the text.", "Data")

    steps: int = described(100, "How many steps.", "Optimiser")
    learning_rate: float = described(1e-3, "AdamW's rate after the warm-up.", "Optimiser")
    warmup: int = described(20, "Steps of linear warm-up; a cosine follows.", "Optimiser")
    final_share: float = described(0.1, "What the cosine leaves of the rate at the end.", "Optimiser")
    weight_decay: float = described(0.1, "AdamW's decay of matrices; norms have none.", "Optimiser")
    beta1: float = described(0.9, "AdamW's memory of gradients.", "Optimiser")
    beta2: float = described(0.95, "AdamW's memory of their squares.", "Optimiser")
    clip: float = described(1.0, "Norm, over the whole mesh, that gradients are clipped to; 0 is never.", "Optimiser")

    ring: int = described(0, "Ranks that share a sequence; 0 is all. The others are data parallel.", "Ranks")
    layout: Literal["zigzag", "contiguous"] = described("zigzag", "Which rows each rank of a ring holds.", "Ranks")
    weights: Literal["sharded", "replicated"] = described(
        "sharded", "Over all ranks, or a copy on each; by FSDP2.", "Ranks"
    )
    dtype: Literal["float32", "bfloat16", "float64"] = described(
        "float32", "bfloat16 is autocast: weights stay in float32.", "Ranks"
    )
    recompute: bool = described(
        True, "Compute layers again in backward. Attention's outputs are kept: the ring is not walked again.", "Ranks"
    )
    patience: float = described(
        1800.0, "Seconds without an answer after which another rank is given up, and with it the run.", "Ranks"
    )

    out: str = described("ringspan-run", "Folder of settings, metrics, checkpoints and the trained model.", "Output")
    save_every: int = described(50, "Steps between checkpoints.", "Output")
    keep: int = described(3, "Checkpoints that are kept.", "Output")

    def __post_init__(self) -> None:
        check_kinds(self)
        for name in ("tokens", "batch", "accumulate", "steps", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("ring", "warmup", "seed", "clip", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must not be negative")
        for name in ("held_out", "final_share", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 0 and below 1")
        for name in ("learning_rate", "patience"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be positive")
        if self.seed >= 2**40:
            raise ValueError(f"seed={self.seed}: must be below 2**40")
        if self.patience > 1e6:
            raise ValueError(f"patience={self.patience}: must be at most 1e6 seconds, which is eleven days")
        if self.model.vocab_size < 256:
            raise ValueError(f"vocab_size={self.model.vocab_size}: must be at least 256, since text is read as bytes")
        if not self.model.causal:
            raise ValueError("model.causal=False: predicting the next byte needs a causal model")

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> TrainSettings:
        """The settings that `to_json` wrote; a key that we do not know is an error."""
        values = known_values(TrainSettings, text)
        if "model" in values:
            values["model"] = LongNetConfig.from_json(json.dumps(values["model"]))
        if isinstance(values.get("data"), list):
            values["data"] = tuple(values["data"])
        return TrainSettings(**values)

    @staticmethod
    def read(path: Path) -> TrainSettings:
        """The settings in a file."""
        try:
            return TrainSettings.from_json(path.read_text())
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}; `ringspan train` writes it into its --out folder") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def changed(self, changes: dict[str, Any]) -> TrainSettings:
        """These settings with others in their place; those of the model by their own names."""
        of_model = {entry.name for entry in dataclasses.fields(LongNetConfig)}
        model = {name: value for name, value in changes.items() if name in of_model}
        rest = {name: value for name, value in changes.items() if name not in of_model}
        return dataclasses.replace(self, **{"model": dataclasses.replace(self.model, **model), **rest})

    def with_absolute_paths(self) -> TrainSettings:
        """The same run as seen from any folder."""
        data = tuple(os.path.abspath(path) for path in self.data)
        return dataclasses.replace(self, data=data, out=os.path.abspath(self.out))

    def ring_size(self, world: int) -> int:
        """Ranks that share a sequence, of ``world`` ranks in all."""
        size = self.ring or world
        if world % size:
            raise ValueError(f"ring={size}: must divide the number of ranks, {world}")
        return size

    def rate_at(self, step: int) -> float:
        """The learning rate of a step, counted from 0.

        >>> settings = TrainSettings(steps=100, warmup=10, learning_rate=1.0, final_share=0.0)
        >>> settings.rate_at(4), round(settings.rate_at(55), 3), round(settings.rate_at(99), 3)
        (0.5, 0.5, 0.0)
        """
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return self.learning_rate * (self.final_share + (1 - self.final_share) * cosine)


def choices_of(settings: type, name: str) -> tuple[str, ...]:
    """What a setting may be, where only a few words will do; nothing where it is free."""
    kind = get_type_hints(settings)[name]
    return get_args(kind) if get_origin(kind) is Literal else ()


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
