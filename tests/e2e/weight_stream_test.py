"""Weights from Python straight into rollout and scorer: every kind of array, both clients, and what happens
to a call whose tensors fail."""

import asyncio
import contextlib
import threading
import time
import unittest
from dataclasses import replace

import grpc
import numpy as np

from isobit import RolloutClient, ScorerClient, aio
from isobit.calls import WEIGHTS_ACCEPTED, held_weight_chunks
from isobit.errors import (
    AbortedError,
    FailedPreconditionError,
    InvalidArgumentError,
    IsobitError,
    UnimplementedError,
)
from isobit.launch import Setting, run_model_tool
from isobit.weights import DistributedWeights, HeldBlock, HeldWeights, WeightSpec, digest_of
from isobit_tools.bf16_files import bf16_tensors
from isobit_tools.testing import BIN_DIR, ServiceTest

PROMPT, COMPLETION = [1, 2, 3], [4, 5, 6, 7]


def as_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


class Lazy:
    """Tensors that are made when their turn comes, as those of a sharded model are."""

    def __init__(self, tensors: dict[str, np.ndarray], fails_at: int | None = None):
        self.specs = [WeightSpec(name, "BF16", tensor.shape) for name, tensor in tensors.items()]
        self._tensors = tensors
        self._fails_at = fails_at
        self.made = 0

    def __iter__(self):
        for name, tensor in self._tensors.items():
            if self.made == self._fails_at:
                raise RuntimeError("a rank has gone")
            self.made += 1
            yield name, tensor.copy()


