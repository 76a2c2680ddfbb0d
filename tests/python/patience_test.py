"""Tests of calls that a full queue refuses and that are tried again, and of timeouts of many calls together.
Each runs on the synchronous clients and on those of asyncio. The services are fakes.

python tests/python/patience_test.py        (in an environment where the package `isobit` is installed)
"""

import math
import threading
import time
import unittest
from concurrent import futures

import blocking_aio
import client_test
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

import isobit
from isobit.errors import CancelledError, DeadlineExceededError, ResourceExhaustedError
from isobit.retry import retried
from isobit.v1 import (
    comparator_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    scorer_pb2_grpc,
)

FOREVER = 951  # first token of a prompt whose call never ends by itself
BROKEN_OFF = 952  # of one that is refused after its first tokens
HINT_MS = 20


class Door:
    """Lets no more than `places` calls in at a time, and refuses `refusals` of them before."""

    def __init__(self):
        self.places, self.refusals, self.hint = 10**9, 0, str(HINT_MS)
        self.refused = self.inside = 0
        self.deadlines = []
        self.closed = threading.Event()
        self._lock = threading.Lock()

    def enter(self, context) -> None:
        with self._lock:
            self.deadlines.append(context.time_remaining())
            full = self.inside >= self.places or self.refused < self.refusals
            self.refused += full
            self.inside += not full
        if full:
            if self.hint:
                context.set_trailing_metadata((("retry-after-ms", self.hint),))
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")

    def leave(self) -> None:
        with self._lock:
            self.inside -= 1


def guarded(kind: type, method: str) -> type:
    """The service `kind`, whose `method` is entered by a door."""

    class Guarded(kind):
        door: Door

        def call(self, request, context):
            self.door.enter(context)
            try:
                prompt = getattr(request, "prompt_token_ids", [0])
                if prompt[0] == FOREVER:
                    over = threading.Event()
                    if context.add_callback(over.set):
                        over.wait(60)
                    return
                if prompt[0] == BROKEN_OFF:
                    yield rollout_pb2.GenerateResponse(
                        request_id="r", chunk=rollout_pb2.GenerateChunk(index=0)
                    )
                    context.set_trailing_metadata((("retry-after-ms", self.door.hint),))
                    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too much is unread")
                yield from getattr(super(), method)(request, context)
            finally:
                self.door.leave()

        def GetServerInfo(self, request, context):
            self.door.enter(context)
            self.door.leave()
            return rollout_pb2.RolloutServerInfo()  # nobody asks the others

    setattr(Guarded, method, Guarded.call)
    return Guarded


