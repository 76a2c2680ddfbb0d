"""Logprobs of both sides that a caller records: whatever is not finite, or no logprob of a drawn token, shows
in the verdict and in every metric that has a mean in it."""

import math
import unittest

import numpy as np

from isobit import ComparatorClient, framework_metrics
from isobit.launch import Setting
from isobit.results import Sample, Score, TokenLogprobs, WeightVersion
from isobit_tools.testing import ServiceTest, http_get, http_url, metric_values

COUNTS = ("token_count", "mismatch_count", "impossible_count")
LOGPROBS = (-1.0, -0.5, -2.0, -0.25)


def tokens(logprobs) -> TokenLogprobs:
    count = len(logprobs)
    return TokenLogprobs(
        np.arange(count, dtype=np.int32), np.array(logprobs, np.float32), np.ones(count, np.uint64), ()
    )


def pair(rollout, scorer) -> tuple[Sample, Score]:
    version = WeightVersion(1, "d")
    sample = Sample(
        request_id="r", index=0, tokens=tokens(rollout), finish_reason="length", stop_token_id=None,
        abort_reason="", num_prompt_tokens=1, seed=1, logprob_mode="processed", fingerprint="f",
        weight_version=version, num_preemptions=0, num_cached_tokens=0,
    )  # fmt: skip
    return sample, Score("s", 0, tokens(scorer), None, None, "processed", "f", version)


class RecordTest(ServiceTest):
    setting = Setting("tree", tp_size=1, shards=1)

    @classmethod
    def make_model(cls):
        """None is needed: the comparator computes nothing."""

    def setUp(self):
        super().setUp()
        self.comparator = self.start(
            "comparator", "--rollout=127.0.0.1:1", "--scorer=127.0.0.1:1", "--metrics_port=0"
        )
        self.client = ComparatorClient(self.comparator.target)
        self.addCleanup(self.client.close)

    def changed(self, value: float, count: int) -> tuple[float, ...]:
        return (value, *LOGPROBS[1:count])

    def test_equal_logprobs_are_a_perfect_match(self):
        summary = self.client.record([pair(LOGPROBS, LOGPROBS)])
        self.assertEqual((summary.verdict, summary.first_impossible), ("equal", None))
        found = framework_metrics(summary)
        self.assertEqual(
            (found["token_count"], found["mismatch_count"], found["impossible_count"]), (4, 0, 0)
        )
        self.assertEqual(found["rollout_corr/kl"], 0.0)
        self.assertEqual(found["rollout_corr/rollout_is_eff_sample_size"], 1.0)

    def test_what_is_not_finite_vanishes_from_no_metric(self):
        for value in (math.nan, math.inf, -math.inf):
            for count in (1, len(LOGPROBS)):
                odd, good = self.changed(value, count), LOGPROBS[:count]
                for name, pairs in (
                    ("rollout", [pair(odd, good)]),
                    ("scorer", [pair(good, odd)]),
                    ("both", [pair(odd, odd)]),
                    ("beside a perfect sequence", [pair(LOGPROBS, LOGPROBS), pair(good, odd)]),
                ):
                    with self.subTest(value=value, side=name, count=count):
                        summary = self.client.record(pairs)
                        equal = name == "both" and math.isinf(value)
                        self.assertEqual(summary.verdict, "impossible" if equal else "unequal")
                        self.assertEqual(summary.first_impossible.position, 0)
                        found = framework_metrics(summary)
                        self.assertEqual(found["impossible_count"], 1)
                        self.assertEqual(found["mismatch_count"], 0 if equal else 1)
                        perfect = {
                            name: number
                            for name, number in found.items()
                            if name not in (*COUNTS, "bit_wise/ratio_tokens_different/mean")
                            and number == (1.0 if "corr" in name and "kl" not in name else 0.0)
                        }
                        self.assertEqual(perfect, {})
        metrics = metric_values(http_get(http_url(self.comparator, "metrics")))
        for name in ("isobit_kl_k1", "isobit_kl_k2", "isobit_kl_k3"):
            self.assertTrue(math.isnan(metrics[name]), name)
        self.assertEqual(metrics["isobit_logprob_abs_diff_max"], math.inf)
        self.assertEqual(metrics["isobit_impossible_logprobs_total"], 3 * 2 * 4)
        update = next(iter(self.client.watch(interval_ms=10)))
        for statistics in (update.window.statistics, update.total.statistics):
            self.assertEqual(statistics.num_impossible, 3 * 2 * 4)
            self.assertTrue(math.isnan(statistics.kl_k3) and math.isnan(statistics.mean_abs_dp))

    def test_a_logprob_above_0_is_impossible(self):
        for value in (5.0, 1e-40):
            odd = self.changed(value, 4)
            summary = self.client.record([pair(LOGPROBS, LOGPROBS), pair(odd, odd)])
            self.assertEqual(summary.verdict, "impossible")
            self.assertEqual(framework_metrics(summary)["impossible_count"], 1)


if __name__ == "__main__":
    unittest.main()
