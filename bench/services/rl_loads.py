"""The requests of an RL step, and what comes back: for rl_step.py.

Every prompt, seed and user part is a function of the command line alone, so that all rollouts get the same.
"""

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from load_generator import LoadGenerator, Request
from prompts import random_prompt

from isobit.client import RolloutClient
from isobit.results import Sample, TokenLogprobs

Prompt = list[int]
# Whose prompts are independent of each other's.
LOADS = ("step", "prompts", "one sample", "conversation", "new prompt")
COUNTERS = ("num_prompt_tokens", "num_cached_prompt_tokens", "num_cached_pages")


@dataclass(frozen=True)
class Outcome:
    """One load on one rollout: its time, what its samples say of themselves, and the rollout's counters."""

    seconds: float
    num_samples: int
    num_completion_tokens: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    before: Mapping[str, int]
    after: Mapping[str, int]

    @property
    def counted_prompt_tokens(self) -> int:
        """By the rollout itself."""
        return self._counted("num_prompt_tokens")

    @property
    def counted_cached_tokens(self) -> int:
        """By the rollout itself."""
        return self._counted("num_cached_prompt_tokens")

    def _counted(self, name: str) -> int:
        return self.after[name] - self.before[name]


class Prompts:
    """Random prompts: of any step of any load, and of the later turns of a conversation."""

    def __init__(self, arguments: argparse.Namespace, vocab_size: int):
        self._arguments = arguments
        self._vocab_size = vocab_size

    def first(self, load: str, step: int) -> list[Prompt]:
        """Of the first turn. A share of them, --repeated, is the same in every step."""
        count = self._arguments.prompts
        repeated = round(self._arguments.repeated * count)
        return [
            self._random(self._arguments.input, load, 0 if index < repeated else step, 0, index)
            for index in range(count)
        ]

    def single(self, load: str, step: int, length: int) -> Prompt:
        """A prompt that no other step has."""
        return self._random(length, load, step, 0, 0)

    def next(
        self, prompts: Sequence[Prompt], completions: Sequence[TokenLogprobs], load: str, step: int, turn: int
    ) -> list[Prompt]:
        """Of turn `turn`, from 1: the last prompt, its completion and new tokens of the user."""
        return [
            [
                *prompt,
                *completion.token_ids.tolist(),
                *self._random(self._arguments.user_tokens, load, step, turn, index),
            ]
            for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]

    def _random(self, length: int, load: str, *place: int) -> Prompt:
        generator = np.random.default_rng([self._arguments.seed, LOADS.index(load), *place])
        return random_prompt(generator, self._vocab_size, length)


class Sampler:
    """Samples groups, each of several completions of one prompt, on one rollout."""

    def __init__(self, arguments: argparse.Namespace, client: RolloutClient, generator: LoadGenerator):
        self._arguments = arguments
        self._client = client
        self._generator = generator

    def sample(
        self, prompts: Sequence[Prompt], first_seed: int, samples: int, max_tokens: int
    ) -> tuple[Outcome, list[list[TokenLogprobs]]]:
        """All groups at once; returns each group's completions.

        A completion depends on seed and index of its sample. So completion 0 of a group is the same in
        every form: in one request, in several, and with `samples` = 1.
        """
        requests = [
            request
            for index, prompt in enumerate(prompts)
            for request in self._group(
                prompt, first_seed + index * self._arguments.samples, samples, max_tokens
            )
        ]
        before = self._counters()
        timing, answers = self._generator.complete(self._client.target, requests, len(requests))
        after = self._counters()
        found = list(itertools.chain.from_iterable(answers))
        outcome = Outcome(
            seconds=timing.total_s,
            num_samples=len(found),
            num_completion_tokens=timing.tokens,
            num_prompt_tokens=_total(found, "num_prompt_tokens"),
            num_cached_tokens=_total(found, "num_cached_tokens"),
            num_preemptions=_total(found, "num_preemptions"),
            before=before,
            after=after,
        )
        tokens = [sample.tokens for sample in found]
        return outcome, [tokens[start : start + samples] for start in range(0, len(tokens), samples)]

    def _group(self, prompt: Prompt, seed: int, samples: int, max_tokens: int) -> list[Request]:
        request = {
            "prompt_token_ids": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "stream": False,
        }
        if self._arguments.groups == "one_request":
            return [{**request, "seed": seed, "n": samples}]
        return [{**request, "seed": seed + index} for index in range(samples)]

    def _counters(self) -> dict[str, int]:
        load = self._client.get_load()
        return {name: getattr(load, name) for name in COUNTERS}


def unequal_tokens(left: TokenLogprobs, right: TokenLogprobs) -> int:
    """Positions at which the token or a bit of its logprob differs, or that only one of the two has."""
    common = min(len(left.token_ids), len(right.token_ids))
    differ = left.token_ids[:common] != right.token_ids[:common]
    differ |= left.logprobs[:common].view(np.uint32) != right.logprobs[:common].view(np.uint32)
    return int(differ.sum()) + len(left.token_ids) + len(right.token_ids) - 2 * common


def _total(samples: Sequence[Sample], field: str) -> int:
    return sum(getattr(sample, field) for sample in samples)
