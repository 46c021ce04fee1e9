"""Settings of a training run, and the presets to start from. Does not import torch."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ringspan.balance import Balanced, work_before
from ringspan.layout import AnyLayout, LayoutName
from ringspan.models.config import LongNetConfig
from ringspan.runtime.settings import check_types, setting, settings_from_json


@dataclass(frozen=True)
class TrainSettings:
    """All settings of a run. The same settings on the same ring reproduce the run bit for bit.

    Fields with a help text are flags of `ringspan train`; ``model`` contributes the fields of `LongNetConfig`.
    """

    model: LongNetConfig = field(default_factory=LongNetConfig)
    data: tuple[str, ...] = ()  # files and folders; if empty, the sources of Python's standard library

    tokens: int = setting(16384, "Sequence length over the whole ring, such as 256k.", "Data")
    batch: int = setting(1, "Sequences per micro-step and data-parallel rank.", "Data")
    accumulate: int = setting(1, "Micro-steps per optimizer step; their gradients are added.", "Data")
    held_out: float = setting(0.05, "Fraction at the end of the text that is held out for evaluation.", "Data")
    documents: bool = setting(
        False, "Files are documents: positions restart in each, and no token attends to another file.", "Data"
    )
    seed: int = setting(0, "Seed of the initial weights and the order of the data.", "Data")

    steps: int = setting(100, "Number of optimizer steps.", "Optimizer")
    learning_rate: float = setting(1e-3, "Peak learning rate of AdamW.", "Optimizer")
    warmup: int = setting(20, "Steps of linear warmup, followed by cosine decay.", "Optimizer")
    final_lr_ratio: float = setting(0.1, "Final learning rate, as a fraction of the peak.", "Optimizer")
    weight_decay: float = setting(0.1, "Weight decay of matrices; norms and sinks have none.", "Optimizer")
    beta1: float = setting(0.9, "AdamW's decay rate of the first moment.", "Optimizer")
    beta2: float = setting(0.95, "AdamW's decay rate of the second moment.", "Optimizer")
    clip: float = setting(1.0, "Maximum gradient norm over all ranks; 0 disables clipping.", "Optimizer")

    ring: int = setting(
        0, "Ranks that share one sequence; 0 means all. Several rings are data parallel.", "Distributed"
    )
    layout: LayoutName = setting(
        "zigzag", "How a sequence is split over the ranks of a ring; balanced needs --documents.", "Distributed"
    )
    weights: Literal["sharded", "replicated"] = setting(
        "sharded", "Shard the weights over all ranks, or replicate them; FSDP2 does both.", "Distributed"
    )
    dtype: Literal["float32", "bfloat16", "float64"] = setting(
        "float32", "Compute dtype. bfloat16 uses autocast: weights stay in float32.", "Distributed"
    )
    recompute: bool = setting(
        True, "Recompute layers in backward. Attention outputs are kept, so this sends nothing.", "Distributed"
    )
    timeout: float = setting(
        1800.0,
        "Seconds in which a rank that waits for a lost one names it and exits; the last 4 are for finding it.",
        "Distributed",
    )

    out: str = setting("ringspan-run", "Folder for settings, metrics, checkpoints and the trained model.", "Output")
    save_every: int = setting(50, "Steps between checkpoints.", "Output")
    keep: int = setting(3, "Number of checkpoints to keep.", "Output")

    metrics_port: int = setting(0, "Serve metrics to Prometheus on this port; 0 disables the server.", "Monitoring")
    metrics_address: str = setting(
        "127.0.0.1", "Address of that server. Any host that reaches it can read the metrics.", "Monitoring"
    )
    measure_communication: bool = setting(
        False, "Time the transfers alone before the first step, and report how much of them is hidden.", "Monitoring"
    )

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("tokens", "batch", "accumulate", "steps", "save_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("ring", "warmup", "seed", "clip", "weight_decay", "metrics_port"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must not be negative")
        for name in ("held_out", "final_lr_ratio", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 0 and below 1")
        for name in ("learning_rate", "timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)}: must be positive")
        for name, bound in (("seed", 2**40), ("timeout", 1e6), ("metrics_port", 2**16)):
            if getattr(self, name) >= bound:
                raise ValueError(f"{name}={getattr(self, name)}: must be below {bound:,.0f}")
        self._check_documents()
        if self.model.vocab_size < 256:
            raise ValueError(
                f"vocab_size={self.model.vocab_size}: must be at least 256, because the text is read as bytes"
            )
        if not self.model.causal:
            raise ValueError("model.causal=False: training predicts the next byte, which needs a causal model")

    def _check_documents(self) -> None:
        if self.layout == "balanced" and not self.documents:
            raise ValueError("layout='balanced': balances packed documents; add --documents, or use zigzag")
        if self.measure_communication and self.documents:
            raise ValueError(
                "measure_communication=True: with --documents, transfers differ from step to step; omit one of them"
            )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> TrainSettings:
        """Parse what `to_json` wrote. Raises ValueError for an unknown key or an invalid value."""
        values = settings_from_json(TrainSettings, text)
        if "model" in values:
            values["model"] = LongNetConfig.from_json(json.dumps(values["model"]))
        if isinstance(values.get("data"), list):
            values["data"] = tuple(values["data"])
        return TrainSettings(**values)

    @staticmethod
    def read(path: Path) -> TrainSettings:
        """Read settings from a file. Raises ValueError, which names the file."""
        try:
            return TrainSettings.from_json(path.read_text())
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}; `ringspan train` writes it into its --out folder") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def changed(self, changes: dict[str, Any]) -> TrainSettings:
        """A copy with some settings replaced. Settings of the model go by their own names, such as ``layers``."""
        of_model = {entry.name for entry in dataclasses.fields(LongNetConfig)}
        model = {name: value for name, value in changes.items() if name in of_model}
        rest = {name: value for name, value in changes.items() if name not in of_model}
        return dataclasses.replace(self, **{"model": dataclasses.replace(self.model, **model), **rest})

    def with_absolute_paths(self) -> TrainSettings:
        """A copy whose paths do not depend on the working directory."""
        data = tuple(os.path.abspath(path) for path in self.data)
        return dataclasses.replace(self, data=data, out=os.path.abspath(self.out))

    def ring_size(self, world: int) -> int:
        """Number of ranks that share a sequence, out of ``world`` ranks."""
        size = self.ring or world
        if world % size:
            raise ValueError(f"ring={size}: must divide the number of ranks, {world}")
        return size

    def ring_layout(self) -> AnyLayout:
        """The layout of the rings. Balanced is by the work of the pattern whose layers have the most of it."""
        if self.layout != "balanced":
            return self.layout
        rows, layers = self.tokens, self.model.layers_by_pattern
        return Balanced(max(layers, key=lambda pattern: len(layers[pattern]) * work_before(pattern, True, rows, rows)))

    def learning_rate_at(self, step: int) -> float:
        """The learning rate of a step; steps count from 0.

        >>> settings = TrainSettings(steps=100, warmup=10, learning_rate=1.0, final_lr_ratio=0.0)
        >>> [round(settings.learning_rate_at(step), 3) for step in (4, 55, 99)]
        [0.5, 0.5, 0.0]
        """
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2
        return self.learning_rate * (self.final_lr_ratio + (1 - self.final_lr_ratio) * cosine)


def choices_of(settings: type, name: str) -> tuple[str, ...]:
    """The values a setting may take; empty if it is not restricted to a list."""
    kind = get_type_hints(settings)[name]
    return get_args(kind) if get_origin(kind) is Literal else ()


@dataclass(frozen=True)
class Preset:
    """Named settings and their purpose."""

    purpose: str
    settings: TrainSettings

    def __str__(self) -> str:
        run = self.settings
        return (
            f"{self.purpose} {run.model.parameters:,} parameters, sequences of {run.tokens:,} tokens, "
            f"{run.steps:,} steps, {run.dtype}, patterns {' and '.join(run.model.patterns)}."
        )


PRESETS: dict[str, Preset] = {
    "quick": Preset(
        "A smoke test: does the loss fall? About a minute on two cores.",
        TrainSettings(model=LongNetConfig.named("nano"), tokens=8192, steps=60),
    ),
    "laptop": Preset(
        "Many short sequences; continue with long ones (docs/training.md). About ten minutes on two cores.",
        TrainSettings(
            model=LongNetConfig.named(
                "nano",
                width=96,
                heads=4,
                kv_heads=4,
                mlp_width=256,
                patterns=("256x1,1024x2,4096x4,65536x16", "256x1,1024x2,4096x4,65536x16 shift 128"),
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
        "One long sequence per step. About four minutes on two ranks and two cores.",
        TrainSettings(
            model=LongNetConfig.named(
                "nano", patterns=("512x1,8192x16,262144x512", "512x1,8192x16,262144x512 shift 256")
            ),
            tokens=262144,
            steps=20,
            warmup=5,
            learning_rate=3e-3,
            save_every=20,
        ),
    ),
    "node": Preset(
        "A node of GPUs. Not measured: it has not been run on a GPU yet.",
        TrainSettings(
            model=LongNetConfig.named(
                "base",
                patterns=(
                    "2048x1,8192x4,32768x16,131072x64,1048576x512",
                    "2048x1,8192x4,32768x16,131072x64,1048576x512 shift 1024",
                ),
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
