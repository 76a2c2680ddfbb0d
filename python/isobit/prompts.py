"""Prompts: text if the model has a tokenizer, otherwise token ids."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from isobit.tokenizer import Tokenizer

_TEXTS = (
    "What is the capital of France, and what is it known for?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about the sea.",
    "Give me three tips for learning to cook.",
    "Why do we have leap years?",
    "Tell a very short story about a robot who finds a flower.",
    "What is the difference between a list and a tuple in Python?",
    "Name five animals that live in the forest.",
)
# Lengths of the built-in prompts for a model without a tokenizer.
_LENGTHS = (1, 2, 5, 8, 13, 16, 21, 34)


@dataclass(frozen=True)
class Prompt:
    """A prompt: the text to show, and the token ids to send."""

    title: str
    token_ids: Sequence[int]


class Text:
    """Turns prompts into ids, and ids into text. Without a tokenizer the text consists of the ids."""

    def __init__(self, model: Path):
        self._tokenizer = Tokenizer(model) if (model / "tokenizer.json").is_file() else None

    def prompt(self, text: str) -> Prompt:
        if self._tokenizer is None:
            return Prompt(text, [int(word) for word in text.split()])
        try:
            return Prompt(text, self._tokenizer.encode_chat(text))
        except ValueError:  # a base model without a chat template
            return Prompt(text, self._tokenizer.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return " ".join(str(token) for token in token_ids)
        return self._tokenizer.decode(token_ids)

    def pieces(self, runs: Iterator[Sequence[int]]) -> Iterator[str]:
        """Yields the text of each run of ids, as far as it consists of whole characters."""
        if self._tokenizer is None:
            yield from (self.decode(run) + " " for run in runs)
        else:
            stream = self._tokenizer.stream()
            yield from (stream.add(run) for run in runs)


def default_prompts(model: Path) -> Sequence[str]:
    """Returns built-in prompts for `model`: sentences, or random token ids as text if it has no tokenizer."""
    if (model / "tokenizer.json").is_file():
        return _TEXTS
    vocab_size = json.loads((model / "config.json").read_text("utf-8"))["vocab_size"]
    generator = random.Random(1)
    return [" ".join(str(generator.randrange(vocab_size)) for _ in range(length)) for length in _LENGTHS]


def read_prompts(path: Path) -> Sequence[str]:
    """Returns the lines of `path` that are not blank.

    Raises:
      ValueError: there are none.
    """
    if texts := [line.strip() for line in path.read_text("utf-8").splitlines() if line.strip()]:
        return texts
    raise ValueError(f"{path} has no prompt: expected at least one line that is not blank")
