"""The experiments' prompts: questions by the model's tokenizer, or random token ids if it has none."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from isobit.prompts import Text

ONE_PROMPT = "Tell me about Richard Feynman"

_QUESTIONS = (
    "A train leaves at 9:40 and arrives at 13:05. How long is the journey?",
    "Find all integers n for which n squared plus n plus 41 is divisible by 41.",
    "How many positive divisors does 360 have? Show each step.",
    "The sum of three consecutive odd numbers is 93. What are they?",
    "Prove that the square root of 2 is irrational.",
    "What is the probability that two fair dice show a sum of at least 9?",
    "Solve for x: 3 to the power of x equals 81.",
    "A rectangle has perimeter 34 and area 60. What are its sides?",
    "In how many ways can five people sit around a round table?",
    "What is the remainder when 7 to the power of 100 is divided by 5?",
    "Explain the difference between a permutation and a combination.",
    "Compute the sum of the first 50 positive even numbers.",
    "How does a binary search work, and why is it fast?",
    "Write a function in Python that reverses a linked list.",
    "What does it mean that addition of floating-point numbers is not associative?",
    "Explain how a hash table resolves collisions.",
    "Why do ships float although steel is denser than water?",
    "Describe the water cycle to a ten-year-old.",
    "What causes the seasons on Earth?",
    "How do vaccines train the immune system?",
    "Tell a story about a lighthouse keeper and a lost whale.",
    "Write a dialogue between a clock and a calendar.",
    "Describe a market in a harbour town early in the morning.",
    "Write a poem about the first snow of the year.",
    "Summarise the history of the printing press.",
    "Why did the Roman Empire fall? Name several explanations.",
    "What were the main effects of the steam engine?",
    "Compare the French and the American Revolution.",
    "Plan a week of simple dinners for a family of four.",
    "Give advice to somebody who starts to learn the piano.",
    "How do I repair a flat bicycle tyre?",
    "What should one think about before adopting a dog?",
)


def make_prompts(model: Path | None, vocab_size: int, count: int, seed: int) -> list[list[int]]:
    """`count` different rows of token ids; `model` is None, or a directory with a tokenizer."""
    if model:
        text = Text(model)
        return [_ids(text, _question(index)) for index in range(count)]
    generator = np.random.default_rng(seed)
    lengths = generator.integers(16, 129, count)
    return [random_prompt(generator, vocab_size, length) for length in lengths]


def one_prompt(model: Path | None, vocab_size: int, seed: int) -> list[int]:
    """The question of "Defeating Nondeterminism in LLM Inference", or random token ids."""
    if model:
        return _ids(Text(model), ONE_PROMPT)
    return random_prompt(np.random.default_rng(seed), vocab_size, 32)


def random_prompt(generator: np.random.Generator, vocab_size: int, length: int) -> list[int]:
    return generator.integers(0, vocab_size, length).tolist()


def _question(index: int) -> str:
    question = _QUESTIONS[index % len(_QUESTIONS)]
    again = index // len(_QUESTIONS)
    return f"{question} Answer in {again + 1} paragraphs." if again else question


def _ids(text: Text, question: str) -> Sequence[int]:
    return [int(token) for token in text.prompt(question).token_ids]
