"""A replica of the rollout is lost in the middle of a stream: the same request at another replica gives the
same tokens and bits, so what had arrived stays right."""

import unittest

from isobit import RolloutClient
from isobit.errors import UnavailableError
from isobit.launch import Setting, run_model_tool
from isobit.results import Chunk, Sample
from isobit_tools.testing import BIN_DIR, ServiceTest

PROMPT = [3, 1, 4, 1, 5]
# Long enough that the replica is killed well before a sample ends.
DRAW = {"seed": 11, "n": 16, "max_tokens": 1000, "temperature": 0.9, "top_p": 0.95, "ignore_eos": True}
ENOUGH = 20  # tokens of a sample before the replica is killed


class ReplicaTest(ServiceTest):
    @classmethod
    def make_model(cls):
        run_model_tool(BIN_DIR, "make", "tiny-qwen2", str(cls.model), "--seed", "3")

    def test_the_next_replica_gives_the_same(self):
        # Replicas may be of different sizes.
        self.setting = Setting("tree", tp_size=1, shards=1)
        first = self.start("rollout")
        self.setting = Setting("tree", tp_size=2, shards=1)
        second = self.start("rollout")
        arrived: dict[int, list[tuple[int, int]]] = {
            i: [] for i in range(DRAW["n"])
        }  # token and bits, by sample
        with RolloutClient(first.target) as client, self.assertRaises(UnavailableError):
            for event in client.generate(PROMPT, stream=True, **DRAW):
                self.assertIsInstance(event, Chunk, "the replica dies before a sample ends")
                tokens = event.tokens
                arrived[event.index] += zip(
                    tokens.token_ids.tolist(), tokens.logprobs.view("u4").tolist(), strict=True
                )
                if len(arrived[0]) >= ENOUGH and first.process.poll() is None:
                    first.process.kill()
        first.process.wait()
        self.assertGreaterEqual(len(arrived[0]), ENOUGH)
        with RolloutClient(second.target) as client:
            whole = self.samples(client, **DRAW)
            other = self.samples(client, **{**DRAW, "seed": 12})
        for index, got in arrived.items():
            self.assertEqual(got, whole[index][: len(got)])
        self.assertNotEqual(arrived[0], other[0][: len(arrived[0])], "control: another seed")

    def samples(self, client: RolloutClient, **draw) -> list[list[tuple[int, int]]]:
        found: list[Sample] = client.generate(PROMPT, **draw)
        return [
            list(zip(s.tokens.token_ids.tolist(), s.tokens.logprobs.view("u4").tolist(), strict=True))
            for s in found
        ]


if __name__ == "__main__":
    unittest.main()
