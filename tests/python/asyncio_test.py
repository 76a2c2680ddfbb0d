"""Tests of what only the asyncio clients promise: cancellation, closing, event loops. The services are fakes.

python tests/python/asyncio_test.py        (in an environment where the package `isobit` is installed)
"""

import asyncio
import contextlib
import socket
import threading
import time
import unittest
from concurrent import futures

import client_test
import grpc
import numpy as np
from connection_test import reserved_port
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from isobit import aio
from isobit.calls import WEIGHTS_ACCEPTED
from isobit.errors import CancelledError, InvalidArgumentError, ResourceExhaustedError, UnavailableError
from isobit.results import Chunk
from isobit.v1 import comparator_pb2_grpc, rollout_pb2, rollout_pb2_grpc

PROMPT_OF_A_SECOND = [902]  # what the fakes make of these, client_test says
REFUSED = [900]


class SlowRollout(client_test.FakeRollout):
    """A prompt [950, t] takes t ms, and [950] until its call ends; `begun` and `ended` count such calls."""

    def __init__(self):
        super().__init__()
        self.begun = 0
        self.ended = 0
        self.running = 0
        self.most = 0  # running at one time
        self._lock = threading.Lock()

    def Generate(self, request, context):
        if request.prompt_token_ids[0] != 950:
            return super().Generate(request, context)
        return self._hang(request, context)

    def _hang(self, request, context):
        over = threading.Event()

        def end():
            over.set()
            with self._lock:
                self.ended += 1

        with self._lock:
            self.begun += 1
            self.running += 1
            self.most = max(self.most, self.running)
        if not context.add_callback(end):
            end()
        if not request.final_only:
            # If the call ends here, nothing after this line runs.
            yield rollout_pb2.GenerateResponse(request_id="r", chunk=rollout_pb2.GenerateChunk(index=0))
        over.wait(request.prompt_token_ids[1] / 1000 if len(request.prompt_token_ids) > 1 else 30)
        with self._lock:
            self.running -= 1
        if context.is_active():
            yield from super().Generate(rollout_pb2.GenerateRequest(prompt_token_ids=[1]), context)

    def GetLoad(self, request, context):
        return rollout_pb2.GetLoadResponse()

    def UpdateWeightsFromStream(self, requests, context):
        next(requests)
        context.send_initial_metadata(((WEIGHTS_ACCEPTED, "1"),))
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no place")


class SlowComparator(client_test.FakeComparator):
    def __init__(self):
        self.begun = threading.Event()
        self.ended = threading.Event()

    def Record(self, requests, context):
        context.add_callback(self.ended.set)
        self.begun.set()
        return super().Record(requests, context)


