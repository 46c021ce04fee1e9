"""Ctrl-C during training: the first one asks for a stop between two steps, the second stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupts_to(ask: Callable[[], None], tell: Callable[[], None]) -> Iterator[None]:
    """While the block runs, the first SIGINT calls ``ask`` and ``tell``; the next one raises KeyboardInterrupt.

    ``tell`` may print: it runs in a thread of its own, since a signal can arrive in the middle of a write.
    """

    def on_first(*_: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ask()
        threading.Thread(target=tell).start()

    before = signal.signal(signal.SIGINT, on_first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