class PatienceTest(unittest.TestCase):
    clients = isobit  # what has the client classes

    def setUp(self):
        self.door = Door()
        server = grpc.server(futures.ThreadPoolExecutor(64))
        for kind, method, add in (
            (client_test.FakeRollout, "Generate", rollout_pb2_grpc.add_RolloutServiceServicer_to_server),
            (client_test.FakeScorer, "Score", scorer_pb2_grpc.add_ScorerServiceServicer_to_server),
            (
                client_test.FakeComparator,
                "Compare",
                comparator_pb2_grpc.add_ComparatorServiceServicer_to_server,
            ),
        ):
            service = guarded(kind, method)()
            service.door = self.door
            add(service, server)
        self.health = health.HealthServicer()
        self.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        self.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        self.addCleanup(lambda: server.stop(None).wait())
        self.rollout = self.enterContext(self.clients.RolloutClient(self.target))
        self.scorer = self.enterContext(self.clients.ScorerClient(self.target))
        self.comparator = self.enterContext(self.clients.ComparatorClient(self.target))

    def calls(self) -> dict:
        """Each kind of call that a full queue may refuse."""
        a, b, c = self.rollout, self.scorer, self.comparator
        return {
            "generate": lambda **t: a.generate([1], **t),
            "stream": lambda **t: list(a.generate([1], stream=True, **t)),
            "batch": lambda **t: a.generate_batch([[1]], **t),
            "score": lambda **t: b.score([([1], [2])], **t),
            "scores": lambda **t: list(b.score([([1], [2])], stream=True, **t)),
            "compare": lambda **t: c.compare([[1], [2]], **t),
            "unary": lambda **t: a.get_server_info(**t),
        }

    def test_a_call_is_tried_again_when_the_service_says(self):
        for name, call in self.calls().items():
            with self.subTest(name):
                self.door.refused, self.door.refusals = 0, 3
                start = time.monotonic()
                self.assertTrue(call())
                self.assertEqual(self.door.refused, 3)
                self.assertGreaterEqual(time.monotonic() - start, 3 * HINT_MS / 1000)

    def test_without_a_hint_the_refusal_is_raised(self):
        self.door.hint = ""
        for name, call in self.calls().items():
            with self.subTest(name):
                self.door.refused, self.door.refusals = 0, 1
                with self.assertRaisesRegex(ResourceExhaustedError, "the queue is full"):
                    call()
                self.assertEqual(self.door.refused, 1)

    def test_a_client_that_does_not_wait(self):
        self.door.refusals = 10**9
        with self.clients.RolloutClient(self.target, wait_if_full=False) as client:
            for call in (lambda: client.generate([1]), lambda: client.generate_batch([[1]])):
                with self.assertRaises(ResourceExhaustedError) as raised:
                    call()
                self.assertEqual(raised.exception.retry_after_ms, HINT_MS)
        self.assertEqual(self.door.refused, 2)

    def test_the_timeout_bounds_all_tries(self):
        self.door.refusals = 10**9
        for name, call in self.calls().items():
            with self.subTest(name):
                start = time.monotonic()
                # The last try may be refused, or overdue.
                with self.assertRaises((ResourceExhaustedError, DeadlineExceededError)):
                    call(timeout=0.5)
                self.assertLess(time.monotonic() - start, 20)
        self.assertGreater(self.door.refused, 2 * len(self.calls()))
        left = [seconds for seconds in self.door.deadlines if seconds is not None]
        self.assertLess(max(left), 0.6)
        self.assertLess(min(left), 0.4)  # a later try has what is left

    def test_no_try_begins_that_has_no_time(self):
        self.door.refusals, self.door.hint = 10**9, "60000"
        for name, call in self.calls().items():
            with self.subTest(name):
                start = time.monotonic()
                with self.assertRaises(ResourceExhaustedError):
                    call(timeout=50)
                self.assertLess(time.monotonic() - start, 40)

    def test_what_has_begun_is_not_begun_again(self):
        with self.assertRaisesRegex(ResourceExhaustedError, "unread"):
            list(self.rollout.generate([BROKEN_OFF], stream=True))

    def test_a_batch_against_few_places(self):
        self.door.places = 5
        samples = self.rollout.generate_batch([[1] * (1 + i % 7) for i in range(150)], max_concurrency=60)
        self.assertEqual([s[0].num_prompt_tokens for s in samples], [1 + i % 7 for i in range(150)])

    def test_closing_ends_the_waiting(self):
        self.door.refusals, self.door.hint = 10**9, "500"
        with futures.ThreadPoolExecutor(2) as pool:
            ends = [pool.submit(self.rollout.generate, [1]), pool.submit(self.rollout.generate_batch, [[1]])]
            while self.door.refused < 2:
                time.sleep(0.01)
            self.rollout.close()
            for end in ends:
                with self.assertRaisesRegex((CancelledError, ValueError), "closed"):
                    end.result(timeout=30)

    def test_work_has_no_timeout_unless_told(self):
        for name, call in self.calls().items():
            if name != "unary":
                for options in ({}, {"timeout": None}, {"timeout": math.inf}, {"timeout": 1e10}):
                    self.door.deadlines.clear()
                    call(**options)
                    # gRPC says of a call without a deadline that years are left.
                    self.assertTrue(all(s is None or s > 10**8 for s in self.door.deadlines), (name, options))
        self.rollout.get_server_info(timeout=math.inf)
        self.health.set("", health_pb2.HealthCheckResponse.SERVING)
        for endless in (None, math.inf, 1e10):
            self.rollout.wait_until_serving(timeout=endless)

    def test_the_timeout_of_a_batch_is_of_all_together(self):
        start = time.monotonic()
        with self.assertRaises(DeadlineExceededError):
            self.rollout.generate_batch([[FOREVER]] * 400, max_concurrency=4, timeout=0.5)
        self.assertLess(time.monotonic() - start, 30)  # 400 / 4 waves of 0.5 s would take longer

    def test_the_first_failure_of_a_batch_ends_it(self):
        with self.assertRaisesRegex(ValueError, "expected < 512"):
            self.rollout.generate_batch([[FOREVER], [900], [FOREVER]])
        while self.door.inside:
            time.sleep(0.01)


class AioPatienceTest(PatienceTest):
    clients = blocking_aio


class RetriedTest(unittest.TestCase):
    def test_what_it_gives_and_raises(self):
        refusals = [5, 5]

        def call(left: float | None) -> str:
            if refusals:
                raise ResourceExhaustedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", refusals.pop())
            return f"{left} left"

        pauses = []
        self.assertEqual(retried(call, sleep=pauses.append), "None left")
        self.assertTrue(all(0.005 <= pause <= 0.0075 for pause in pauses), pauses)
        refusals[:] = [None, 5]
        with self.assertRaises(ResourceExhaustedError):
            retried(call, sleep=pauses.append)


if __name__ == "__main__":
    unittest.main()