class AsyncioTest(unittest.IsolatedAsyncioTestCase):
    def setUp(self):
        self.service, self.comparator_service = SlowRollout(), SlowComparator()
        self.health = health.HealthServicer()
        server = grpc.server(futures.ThreadPoolExecutor(32))
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self.service, server)
        comparator_pb2_grpc.add_ComparatorServiceServicer_to_server(self.comparator_service, server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        self.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        self.addCleanup(lambda: server.stop(None).wait())
        self.client = aio.RolloutClient(self.target)
        self.comparator = aio.ComparatorClient(self.target)

    async def asyncTearDown(self):
        await self.client.close()
        await self.comparator.close()

    async def wait_until(self, condition, what: str) -> None:
        deadline = time.monotonic() + 120
        while not condition():
            self.assertLess(time.monotonic(), deadline, what)
            await asyncio.sleep(0.01)

    async def assert_cancelled(self, task: asyncio.Task) -> None:
        """Cancels `task` and checks that it ends as cancelled, soon."""
        task.cancel()
        start = time.monotonic()
        with self.assertRaises(asyncio.CancelledError):
            await task
        self.assertTrue(task.cancelled())
        self.assertLess(time.monotonic() - start, 20)  # a call that hangs takes 30 s

    async def begun(self, coroutine, calls: int = 1) -> asyncio.Task:
        """A task of `coroutine` once the service has `calls` more calls."""
        before = self.service.begun
        task = asyncio.create_task(coroutine)
        await self.wait_until(lambda: self.service.begun == before + calls, "the service was not called")
        return task

    async def assert_all_ended(self) -> None:
        await self.wait_until(lambda: self.service.ended == self.service.begun, "a call goes on")

    async def read(self, events, pause_s: float = 0.0) -> list:
        found = []
        async for event in events:
            found.append(event)
            await asyncio.sleep(pause_s)
        return found


class CancellationTest(AsyncioTest):
    async def test_waiting_for_the_first_response(self):
        await self.assert_cancelled(await self.begun(self.client.generate([950])))
        await self.assert_all_ended()

    async def test_between_responses_and_in_the_caller_s_own_code(self):
        for pause_s in (0.0, 30.0):
            with self.subTest(pause_s=pause_s):
                reading = self.read(self.client.generate([950], stream=True), pause_s)
                task = await self.begun(reading)
                await asyncio.sleep(0.2)  # the first chunk is read
                await self.assert_cancelled(task)
                await self.assert_all_ended()

    async def test_a_stream_that_is_closed_or_left(self):
        async def close():
            events = self.client.generate([950], stream=True)
            self.assertIsInstance(await anext(events), Chunk)
            await events.aclose()

        async def leave():
            async for _ in self.client.generate([950], stream=True):
                break

        for use in (close, leave):
            with self.subTest(use.__name__):
                await use()
                await self.assert_all_ended()

    async def test_waiting_for_a_connection(self):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            async with aio.RolloutClient(f"127.0.0.1:{silent.getsockname()[1]}") as client:
                for call in (client.get_load, client.wait_until_serving, lambda: client.generate([1])):
                    task = asyncio.create_task(call())
                    await asyncio.sleep(0.1)
                    await self.assert_cancelled(task)

    async def test_waiting_for_a_connection_to_come_back(self):
        with reserved_port() as port:
            async with aio.RolloutClient(f"127.0.0.1:{port}") as client:
                with self.assertRaises(UnavailableError):
                    await client.get_load()
                task = asyncio.create_task(client.get_load())
                await asyncio.sleep(0.1)
                await self.assert_cancelled(task)

    async def test_waiting_for_a_service_to_serve(self):
        self.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        task = asyncio.create_task(self.client.wait_until_serving())
        await asyncio.sleep(0.3)
        await self.assert_cancelled(task)

    async def test_all_of_a_batch(self):
        prompts = [[950]] * 8
        task = await self.begun(self.client.generate_batch(prompts, max_concurrency=4), calls=4)
        await self.assert_cancelled(task)
        await self.assert_all_ended()
        self.assertEqual(self.service.begun, 4)

    async def test_sending_of_records(self):
        (sample,) = await self.client.generate([1])
        sent = asyncio.Event()

        async def pairs():
            yield sample, sample
            sent.set()
            await asyncio.sleep(30)

        task = asyncio.create_task(self.comparator.record(pairs()))
        await asyncio.wait_for(sent.wait(), 20)
        await self.wait_until(self.comparator_service.begun.is_set, "the call never comes")
        await self.assert_cancelled(task)
        await self.wait_until(self.comparator_service.ended.is_set, "the call goes on")

    async def test_by_a_timeout_of_asyncio(self):
        with self.assertRaises(TimeoutError):
            async with asyncio.timeout(0.3):
                await self.client.generate([950])
        with self.assertRaises(TimeoutError):
            await asyncio.wait_for(self.client.generate([950]), 0.3)
        await self.assert_all_ended()
        await self.client.get_load()

    async def test_one_call_leaves_the_others(self):
        others = [asyncio.create_task(self.client.generate([950, 800])) for _ in range(3)]
        await self.assert_cancelled(await self.begun(self.client.generate([950]), calls=4))
        for samples in await asyncio.gather(*others):
            self.assertEqual(len(samples), 1)


class ClosingTest(AsyncioTest):
    async def test_calls_in_flight_raise_the_package_s_error(self):
        self.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        stream = self.client.generate([950], stream=True)
        self.assertIsInstance(await anext(stream), Chunk)
        calls = {
            "unary": self.client.generate([950]),
            "stream": self.read(self.client.generate([950], stream=True)),
            "wait": self.client.wait_until_serving(),
            "batch": self.client.generate_batch([[950]] * 2),
        }
        tasks = {name: asyncio.create_task(call) for name, call in calls.items()}
        await self.wait_until(lambda: self.service.begun == 5, "the service was not called")
        await self.client.close()
        tasks["stream that nobody awaits"] = asyncio.create_task(self.next_of(stream))
        for name, task in tasks.items():
            with self.subTest(name), self.assertRaisesRegex(CancelledError, "was closed"):
                await asyncio.wait_for(task, 20)
        await self.assert_all_ended()

    async def next_of(self, stream):
        return await anext(stream)

    async def test_a_call_that_waits_for_its_connection(self):
        with reserved_port() as port:
            client = aio.RolloutClient(f"127.0.0.1:{port}")
            with self.assertRaises(UnavailableError):
                await client.get_load()
            task = asyncio.create_task(client.get_load())
            await asyncio.sleep(0.1)
            await client.close()
            with self.assertRaisesRegex(CancelledError, "was closed"):
                await task

    async def test_a_task_that_is_cancelled_too_ends_as_cancelled(self):
        task = await self.begun(self.client.generate([950]))
        closing = asyncio.create_task(self.client.close())
        await asyncio.sleep(0)
        await self.assert_cancelled(task)
        await closing

    async def test_a_failed_block_ends_its_calls(self):
        async def work():
            async with aio.RolloutClient(self.target) as client:
                task = await self.begun(client.generate([950]))
                try:
                    raise KeyError("the block's own")
                finally:
                    self.tasks = [task]

        with self.assertRaises(KeyError):
            await work()
        with self.assertRaises(CancelledError):
            await self.tasks[0]
        await self.assert_all_ended()

    async def test_a_closed_client_refuses_every_call(self):
        unused = aio.RolloutClient(self.target)
        used = aio.RolloutClient(self.target)
        await used.get_load()
        for client in (unused, used):
            await client.close()
            await client.close()
            for call in (
                client.wait_until_serving(),
                client.get_load(),
                client.generate([1]),
                self.read(client.generate([1], stream=True)),
                client.generate_batch([[1]]),
            ):
                with self.assertRaisesRegex(ValueError, "is closed"):
                    await call


class EventLoopTest(AsyncioTest):
    async def test_no_wait_blocks_the_event_loop(self):
        self.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        waits = {
            "serving": lambda: self.client.wait_until_serving(timeout=1),
            "nobody": lambda: self.nobody_serves(),
            "response": lambda: self.client.generate(PROMPT_OF_A_SECOND),
        }
        for name, wait in waits.items():
            with self.subTest(name):
                waiting = asyncio.create_task(wait())
                turns = 0  # of the event loop; a wait of a second that blocks it leaves it one or two
                while not waiting.done():
                    await asyncio.sleep(0.005)
                    turns += 1
                await asyncio.gather(waiting, return_exceptions=True)
                self.assertGreater(turns, 5)

    async def nobody_serves(self):
        with reserved_port() as port:
            async with aio.RolloutClient(f"127.0.0.1:{port}") as client:
                for _ in range(2):  # the second waits for the connection
                    with contextlib.suppress(UnavailableError):
                        await client.get_load()

    async def test_many_calls_at_a_time(self):
        results = await asyncio.gather(*(self.client.generate([1] * (1 + i % 7)) for i in range(300)))
        self.assertEqual(
            [samples[0].num_prompt_tokens for samples in results], [1 + i % 7 for i in range(300)]
        )

    async def test_calls_do_not_wait_for_each_other(self):
        start = time.monotonic()
        await asyncio.gather(*(self.client.generate([950, 1500]) for _ in range(20)))
        self.assertEqual(self.service.most, 20)
        self.assertLess(time.monotonic() - start, 15)

    async def test_a_client_of_another_event_loop_is_refused(self):
        await self.client.get_load()

        def elsewhere(call):
            with self.assertRaisesRegex(RuntimeError, "another event loop"):
                asyncio.run(call())

        for call in (self.client.get_load, lambda: self.client.generate([1]), self.client.close):
            await asyncio.to_thread(elsewhere, call)
        await self.client.get_load()

    def test_a_client_may_be_made_before_its_loop(self):
        client = aio.RolloutClient(self.target)

        async def use():
            async with client:
                return await client.generate([1])

        self.assertEqual(len(asyncio.run(use())), 1)


class BatchTest(AsyncioTest):
    async def test_no_more_calls_than_asked_for(self):
        await self.client.generate_batch([[950, 100]] * 12, max_concurrency=3)
        self.assertEqual((self.service.begun, self.service.most), (12, 3))
        with self.assertRaisesRegex(ValueError, "max_concurrency is 0"):
            await asyncio.wait_for(self.client.generate_batch([[1]], max_concurrency=0), 5)

    async def test_the_first_failure_is_raised_and_ends_the_rest(self):
        with self.assertRaisesRegex(InvalidArgumentError, "expected < 512"):
            await asyncio.wait_for(self.client.generate_batch([[950], REFUSED, [950]]), 20)
        await self.assert_all_ended()


class RecordTest(AsyncioTest):
    async def test_pairs_may_come_asynchronously(self):
        (sample,) = await self.client.generate([1])

        async def pairs():
            for _ in range(3):
                await asyncio.sleep(0.01)
                yield sample, sample

        await self.comparator.record(pairs())
        self.assertEqual(len(self.comparator_service.records), 3)

    async def test_an_error_of_the_pairs_is_raised(self):
        (sample,) = await self.client.generate([1])

        async def pairs():
            yield sample, sample
            # A call that is cancelled before the service has it never ends there.
            await self.wait_until(self.comparator_service.begun.is_set, "the service was not called")
            raise KeyError("lost")

        with self.assertRaisesRegex(KeyError, "lost"):
            await asyncio.wait_for(self.comparator.record(pairs()), 20)
        await self.wait_until(self.comparator_service.ended.is_set, "the call goes on")


class RefusedTest(AsyncioTest):
    async def test_a_refusal_is_raised_while_requests_are_written(self):
        tensors = {f"layer {i}": np.zeros(1 << 14, np.uint16) for i in range(64)}
        for _ in range(150):
            with self.assertRaisesRegex(ResourceExhaustedError, "no place"):
                await self.client.update_weights_from_stream(tensors)


if __name__ == "__main__":
    unittest.main()
