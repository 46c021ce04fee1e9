"""What is verified: ringspan itself, or any function with the signature that `ringspan.evidence.peers` describes."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor

from ringspan.api import attention
from ringspan.evidence.peers import Attention
from ringspan.geometry import Full, Pattern
from ringspan.layout import Layout, LayoutName, check_layout_name
from ringspan.ring import Ring


@dataclass(frozen=True)
class Subject:
    """What is verified, as something that can be handed to another process.

    ``target`` is ``package.module:function``, or empty for ringspan. Functions of others compute plain attention.
    """

    target: str = ""
    pattern: Pattern = field(default_factory=Full)
    layout: LayoutName = "zigzag"
    equal_shards: bool = False  # whether it needs as many rows on each rank

    @property
    def is_ringspan(self) -> bool:
        return not self.target

    @property
    def name(self) -> str:
        return self.target or f"ringspan, {self.pattern.text.partition(' interleaved')[0]}"

    @staticmethod
    def load(target: str) -> Subject:
        """Another function; its attributes ``layout`` and ``equal_shards`` say which rows a rank holds."""
        function = _find(target)
        layout: Any = getattr(function, "layout", "contiguous")
        check_layout_name(layout)
        return Subject(target, Full(), layout, bool(getattr(function, "equal_shards", False)))

    def on(self, group: dist.ProcessGroup) -> Bound:
        """The subject as a rank of a group calls it."""
        ring = Ring(group, layout=self.layout, min_size=1)
        return Bound(self, ring, None if self.is_ringspan else _find(self.target))


@dataclass(frozen=True)
class Bound:
    """A subject on a rank. For functions of others, ``ring`` says who holds what, and does nothing else."""

    subject: Subject
    ring: Ring
    function: Attention | None

    def layout_of(self, tokens: int) -> Layout:
        return self.ring.layout_of(tokens)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pattern: Pattern, causal: bool, tokens: int) -> Tensor:
        """This rank's rows of the output."""
        if self.function is not None:
            return self.function(q, k, v, causal=causal, group=self.ring.group)
        return attention(q, k, v, pattern=pattern, causal=causal, ring=self.ring, seq_len=tokens)


def _find(target: str) -> Attention:
    module_name, colon, function_name = target.partition(":")
    if not colon:
        raise ValueError(f"{target!r}: say package.module:function")
    here = str(Path.cwd())
    if here not in sys.path:  # as `python -m` has it: a user's own module lies where the command is started
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{target!r}: {error}; start in the folder that holds it, or install it") from error
    except AttributeError as error:
        raise ValueError(f"{target!r}: {error}") from error
    if not callable(function):
        raise ValueError(f"{target!r}: a {type(function).__name__}, but must be a function")
    return cast(Attention, function)
