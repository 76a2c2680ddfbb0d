"""The logprobs that a patched model computes in training have the rollout's and the scorer's bits, for tokens
drawn with temperature and filters; and what it learns and saves serves with its bits."""

import os
import shutil
import unittest
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

import isobit.torch as it
from isobit import RolloutClient, ScorerClient
from isobit.launch import Setting, run_model_tool
from isobit_tools.testing import BIN_DIR, ServiceTest

SHAPES = os.environ.get("ISOBIT_SHAPES", "tiny-qwen3 tiny-qwen2 tiny-llama tiny-mistral").split()
VOCABULARY = 499
TOKENS = 24
SAMPLINGS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 20},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.1, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
]
# Prompt and completion.
Sample = tuple[list[int], list[int]]


def bits(values) -> list[int]:
    return np.asarray(values, dtype=np.float32).view(np.uint32).tolist()


def load(directory: Path):
    return it.patch(AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16))


def generate(rollout: RolloutClient, sampling: dict) -> tuple[list[Sample], np.ndarray]:
    """Two samples of each of three prompts, and their logprobs in one row."""
    random = np.random.default_rng(1)
    samples, logprobs = [], []
    for seed, length in enumerate((5, 17, 40)):
        prompt = random.integers(0, VOCABULARY, length).tolist()
        for sample in rollout.generate(
            prompt, max_tokens=TOKENS, ignore_eos=True, seed=seed, n=2, **sampling
        ):
            samples.append((prompt, sample.tokens.token_ids.tolist()))
            logprobs.append(sample.tokens.logprobs)
    return samples, np.concatenate(logprobs)


def score(scorer: ScorerClient, samples: list[Sample], sampling: dict) -> tuple[np.ndarray, np.ndarray]:
    scores = scorer.score(samples, entropy=True, **sampling)
    return np.concatenate([s.tokens.logprobs for s in scores]), np.concatenate([s.entropies for s in scores])


def train(model, samples: list[Sample], sampling: dict):
    """The logprobs and entropies of a training pass, and its backward pass, whose gradients stay."""
    model.zero_grad()
    batch = it.Batch.of([p + c for p, c in samples], prompt_lengths=[len(p) for p, _ in samples])
    out = it.logprobs(model, batch, it.Sampling(**sampling))
    ones = torch.ones_like(out.logprobs)
    it.functional.policy_loss(out.logprobs, ones, ones / ones.numel()).backward()
    return out.logprobs.detach(), out.entropies.detach()


class ServicesTest(ServiceTest):
    setting = Setting("tree", tp_size=2, shards=2)

    @classmethod
    def make_model(cls):
        for shape in SHAPES:
            run_model_tool(BIN_DIR, "make", shape, str(cls.scratch / shape), "--seed", "3")

    def check(self, shape: str) -> None:
        self.model = self.scratch / shape
        services = self.launch("rollout"), self.launch("scorer")
        for service in services:
            self.services.wait_serving(service)
        model = load(self.model)
        with RolloutClient(services[0].target) as rollout, ScorerClient(services[1].target) as scorer:
            for sampling in SAMPLINGS:
                samples, sampled = generate(rollout, sampling)
                logprobs, entropies = train(model, samples, sampling)
                scored, scored_entropies = score(scorer, samples, sampling)
                self.assertEqual(len(sampled), 6 * TOKENS)
                self.assertEqual(bits(logprobs), bits(sampled), sampling)
                self.assertEqual(bits(logprobs), bits(scored), sampling)
                self.assertEqual(bits(entropies), bits(scored_entropies), sampling)
            others, _ = train(model, samples, {"temperature": 1.0})
            self.assertNotEqual(bits(others), bits(sampled), "control: another temperature")

            it.AdamW(model.parameters(), lr=1e-2).step()
            model.save_pretrained(self.scratch / "trained")
            shutil.copy(self.model / "generation_config.json", self.scratch / "trained")
            scorer.update_weights("trained")
            rescored, _ = score(scorer, samples, sampling)
            logprobs, _ = train(model, samples, sampling)
            self.assertEqual(bits(logprobs), bits(rescored))
            self.assertNotEqual(bits(rescored), bits(scored), "control: the step changed nothing")

    def test_every_shape(self):
        for shape in SHAPES:
            with self.subTest(shape):
                self.check(shape)


if __name__ == "__main__":
    unittest.main()
