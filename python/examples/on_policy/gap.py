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
    first: str  # where the first unequal token is, with both logprobs; empty if all are equal
    kl_k1: float = 0.0  # the same KL by the mean of -log r
    kl_k2: float = 0.0  # and by the mean of its half square

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
        dlogp = np.where(unequal, sampled.astype(np.float64) - computed, 0.0)

        def mean(values: np.ndarray) -> float:
            return math.fsum(values.tolist()) / max(len(values), 1)

        return cls(
            tokens=len(sampled),
            unequal=int(unequal.sum()),
            max_abs_dlogp=float(np.abs(dlogp).max(initial=0.0)),
            kl=mean(np.expm1(-dlogp) + dlogp),
            kl_k1=mean(dlogp),
            kl_k2=mean(0.5 * dlogp**2),
            first=_where(completions, trainer, int(unequal.argmax())) if unequal.any() else "",
        )


def _where(completions: Sequence[Completion], trainer: Sequence[np.ndarray], token: int) -> str:
    for completion, logprobs in zip(completions, trainer, strict=True):
        if token < len(logprobs):
            pair = {"rollout": completion.logprobs[token], "trainer": logprobs[token]}
            told = ", ".join(f"{side} {x:.9g} ({x.view(np.uint32):#010x})" for side, x in pair.items())
            return f"prompt {completion.number}, sample {completion.index}, token {token}: {told}"
        token -= len(logprobs)
    raise IndexError(token)
