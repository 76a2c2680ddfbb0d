"""Tests of the Python clients against fake services in this process.

python tests/python/client_test.py        (in an environment where the package `isobit` is installed)
"""

import math
import pickle
import time
import unittest
from concurrent import futures

import grpc
import numpy as np
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

import isobit
from isobit import errors, framework_metrics
from isobit.errors import (
    DeadlineExceededError,
    IncompleteStreamError,
    InvalidArgumentError,
    IsobitError,
    ResourceExhaustedError,
)
from isobit.results import Chunk, CompareSummary, Sample, SequenceReport, TokenGaps
from isobit.v1 import (
    comparator_pb2,
    comparator_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    scorer_pb2,
    scorer_pb2_grpc,
    types_pb2,
)

# -0, the smallest subnormal, the neighbours of -1, a large value: conversion to another type would show.
AWKWARD_BITS = np.array([0x80000000, 0x80000001, 0xBF7FFFFF, 0xBF800001, 0xC2C80001], np.uint32)
AWKWARD = AWKWARD_BITS.view(np.float32)
STATUSES = [status for status in grpc.StatusCode if status != grpc.StatusCode.OK]


def tokens_message(ids, logprobs, top=()):
    return types_pb2.TokenLogprobs(
        token_ids=ids, logprobs=logprobs.tolist(), weight_versions=[7] * len(ids), top=top
    )


class FakeRollout(rollout_pb2_grpc.RolloutServiceServicer):
    """Streams AWKWARD in two chunks per sample, samples interleaved; special prompts make it misbehave."""

    def __init__(self):
        self.requests = []
        self.cancelled = False

    def Generate(self, request, context):
        self.requests.append(request)
        first = request.prompt_token_ids[0]
        if first == 900:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "prompt_token_ids[0] is 900, expected < 512")
        if first == 901:
            context.set_trailing_metadata((("retry-after-ms", "250"),))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue is full")
        if first == 902:
            time.sleep(1)
        if first == 905:
            context.abort(STATUSES[request.prompt_token_ids[1]], "no")
        if first == 904:
            context.add_callback(lambda: setattr(self, "cancelled", True))
        samples = range(request.sampling.n or 1)
        for start, end in ((0, 2), (2, 5)):
            for index in samples:
                top = [types_pb2.TopLogprobs(token_ids=[1], logprobs=[-0.5])] * (end - start)
                chunk = rollout_pb2.GenerateChunk(
                    index=index, tokens=tokens_message(range(start, end), AWKWARD[start:end], top)
                )
                if first != 903 or start == 0:
                    yield rollout_pb2.GenerateResponse(request_id="r", chunk=chunk)
            if first == 904:
                time.sleep(0.5)
        for index in reversed(samples):
            complete = rollout_pb2.GenerateComplete(
                index=index,
                finish_reason=types_pb2.FINISH_REASON_STOP,
                stop_token_id=0,
                num_prompt_tokens=len(request.prompt_token_ids),
                num_completion_tokens=5,
                seed=request.sampling.seed,
                logprob_mode=request.logprob_mode,
                fingerprint=types_pb2.Fingerprint(hex="f00d", settings="eos_token_ids=1"),
                weight_version=types_pb2.WeightVersion(id=7, digest="d1"),
                num_preemptions=index,
                num_cached_tokens=10 * index,
            )
            yield rollout_pb2.GenerateResponse(request_id="r", complete=complete)


