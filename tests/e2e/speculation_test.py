"""Guesses over gRPC: a rollout that speculates gives the bits of one that does not, in fewer steps."""

import unittest

import grpc
import numpy as np

from isobit import RolloutClient
from isobit.errors import InvalidArgumentError
from isobit.launch import Setting
from isobit.results import Sample
from isobit.v1 import rollout_pb2, rollout_pb2_grpc
from isobit_tools.testing import ServiceTest, http_get, http_url, metric_values

VOCABULARY = 499


def prompt(seed: int, length: int = 40) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def bits(samples: list[Sample]) -> list[tuple]:
    return [
        (
            one.tokens.token_ids.tolist(),
            one.tokens.logprobs.view("u4").tolist(),
            one.tokens.weight_versions.tolist(),
            [(top.token_ids.tolist(), top.logprobs.view("u4").tolist()) for top in one.tokens.top],
            one.finish_reason,
            one.stop_token_id,
        )
        for one in samples
    ]


class SpeculationTest(ServiceTest):
    setting = Setting("tree", tp_size=2, shards=1)

    def setUp(self):
        super().setUp()
        flags = ("--metrics_port=0", "--max_running=128")
        services = [self.launch("rollout", *flags, f"--speculation={by}") for by in ("history,lookup", "off")]
        for service in services:
            self.services.wait_serving(service)
        self.url = http_url(services[0], "metrics")
        self.target = services[0].target
        self.guessing, self.plain = (self.enterContext(RolloutClient(s.target)) for s in services)

    def generate(self, ids: list[int], *, draft_token_ids=(), speculation=None, **sampling) -> list[Sample]:
        """The samples of the rollout that guesses, whose bits must be those of the other."""
        options = {"max_tokens": 60, "seed": 5, "ignore_eos": True, **sampling}
        plain = self.plain.generate(ids, **options)
        self.assertEqual({sample.num_draft_tokens for sample in plain}, {0})
        guessing = self.guessing.generate(
            ids, draft_token_ids=draft_token_ids, speculation=speculation, **options
        )
        self.assertEqual(bits(guessing), bits(plain))
        for sample in guessing:
            self.assertLessEqual(sample.num_accepted_tokens, sample.num_draft_tokens)
        return guessing

    def steps(self) -> float:
        return metric_values(http_get(self.url))["isobit_steps_total"]

    def test_a_replay_takes_few_steps(self):
        ids = prompt(1)
        (drawn,) = self.plain.generate(ids, max_tokens=60, seed=5, ignore_eos=True)
        before = self.steps()
        (sample,) = self.generate(ids, draft_token_ids=drawn.tokens.token_ids)
        self.assertGreater(sample.num_accepted_tokens, 30)
        self.assertLess(self.steps() - before, 30)

    def test_an_answer_is_a_guess_for_the_next(self):
        ids = prompt(2)
        self.assertEqual(self.generate(ids)[0].num_accepted_tokens, 0)
        self.assertGreater(self.generate(ids)[0].num_accepted_tokens, 30)
        self.assertEqual(self.generate(ids, speculation=False)[0].num_draft_tokens, 0)

    def test_the_sampling_parameters(self):
        ids = prompt(3)
        stop = self.plain.generate(ids, max_tokens=30, seed=5, ignore_eos=True)[0].tokens.token_ids[20]
        for sampling in (
            {"temperature": 0.0},
            {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "logprobs": 3},
            {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": 0.4},
            {"stop_token_ids": [int(stop)]},
            {"stop_token_ids": [int(stop)], "min_tokens": 40},
            {"logprob_mode": "raw"},
        ):
            with self.subTest(sampling):
                first = self.generate(ids, **sampling)
                again = self.generate(ids, **sampling, draft_token_ids=first[0].tokens.token_ids)
                self.assertGreater(sum(sample.num_accepted_tokens for sample in again), 0)

    def test_groups(self):
        ids = prompt(7)
        self.generate(ids, n=4)
        self.generate(ids, n=4)

    def test_each_sample_begins_with_its_own_draft(self):
        ids = prompt(8)
        drawn = self.plain.generate(ids, n=2, max_tokens=60, seed=5, ignore_eos=True)
        samples = self.generate(ids, n=2, draft_token_ids=[sample.tokens.token_ids for sample in drawn])
        for sample in samples:
            self.assertGreater(sample.num_accepted_tokens, 30)
            # At most the last one, which ends the sample, is right and brings nothing more.
            self.assertLessEqual(sample.num_draft_tokens - sample.num_accepted_tokens, 1)

    def test_wrong_guesses(self):
        (sample,) = self.generate(prompt(4), draft_token_ids=prompt(5, 60))
        self.assertEqual(sample.num_accepted_tokens, 0)

    def test_metrics_and_info(self):
        (first,) = self.generate(prompt(6))
        (second,) = self.generate(prompt(6))
        values = metric_values(http_get(self.url))

        def total(name: str) -> float:
            return sum(
                v for key, v in values.items() if key.split("{")[0] == f"isobit_spec_decode_{name}_total"
            )

        drafted = first.num_draft_tokens + second.num_draft_tokens
        accepted = first.num_accepted_tokens + second.num_accepted_tokens
        self.assertEqual(total("num_draft_tokens"), drafted)
        self.assertEqual(total("num_accepted_tokens"), accepted)
        self.assertEqual(total("num_accepted_tokens_per_pos"), accepted)
        self.assertGreater(total("num_drafts"), 0)
        self.assertEqual(list(self.guessing.get_server_info().drafters), ["history", "lookup"])
        self.assertEqual(list(self.plain.get_server_info().drafters), [])

    def test_bounds(self):
        for drafts, message in (
            ([1] * 61, r"draft_token_ids: expected at most 60 tokens .*, got 61"),
            ([VOCABULARY + 1000], r"draft_token_ids"),
            ([[1], [2]], r"draft_lengths: expected at most 1 \(sampling.n\), got 2"),
        ):
            with self.assertRaisesRegex(InvalidArgumentError, message):
                self.guessing.generate([1, 2], max_tokens=60, draft_token_ids=drafts)
        for drafts in ([1.5], [[1], [1.5]], [[1], 2]):
            with self.assertRaises(TypeError):
                self.guessing.generate([1, 2], n=2, draft_token_ids=drafts)
        request = rollout_pb2.GenerateRequest(
            prompt_token_ids=[1], draft_token_ids=[1, 2, 3], draft_lengths=[1, 2**32 - 1]
        )
        request.sampling.n = 2
        stub = rollout_pb2_grpc.RolloutServiceStub(self.enterContext(grpc.insecure_channel(self.target)))
        with self.assertRaisesRegex(grpc.RpcError, "draft_lengths: expected a sum of 3 .*, got 4294967296"):
            list(stub.Generate(request))


if __name__ == "__main__":
    unittest.main()
