"""Counts how often operators run."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountingMode(TorchDispatchMode):
    """Counts calls of operators: those of ringspan by name, and the total."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.total += 1
        if func.namespace == "ringspan":
            self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))
