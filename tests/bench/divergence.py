"""Where the outputs of one prompt part under different settings, and how far apart their probabilities are.

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
    first_parting: int | None  # the first position whose tokens differ

    @classmethod
    def merge(cls, parts: Sequence[Self]) -> Self:
        positions = sum(part.positions for part in parts)
        partings = [part.first_parting for part in parts if part.first_parting is not None]
        return cls(
            positions,
            sum(part.unequal_positions for part in parts),
            sum(part.mean * part.positions for part in parts) / max(positions, 1),
            max((part.maximum for part in parts), default=0.0),
            min(partings, default=None),
        )


def distinct(outputs: Sequence[TokenLogprobs]) -> int:
    """How many different rows of tokens there are."""
    return len({output.token_ids.tobytes() for output in outputs})


def first_parting(outputs: Sequence[TokenLogprobs]) -> int | None:
    """The first position at which not all have the same token, or at which some have ended; None if equal."""
    shortest = min(len(output.token_ids) for output in outputs)
    tokens = np.stack([output.token_ids[:shortest] for output in outputs])
    parted = np.flatnonzero((tokens != tokens[0]).any(axis=0))
    if parted.size:
        return int(parted[0])
    return shortest if any(len(output.token_ids) != shortest for output in outputs) else None


def measure(outputs: Sequence[TokenLogprobs]) -> Divergence:
    """Compares the outputs of one prompt; each has its most likely tokens at every position."""
    parting = first_parting(outputs)
    shortest = min(len(output.token_ids) for output in outputs)
    positions = shortest if parting is None else min(parting + 1, shortest)
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
        parting,
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