class WeightStreamTest(ServiceTest):
    setting = Setting("tree", tp_size=2, shards=2)

    @classmethod
    def make_model(cls):
        for seed, name in enumerate(("model", "other")):
            run_model_tool(BIN_DIR, "make", "tiny-qwen2", str(cls.scratch / name), f"--seed={seed}")

    def setUp(self):
        super().setUp()
        self.tensors = bf16_tensors(self.scratch / "other")
        self.digest = run_model_tool(BIN_DIR, "verify", str(self.scratch / "other")).split()[0]

    def both(self):
        """Name, client and witness of each service: bits that its weights determine."""
        services = self.launch("rollout"), self.launch("scorer")
        for service in services:
            self.services.wait_serving(service)
        rollout = self.enterContext(RolloutClient(services[0].target))
        scorer = self.enterContext(ScorerClient(services[1].target))

        def sampled():
            (sample,) = rollout.generate(PROMPT, seed=1, max_tokens=4, ignore_eos=True)
            return sample.tokens.logprobs.tobytes()

        def scored():
            return scorer.score([(PROMPT, COMPLETION)])[0].tokens.logprobs.tobytes()

        return ("rollout", rollout, sampled), ("scorer", scorer, scored)

    def test_every_form_of_weights(self):
        wide = {name: as_float32(bits) for name, bits in self.tensors.items()}
        self.assertEqual(digest_of(self.tensors), self.digest)
        self.assertEqual(digest_of(wide), self.digest)
        forms = {
            "bits": self.tensors,
            "float32": wide,
            "pairs in reverse": list(reversed(self.tensors.items())),
            "a generator": ((name, tensor) for name, tensor in wide.items()),
            "lazy": Lazy(self.tensors),
            "strides": {n: np.asfortranarray(t) for n, t in wide.items()},
        }
        for name, client, witness in self.both():
            old = witness()
            client.update_weights("other")
            expected = witness()
            self.assertNotEqual(expected, old)
            for form, tensors in forms.items():
                if form == "a generator":
                    tensors = iter(list(wide.items()))
                with self.subTest(service=name, form=form):
                    client.update_weights("model")
                    version = client.get_server_info().server.weight_version.id + 5
                    response = client.update_weights_from_stream(tensors, weight_version=version)
                    self.assertEqual((response.current.id, response.current.digest), (version, self.digest))
                    self.assertEqual(witness(), expected)

    def test_memory_of_gpus_is_refused(self):
        """These services compute on CPUs; what is wrong with the list is said first."""
        held = HeldWeights(
            [WeightSpec(name, "BF16", tensor.shape) for name, tensor in self.tensors.items()],
            [bytes(64)],
            [
                HeldBlock(n, (0, t.shape[0]), (0, t.shape[1] if t.ndim > 1 else 1), 0, 0, t.shape[-1])
                for n, t in enumerate(self.tensors.values())
            ],
        )
        cases = (
            (UnimplementedError, "--backend=cpu", held),
            (InvalidArgumentError, "0 of its", replace(held, blocks=held.blocks[1:])),
            (InvalidArgumentError, "expected one of the 0 listed", replace(held, handles=[])),
            (InvalidArgumentError, "missing tensors: ", HeldWeights(held.specs[:1], [b""], held.blocks[:1])),
        )
        for name, client, witness in self.both():
            old = witness()
            for kind, message, weights in cases:
                with self.subTest(service=name, message=message), self.assertRaisesRegex(kind, message):
                    client.update_weights_from_tensor(weights)
            sent = DistributedWeights(held.specs, held.blocks, [bytes(128)], 1, False, 22809)
            cases_of_nccl = (
                (UnimplementedError, "--backend=cpu", sent),
                (InvalidArgumentError, "0 senders, expected 1 to 65536", replace(sent, num_senders=0)),
                (InvalidArgumentError, "0 of its", replace(sent, blocks=held.blocks[1:])),
            )
            for kind, message, weights in cases_of_nccl:
                with self.subTest(service=name, message=message), self.assertRaisesRegex(kind, message):
                    client.update_weights_from_distributed(weights)
            both = list(held_weight_chunks(held, None, "", None))
            both[0].begin.nccl.num_senders = 1
            with self.assertRaisesRegex(InvalidArgumentError, "expected cuda_ipc or nccl, got both"):
                client._upload("UpdateWeightsFromStream", both, 20, WEIGHTS_ACCEPTED)
            self.assertEqual(witness(), old)
            client.update_weights_from_stream(self.tensors)
            self.assertNotEqual(witness(), old)

    def test_a_fault_is_raised_here_and_the_next_stream_works(self):
        for name, client, witness in self.both():
            before = client.get_server_info().server.weight_version
            old = witness()
            short = dict(list(self.tensors.items())[:-1])
            misshapen = {n: t.reshape(-1) for n, t in self.tensors.items()}
            halves = {n: as_float32(t).astype(np.float16) for n, t in self.tensors.items()}
            cases = (
                (InvalidArgumentError, "missing tensors: ", short, {}),
                (InvalidArgumentError, "tensors of another shape: ", misshapen, {}),
                (InvalidArgumentError, "--round_fp16_weights", halves, {}),
                (InvalidArgumentError, "weight_version", self.tensors, {"weight_version": 1}),
                (FailedPreconditionError, "expected 0123", self.tensors, {"expected_digest": "0123"}),
                (RuntimeError, "a rank has gone", Lazy(self.tensors, 5), {}),
                (TypeError, "float64", {n: t.astype(np.float64) for n, t in self.tensors.items()}, {}),
            )
            for kind, message, tensors, arguments in cases:
                with self.subTest(service=name, message=message):
                    with self.assertRaisesRegex(kind, message):
                        client.update_weights_from_stream(tensors, **arguments)
                    self.assertEqual(client.get_server_info().server.weight_version, before)
                    self.assertEqual(witness(), old)
            self.update_when_free(client)
            self.assertNotEqual(witness(), old)

    def update_when_free(self, client) -> None:
        """A call that was cancelled ends on the service a moment later."""

        def updated():
            try:
                return client.update_weights_from_stream(self.tensors)
            except AbortedError:
                return None

        self.wait_until(updated, "the service never gives the broken stream up")

    def test_a_refusal_comes_before_the_tensors(self):
        """Whatever the load: the client asks for no tensor until the service has accepted the list."""
        wrong = {**self.tensors, "unknown": np.zeros(3, np.uint16)}
        for name, client, witness in self.both():
            old = witness()
            kind = {"rollout": aio.RolloutClient, "scorer": aio.ScorerClient}[name]

            async def update(tensors, kind=kind, target=client.target, **arguments):
                async with kind(target) as other:
                    await other.update_weights_from_stream(tensors, **arguments)

            ways = {
                "sync": client.update_weights_from_stream,
                "aio": lambda *a, update=update, **k: asyncio.run(update(*a, **k)),
            }
            for way, send in ways.items():
                with self.subTest(service=name, way=way):
                    tensors = Lazy(wrong)
                    with self.assertRaisesRegex(InvalidArgumentError, 'unexpected tensors: "unknown"'):
                        send(tensors)
                    self.assertEqual(tensors.made, 0)
                    tensors = Lazy(self.tensors)
                    with self.assertRaisesRegex(InvalidArgumentError, "weight_version"):
                        send(tensors, weight_version=1)
                    self.assertEqual(tensors.made, 0)
                    with self.second_update(client) as tensors, self.assertRaises(AbortedError):
                        send(tensors)
                    self.assertEqual(tensors.made, 0)
            self.assertEqual(witness(), old)

    @contextlib.contextmanager
    def second_update(self, client):
        """Tensors for an update that comes while another one, which then fails, has begun."""
        begun, go_on = threading.Event(), threading.Event()

        class Waiting(Lazy):
            def __iter__(self):
                begun.set()
                go_on.wait()
                raise RuntimeError("given up")

        def first():
            with contextlib.suppress(RuntimeError):
                client.update_weights_from_stream(Waiting(self.tensors))

        thread = threading.Thread(target=first)
        thread.start()
        try:
            begun.wait()
            yield Lazy(self.tensors)
        finally:
            go_on.set()
            thread.join()

    def test_asyncio(self):
        for name, client, witness in self.both():
            kind = {"rollout": aio.RolloutClient, "scorer": aio.ScorerClient}[name]

            async def use(kind=kind, target=client.target):
                async with kind(target) as other:
                    response = await other.update_weights_from_stream(self.tensors)
                    self.assertEqual(response.current.digest, self.digest)
                    with self.assertRaisesRegex(RuntimeError, "a rank has gone"):
                        await other.update_weights_from_stream(Lazy(self.tensors, 5))
                    with self.assertRaisesRegex(InvalidArgumentError, "missing tensors"):
                        await other.update_weights_from_stream({})  # refused before the switch is asked
                    await self.when_free(other, self.tensors)
                    stalled = asyncio.create_task(other.update_weights_from_stream(Slow(self.tensors)))
                    await asyncio.sleep(0.3)
                    stalled.cancel()
                    with self.assertRaises(asyncio.CancelledError):
                        await stalled

            old = witness()
            asyncio.run(use())
            self.assertNotEqual(witness(), old, name)
            self.update_when_free(client)

    async def when_free(self, client, tensors):
        for _ in range(100):
            try:
                return await client.update_weights_from_stream(tensors)
            except AbortedError:
                await asyncio.sleep(0.05)
        raise TimeoutError

    def test_a_silent_sender_is_told_so(self):
        rollout = self.enterContext(
            RolloutClient(self.start("rollout", "--weight_stream_timeout_s=1").target)
        )
        with self.assertRaises(IsobitError) as raised:
            rollout.update_weights_from_stream(Slow(self.tensors))
        self.assertEqual(raised.exception.code, grpc.StatusCode.DEADLINE_EXCEEDED)
        self.assertIn("the sender was silent for 1000 ms", raised.exception.details)


class Slow(Lazy):
    def __iter__(self):
        for at, item in enumerate(super().__iter__()):
            if at == 3:
                time.sleep(2.5)
            yield item


if __name__ == "__main__":
    unittest.main()
