"""What launched ranks tell one another: answers as JSON. Nothing that comes from a peer is unpickled."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch

from ringspan.evidence.texts import exchange_texts
from ringspan.verify import check, exactness, examination, memory, reach, speed, wire, work

_KINDS = {
    name: kind
    for module in (check, examination, exactness, memory, reach, speed, wire, work)
    for name, kind in vars(module).items()
    if isinstance(kind, type) and dataclasses.is_dataclass(kind)
}


def tell_all(mine: Any, device: torch.device) -> list[Any]:
    """What each rank of the whole group has to tell, in order of rank."""
    return [read(text) for text in exchange_texts(write(mine), device)]


def write(told: Any) -> str:
    """Answers as JSON; a kind of answer is known by its name.

    >>> write({"work": work.WorkAnswer(3, 0.5)})
    '{"work": {"kind": "WorkAnswer", "flops": 3, "share": 0.5}}'
    """
    return json.dumps(told, default=lambda answer: {"kind": type(answer).__name__, **vars(answer)})


def read(text: str) -> Any:
    """What `write` has written.

    >>> read('{"work": {"kind": "WorkAnswer", "flops": 3, "share": 0.5}}')
    {'work': WorkAnswer(flops=3, share=0.5)}
    """
    return json.loads(text, object_hook=_answer)


def _answer(values: dict[str, Any]) -> Any:
    if "kind" not in values:
        return values
    figures = {name: tuple(x) if isinstance(x, list) else x for name, x in values.items() if name != "kind"}
    return _KINDS[values["kind"]](**figures)
