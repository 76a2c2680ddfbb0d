"""Shared prompts: what conversations, groups and updates find, with the bits of a rollout without sharing."""

import unittest
from collections.abc import Sequence

import numpy as np

from isobit import RolloutClient
from isobit.launch import Setting, run_model_tool
from isobit.results import Sample
from isobit_tools.testing import BIN_DIR, ServiceTest

PAGE = 16
VOCABULARY = 499
USER = [7, 8, 9, 10]
LENGTH = 600
ABORTED_LENGTH = 1900  # of 2048 positions: an abort must come before the last token, on a busy machine, too


def prompt(seed: int, length: int = 40) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def bits(samples: Sequence[Sample]) -> list[tuple[list[int], list[int]]]:
    return [(one.tokens.token_ids.tolist(), one.tokens.logprobs.view("u4").tolist()) for one in samples]


def whole_pages(tokens: int) -> int:
    """Tokens in the whole pages of `tokens`, whose last one has no keys and values yet."""
    return (tokens - 1) // PAGE * PAGE


class ConversationTest(ServiceTest):
    """`warm` shares prompts, `cold` computes each of them."""

    setting = Setting("tree", tp_size=2, shards=1)

    @classmethod
    def make_model(cls):
        super().make_model()
        run_model_tool(BIN_DIR, "make", "tiny-llama", str(cls.scratch / "next"), "--seed", "4")

    def setUp(self):
        super().setUp()
        services = [self.launch("rollout", f"--page_size={PAGE}", f"--prefix_sharing={on}") for on in (1, 0)]
        for service in services:
            self.services.wait_serving(service)
        self.warm, self.cold = (self.enterContext(RolloutClient(service.target)) for service in services)
        self.assertEqual(
            [one.get_server_info().prefix_sharing for one in (self.warm, self.cold)], [True, False]
        )

    def generate(self, ids: list[int], **sampling) -> list[Sample]:
        """The samples of `warm`, whose bits must be those of `cold`, which must have computed all."""
        options = {"max_tokens": 25, "ignore_eos": True, "seed": 5, **sampling}
        cold = self.cold.generate(ids, **options)
        self.assertEqual({sample.num_cached_tokens for sample in cold}, {0})
        warm = self.warm.generate(ids, **options)
        self.assertEqual(bits(warm), bits(cold))
        return warm

    def assert_all_free(self) -> None:
        load = self.warm.get_load()
        self.wait_until(lambda: self.warm.get_load().num_used_pages == 0, f"pages stay taken: {load}")

    def test_a_turn_finds_the_turns_before(self):
        ids = prompt(1)
        self.assertEqual(self.generate(ids)[0].num_cached_tokens, 0)
        for _ in range(3):
            (first, *_) = self.generate(ids, n=2)
            known = len(ids) + len(first.tokens.token_ids)
            ids = [*ids, *first.tokens.token_ids.tolist(), *USER]
            for sample in self.generate(ids, n=2):
                self.assertGreaterEqual(sample.num_cached_tokens, whole_pages(known))
                self.assertLess(sample.num_cached_tokens, len(ids) + 1)
        self.assert_all_free()

    def test_counters_say_what_samples_say(self):
        before = self.warm.get_load()
        self.assertEqual((before.num_prompt_tokens, before.num_cached_prompt_tokens), (0, 0))
        samples = [*self.generate(prompt(2), n=3), *self.generate(prompt(2)), *self.generate(prompt(3))]
        load = self.warm.get_load()
        self.assertEqual(load.num_prompt_tokens, sum(sample.num_prompt_tokens for sample in samples))
        self.assertEqual(load.num_cached_prompt_tokens, sum(sample.num_cached_tokens for sample in samples))
        self.assertGreaterEqual(load.num_cached_prompt_tokens, 3 * whole_pages(40))
        self.assertGreaterEqual(load.num_cached_pages, 2 * whole_pages(40) // PAGE)
        self.assertLessEqual(load.num_cached_pages, load.num_free_pages)
        self.assertEqual(self.cold.get_load().num_cached_prompt_tokens, 0)

    def test_a_request_that_is_aborted_leaves_its_siblings_alone(self):
        ids = prompt(4)
        lengths = [LENGTH, LENGTH, ABORTED_LENGTH]
        siblings = [
            {"seed": seed, "max_tokens": length, "ignore_eos": True} for seed, length in enumerate(lengths)
        ]
        streams = [
            self.warm.generate(ids, stream=True, request_id=f"sibling-{index}", **options)
            for index, options in enumerate(siblings)
        ]
        for stream in streams:
            next(stream)
        self.assertEqual(self.warm.abort("sibling-2"), ["sibling-2"])
        *ended, aborted = [next(event for event in stream if isinstance(event, Sample)) for stream in streams]
        *whole, unaborted = [self.cold.generate(ids, **options)[0] for options in siblings]
        self.assertEqual([one.finish_reason for one in (*ended, aborted)], ["length", "length", "abort"])
        self.assertEqual(bits(ended), bits(whole))
        generated = len(aborted.tokens.token_ids)
        self.assertLess(generated, ABORTED_LENGTH)
        self.assertEqual(bits([aborted])[0], tuple(row[:generated] for row in bits([unaborted])[0]))
        # What the aborted one left must serve whoever comes next.
        self.generate([*ids, *aborted.tokens.token_ids.tolist()[:LENGTH], *USER])
        self.assert_all_free()

    def test_a_sample_that_stops_early_leaves_its_siblings_alone(self):
        ids = prompt(5)
        whole = self.generate(ids, n=4)
        stop = int(whole[1].tokens.token_ids[3])
        ended = self.generate(ids, n=4, stop_token_ids=[stop])
        self.assertEqual(ended[1].finish_reason, "stop")
        self.assertIn("length", [sample.finish_reason for sample in ended])
        self.assert_all_free()

    def test_an_update_leaves_nothing_to_find(self):
        ids = prompt(6)
        before = self.generate(ids)
        self.assertGreaterEqual(self.generate(ids)[0].num_cached_tokens, whole_pages(len(ids)))
        for rollout in (self.warm, self.cold):
            rollout.update_weights("next")
        self.assertEqual(self.warm.get_load().num_cached_pages, 0)
        after = self.generate(ids)
        self.assertEqual(after[0].num_cached_tokens, 0)
        self.assertNotEqual(bits(after), bits(before))
        self.assertGreaterEqual(self.generate(ids)[0].num_cached_tokens, whole_pages(len(ids)))


if __name__ == "__main__":
    unittest.main()