class FakeScorer(scorer_pb2_grpc.ScorerServiceServicer):
    """Answers in reverse order, with logprobs that identify the sequence."""

    def Score(self, request, context):
        self.request = request
        for index in reversed(range(len(request.sequences))):
            sequence = request.sequences[index]
            ids = sequence.completion_token_ids
            response = scorer_pb2.ScoreResponse(
                index=index,
                completion=tokens_message(ids, np.full(len(ids), -index, np.float32)),
                entropies=[1.5] * len(ids) if request.entropy else [],
                logprob_mode=request.logprob_mode,
                fingerprint=types_pb2.Fingerprint(hex="f00d", settings="eos_token_ids=1"),
                weight_version=types_pb2.WeightVersion(id=7, digest="d1"),
            )
            if request.prompt_logprobs:
                prompt = sequence.prompt_token_ids[1:]
                response.prompt.CopyFrom(tokens_message(prompt, np.full(len(prompt), -9, np.float32)))
            yield response


def summary_message(num_nan=0):
    return comparator_pb2.CompareSummary(
        verdict=comparator_pb2.VERDICT_UNEQUAL,
        num_sequences=1,
        num_unequal_sequences=1,
        statistics=comparator_pb2.GapStatistics(
            num_tokens=4, num_unequal=1, num_nan=num_nan, num_finite=4 - num_nan, kl_k3=0.5
        ),
        first_divergence=comparator_pb2.Divergence(sequence_id="0/0", position=2),
    )


class FakeComparator(comparator_pb2_grpc.ComparatorServiceServicer):
    def Compare(self, request, context):
        self.request = request
        gap = comparator_pb2.TokenGap(
            position=2, token_id=5, rollout_bits=0x7FC00123, scorer_bits=0x80000000, equal=False
        )
        yield comparator_pb2.CompareEvent(gaps=comparator_pb2.TokenGaps(sequence_id="0/0", gaps=[gap]))
        for index in (1, 0):
            report = comparator_pb2.SequenceReport(sequence_id=f"{index}/0", prompt_index=index)
            yield comparator_pb2.CompareEvent(sequence=report)
        if len(request.prompts) > 1:
            yield comparator_pb2.CompareEvent(summary=summary_message())

    def Record(self, requests, context):
        self.records = list(requests)
        return summary_message(num_nan=1)

    def Watch(self, request, context):
        while context.is_active():
            yield comparator_pb2.WatchResponse(window=summary_message(), uptime_seconds=2)


