"""What launched ranks tell one another: answers as JSON. Nothing that comes from a peer is unpickled."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch

from ringspan.evidence.texts import exchange_texts
from ringspan.verify import examine

_KINDS = {
    kind.__name__: kind
    for kind in vars(examine).values()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == examine.__name__
}


def tell_all(mine: Any, device: torch.device) -> list[Any]:
    """What each rank of the whole group has to tell, in order of rank."""
    return [read(text) for text in exchange_texts(write(mine), device)]


def write(told: Any) -> str:
    """Answers as JSON; a kind of answer is known by its name.

    >>> write({"work": examine.WorkAnswer(3)})
    '{"work": {"kind": "WorkAnswer", "flops": 3}}'
    """
    return json.dumps(told, default=lambda answer: {"kind": type(answer).__name__, **vars(answer)})


def read(text: str) -> Any:
    """What `write` has written.

    >>> read('{"work": {"kind": "WorkAnswer", "flops": 3}}')
    {'work': WorkAnswer(flops=3)}
    """
    return json.loads(text, object_hook=_answer)


def _answer(values: dict[str, Any]) -> Any:
    if "kind" not in values:
        return values
    figures = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items() if name != "kind"}
    return _KINDS[values["kind"]](**figures)
