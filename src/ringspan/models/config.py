"""`LongNetConfig`: sizes and patterns of a LongNet, the named sizes, and the files of a saved model."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringspan.geometry import Pattern, parse_pattern
from ringspan.runtime.files import atomic_path, write_atomic
from ringspan.runtime.settings import check_types, setting, settings_from_json

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class LongNetConfig:
    """Sizes and options of a LongNet. They determine its weights and its results.

    >>> LongNetConfig.named("tiny").layers
    4
    """

    vocab_size: int = setting(256, "Vocabulary size; 256 for bytes.")
    layers: int = setting(4, "Number of layers, each attention and MLP.")
    width: int = setting(128, "Width of the hidden states.")
    heads: int = setting(4, "Query heads; must divide the width.")
    kv_heads: int = setting(4, "KV heads; must divide the query heads.")
    mlp_width: int = setting(384, "Inner width of the gated MLP.")
    patterns: tuple[str, ...] = setting(
        ("1024x1,4096x4,16384x16", "1024x1,4096x4,16384x16 shift 512"),
        "Pattern of all layers: full, SEGMENTxRATE pairs, 'window N', or a sum. Layers use several in turn.",
    )
    softcap: float = setting(0.0, "Soft cap of the attention scores; 0 for none.")
    sinks: bool = setting(False, "A learned sink for each head and layer: a logit that joins the softmax.")
    causal: bool = setting(True, "A decoder, which predicts the next token; false for an encoder.")
    rotary_base: float = setting(500_000.0, "The longest rotary wavelength is about 6 times this many tokens.")
    norm_eps: float = setting(1e-5, "Epsilon of the norms.")
    tie_embeddings: bool = setting(False, "Use the embedding as the output head.")

    def __post_init__(self) -> None:
        if isinstance(self.patterns, list):  # JSON has no tuples
            object.__setattr__(self, "patterns", tuple(self.patterns))
        check_types(self)
        for name in ("vocab_size", "layers", "width", "heads", "kv_heads", "mlp_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"heads={self.heads}: must divide width={self.width}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads}: must divide heads={self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"width / heads = {self.head_dim}: must be even for rotary embeddings")
        if not self.rotary_base > 0:
            raise ValueError(f"rotary_base={self.rotary_base}: must be positive")
        for name in ("norm_eps", "softcap"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)}: must not be negative")
        if not self.patterns:
            raise ValueError("patterns=(): give at least one, such as 'full'")
        patterns = [parse_pattern(text) for text in self.patterns]
        for pattern in patterns:
            pattern.check_heads(self.kv_heads)
        object.__setattr__(self, "patterns", tuple(pattern.text for pattern in patterns))

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def pattern_of(self, layer: int) -> Pattern:
        """The pattern of a layer: ``patterns`` repeat over the layers.

        >>> [LongNetConfig(patterns=("window 3", "window 3", "full")).pattern_of(i).text for i in range(4)]
        ['window 3', 'window 3', 'full', 'window 3']
        """
        return parse_pattern(self.patterns[layer % len(self.patterns)])

    @property
    def layers_by_pattern(self) -> dict[Pattern, list[int]]:
        """The patterns in use, each with its layers."""
        found: dict[Pattern, list[int]] = {}
        for layer in range(self.layers):
            found.setdefault(self.pattern_of(layer), []).append(layer)
        return found

    @property
    def parameters(self) -> int:
        """Number of weights of the model."""
        kv_width = self.head_dim * self.kv_heads
        attention = 2 * self.width * (self.width + kv_width)
        sinks = self.heads if self.sinks else 0
        layer = attention + sinks + 3 * self.width * self.mlp_width + 2 * self.width
        head = 0 if self.tie_embeddings else self.vocab_size * self.width
        return self.layers * layer + self.vocab_size * self.width + self.width + head

    @staticmethod
    def named(name: str, **changes: Any) -> LongNetConfig:
        """A named size, with optional changes."""
        if name not in NAMED:
            raise ValueError(f"size {name!r}: must be one of {', '.join(NAMED)}")
        return dataclasses.replace(NAMED[name], **changes)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> LongNetConfig:
        """Read the output of `to_json`. Unknown keys are an error."""
        return LongNetConfig(**settings_from_json(LongNetConfig, text))


NAMED = {
    "nano": LongNetConfig(layers=2, width=64, heads=2, kv_heads=2, mlp_width=192),
    "tiny": LongNetConfig(),
    "small": LongNetConfig(layers=8, width=512, heads=8, kv_heads=4, mlp_width=1408),
    "base": LongNetConfig(
        layers=12,
        width=768,
        heads=12,
        kv_heads=4,
        mlp_width=2048,
        patterns=("2048x1,8192x4,32768x16,131072x64", "2048x1,8192x4,32768x16,131072x64 shift 1024"),
    ),
}


def save_weights(folder: Path, config: str, weights: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors atomically. Tied weights are written once for each name."""
    from safetensors import SafetensorError  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    copies = {name: weight.detach().cpu().clone().contiguous() for name, weight in weights.items()}
    with atomic_path(folder / WEIGHTS, unique=False) as temporary:
        try:
            save_file(copies, temporary)
        except SafetensorError as error:
            raise OSError(f"{folder / WEIGHTS}: cannot be written ({error})") from error
        write_atomic(folder / CONFIG, config, durable=False)


def load_weights(folder: Path) -> tuple[str, dict[str, Tensor]]:
    """Read the configuration and the weights of a saved model."""
    from safetensors import SafetensorError  # noqa: PLC0415
    from safetensors.torch import load_file  # noqa: PLC0415

    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder / name}: no such file; a saved model is a folder with {CONFIG} and {WEIGHTS}, such as "
                "`ringspan train` writes"
            )
    try:
        return (folder / CONFIG).read_text(), load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / WEIGHTS}: cannot be read ({error}); the file may be truncated") from error
