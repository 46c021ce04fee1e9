"""Masks of Transformers models: what `register` gives to models instead of one, and which masks a pattern expresses.

Imports without Transformers. Some models request a mask and then compute attention themselves; None would silently run
them without a mask, but any use of a `MaskDescription` raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

import ringspan as rs

MaskFunction = Callable[..., Any]
REFUSAL = (
    "this model uses the attention mask itself, and ringspan builds none, so its attention cannot be replaced; use "
    "attn_implementation='eager'"
)


@dataclass(frozen=True, eq=False)
class MaskDescription:
    """Describes a mask that is never built. Not a tensor; any use as one raises."""

    causal: bool
    kv_length: int  # keys, those in a cache included
    padding: Tensor | None  # (batch, kv_length), bool, False for padding; None without padding
    lengths: Tensor | None  # of packed documents, int64; None for one document, or under torch.compile
    pattern: rs.Pattern  # of the model's own mask: full, a sliding window, or chunks

    def _refuse(self, *_: object) -> NoReturn:
        raise ValueError(REFUSAL)

    # Python would accept these or raise an unclear error. All other uses reach __torch_function__.
    __bool__ = __len__ = __iter__ = __getitem__ = __invert__ = __neg__ = __float__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __and__ = __or__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> NoReturn:
        # An AttributeError, so that hasattr() still works.
        raise AttributeError(f"attention_mask.{name}: {REFUSAL}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise ValueError(f"{getattr(func, '__name__', func)} of an attention mask: {REFUSAL}")


@dataclass(frozen=True, eq=False)
class KnownMasks:
    """The mask functions of Transformers that a pattern can express, by function and by code object."""

    causal: MaskFunction
    both: MaskFunction
    combined: Any  # the code of each intersection of masks
    packed: set[Any]  # the codes that keep documents apart, and map rows to positions in their documents
    remapped: Any  # the latter of these
    overlays: dict[tuple[str, bool], set[Any]]  # by kind and causality: the codes that a mask combines

    @staticmethod
    def of(masks: Any) -> KnownMasks:
        """Those of `transformers.masking_utils`."""
        causal, both = masks.causal_mask_function, masks.bidirectional_mask_function
        overlays = {
            ("full", True): {causal.__code__},
            ("full", False): {both.__code__},
            ("window", True): {causal.__code__, masks.sliding_window_overlay(1).__code__},
            ("window", False): {both.__code__, masks.sliding_window_bidirectional_overlay(1).__code__},
            ("chunks", True): {causal.__code__, masks.chunked_overlay(1, None).__code__},
        }
        combined = masks.and_masks(causal).__code__
        remapped = masks.remap_positions_for_packed_sequence(causal, None).__code__
        packed = {masks.packed_sequence_mask_function(None).__code__, remapped}
        return KnownMasks(causal, both, combined, packed, remapped, overlays)

    def check(self, function: MaskFunction | None, causal: bool, pattern: rs.Pattern, size: int | None) -> None:
        """Raise unless the function is the mask of this pattern, optionally of packed documents."""
        leaves = list(self.leaves(function))
        codes = {getattr(leaf, "__code__", None) for leaf in leaves}
        kind = {rs.Full: "full", rs.Window: "window", rs.Dilated: "chunks"}[type(pattern)]
        if codes - self.packed != self.overlays.get((kind, causal)) or codes & self.packed not in (set(), self.packed):
            raise own_mask_error(*leaves)
        for leaf in leaves:
            values = _closure(leaf)
            if values.get("sliding_window", size) != size or values.get("chunk_size", size) != size:
                raise own_mask_error(leaf)

    def leaves(self, function: Any) -> Iterator[Any]:
        """The functions that an intersection combines. Under torch.compile, which cannot trace closures, itself."""
        code = None if torch.compiler.is_compiling() else getattr(function, "__code__", None)
        if code is self.combined:
            for part in _closure(function)["mask_functions"]:
                yield from self.leaves(part)
        else:
            yield function
        if code is self.remapped:
            yield from self.leaves(_closure(function)["mask_function"])


def _closure(function: Any) -> dict[str, Any]:
    """The values that a nested function captures, by name."""
    if getattr(function, "__closure__", None) is None:
        return {}
    return {
        name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True)
    }


def own_mask_error(*functions: Any) -> ValueError:
    names = ", ".join(getattr(each, "__qualname__", repr(each)).split(".<locals>")[0] for each in functions)
    return ValueError(
        f"this model builds its own mask ({names}), which a pattern cannot express; use attn_implementation='eager'"
    )


def pattern_of_mask(local_size: int | None, causal: bool, config: Any) -> rs.Pattern:
    """The pattern of a mask that Transformers limits to ``local_size`` tokens: a sliding window or chunks."""
    if local_size is None:
        return rs.Full()
    settings = {name: getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")}
    kinds = [name for name, size in settings.items() if size == local_size]
    if len(kinds) != 1:
        raise ValueError(
            f"a mask of {local_size} tokens, and {settings} in the configuration: cannot tell whether it is a sliding "
            "window or chunks; use attn_implementation='eager'"
        )
    if kinds == ["attention_chunk_size"]:
        return rs.Dilated((local_size,), (1,))
    # A causal window counts the query's own position, a bidirectional one counts the tokens on each side.
    return rs.Window(local_size - 1) if causal else rs.Window(local_size, local_size)


def described(mask: MaskDescription | Tensor | None) -> MaskDescription | None:
    if mask is None or isinstance(mask, MaskDescription):
        return mask
    raise mask_shape_error(mask)


def mask_shape_error(mask: Tensor) -> ValueError:
    return ValueError(
        f"attention_mask of shape {tuple(mask.shape)}: cannot be combined with a pattern; pass a padding mask of "
        "shape (batch, rows)"
    )


def causality(module: nn.Module, argument: bool | None, mask: MaskDescription | None) -> bool:
    """Whether the module is causal. Raises if it does not state it, or if its mask differs."""
    said = getattr(module, "is_causal", None) if argument is None else argument
    name = type(module).__name__
    if said is None:
        raise ValueError(
            f"{name} does not state whether it is causal: set is_causal on its attention modules, or use "
            "attn_implementation='eager'"
        )
    if mask is None and said:
        raise ValueError(
            f"{name} is causal, but its model takes no mask from the mask interface, so it may see the future or "
            "padding: use attn_implementation='eager'"
        )
    if mask is not None and mask.causal != bool(said):
        kinds = ("bidirectional", "causal")
        raise ValueError(
            f"{name} is {kinds[bool(said)]}, but its mask is {kinds[mask.causal]}: set is_causal to "
            f"{mask.causal} on its attention modules, or use attn_implementation='eager'"
        )
    return bool(said)
