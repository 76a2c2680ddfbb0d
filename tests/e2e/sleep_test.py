"""A rollout that sleeps gives its memory back to the machine, and wakes up with the same bits."""

import unittest

from isobit import RolloutClient
from isobit.errors import FailedPreconditionError, UnavailableError
from isobit.launch import Setting
from isobit_tools.testing import ServiceTest

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
SAMPLING = {"seed": 1, "max_tokens": 40, "ignore_eos": True, "n": 2}


class SleepTest(ServiceTest):
    setting = Setting("tree", tp_size=2, shards=1)

    def generate(self, client: RolloutClient) -> list[tuple]:
        """Tokens and logprob bits of all samples."""
        requests = client.generate_batch(PROMPTS, **SAMPLING)
        return [
            (sample.tokens.token_ids.tolist(), sample.tokens.logprobs.tobytes())
            for samples in requests
            for sample in samples
        ]

    def test_sleep_and_wake_up(self):
        rollout = self.start("rollout")
        client = self.enterContext(RolloutClient(rollout.target))
        before = self.generate(client)
        awake = client.get_server_info()
        for level, weights in (("kv_cache", awake.weight_bytes), ("kv_cache_and_weights", 0)):
            with self.subTest(level=level):
                slept = client.sleep(level, "keep")
                self.assertGreater(slept.released_bytes, awake.kv_cache_bytes)
                asleep = client.get_server_info()
                self.assertEqual((asleep.kv_cache_bytes, asleep.weight_bytes), (0, weights))
                self.assertTrue(client.get_load().asleep)
                with self.assertRaises(FailedPreconditionError):
                    client.continue_generation()
                client.wake_up()
                self.assertEqual(client.get_server_info().kv_cache_bytes, awake.kv_cache_bytes)
                self.assertFalse(client.get_load().paused)
                self.assertEqual(self.generate(client), before)

    def test_requests_may_be_refused(self):
        rollout = self.start("rollout", "--refuse_while_asleep")
        client = self.enterContext(RolloutClient(rollout.target))
        client.sleep()
        with self.assertRaises(UnavailableError) as raised:
            client.generate(PROMPTS[0], **SAMPLING)
        self.assertIn("WakeUp", raised.exception.details)
        client.wake_up()
        client.generate(PROMPTS[0], **SAMPLING)


if __name__ == "__main__":
    unittest.main()
