"""LLM-42's scheme over gRPC: a rollout that decodes on a fast path gives all who want them the bits of one
that does not, beside requests that want none."""

import unittest
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from isobit import ComparatorClient, RolloutClient
from isobit.launch import Setting
from isobit_tools.testing import ServiceTest, http_get, http_url, metric_values

VOCABULARY = 499
OPTIONS = {"max_tokens": 60, "seed": 5, "ignore_eos": True}


def prompt(seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, 40).tolist()


class FastPathTest(ServiceTest):
    setting = Setting("tree", tp_size=4, shards=1)
    flags = ("--speculation=fast_path", "--metrics_port=0", "--max_running=128")

    def setUp(self):
        super().setUp()
        services = [self.launch("rollout", *self.flags), self.launch("rollout")]
        for service in services:
            self.services.wait_serving(service)
        self.service = services[0]
        self.fast, self.plain = (self.enterContext(RolloutClient(s.target)) for s in services)

    def counts(self) -> dict[str, float]:
        return metric_values(http_get(http_url(self.service, "metrics")))

    def test_mixed_requests(self):
        def ask(client, seed: int, **options):
            return client.generate(prompt(seed), n=2, **OPTIONS, **options)

        with ThreadPoolExecutor(12) as pool:
            required = [pool.submit(ask, self.fast, seed) for seed in range(6)]
            others = [pool.submit(ask, self.fast, seed, determinism="none") for seed in range(6)]
        own = self.plain.get_server_info().server.fingerprint.hex
        for seed, samples in enumerate(required):
            for sample, expected in zip(samples.result(), ask(self.plain, seed), strict=True):
                self.assertEqual(sample.tokens.token_ids.tolist(), expected.tokens.token_ids.tolist())
                self.assertEqual(
                    sample.tokens.logprobs.view("u4").tolist(), expected.tokens.logprobs.view("u4").tolist()
                )
                self.assertEqual(sample.fingerprint, own)
                self.assertGreater(sample.num_accepted_tokens, 30)
        for samples in others:
            for sample in samples.result():
                self.assertEqual(len(sample.tokens.token_ids), 60)
                self.assertEqual(sample.num_draft_tokens, 0)
                self.assertNotEqual(sample.fingerprint, own, "nobody may take them for the contract's")
        counts = self.counts()
        verified = counts['isobit_fast_path_tokens_total{outcome="verified"}']
        drafts = sum(sample.num_draft_tokens for samples in required for sample in samples.result())
        self.assertEqual(
            verified, sum(sample.num_accepted_tokens for samples in required for sample in samples.result())
        )
        # More windows were dropped than verified only if sequences were preempted.
        self.assertGreaterEqual(
            verified + counts['isobit_fast_path_tokens_total{outcome="recomputed"}'], drafts
        )
        self.assertGreater(counts["isobit_fast_path_windows_total"], 12 * 3)
        self.assertGreater(counts["isobit_fast_path_steps_total"], 40)
        self.assertLess(counts["isobit_fast_path_steps_total"], counts["isobit_steps_total"])

    def test_a_comparator_finds_no_gap(self):
        scorer = self.start("scorer")
        comparator = self.start("comparator", f"--rollout={self.service.target}", f"--scorer={scorer.target}")
        with ComparatorClient(comparator.target) as client:
            result = client.compare([prompt(1), prompt(2)], n=2, max_tokens=40, seed=3, ignore_eos=True)
        self.assertEqual(result.summary.statistics.num_tokens, 160)
        self.assertEqual(result.summary.statistics.num_unequal, 0)

    def test_info(self):
        info = self.fast.get_server_info()
        self.assertEqual((list(info.drafters), info.verify_window, info.verify_group), (["fast_path"], 16, 8))
        self.assertEqual(list(self.plain.get_server_info().drafters), [])
        # Without a fast path a request that wants no determinism has it nevertheless.
        (sample,) = self.plain.generate(prompt(1), determinism="none", **OPTIONS)
        self.assertEqual(sample.fingerprint, self.plain.get_server_info().server.fingerprint.hex)
        with self.assertRaisesRegex(ValueError, "Determinism is 'some', expected one of required, none"):
            self.fast.generate(prompt(1), determinism="some")

    def test_flags_that_do_not_fit(self):
        for status, flags, message in (
            (2, ("--verify_window=1",), "--verify_window is 1, expected"),
            (2, ("--verify_group=2000",), "--verify_group is 2000, expected"),
            (
                2,
                ("--numerics=vanilla",),
                "--speculation=fast_path verifies by tree, but --numerics is vanilla",
            ),
            (2, ("--speculation=fast_path,lookup",), "expected off, fast_path, or each"),
            # What a step has room for is known with the model alone.
            (
                1,
                ("--verify_window=64", "--verify_group=4"),
                "is 64 x 4 = 256 rows of a step, expected at most",
            ),
        ):
            with self.subTest(flags):
                service = self.launch("rollout", *self.flags, *flags)
                self.assertEqual(service.process.wait(30), status)
                self.assertIn(message, service.log.read_text())


if __name__ == "__main__":
    unittest.main()
