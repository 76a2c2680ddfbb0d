"""C8 of docs/NUMERICS.md: from logits to a filtered distribution and a token."""

import numpy as np


def penalise(x: np.ndarray, count: np.ndarray, repetition, presence, frequency) -> np.ndarray:
    """The logits of ids that occur in the prompt or, `count` times, in the completion."""
    x = np.where(x > 0, x / repetition, x * repetition)
    x = x - frequency * count
    return np.where(count > 0, x - presence, x)
