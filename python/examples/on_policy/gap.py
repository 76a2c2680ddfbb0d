"""The gap between sampler and trainer: whether a token's two logprobs have the same bits, and if not, how
far apart they are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from completions import Completion
from ranks import RunError


class GapError(RunError):
    """Sampler and trainer computed different logprobs for the same tokens and weights."""


@dataclass(frozen=True)
class Gap:
    """Over the tokens of a batch."""

    tokens: int
    unequal: int  # tokens whose bits differ, or that are NaN
    max_abs_dlogp: float
    kl: float  # estimates KL(rollout || trainer) from the rollout's tokens: the mean of r - 1 - log r (k3)
    first: str  # where the first unequal or impossible token is, with both logprobs; empty if there is none
    kl_k1: float = 0.0  # the same KL by the mean of -log r
    kl_k2: float = 0.0  # and by the mean of its half square
    impossible: int = 0  # tokens with a logprob, on either side, that no token is drawn with

    def __add__(self, other: "Gap") -> "Gap":
        """Of both batches."""
        tokens = self.tokens + other.tokens

        def joint(ours: float, theirs: float) -> float:
            return (ours * self.tokens + theirs * other.tokens) / max(tokens, 1)

        return Gap(
            tokens,
            self.unequal + other.unequal,
            max(self.max_abs_dlogp, other.max_abs_dlogp),
            joint(self.kl, other.kl),
            self.first or other.first,
            joint(self.kl_k1, other.kl_k1),
            joint(self.kl_k2, other.kl_k2),
            self.impossible + other.impossible,
        )

    @classmethod
    def between(cls, completions: Sequence[Completion], trainer: Sequence[np.ndarray]) -> "Gap":
        """trainer: for each completion the trainer's logprobs, fp32 [tokens], by the weights that drew it."""
        sampled = np.concatenate([c.logprobs for c in completions])
        computed = np.concatenate(trainer)
        if sampled.dtype != np.float32 or computed.dtype != np.float32 or sampled.shape != computed.shape:
            raise ValueError(
                f"trainer: expected float32 {sampled.shape}, got {computed.dtype} {computed.shape}"
            )
        unequal = (sampled.view(np.uint32) != computed.view(np.uint32)) | np.isnan(sampled)
        impossible = np.zeros(len(sampled), bool)
        for side in (sampled, computed):
            impossible |= ~(np.isfinite(side) & (side <= 0))
        odd = unequal | impossible
        with np.errstate(invalid="ignore", over="ignore"):
            dlogp = sampled.astype(np.float64) - computed
            # No number says how far a NaN, or equal infinities, are apart: nothing of that may vanish.
            dlogp[np.isnan(dlogp)] = np.inf
            k3, k2 = np.expm1(-dlogp) + dlogp, 0.5 * dlogp**2

        def mean(values: np.ndarray) -> float:
            if not np.isfinite(values).all():
                return math.nan if np.isnan(values).any() else float(values.sum())
            return math.fsum(values.tolist()) / max(len(values), 1)

        return cls(
            tokens=len(sampled),
            unequal=int(unequal.sum()),
            max_abs_dlogp=float(np.abs(dlogp).max(initial=0.0)),
            kl=mean(k3),
            kl_k1=mean(dlogp),
            kl_k2=mean(k2),
            first=_where(completions, trainer, int(odd.argmax())) if odd.any() else "",
            impossible=int(impossible.sum()),
        )


def _where(completions: Sequence[Completion], trainer: Sequence[np.ndarray], token: int) -> str:
    for completion, logprobs in zip(completions, trainer, strict=True):
        if token < len(logprobs):
            pair = {"rollout": completion.logprobs[token], "trainer": logprobs[token]}
            told = ", ".join(f"{side} {x:.9g} ({x.view(np.uint32):#010x})" for side, x in pair.items())
            return f"prompt {completion.number}, sample {completion.index}, token {token}: {told}"
        token -= len(logprobs)
    raise IndexError(token)
