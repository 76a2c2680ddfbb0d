"""Shadow comparison: what an ordinary client has generated is scored and compared, through restarts and
updates of weights; other arithmetic shows."""

import unittest

import grpc

from isobit import ComparatorClient, RolloutClient, ScorerClient
from isobit.launch import Setting, run_model_tool
from isobit.v1 import rollout_pb2, rollout_pb2_grpc
from isobit_tools.testing import BIN_DIR, ServiceTest, http_get, http_url, metric_values

DRAW = {"n": 4, "max_tokens": 40, "temperature": 0.9, "top_p": 0.95, "ignore_eos": True}


class ShadowTest(ServiceTest):
    setting = Setting("tree", tp_size=2, shards=2)

    @classmethod
    def make_model(cls):
        super().make_model()
        run_model_tool(
            BIN_DIR, "flip-bit", str(cls.model), "model.layers.1.mlp.down_proj.weight", "77", "1",
            str(cls.scratch / "flipped"),
        )  # fmt: skip

    def start_with_shadow(self, fraction: float = 1) -> None:
        self.rollout = self.start("rollout", "--metrics_port=0")
        self.scorer = self.start("scorer")
        self.start_comparator(fraction)

    def start_comparator(self, fraction: float) -> None:
        self.comparator = self.start(
            "comparator",
            f"--rollout={self.rollout.target}",
            f"--scorer={self.scorer.target}",
            f"--shadow_fraction={fraction}",
            "--metrics_port=0",
        )
        self.compared = ComparatorClient(self.comparator.target)
        self.addCleanup(self.compared.close)
        # The tap shows in no metric until a sample has passed.
        self.wait_until(self.tap_is_open, "the comparator has opened the tap")

    def tap_is_open(self) -> bool:
        with RolloutClient(self.rollout.target) as client:
            before = self.outcomes(self.rollout, "tap")
            client.generate([1], max_tokens=1, ignore_eos=True, seed=1)
            return self.outcomes(self.rollout, "tap") != before

    def outcomes(self, service, kind: str) -> dict[str, float]:
        values = metric_values(http_get(http_url(service, "metrics")))
        return {
            outcome: values[f'isobit_{kind}_samples_total{{outcome="{outcome}"}}']
            for outcome in (("sent", "dropped", "skipped") if kind == "tap" else
                            ("compared", "dropped", "skipped", "failed"))
        }  # fmt: skip

    def generate(self, count: int, first: int = 0) -> int:
        """Samples with an ordinary client, in different ways. Returns the number of tokens."""
        tokens = 0
        with RolloutClient(self.rollout.target) as client:
            for i in range(first, first + count):
                mode = "raw" if i % 3 == 0 else "processed"
                samples = client.generate([1 + i, 2, 3], seed=i, logprob_mode=mode, **DRAW)
                tokens += sum(len(sample.tokens.token_ids) for sample in samples)
        return tokens

    def total(self):
        return self.compared.get_server_info().total.statistics

    def wait_for_tokens(self, expected: int) -> None:
        self.wait_until(lambda: self.total().num_tokens >= expected, f"{expected} tokens are compared")
        self.assertEqual(self.total().num_tokens, expected)

    def test_all_traffic_is_compared_through_updates(self):
        self.start_with_shadow()
        base = self.total().num_tokens
        self.wait_until(
            lambda: self.outcomes(self.comparator, "shadow")["compared"] >= 1, "the first sample is compared"
        )
        base = self.total().num_tokens
        tokens = self.generate(20)
        self.wait_for_tokens(base + tokens)
        self.assertEqual(self.total().num_unequal, 0)
        self.assertEqual(self.outcomes(self.rollout, "tap")["dropped"], 0)
        with ScorerClient(self.scorer.target) as scorer, RolloutClient(self.rollout.target) as rollout:
            before = self.outcomes(self.comparator, "shadow")["skipped"]
            scorer.update_weights("flipped", weight_version=2)
            self.generate(2)  # still version 1
            self.wait_until(
                lambda: self.outcomes(self.comparator, "shadow")["skipped"] == before + 8,
                "samples of other weights are skipped, not called unequal",
            )
            self.assertEqual(self.total().num_unequal, 0)
            rollout.update_weights("flipped", weight_version=2)
        tokens = base + tokens + self.generate(3)
        self.wait_for_tokens(tokens)
        self.assertEqual(self.total().num_unequal, 0)

    def test_unequal_arithmetic_shows(self):
        self.setting = Setting("vanilla", tp_size=2, shards=2)
        self.start_with_shadow()
        self.generate(10)
        self.wait_until(lambda: self.total().num_tokens >= 1600, "all are compared")
        self.assertGreater(self.total().num_unequal, 1000, "control: vanilla is not equal")

    def test_restarts_are_survived(self):
        self.start_with_shadow()
        port = self.scorer.target.rsplit(":", 1)[1]
        self.scorer.process.terminate()
        self.scorer.process.wait()
        self.generate(2)
        self.wait_until(
            lambda: self.outcomes(self.comparator, "shadow")["failed"] >= 8,
            "lost scores are counted",
            timeout=60,
        )
        self.scorer = self.start("scorer", f"--port={port}")
        before = self.total().num_tokens

        def compares() -> bool:
            self.generate(1)
            return self.total().num_tokens > before

        self.wait_until(compares, "the scorer is back")
        port = self.rollout.target.rsplit(":", 1)[1]
        self.rollout.process.kill()
        self.rollout.process.wait()
        self.rollout = self.start("rollout", f"--port={port}", "--metrics_port=0")
        before = self.total().num_tokens
        self.wait_until(compares, "the rollout is back")
        self.assertEqual(self.total().num_unequal, 0)

    def test_a_share_is_the_same_for_all_and_a_slow_reader_delays_nobody(self):
        self.rollout = self.start("rollout", "--metrics_port=0")
        with grpc.insecure_channel(self.rollout.target) as channel:
            stub = rollout_pb2_grpc.RolloutServiceStub(channel)
            for fraction in (0, -1, 1.5, float("nan")):
                with self.assertRaises(grpc.RpcError) as refused:
                    next(stub.Tap(rollout_pb2.TapRequest(fraction=fraction)))
                self.assertEqual(refused.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
                self.assertIn("fraction", refused.exception.details())
            half, all_of_them = (stub.Tap(rollout_pb2.TapRequest(fraction=f)) for f in (0.5, 1.0))
            self.wait_until(self.tap_is_open, "a tap is open")
            slow = stub.Tap(rollout_pb2.TapRequest(fraction=1.0))  # never read
            self.generate(60)
            sent = self.outcomes(self.rollout, "tap")
            self.assertGreater(sent["sent"], 240 * 2)
            whole = {}
            for sample in all_of_them:
                whole[sample.request_id, sample.complete.index] = sample
                if len(whole) >= 240:
                    break
            # The smaller share is a part of the larger one.
            some_of_half = (sample for sample, _ in zip(half, range(90), strict=False))
            part = {(sample.request_id, sample.complete.index) for sample in some_of_half}
            self.assertEqual(len(part), 90)
            self.assertLess(len(part - whole.keys()), 3, "those of tap_is_open alone")
            some = next(iter(whole.values()))
            self.assertEqual(len(some.tokens.token_ids), some.complete.num_completion_tokens)
            self.assertEqual(len(some.prompt_token_ids), some.complete.num_prompt_tokens)
            self.assertFalse(some.sampling.HasField("seed"))
            extra = [stub.Tap(rollout_pb2.TapRequest(fraction=1.0)) for _ in range(2)]
            self.wait_until(lambda: not all(tap.is_active() for tap in extra), "the fifth tap is refused")
            (refused,) = (tap for tap in extra if not tap.is_active())
            self.assertEqual(refused.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)
            for call in (half, all_of_them, slow, *extra):
                call.cancel()
        # Without a reader nothing is chosen.
        self.wait_until(lambda: not self.tap_is_open(), "the taps are closed")


if __name__ == "__main__":
    unittest.main()
