"""The weights of a Prov-GigaPath slide encoder, from a file or a state dict."""

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ringspan.integrations.tile_grid import position_embedding
from ringspan.integrations.torchscale import without_prefix

_UNUSED = ("mask_token", "decoder")  # the start of names of the decoder with which the encoder was pre-trained


def used_weights(source: str | Path | Mapping[str, Any], prefix: str, embed_dim: int) -> dict[str, Tensor]:
    """The weights whose names start with ``prefix``, by the rest of their names, without those of `_UNUSED`.

    A stored table of position embeddings is compared with the one that the encoder computes, and left out.
    """
    content = _read(Path(source)) if isinstance(source, (str, Path)) else source
    content = content["model"] if isinstance(content.get("model"), Mapping) else content
    weights = without_prefix(content, prefix)
    for name, x in weights.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name!r} is a {type(x).__name__}, not a tensor: pass the state dict of the encoder")
    if "pos_embed" in weights:
        _check_table(weights.pop("pos_embed"), embed_dim)
    return {name: x for name, x in weights.items() if not name.startswith(_UNUSED)}


def _read(path: Path) -> Mapping[str, Any]:
    """The content of a file. Nothing but tensors and plain containers is unpickled."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file  # noqa: PLC0415

            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{path}: holds more than tensors, which is not unpickled. Allow harmless classes with "
            "torch.serialization.add_safe_globals([argparse.Namespace]), or save the tensors as safetensors"
        ) from error
    except OSError:
        raise
    except Exception as error:  # safetensors and torch raise many kinds
        raise ValueError(f"{path}: cannot be read ({error}); the file may be truncated") from error
    if not isinstance(content, Mapping):
        raise ValueError(f"{path}: holds a {type(content).__name__}: must be a state dict")
    return content


def _check_table(table: Tensor, embed_dim: int) -> None:
    """Raise unless the table has a row for CLS and sines and cosines of a square grid: compares two of its edges."""
    side = math.isqrt(max(table.shape[-2] - 1, 0))
    edge = torch.arange(side)
    cells = torch.cat([torch.stack([edge * 0, edge], 1), torch.stack([edge, edge * 0], 1)])
    wanted = position_embedding(cells, embed_dim)
    if table.shape != (1, side**2 + 1, embed_dim) or not torch.allclose(
        table[0, 1 + cells[:, 0] * side + cells[:, 1]].float(), wanted, rtol=0, atol=1e-6
    ):
        raise ValueError(
            f"pos_embed of shape {tuple(table.shape)} is not a table of sines and cosines for embed_dim={embed_dim}: "
            "the weights are those of another model"
        )
