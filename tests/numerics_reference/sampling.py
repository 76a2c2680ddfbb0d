"""C8 of docs/NUMERICS.md: from logits to a filtered distribution and a token."""

import math
from dataclasses import dataclass, field

import numpy as np

from numerics_reference.arithmetic import F32, INFINITY, LOG2E, exp2
from numerics_reference.log_prob import integer, weights
from numerics_reference.noise import token_noise


@dataclass(frozen=True)
class Parameters:
    """The sampling parameters that change a distribution or a draw; eos_token_ids: the model's."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()


def penalise(x: np.ndarray, count: np.ndarray, repetition, presence, frequency) -> np.ndarray:
    """Penalised logits of ids that occur in the prompt or, `count` times, in the completion."""
    x = np.where(x > 0, x / repetition, x * repetition)
    x = x - frequency * count
    return np.where(count > 0, x - presence, x)


def order_of(z: np.ndarray) -> np.ndarray:
    """The ids with z > -inf, in the order of the filters."""
    ids = np.lexsort((np.arange(z.size), -z))
    return ids[z[ids] > -INFINITY]


def kept(z: np.ndarray, p: Parameters) -> np.ndarray:
    """The ids that the filters keep, in their order."""
    ids = order_of(z)
    top = z[ids[0]]
    if p.min_p > 0:
        failing = exp2((z[ids] - top) * LOG2E) < F32(p.min_p)
        ids = ids[: failing.argmax()] if failing.any() else ids
    if p.top_k > 0:
        ids = ids[: p.top_k]
    if p.top_p < 1:
        mass = integer(weights(z[ids], top))
        bound = math.ceil(float(mass.sum()) * float(F32(p.top_p)))
        ids = ids[np.cumsum(mass) - mass < bound]
    return ids


def distribution(logits: np.ndarray, p: Parameters, prompt: list[int], completion: list[int]) -> np.ndarray:
    """The z of the next token; -inf for tokens that cannot be drawn."""
    x = logits.copy()
    for token, bias in p.logit_bias.items():
        x[token] += F32(bias)
    if len(completion) < p.min_tokens:
        x[[*p.stop_token_ids, *p.eos_token_ids]] = -INFINITY
    seen = np.unique([*prompt, *completion])
    count = np.bincount(completion, minlength=x.size)[seen].astype(F32)
    x[seen] = penalise(
        x[seen], count, F32(p.repetition_penalty), F32(p.presence_penalty), F32(p.frequency_penalty)
    )
    if p.temperature == 0:
        return x
    z = x * (F32(1) / F32(p.temperature))
    ids = kept(z, p)
    filtered = np.full_like(z, -INFINITY)
    filtered[ids] = z[ids]
    return filtered


def draw(z: np.ndarray, p: Parameters, sample: int, position: int) -> int:
    if p.temperature > 0:
        z = z + token_noise(p.seed, sample, position, z.size)
    return int(z.argmax())
