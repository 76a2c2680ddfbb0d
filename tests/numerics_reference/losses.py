"""Losses of C14 of docs/NUMERICS.md, on NumPy arrays: of tokens, sequences and pairs, with their gradients.

A loss is a pair: values and gradients with regard to the logprobs, before what sums them.
"""

import numpy as np

from numerics_reference.arithmetic import F32, LOG2E, exp2, log, log_of_reduced, padded_tree, sigmoid

Loss = tuple[np.ndarray, np.ndarray]


def exp(x: np.ndarray) -> np.ndarray:
    return exp2(x * LOG2E)


# ---- Tokens


def policy_gradient(logprob, advantage) -> Loss:
    return -(advantage * logprob), -advantage


def clamp(x, low, high) -> np.ndarray:
    return np.where(x < low, low, np.where(x > high, high, x))


def clipped(logprob, old, advantage, low: float, high: float) -> Loss:
    with np.errstate(invalid="ignore", over="ignore"):
        r = exp(logprob - old)
        u = r * advantage
        c = clamp(r, F32(1) - F32(low), F32(1) + F32(high)) * advantage
    gradient = np.where(u <= c, -u, np.where(u > c, F32(0), F32(np.nan)))
    return -np.minimum(u, c), gradient  # np.minimum keeps NaN


def with_reference(loss: Loss, logprob, reference, kl: float) -> Loss:
    x = reference - logprob
    e = exp(x)
    return loss[0] + F32(kl) * ((e - x) - F32(1)), loss[1] + F32(kl) * (F32(1) - e)


def weighed(loss: Loss, weight) -> Loss:
    return loss[0] * weight, loss[1] * weight


def cispo(logprob, old, advantage, weight, low: float, high: float) -> Loss:
    ratio = clamp(exp(logprob - old), F32(1) - F32(low), F32(1) + F32(high))
    return weighed(policy_gradient(logprob, ratio * advantage), weight)


# ---- What losses are made of


def log1p(e: np.ndarray) -> np.ndarray:
    near_zero = log_of_reduced(e, np.zeros_like(e))
    return np.where(e <= F32(0.25), near_zero, log(F32(1) + e))


def log_sigmoid(x: np.ndarray) -> Loss:
    negative = x < 0
    value = np.where(negative, x, F32(0)) - log1p(exp(np.where(negative, x, -x)))
    return value, sigmoid(-x)


def functions(x: np.ndarray) -> dict[str, Loss]:
    """By the operators' names."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logarithm = log(x)
        inverse = np.where(np.isnan(logarithm), logarithm, F32(1) / x)
    return {
        "exp": (exp(x), exp(x)),
        "log": (logarithm, inverse),
        "sigmoid": (sigmoid(x), sigmoid(x) * sigmoid(-x)),
        "log_sigmoid": log_sigmoid(x),
    }


def parts(x: np.ndarray, lengths: list[int]) -> list[np.ndarray]:
    return np.split(x, np.cumsum(lengths)[:-1])


def sequence_sums(x: np.ndarray, lengths: list[int]) -> np.ndarray:
    return np.array([padded_tree(part) if len(part) else F32(0) for part in parts(x, lengths)], F32)


# ---- Sequences and pairs


def gspo(logprob, old, advantage, weight, lengths: list[int], low: float, high: float) -> Loss:
    """The values are those of sequences, the gradients those of tokens."""
    counts = np.array(lengths, F32)
    mean = sequence_sums(logprob - old, lengths) / counts
    value, gradient = weighed(clipped(mean, F32(0), advantage, low, high), weight)
    return value, np.repeat(gradient / counts, lengths)


def dpo(logprob, reference, weight, lengths: list[int], beta: float) -> Loss:
    """The values are those of pairs, the gradients those of tokens."""
    sums = sequence_sums(logprob - reference, lengths)
    value, slope = log_sigmoid(F32(beta) * (sums[::2] - sums[1::2]))
    gradient = (slope * -weight) * F32(beta)
    return -value * weight, np.repeat(np.stack([gradient, -gradient], -1).reshape(-1), lengths)
