"""A step's completions and what the loss needs of them: advantages, staleness. No I/O, no ranks."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np


@dataclass
class Completion:
    """One sample of one prompt."""

    number: int  # of its prompt, counted from the run's first; decides about prompt and seed
    index: int  # among the prompt's samples
    prompt: list[int]
    tokens: np.ndarray  # int32 [tokens]
    logprobs: np.ndarray  # float32 [tokens], the rollout's
    steps: np.ndarray  # int64 [tokens]: after how many optimizer steps were the weights that drew each?
    reward: float

    @property
    def sequence(self) -> list[int]:
        return [*self.prompt, *self.tokens.tolist()]

    def to_json(self) -> dict[str, Any]:
        """All bits survive: a float32 is written as the float64 that equals it."""
        values = asdict(self)
        return values | {name: values[name].tolist() for name in ("tokens", "logprobs", "steps")}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Completion":
        dtypes = {"tokens": np.int32, "logprobs": np.float32, "steps": np.int64}
        return cls(**values | {name: np.array(values[name], dtype) for name, dtype in dtypes.items()})


# The difference of two rewards is finite in fp32.
MAX_REWARD = 2.0**127


def advantages(rewards: Sequence[float], group_size: int, by_deviation: bool) -> list[float]:
    """The advantage of each completion: its reward less the mean of its group.

    Args:
        rewards: of whole groups, one after the other.
        group_size: completions of one prompt.
        by_deviation: also divides by the group's standard deviation (GRPO). A group whose rewards are all
            equal has advantages of 0.

    Raises:
        ValueError: the last group is not whole; or a reward, which it names, is not a finite number that the
            loss, in fp32, can hold: it would make the whole group's advantages NaN, or 0.
    """
    if len(rewards) % group_size:
        raise ValueError(f"rewards: expected groups of {group_size}, got {len(rewards)} rewards")
    for i, reward in enumerate(rewards):
        if not abs(reward) < MAX_REWARD:
            raise ValueError(
                f"rewards[{i}] (group {i // group_size}, sample {i % group_size}): expected a finite number"
                f" below 2^127, got {reward}"
            )
    result: list[float] = []
    for begin in range(0, len(rewards), group_size):
        group = rewards[begin : begin + group_size]
        center = mean(group)
        divisor = deviation(group) if by_deviation else 1.0
        # The mean of equal rewards may be another number, by rounding.
        is_equal = len(set(group)) == 1 or divisor == 0
        result += [0.0 if is_equal else (reward - center) / divisor for reward in group]
    return result


def mean(values: Sequence[float]) -> float:
    """The sum is rounded once, so that no machine has other bits."""
    return math.fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of all of them, with sums rounded once."""
    center = mean(values)
    return math.sqrt(mean([(value - center) * (value - center) for value in values]))


def staleness(completions: Sequence[Completion], step: int) -> np.ndarray:
    """Of each token, how many optimizer steps lie between the weights that drew it and the present ones:
    int64 [all tokens].

    Raises:
        ValueError: a token's weights are later than the present ones.
    """
    steps = np.concatenate([c.steps for c in completions]) if completions else np.zeros(0, np.int64)
    if (late := steps > step).any():
        raise ValueError(
            f"expected tokens of weights up to step {step}, got some of step {steps[late].max()}"
        )
    return step - steps
