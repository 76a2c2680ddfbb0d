"""The asyncio clients and real services: the bits of the synchronous clients, and no work left behind."""

import asyncio
import unittest

import numpy as np

from isobit import ComparatorClient, RolloutClient, ScorerClient, aio
from isobit.errors import CancelledError, DeadlineExceededError, IsobitError, UnavailableError
from isobit.launch import Service
from isobit.results import Chunk, Sample, Score
from isobit_tools.testing import ServiceTest

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9], [10, 11]]
SHORT = {"seed": 1, "max_tokens": 8}
# Long enough for a test to act before the last token.
LONG = {"seed": 1, "max_tokens": 1900, "ignore_eos": True, "n": 8}


def bits(result: Sample | Score) -> tuple:
    """What must be equal, as bytes."""
    tokens = result.tokens
    return (
        tokens.token_ids.tobytes(),
        tokens.logprobs.tobytes(),
        tokens.weight_versions.tobytes(),
        [(top.token_ids.tobytes(), top.logprobs.tobytes()) for top in tokens.top],
        result.fingerprint,
        result.weight_version,
    )


class AioTest(ServiceTest, unittest.IsolatedAsyncioTestCase):
    async def rollout(self, *flags: str) -> tuple[Service, aio.RolloutClient]:
        service = await asyncio.to_thread(self.start, "rollout", *flags)
        return service, await self.enterAsyncContext(aio.RolloutClient(service.target))

    async def scorer(self) -> tuple[Service, aio.ScorerClient]:
        service = await asyncio.to_thread(self.start, "scorer")
        return service, await self.enterAsyncContext(aio.ScorerClient(service.target))

    async def wait_until_load(self, client: aio.RolloutClient, is_reached) -> None:
        async with asyncio.timeout(20):
            while not is_reached(await client.get_load()):
                await asyncio.sleep(0.02)

    async def busy(self, client: aio.RolloutClient) -> None:
        await self.wait_until_load(client, lambda load: load.num_running_requests)

    async def idle(self, client: aio.RolloutClient) -> None:
        def is_idle(load) -> bool:
            return load.num_used_pages == load.num_running_requests == load.num_waiting_requests == 0

        await self.wait_until_load(client, is_idle)


