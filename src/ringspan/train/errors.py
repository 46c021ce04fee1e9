"""The one error of runs."""

from __future__ import annotations


class RunError(RuntimeError):
    """A run that cannot start, or must not go on. The message is for its user: what is wrong, and the way out."""
