"""C7 of docs/NUMERICS.md: logprobs and entropies. z is [rows, vocab] fp32; -inf is filtered out."""

import itertools
from dataclasses import dataclass

import numpy as np

from numerics_reference.arithmetic import F32, INFINITY, LOG2E, exp2, fma, leaf_bounds, log

ONE = F32(2.0**40)
UNIT = F32(2.0**-40)


@dataclass
class RangeResult:
    """M, S and D of a range of the vocabulary, or of several combined; arrays over rows. M = -inf: no id."""

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


def result_of_range(z: np.ndarray) -> RangeResult:
    top = z.max(-1, initial=-INFINITY)
    shown = np.where(top == -INFINITY, F32(0), top)[:, None]
    total = integer(weights(z, shown)).sum(-1)
    distance = integer(weighted_distances(z, shown)).sum(-1)
    return RangeResult(top, total.astype(F32) * UNIT, distance.astype(F32) * UNIT)


def combine(a: RangeResult, b: RangeResult) -> RangeResult:
    top = np.maximum(a.max, b.max)
    shown = np.where(top == -INFINITY, F32(0), top)
    sums, distances = [], []
    for one in (a, b):
        gap = np.where(one.max == -INFINITY, F32(0), one.max - shown)
        factor = exp2(gap * LOG2E)
        sums.append(one.sum * factor)
        distances.append(fma(gap, one.sum, one.distance) * factor)
    both = (a.max != -INFINITY) & (b.max != -INFINITY)
    first = a.max != -INFINITY
    return RangeResult(
        top,
        np.where(both, sums[0] + sums[1], np.where(first, a.sum, b.sum)),
        np.where(both, distances[0] + distances[1], np.where(first, a.distance, b.distance)),
    )


def sum_rows(z: np.ndarray) -> RangeResult:
    bounds = leaf_bounds(z.shape[-1])
    results = [result_of_range(z[:, begin:end]) for begin, end in itertools.pairwise(bounds)]
    while len(results) > 1:
        results = [combine(a, b) for a, b in zip(results[::2], results[1::2], strict=True)]
    return results[0]


def log_probs(z: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Of one id in each row."""
    row = sum_rows(z)
    return log_prob(z[np.arange(len(z)), ids], row)


def log_prob(z: np.ndarray, row: RangeResult) -> np.ndarray:
    return (z - row.max) - log(row.sum)


def entropy(row: RangeResult) -> np.ndarray:
    return log(row.sum) - row.distance / row.sum
