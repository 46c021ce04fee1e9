"""The one error of rings."""


class RingError(RuntimeError):
    """A ring that cannot be had, ranks that disagree, or a peer that is gone. Nothing falls back in silence."""
