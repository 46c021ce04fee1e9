"""A model on disk: config.json and model.safetensors in one folder. Needs the extra ``train``."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def save_weights(folder: Path, config: str, weights: dict[str, Tensor]) -> None:
    """Write a model, whole or not at all. Tensors that share memory (tied embeddings) are written for each name."""
    from safetensors import SafetensorError  # noqa: PLC0415
    from safetensors.torch import save_file  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{WEIGHTS}.writing"
    try:
        save_file({name: weight.detach().cpu().clone().contiguous() for name, weight in weights.items()}, unfinished)
    except SafetensorError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(f"{folder / WEIGHTS}: cannot be written ({error})") from error
    (folder / CONFIG).write_text(config)
    unfinished.replace(folder / WEIGHTS)


def load_weights(folder: Path) -> tuple[str, dict[str, Tensor]]:
    """The configuration and the weights in a folder."""
    from safetensors import SafetensorError  # noqa: PLC0415
    from safetensors.torch import load_file  # noqa: PLC0415

    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise FileNotFoundError(
                f"{folder / name}: not there; a saved model is a folder with {CONFIG} and {WEIGHTS}"
            )
    try:
        return (folder / CONFIG).read_text(), load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / WEIGHTS}: cannot be read ({error}); is it whole?") from error
