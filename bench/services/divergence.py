"""Where the outputs of one prompt diverge under different settings, and how far their probabilities differ.

At each position up to and including the first at which the tokens differ, all outputs continue the same
text, so their distributions are comparable. There the maximum probability divergence is the largest
difference, over the tokens that every setting lists among its most likely, between any two settings'
probabilities.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from isobit.results import TokenLogprobs, TopLogprobs


@dataclass(frozen=True)
class Divergence:
    """Over the comparable positions of one or more prompts."""

    positions: int
    unequal_positions: int  # a listed token id, or a bit of a logprob, differs
    mean: float
    maximum: float
    first_difference: int | None  # the first position whose tokens differ

    @classmethod
    def merge(cls, prompts: Sequence[Self]) -> Self:
        positions = sum(one.positions for one in prompts)
        differences = [one.first_difference for one in prompts if one.first_difference is not None]
        return cls(
            positions,
            sum(one.unequal_positions for one in prompts),
            sum(one.mean * one.positions for one in prompts) / max(positions, 1),
            max((one.maximum for one in prompts), default=0.0),
            min(differences, default=None),
        )


def distinct(outputs: Sequence[TokenLogprobs]) -> int:
    """How many different rows of tokens there are."""
    return len({output.token_ids.tobytes() for output in outputs})


def first_difference(outputs: Sequence[TokenLogprobs]) -> int | None:
    """The first position at which not all have the same token, or at which some have ended; None if equal."""
    shortest = min(len(output.token_ids) for output in outputs)
    tokens = np.stack([output.token_ids[:shortest] for output in outputs])
    differing = np.flatnonzero((tokens != tokens[0]).any(axis=0))
    if differing.size:
        return int(differing[0])
    return shortest if any(len(output.token_ids) != shortest for output in outputs) else None


def measure(outputs: Sequence[TokenLogprobs]) -> Divergence:
    """Compares the outputs of one prompt; each has its most likely tokens at every position."""
    difference = first_difference(outputs)
    shortest = min(len(output.token_ids) for output in outputs)
    positions = shortest if difference is None else min(difference + 1, shortest)
    gaps = np.zeros(positions)
    unequal = 0
    for position in range(positions):
        lists = [output.top[position] for output in outputs]
        sampled = {_bits(output.token_ids[position], output.logprobs[position]) for output in outputs}
        if len(sampled) > 1 or len({_bits(top.token_ids, top.logprobs) for top in lists}) > 1:
            unequal += 1
            gaps[position] = _largest_gap(lists)
    return Divergence(
        positions,
        unequal,
        float(gaps.mean()) if positions else 0.0,
        float(gaps.max(initial=0.0)),
        difference,
    )


def _bits(token_ids: np.ndarray, logprobs: np.ndarray) -> bytes:
    return token_ids.tobytes() + logprobs.tobytes()


def _largest_gap(lists: Sequence[TopLogprobs]) -> float:
    tables = [
        dict(zip(top.token_ids.tolist(), np.exp(top.logprobs.astype(np.float64)), strict=True))
        for top in lists
    ]
    common = set.intersection(*(set(table) for table in tables))
    gaps = (max(table[token] for table in tables) - min(table[token] for table in tables) for token in common)
    return float(max(gaps, default=0.0))
