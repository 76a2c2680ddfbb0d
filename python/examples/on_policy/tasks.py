"""What to learn: prompts by number, and a reward for each completion. Your own goes by `--task module:Class`.

A prompt and a reward must depend on nothing but the arguments, or a run that goes on after a stop is another
run: draw random numbers from `random.Random` with the prompt's number in its seed, as here.
"""

import importlib
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from isobit import Tokenizer


class Task(Protocol):
    def __init__(self, model: Path):
        """model: the Hugging Face directory that is trained."""

    def prompt(self, number: int) -> Sequence[int]:
        """The tokens of the prompt of that number, at least one."""

    def reward(self, number: int, completion: Sequence[int]) -> float:
        """How good a completion of that prompt is: finite. It ends with its end-of-sequence token, if any."""


class Share:
    """For any model, also a random one: the share of tokens in the first quarter of the vocabulary."""

    PROMPT_TOKENS = 8

    def __init__(self, model: Path):
        self._vocabulary = json.loads((model / "config.json").read_text("utf-8"))["vocab_size"]

    def prompt(self, number: int) -> list[int]:
        generator = random.Random(f"share {number}")
        return [generator.randrange(self._vocabulary) for _ in range(self.PROMPT_TOKENS)]

    def reward(self, number: int, completion: Sequence[int]) -> float:
        return sum(token < self._vocabulary // 4 for token in completion) / len(completion)


class Arithmetic:
    """Sums with answers that can be checked, for a model with a tokenizer and a chat template: 1 if the last
    number that the answer names is right, else 0."""

    def __init__(self, model: Path):
        self._tokenizer = Tokenizer(model)

    @staticmethod
    def summands(number: int) -> tuple[int, int]:
        generator = random.Random(f"arithmetic {number}")
        return generator.randrange(1, 10), generator.randrange(1, 10)

    def prompt(self, number: int) -> Sequence[int]:
        a, b = self.summands(number)
        return self._tokenizer.encode_chat(f"Compute {a} + {b}.")

    def reward(self, number: int, completion: Sequence[int]) -> float:
        numbers = re.findall(r"\d+", self._tokenizer.decode(completion))
        return float(numbers[-1:] == [str(sum(self.summands(number)))])


BUILT_IN = {"share": Share, "arithmetic": Arithmetic}


def load_task(name: str, model: Path) -> Task:
    """A built-in task, or the class that `module:Class` names, for `model`.

    Raises:
        ValueError: there is no such task.
    """
    if name in BUILT_IN:
        return BUILT_IN[name](model)
    module, _, class_name = name.partition(":")
    if not module or not class_name:
        raise ValueError(f"--task: expected {', '.join(BUILT_IN)} or module:Class, got {name}")
    try:
        task = getattr(importlib.import_module(module), class_name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ValueError(f"--task {name}: {error}") from error
    return task(model)
