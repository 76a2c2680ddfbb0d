"""C7 of docs/NUMERICS.md: logprobs and entropies. z is [rows, vocab] fp32; -inf is filtered out."""

import itertools
from dataclasses import dataclass

import numpy as np

from numerics_reference.arithmetic import F32, INFINITY, LOG2E, exp2, fma, leaf_bounds, log

ONE = F32(2.0**40)
UNIT = F32(2.0**-40)


@dataclass
class Part:
    """What part of the vocabulary hands on: M, S and D, arrays over rows. M = -inf: an empty part."""

    max: np.ndarray
    sum: np.ndarray
    distance: np.ndarray


def integer(x: np.ndarray) -> np.ndarray:
    return (x * ONE).astype(np.int64)


def weights(z: np.ndarray, top: np.ndarray) -> np.ndarray:
    """exp(z - top) in fp32."""
    return exp2((z - top) * LOG2E)


def weighted_distances(z: np.ndarray, top: np.ndarray) -> np.ndarray:
    w = weights(z, top)
    return w * np.where(w > 0, z - top, F32(0))


def part_of(z: np.ndarray) -> Part:
    top = z.max(-1, initial=-INFINITY)
    shown = np.where(top == -INFINITY, F32(0), top)[:, None]
    total = integer(weights(z, shown)).sum(-1)
    distance = integer(weighted_distances(z, shown)).sum(-1)
    return Part(top, total.astype(F32) * UNIT, distance.astype(F32) * UNIT)


def combine(a: Part, b: Part) -> Part:
    top = np.maximum(a.max, b.max)
    shown = np.where(top == -INFINITY, F32(0), top)
    sums, distances = [], []
    for part in (a, b):
        gap = np.where(part.max == -INFINITY, F32(0), part.max - shown)
        factor = exp2(gap * LOG2E)
        sums.append(part.sum * factor)
        distances.append(fma(gap, part.sum, part.distance) * factor)
    both = (a.max != -INFINITY) & (b.max != -INFINITY)
    one = a.max != -INFINITY
    return Part(
        top,
        np.where(both, sums[0] + sums[1], np.where(one, a.sum, b.sum)),
        np.where(both, distances[0] + distances[1], np.where(one, a.distance, b.distance)),
    )


def sum_rows(z: np.ndarray) -> Part:
    bounds = leaf_bounds(z.shape[-1])
    parts = [part_of(z[:, begin:end]) for begin, end in itertools.pairwise(bounds)]
    while len(parts) > 1:
        parts = [combine(a, b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def log_probs(z: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Of one id in each row."""
    row = sum_rows(z)
    return log_prob(z[np.arange(len(z)), ids], row)


def log_prob(z: np.ndarray, row: Part) -> np.ndarray:
    return (z - row.max) - log(row.sum)


def entropy(row: Part) -> np.ndarray:
    return log(row.sum) - row.distance / row.sum
