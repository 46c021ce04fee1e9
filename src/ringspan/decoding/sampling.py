"""`Sampler`: picks the next token from logits, greedily or at random with a seed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ringspan.geometry import as_int


class Sampler:
    """Picks a token for each row of logits. The same seed and logits give the same tokens on any device.

    Args:
        temperature: divides the logits; 0 always takes the most likely token.
        top_k: sample from this many of the most likely tokens; 0 for all.
        top_p: sample from the smallest set of most likely tokens with at least this total probability; 1 for all.
        seed: of the random numbers.

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
            raise ValueError(f"temperature={temperature}: must be at least 0; 0 takes the most likely token")
        if top_k < 0:
            raise ValueError(f"top_k={top_k}: must be at least 0; 0 for all tokens")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p={top_p}: must be above 0 and at most 1; 1 for all tokens")
        if not -(2**63) <= seed < 2**64:
            raise ValueError(f"seed={seed}: must have at most 64 bits")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self._random = torch.Generator().manual_seed(seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """Tokens (batch,) from logits (batch, vocabulary)."""
        if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[1] == 0:
            found = tuple(logits.shape) if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
            raise ValueError(
                f"logits are {found}: must be a tensor (batch, vocabulary); take [:, -1] of (batch, rows, vocabulary)"
            )
        scores = logits.detach().double().cpu()
        highest = scores.amax(-1, keepdim=True)
        if not highest.isfinite().all():  # NaN propagates
            raise ValueError("logits are not finite: the model has diverged, or its file is corrupt")
        if self.temperature == 0:
            return scores.argmax(-1).to(logits.device)
        values, tokens = scores.topk(min(self.top_k or scores.shape[-1], scores.shape[-1]))
        probabilities = ((values - highest) / self.temperature).softmax(
            -1
        )  # subtract first, so that nothing overflows to NaN
        # Keep a token if more likely tokens do not reach top_p already.
        probabilities = probabilities.masked_fill(probabilities.cumsum(-1) - probabilities >= self.top_p, 0.0)
        drawn = torch.multinomial(probabilities, 1, generator=self._random)
        return tokens.gather(-1, drawn).squeeze(-1).to(logits.device)