class ClientTest(unittest.TestCase):
    clients = isobit  # what has the three client classes

    def setUp(self):
        self.rollout_service, self.scorer_service = FakeRollout(), FakeScorer()
        self.comparator_service = FakeComparator()
        self.health = health.HealthServicer()
        server = grpc.server(futures.ThreadPoolExecutor(8))
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self.rollout_service, server)
        scorer_pb2_grpc.add_ScorerServiceServicer_to_server(self.scorer_service, server)
        comparator_pb2_grpc.add_ComparatorServiceServicer_to_server(self.comparator_service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        self.addCleanup(lambda: server.stop(None).wait())
        self.rollout = self.clients.RolloutClient(target)
        self.scorer = self.clients.ScorerClient(target)
        self.comparator = self.clients.ComparatorClient(target)
        for client in (self.rollout, self.scorer, self.comparator):
            self.addCleanup(client.close)

    def test_generate_keeps_every_bit_and_orders_samples(self):
        samples = self.rollout.generate(np.array([1, 2], np.uint32), n=3, seed=5, logprobs=1)
        self.assertEqual([sample.index for sample in samples], [0, 1, 2])
        self.assertEqual([sample.num_preemptions for sample in samples], [0, 1, 2])
        self.assertEqual([sample.num_cached_tokens for sample in samples], [0, 10, 20])
        for sample in samples:
            np.testing.assert_array_equal(sample.tokens.logprobs.view(np.uint32), AWKWARD_BITS)
            np.testing.assert_array_equal(sample.tokens.token_ids, np.arange(5))
            self.assertEqual(sample.tokens.token_ids.dtype, np.int32)
            self.assertEqual(len(sample.tokens.top), 5)
            self.assertEqual((sample.finish_reason, sample.stop_token_id), ("stop", 0))
            self.assertEqual((sample.logprob_mode, sample.seed), ("processed", 5))
            self.assertEqual(sample.weight_version.digest, "d1")

    def test_generate_streams_chunks_then_the_sample(self):
        events = list(self.rollout.generate([1], stream=True))
        self.assertEqual([type(event) for event in events], [Chunk, Chunk, Sample])

    def test_only_a_stream_asks_for_tokens_on_the_way(self):
        self.rollout.generate([1])
        list(self.rollout.generate([1], stream=True, chunk_interval_ms=50))
        requests = self.rollout_service.requests
        self.assertEqual([request.final_only for request in requests], [True, False])
        self.assertEqual([request.chunk_interval_ms for request in requests], [0, 50])
        with self.assertRaisesRegex(ValueError, "chunk_interval_ms is -1, expected 0 to"):
            self.rollout.generate([1], stream=True, chunk_interval_ms=-1)

    def test_closing_a_stream_cancels_the_request(self):
        events = self.rollout.generate([904], stream=True)
        next(events)
        events.close()
        deadline = time.monotonic() + 5
        while not self.rollout_service.cancelled and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertTrue(self.rollout_service.cancelled)

    def test_generate_batch_keeps_the_order_of_prompts(self):
        results = self.rollout.generate_batch([[1] * length for length in (3, 1, 2)], max_concurrency=2)
        self.assertEqual([samples[0].num_prompt_tokens for samples in results], [3, 1, 2])

    def test_missing_tokens_are_an_error(self):
        with self.assertRaisesRegex(IncompleteStreamError, "2 tokens, expected 5"):
            self.rollout.generate([903])

    def test_statuses_become_exceptions(self):
        with self.assertRaisesRegex(InvalidArgumentError, "expected < 512"):
            self.rollout.generate([900])
        with self.assertRaises(ResourceExhaustedError) as caught:
            self.rollout.generate([901], timeout=0.2)  # no time for another try
        self.assertEqual(caught.exception.retry_after_ms, 250)
        self.assert_survives_pickling(caught.exception)
        with self.assertRaises(DeadlineExceededError):
            self.rollout.generate([902], timeout=0.1)

    def assert_survives_pickling(self, error: IsobitError):
        """As a worker process hands it on."""
        copy = pickle.loads(pickle.dumps(error))
        self.assertEqual((type(copy), str(copy), vars(copy)), (type(error), str(error), vars(error)))

    def test_every_status_has_a_class_of_its_own(self):
        raised = set()
        for index, status in enumerate(STATUSES):
            with self.assertRaisesRegex(IsobitError, f"^{status.name}: no$") as caught:
                self.rollout.generate([905, index])
            self.assertEqual(caught.exception.code, status)
            self.assert_survives_pickling(caught.exception)
            raised.add(type(caught.exception))
        self.assertEqual(len(raised - {IsobitError}), len(STATUSES), sorted(map(str, raised)))
        self.assertIn(errors.NotFoundError, raised)

    def test_ids_must_be_one_row_of_integers(self):
        for bad in ([[1, 2]], [0.5], ["a"]):
            with self.assertRaisesRegex(TypeError, "prompt_token_ids"):
                self.rollout.generate(bad)
        for outside in (-1, 2**32):
            with self.assertRaisesRegex(ValueError, rf"prompt_token_ids\[1\] is {outside}, expected 0 to"):
                self.rollout.generate([1, outside])

    def test_scores_come_in_the_order_of_the_request(self):
        sequences = [([1, 2, 3], [4]), ([5], [6, 7])]
        first, second = self.scorer.score(sequences, prompt_logprobs=True, entropy=True)
        np.testing.assert_array_equal(first.prompt.token_ids, [2, 3])
        np.testing.assert_array_equal(second.tokens.token_ids, [6, 7])
        np.testing.assert_array_equal(second.tokens.logprobs, [-1, -1])
        np.testing.assert_array_equal(second.entropies, [1.5, 1.5])
        plain = self.scorer.score(sequences)
        self.assertIsNone(plain[0].prompt)
        self.assertIsNone(plain[0].entropies)
        self.assertEqual([score.index for score in self.scorer.score(sequences, stream=True)], [1, 0])

    def test_unset_and_zero_differ_on_the_wire(self):
        self.scorer.score([([1], [2])], temperature=0, weight_version=0)
        self.assertTrue(self.scorer_service.request.sampling.HasField("temperature"))
        self.assertTrue(self.scorer_service.request.HasField("weight_version"))
        self.scorer.score([([1], [2])])
        self.assertFalse(self.scorer_service.request.sampling.HasField("temperature"))
        self.assertFalse(self.scorer_service.request.HasField("weight_version"))

    def test_compare_brings_gaps_reports_and_summary(self):
        comparison = self.comparator.compare([[1], [2]], gap_detail="unequal", max_tokens=3)
        self.assertEqual(comparison.summary.verdict, "unequal")
        self.assertEqual(comparison.summary.first_divergence.position, 2)
        self.assertIsNone(comparison.summary.rollout)
        self.assertIsNone(comparison.summary.statistics.pearson_correlation)
        self.assertEqual([report.prompt_index for report in comparison.reports], [0, 1])
        gaps = comparison.gaps[0]
        self.assertEqual(gaps.rollout_logprobs.view(np.uint32)[0], 0x7FC00123)
        self.assertEqual(gaps.scorer_logprobs.view(np.uint32)[0], 0x80000000)
        self.assertFalse(gaps.equal[0])
        self.assertEqual(self.comparator_service.request.gap_detail, comparator_pb2.GAP_DETAIL_UNEQUAL)
        kinds = [type(event) for event in self.comparator.compare([[1], [2]], stream=True)]
        self.assertEqual(kinds, [TokenGaps, SequenceReport, SequenceReport, CompareSummary])

    def test_compare_without_summary_is_an_error(self):
        with self.assertRaisesRegex(IncompleteStreamError, "0 summaries"):
            self.comparator.compare([[1]])

    def test_record_sends_both_sides_bit_by_bit(self):
        sample = self.rollout.generate([1])[0]
        score = self.scorer.score([([1], sample.tokens.token_ids)])[0]
        summary = self.comparator.record([(sample, score)])
        record = self.comparator_service.records[0]
        sent = np.array(record.rollout.tokens.logprobs, np.float32).view(np.uint32)
        np.testing.assert_array_equal(sent, AWKWARD_BITS)
        self.assertEqual((sample.settings, score.settings), ("eos_token_ids=1",) * 2)
        for side in (record.rollout, record.scorer):
            self.assertEqual(side.fingerprint.hex, "f00d")
            self.assertEqual(side.fingerprint.settings, "eos_token_ids=1")
        self.assertEqual(record.scorer.weight_version.digest, "d1")
        self.assertEqual(list(record.scorer.tokens.weight_versions), [7] * 5)
        self.assertTrue(math.isnan(framework_metrics(summary)["gen_kl_error"]))

    def test_watch_goes_on_until_closed(self):
        updates = self.comparator.watch(interval_ms=10)
        self.assertEqual(next(updates).window.num_sequences, 1)
        self.assertEqual(next(updates).uptime_seconds, 2)
        updates.close()

    def test_wait_until_serving_follows_health(self):
        self.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        with self.assertRaisesRegex(DeadlineExceededError, "NOT_SERVING"):
            self.rollout.wait_until_serving(timeout=2)
        self.health.set("", health_pb2.HealthCheckResponse.SERVING)
        self.rollout.wait_until_serving(timeout=5)
        with (
            self.clients.RolloutClient("127.0.0.1:1") as nobody,
            self.assertRaisesRegex(TimeoutError, "UNAVAILABLE"),
        ):
            nobody.wait_until_serving(timeout=2)


if __name__ == "__main__":
    unittest.main()
