"""Which token comes next: the likeliest, or one drawn with a seed from the likely ones. Knows logits, and no model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringspan.geometry import as_int


class Sampler:
    """Chooses a token for each row of logits. The same seed and the same logits give the same tokens, on any device.

    Args:
        temperature: divides the logits; 0 always takes the likeliest token.
        top_k: draw from this many of the likeliest tokens; 0 is all.
        top_p: draw from the fewest likeliest tokens that together have at least this probability; 1 is all.
        seed: decides the draws.

    >>> Sampler(temperature=0)(torch.tensor([[0.0, 2.0, 1.0]])).tolist()
    [1]
    >>> sampler = Sampler(top_k=2, seed=7)
    >>> {int(sampler(torch.tensor([[0.0, 2.0, 1.0]]))) for _ in range(100)}
    {1, 2}
    """

    def __init__(self, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> None:
        for name, value in (("temperature", temperature), ("top_p", top_p)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name}={value!r}: must be a number")
        top_k, seed = as_int("top_k", top_k), as_int("seed", seed)
        if not (temperature >= 0 and math.isfinite(temperature)):
            raise ValueError(f"temperature={temperature}: must be at least 0; 0 takes the likeliest token")
        if top_k < 0:
            raise ValueError(f"top_k={top_k}: must be at least 0; 0 is all tokens")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p={top_p}: must be above 0 and at most 1; 1 is all tokens")
        if not -(2**63) <= seed < 2**64:
            raise ValueError(f"seed={seed}: must have at most 64 bits")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self._random = torch.Generator().manual_seed(seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """Tokens (batch,) from logits (batch, vocabulary)."""
        if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[1] == 0:
            found = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise ValueError(f"logits are {found}: must be a tensor (batch, vocabulary); of longer texts, take [:, -1]")
        scores = logits.detach().double().cpu()
        highest = scores.amax(-1, keepdim=True)
        if not highest.isfinite().all():  # the highest of NaN and anything is NaN
            raise ValueError("logits are not numbers: the model has diverged, or was loaded from a damaged file")
        if self.temperature == 0:
            return scores.argmax(-1).to(logits.device)
        likeliest, tokens = scores.topk(min(self.top_k or scores.shape[-1], scores.shape[-1]))
        odds = ((likeliest - highest) / self.temperature).softmax(-1)  # the difference first: it cannot overflow to NaN
        # A token is drawn from if those that are likelier do not make up top_p already.
        odds = odds.masked_fill(odds.cumsum(-1) - odds >= self.top_p, 0.0)
        drawn = torch.multinomial(odds, 1, generator=self._random)
        return tokens.gather(-1, drawn).squeeze(-1).to(logits.device)