class SameBitsTest(AioTest):
    async def test_rollout_and_scorer_at_once(self):
        (rollout_service, rollout), (scorer_service, scorer) = await asyncio.gather(
            self.rollout(), self.scorer()
        )
        sampling = {**SHORT, "temperature": 0.8, "top_p": 0.9, "logprobs": 2}
        samples = [one for many in await rollout.generate_batch(PROMPTS, n=2, **sampling) for one in many]
        pairs = [(PROMPTS[i // 2], sample.tokens.token_ids) for i, sample in enumerate(samples)]
        # Both services at one time.
        again, scores, streamed = await asyncio.gather(
            rollout.generate_batch(PROMPTS, n=2, **sampling),
            scorer.score(pairs, entropy=True, prompt_logprobs=True, **sampling),
            self.collect(scorer.score(pairs, stream=True, **sampling)),
        )
        with RolloutClient(rollout_service.target) as blocking:
            expected = [one for p in PROMPTS for one in blocking.generate(p, n=2, **sampling)]
        with ScorerClient(scorer_service.target) as blocking:
            expected_scores = blocking.score(pairs, entropy=True, prompt_logprobs=True, **sampling)
        self.assertEqual([bits(x) for x in samples], [bits(x) for x in expected])
        self.assertEqual([bits(x) for many in again for x in many], [bits(x) for x in expected])
        self.assertEqual([bits(x) for x in scores], [bits(x) for x in expected_scores])
        in_order = sorted(streamed, key=lambda score: score.index)
        self.assertEqual([bits(x) for x in in_order], [bits(x) for x in expected_scores])
        for sample, score, other in zip(samples, scores, expected_scores, strict=True):
            self.assertEqual(sample.tokens.logprobs.tobytes(), score.tokens.logprobs.tobytes())
            self.assertEqual(score.entropies.tobytes(), other.entropies.tobytes())
            self.assertEqual(score.prompt.logprobs.tobytes(), other.prompt.logprobs.tobytes())
        # Control: other draws have other bits.
        (changed,) = await rollout.generate(PROMPTS[0], **{**sampling, "seed": 2})
        self.assertNotEqual(bits(changed), bits(samples[0]))

    async def collect(self, items) -> list:
        return [item async for item in items]

    async def test_a_stream_s_chunks_are_its_sample(self):
        _, rollout = await self.rollout()
        *chunks, sample = await self.collect(rollout.generate(PROMPTS[0], stream=True, **SHORT))
        self.assertTrue(all(isinstance(chunk, Chunk) for chunk in chunks))
        joined = np.concatenate([chunk.tokens.logprobs for chunk in chunks])
        self.assertEqual(joined.tobytes(), sample.tokens.logprobs.tobytes())
        (whole,) = await rollout.generate(PROMPTS[0], **SHORT)
        self.assertEqual(bits(whole), bits(sample))

    async def test_comparator(self):
        started = await asyncio.to_thread(self.start_all)
        async with (
            aio.ComparatorClient(started["comparator"].target) as comparator,
            aio.RolloutClient(started["rollout"].target) as rollout,
            aio.ScorerClient(started["scorer"].target) as scorer,
        ):
            watching = comparator.watch(interval_ms=10)
            compared = await comparator.compare(PROMPTS, **SHORT)
            self.assertEqual(compared.summary.verdict, "equal")
            *_, summary = await self.collect(comparator.compare(PROMPTS, stream=True, **SHORT))
            self.assertEqual(summary, compared.summary)
            with ComparatorClient(started["comparator"].target) as blocking:
                self.assertEqual(blocking.compare(PROMPTS, **SHORT).summary, summary)
            (sample,) = await rollout.generate(PROMPTS[0], **SHORT)
            (score,) = await scorer.score([(PROMPTS[0], sample.tokens.token_ids)], **SHORT)
            self.assertEqual((await comparator.record([(sample, score)])).verdict, "equal")
            async for update in watching:
                if update.total.num_sequences == 3 * len(PROMPTS) + 1:
                    break
            await watching.aclose()
            self.assertEqual((await comparator.get_server_info()).obstacle, "")

    async def test_control_calls(self):
        _, client = await self.rollout()
        await client.wait_until_serving()
        old = (await client.get_server_info()).server.weight_version.id
        generating = asyncio.create_task(client.generate(PROMPTS[0], request_id="mine", **LONG))
        await self.busy(client)
        self.assertEqual(await client.abort("mine"), ["mine"])
        self.assertEqual({sample.finish_reason for sample in await generating}, {"abort"})
        await client.pause_generation("keep")
        self.assertTrue((await client.get_load()).paused)
        waiting = asyncio.create_task(client.generate(PROMPTS[0], **SHORT))
        await self.wait_until_load(client, lambda load: load.num_waiting_requests)
        await client.continue_generation()
        self.assertEqual(len((await waiting)[0].tokens.token_ids), SHORT["max_tokens"])
        await client.update_weights(self.model.name, in_flight="abort")
        self.assertEqual((await client.get_server_info()).server.weight_version.id, old + 1)
        with self.assertRaisesRegex(IsobitError, "NOT_FOUND"):
            await client.update_weights("nowhere")
        self.assertEqual(await client.abort_all(), [])


class NothingLeftTest(AioTest):
    """What is cancelled, closed or late is freed: the load goes to zero."""

    async def test_cancelled_while_it_runs(self):
        _, client = await self.rollout()

        async def stream():
            async for _ in client.generate(PROMPTS[0], stream=True, **LONG):
                pass

        for call in (
            lambda: client.generate(PROMPTS[0], **LONG),
            stream,
            lambda: client.generate_batch(PROMPTS, **LONG),
        ):
            task = asyncio.create_task(call())
            await self.busy(client)
            task.cancel()
            with self.assertRaises(asyncio.CancelledError):
                await task
            await self.idle(client)

    async def test_cancelled_in_the_queue(self):
        _, client = await self.rollout()
        await client.pause_generation("keep")
        task = asyncio.create_task(client.generate(PROMPTS[0], **SHORT))
        await self.wait_until_load(client, lambda load: load.num_waiting_requests)
        task.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await task
        await self.idle(client)  # still paused: only the cancellation can have ended it

    async def test_a_cancelled_pause_is_dropped(self):
        _, client = await self.rollout()
        generating = asyncio.create_task(client.generate(PROMPTS[0], **LONG))
        await self.busy(client)
        pausing = asyncio.create_task(client.pause_generation("wait"))
        await asyncio.sleep(0.2)
        self.assertFalse(pausing.done())
        pausing.cancel()
        with self.assertRaises(asyncio.CancelledError):
            await pausing
        # A new request is admitted before the long one ends.
        await client.generate(PROMPTS[1], timeout=20, **SHORT)
        self.assertFalse(generating.done())
        generating.cancel()
        await self.idle(client)

    async def test_a_deadline(self):
        _, client = await self.rollout()
        with self.assertRaises(DeadlineExceededError):
            await client.generate(PROMPTS[0], timeout=0.3, **LONG)
        await self.idle(client)
        with self.assertRaises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.generate(PROMPTS[0], **LONG)
        await self.idle(client)

    async def test_closed_with_calls_in_flight(self):
        service, watcher = await self.rollout()
        client = aio.RolloutClient(service.target)
        tasks = [asyncio.create_task(client.generate(prompt, **LONG)) for prompt in PROMPTS]
        await self.busy(watcher)
        await client.close()
        for task in tasks:
            with self.assertRaisesRegex(CancelledError, "was closed"):
                await task
        await self.idle(watcher)

    async def test_one_dead_service_leaves_the_other_s_calls(self):
        (service, client), (_, scorer) = await asyncio.gather(self.rollout(), self.scorer())
        events = client.generate(PROMPTS[0], stream=True, **LONG)
        self.assertIsInstance(await anext(events), Chunk)
        scoring = [asyncio.create_task(scorer.score([([1, 2], [3] * 900)])) for _ in range(4)]
        service.process.kill()
        with self.assertRaises(UnavailableError):
            async for _ in events:
                pass
        for (score,) in await asyncio.gather(*scoring):
            self.assertEqual(len(score.tokens.token_ids), 900)
        service.process.wait()
        await asyncio.to_thread(self.start, "rollout", f"--port={service.target.rpartition(':')[2]}")
        await client.wait_until_serving()
        self.assertEqual(len(await client.generate(PROMPTS[1], **SHORT)), 1)


if __name__ == "__main__":
    unittest.main()
