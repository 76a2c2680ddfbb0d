"""Weights that a trainer broadcasts, from Python processes' side: an id pickled by Python, a store that
speaks torch's protocol, TP 2, both clients; then a rollout and a scorer compute the same bits."""

import asyncio
import os
import pickle
import threading
import unittest
from collections.abc import Callable
from functools import partial

from isobit import RolloutClient, ScorerClient, aio
from isobit.errors import (
    AbortedError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    IsobitError,
)
from isobit.weights import WeightSpec
from isobit_tools.bf16_files import bf16_tensors
from isobit_tools.services import Setting, run_model_tool, start_rollout
from isobit_tools.testing import BIN_DIR, ServiceTest
from isobit_tools.testing_transfer import StoreServer, TcpGroup

PROMPT = [1, 2, 3]


class WeightTransferTest(ServiceTest):
    setting = Setting("tree", tp_size=2, shards=2)

    @classmethod
    def make_model(cls):
        for seed, name in enumerate(("model", "other")):
            run_model_tool(BIN_DIR, "make", "tiny-qwen2", str(cls.scratch / name), f"--seed={seed}")

    def setUp(self):
        super().setUp()
        tensors = bf16_tensors(self.scratch / "other")
        self.tensors = {name: bits.tobytes() for name, bits in tensors.items()}
        self.specs = [WeightSpec(name, "BF16", bits.shape) for name, bits in tensors.items()]
        self.digest = run_model_tool(BIN_DIR, "verify", str(self.scratch / "other")).split()[0]
        self.rollout = self.start("rollout")
        self.client = self.enterContext(RolloutClient(self.rollout.target))

    def beside(self, work: Callable[[], None]) -> None:
        """Runs the trainer's part on a thread until the test ends, which fails if the part does."""

        def checked():
            try:
                work()
            except BaseException as error:
                failures.append(error)

        failures: list[BaseException] = []
        thread = threading.Thread(target=checked, daemon=True)
        thread.start()

        def end():
            thread.join(30)
            self.assertFalse(thread.is_alive(), "the trainer's part has not ended")
            self.assertEqual(failures, [])

        self.addCleanup(end)

    def join(self, protocol: int | None = None, **packing) -> TcpGroup:
        """Trainer and rollout meet as vLLM's do: all workers come to the store, then the id is put there."""
        group, store = self.enterContext(TcpGroup()), self.enterContext(StoreServer())

        def trainer():
            store.wait_workers(2)
            store.put_id(group.unique_id, protocol)
            group.join()

        self.beside(trainer)
        self.client.init_weight_transfer(
            master_address="localhost", master_port=store.port, timeout=60, **packing
        )
        self.assertEqual(store.errors, [])
        return group

    def sampled(self) -> bytes:
        (sample,) = self.client.generate(PROMPT, seed=1, max_tokens=4, ignore_eos=True)
        return sample.tokens.logprobs.tobytes()

    def test_an_update_has_the_bits_of_its_directory(self):
        old = self.sampled()
        self.client.update_weights("other")
        expected = self.sampled()
        self.assertNotEqual(expected, old)
        whole = sum(map(len, self.tensors.values()))
        for protocol in (3, 4, 5):
            self.client.update_weights("model")
            group = self.join(protocol, packed=True, packed_buffer_size_bytes=5000)
            self.client.start_weight_transfer(in_flight="recompute_kv")
            self.beside(partial(group.broadcast_packed, self.tensors.values(), 5000))
            self.assertEqual(self.client.receive_weights(self.specs), whole)
            done = self.client.finish_weight_transfer(expected_digest=self.digest)
            self.assertEqual(done.current.digest, self.digest)
            self.assertEqual(self.sampled(), expected)
            # Of the same group, each tensor by itself, which vLLM before 0.28 says in each update.
            self.client.update_weights("model")
            self.client.start_weight_transfer()
            self.beside(partial(group.broadcast_each, self.tensors.values()))
            self.client.receive_weights(packed=False)
            self.client.finish_weight_transfer()
            self.assertEqual(self.sampled(), expected)
        self.client.shutdown_weight_transfer()
        scorer = self.enterContext(ScorerClient(self.start("scorer").target))
        scorer.update_weights("other")
        (sample,) = self.client.generate(PROMPT, seed=2, max_tokens=8, ignore_eos=True)
        (score,) = scorer.score([(PROMPT, sample.tokens.token_ids)])
        self.assertEqual(score.tokens.logprobs.tobytes(), sample.tokens.logprobs.tobytes())

    def test_the_asyncio_client(self):
        self.client.update_weights("other")
        expected = self.sampled()
        self.client.update_weights("model")
        group = self.enterContext(TcpGroup())

        async def update():
            async with aio.RolloutClient(self.rollout.target) as client:
                self.beside(group.join)
                await client.init_weight_transfer(nccl_unique_id=group.unique_id)
                await client.start_weight_transfer(weight_version=77)
                self.beside(partial(group.broadcast_each, self.tensors.values()))
                await client.receive_weights(self.specs)
                done = await client.finish_weight_transfer(expected_digest=self.digest)
                await client.shutdown_weight_transfer()
                return done

        self.assertEqual(asyncio.run(update()).current.id, 77)
        self.assertEqual(self.sampled(), expected)

    def test_a_tied_heads_copy(self):
        """A trainer that sends a state_dict sends the embedding twice: the copy must be equal."""
        directory = self.scratch / "tied"
        run_model_tool(BIN_DIR, "make", "tiny-qwen3", str(directory), "--seed=5")
        rollout = start_rollout(self.services, self.setting, directory, "tied")
        self.services.wait_serving(rollout)
        self.client = self.enterContext(RolloutClient(rollout.target))
        tensors = bf16_tensors(directory)
        self.assertNotIn("lm_head.weight", tensors)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        specs = [WeightSpec(name, "BF16", bits.shape) for name, bits in tensors.items()]
        for is_equal in (True, False):
            tensors["lm_head.weight"][3, 5] ^= 0 if is_equal else 1
            group = self.join()
            self.client.start_weight_transfer()
            self.beside(partial(group.broadcast_each, [bits.tobytes() for bits in tensors.values()]))
            self.client.receive_weights(specs)
            if is_equal:
                self.client.finish_weight_transfer()
                continue
            with self.assertRaisesRegex(InvalidArgumentError, "lm_head.weight"):
                self.client.finish_weight_transfer()

    def test_a_store_is_not_trusted(self):
        """Whatever lies under the key, nothing of it is run, and the service serves on."""
        old = self.sampled()
        mark = self.scratch / "run"

        class Evil:
            def __reduce__(self):
                return os.system, (f"touch {mark}",)

        cases = [
            (value, "is not the pickle of an ncclUniqueId")
            for value in (b"", pickle.dumps(Evil()), pickle.dumps(bytes(128)), b"\x80" * 4096)
        ]
        for value, message in [*cases, (bytes(1 << 24), "16777216 bytes .* expected at most 4096")]:
            with (
                StoreServer({b"/broadcast_from/0/0": value}) as store,
                self.subTest(value=value[:20]),
                self.assertRaisesRegex(InvalidArgumentError, message),
            ):
                self.client.init_weight_transfer(master_address="127.0.0.1", master_port=store.port)
        self.assertFalse(mark.exists())
        with StoreServer() as store, self.assertRaises(DeadlineExceededError):  # without an id
            self.client.init_weight_transfer(master_address="127.0.0.1", master_port=store.port, timeout=0.3)

        def is_refused() -> bool:
            try:
                self.client.start_weight_transfer()
            except AbortedError:  # the service has not yet seen that the client of Init has gone
                return False
            except FailedPreconditionError as error:
                self.assertIn("call InitWeightTransfer first", str(error))
                return True
            self.fail("an update began without a group")

        self.wait_until(is_refused, "Init does not end with its client")
        self.assertEqual(self.sampled(), old)

    def test_a_trainer_that_dies_leaves_the_old_weights(self):
        old = self.sampled()
        group = self.join()
        self.client.start_weight_transfer()
        first = next(iter(self.tensors.values()))

        def dies():
            group.broadcast(first)
            group.close()

        self.beside(dies)
        with self.assertRaises(IsobitError) as raised:
            self.client.receive_weights(self.specs)
        self.assertIn("closed the connection", str(raised.exception))
        self.assertEqual(self.sampled(), old)
        self.client.update_weights("other")
        self.assertNotEqual(self.sampled(), old)


if __name__ == "__main__":
    unittest.main()
