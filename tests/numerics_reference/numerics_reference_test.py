"""The services' bits are those that docs/NUMERICS.md defines, by an implementation of that page alone.

Values are compared as bit patterns; the tolerance is zero. The test prints what it has compared.
"""

import json
import sys
import unittest
from pathlib import Path

import numpy as np

from isobit import RolloutClient, ScorerClient
from isobit.launch import Service, Setting, run_model_tool
from isobit_tools.testing import BIN_DIR, ServiceTest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from numerics_reference import log_prob, models, sampling
from numerics_reference.checkpoint import Config, read_config, read_parameters
from numerics_reference.fingerprint import fingerprint
from numerics_reference.forward import Model

# Tokens of the sequence that is scored: with 560, attention has a second split.
SCORED = {
    "tiny-qwen3": 560,
    "tiny-qwen2": 70,
    "tiny-llama": 70,
    "tiny-mistral": 140,
    "llama-biases-linear": 70,
    "qwen2-windows": 140,
    "qwen3-yarn": 140,
    "qwen3-wide-heads": 140,
}
# Parameters of drawn samples.
DRAWN = (
    {},
    {"temperature": 1.5, "top_p": 0.6},
    {"temperature": 0.8, "min_p": 0.3, "top_p": 0.8},
    {"top_k": 7, "min_p": 0.05, "repetition_penalty": 0.7},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": {5: 3.0, 9: 4.0}},
    {
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.3,
        "min_tokens": 6,
        "stop_token_ids": (11, 12),
        "logit_bias": {1: 9.0, 3: 2.5, 11: 6.0, 200: -4.0},  # 1: the end of sequence, 11: a stop token
    },
)


def unequal(actual, expected) -> int:
    actual, expected = (np.asarray(x, np.float32).view(np.uint32) for x in (actual, expected))
    return int((actual != expected).sum()) if actual.shape == expected.shape else -1


class NumericsReferenceTest(ServiceTest):
    setting = Setting("tree", tp_size=4, shards=2)

    @classmethod
    def make_model(cls):
        """Nothing here: each test makes its own model."""

    def read_model(self, name: str) -> tuple[Config, dict]:
        directory = self.scratch / name
        if not directory.exists():
            shape = [name]
            if name in models.CONFIGS:
                shape = [f"--config={models.write_config(name, self.scratch)}"]
            run_model_tool(BIN_DIR, "make", *shape, str(directory), "--seed", "21")
        if name in models.CONFIGS and models.CONFIGS[name].get("torch_dtype") == "float32":
            models.widen_to_fp32(directory)
        return read_config(directory), read_parameters(directory)

    def client(self, kind, service: Service):
        self.services.wait_serving(service)
        return kind(service.target)

    def test_scores(self):
        for name, length in SCORED.items():
            with self.subTest(name):
                config, parameters = self.read_model(name)
                service = self.launch("scorer", f"--model={name}")
                tokens = np.random.default_rng(length).integers(0, config.vocab, length)
                logits = Model(config, parameters, length).step(tokens)[:-1]
                rows = log_prob.sum_rows(logits)
                expected = log_prob.log_prob(logits[np.arange(length - 1), tokens[1:]], rows)

                with self.client(ScorerClient, service) as scorer:
                    digest = scorer.get_server_info().server.fingerprint.hex
                    (score,) = scorer.score([(tokens[:1], tokens[1:])], logprob_mode="raw", entropy=True)
                self.services.stop()
                self.assertEqual(digest, fingerprint(config, "tree"))
                found = (
                    unequal(score.tokens.logprobs, expected),
                    unequal(score.entropies, log_prob.entropy(rows)),
                )
                print(f"{name}: {length - 1} logprobs and entropies, {found[0]} and {found[1]} unequal")
                self.assertEqual(found, (0, 0))

    def test_draws(self):
        """Tokens and logprobs under every sampling parameter, two samples of a prompt."""
        name, count, prompt = "tiny-qwen3", 24, [7, 3, 11, 3, 250]
        config, parameters = self.read_model(name)
        eos = json.loads((self.scratch / name / "config.json").read_text())["eos_token_id"]
        eos = tuple(eos) if isinstance(eos, list) else (eos,)
        service = self.launch("rollout", f"--model={name}")
        with self.client(RolloutClient, service) as rollout:
            for seed, options in enumerate(DRAWN, start=2**40):
                samples = rollout.generate(
                    prompt, seed=seed, n=2, max_tokens=count, ignore_eos=True, **options
                )
                with self.subTest(options):
                    given = sampling.Parameters(seed=seed, eos_token_ids=eos, **options)
                    found = [
                        self.draw_again(Model(config, parameters, 64), given, prompt, index, sample.tokens)
                        for index, sample in enumerate(samples)
                    ]
                    print(f"{options}: {found[0]} and {found[1]} unequal tokens and logprobs")
                    self.assertEqual(found, [(0, 0), (0, 0)])

    def draw_again(self, model: Model, given, prompt: list[int], index: int, tokens) -> tuple[int, int]:
        """How many ids and logprobs differ from those that the page defines, given the tokens before them."""
        ids = [int(token) for token in tokens.token_ids]
        rows = model.step([*prompt, *ids])[len(prompt) - 1 : -1]
        drawn, logprobs = [], []
        for i, row in enumerate(rows):
            z = sampling.distribution(row, given, prompt, ids[:i])
            drawn.append(sampling.draw(z, given, index, len(prompt) + i))
            logprobs.append(log_prob.log_probs(z[None], np.array(ids[i : i + 1]))[0])
        return int((np.array(drawn) != ids).sum()), unequal(tokens.logprobs, logprobs)

    def test_modes(self):
        """Greedy tokens and logprobs at TP 4: a prompt in one step, then token by token."""
        name = "tiny-qwen2"
        config, parameters = self.read_model(name)
        prompt, count = list(range(3, 40)), 12
        of_mode = {}
        for mode in ("tree", "batch_invariant", "vanilla"):
            with self.subTest(mode):
                service = self.launch("rollout", f"--model={name}", f"--numerics={mode}")
                model = Model(config, parameters, len(prompt) + count, mode, ranks=4)
                step, ids, expected = prompt, [], []
                for _ in range(count):
                    logits = model.step(step, last_only=True)
                    ids.append(int(logits[0].argmax()))
                    expected.append(log_prob.log_probs(logits, np.array(ids[-1:]))[0])
                    step = ids[-1:]

                with self.client(RolloutClient, service) as rollout:
                    digest = rollout.get_server_info().server.fingerprint.hex
                    (sample,) = rollout.generate(prompt, temperature=0.0, max_tokens=count, ignore_eos=True)
                self.services.stop()
                self.assertEqual(digest, fingerprint(config, mode))
                self.assertEqual(list(sample.tokens.token_ids), ids)
                found = unequal(sample.tokens.logprobs, expected)
                print(f"{mode}, TP 4: {count} tokens and logprobs, {found} unequal")
                self.assertEqual(found, 0)
                of_mode[mode] = np.array(expected)
        # The three modes must differ, or the comparison would show nothing.
        for mode in ("batch_invariant", "vanilla"):
            self.assertNotEqual(unequal(of_mode[mode], of_mode["tree"]), 0)


if __name__ == "__main__":
    unittest.main()
