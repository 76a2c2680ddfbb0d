"""Weights that a trainer's ranks send by NCCL: the same bits as by stream, for plain and sharded models and
any number of receiving ranks; groups that last and groups that are made anew; what is refused; senders and
receivers that are killed at any moment, or are silent. Without a GPU it skips.

Ranks share one GPU here: each process says that it is a host of its own, so that NCCL takes sockets.
"""

import importlib
import multiprocessing
import os
import random
import threading
import time
import unittest
from pathlib import Path

import torch
from cuda_ipc_test import COMPLETION, PROMPT, load, sharded
from weights_test import on_ranks, stir

from isobit import RolloutClient, ScorerClient, nccl
from isobit.errors import (
    AbortedError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    IsobitError,
)
from isobit.launch import Setting, run_model_tool
from isobit_tools.testing import BIN_DIR, ServiceTest

weights = importlib.import_module("isobit.torch_weights")
parameters = importlib.import_module("isobit.torch_weights.parameters")
senders = importlib.import_module("isobit.torch_weights.senders")
if os.environ.get("ISOBIT_TORCH_LIBRARY"):
    importlib.import_module("isobit.torch")  # the digest by the operator

KILLS = int(os.environ.get("ISOBIT_NCCL_KILLS", "10"))
SILENCE_S = 3
ENOUGH_S = 20


def as_host(number: int) -> None:
    """NCCL takes a process for one of another host, so that ranks may share a GPU."""
    os.environ["NCCL_HOSTID"] = f"isobit-{number}"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"


def named_shards(rank: int, world: int, directory: Path):
    model = sharded(stir(load(directory)), world, rank)
    named = [(name.replace("/", "."), p.detach()) for name, p in model.named_parameters()]
    parameters.of_model = lambda _: named
    return model


def send_shards(rank: int, world: int, directory: Path, target: str, first_gpu: int | None = None) -> list:
    """Two updates by one group, then one by another. first_gpu: of the ranks' own, on the service's host."""
    if first_gpu is None:
        as_host(1 + rank)
    else:
        as_host(0)
        torch.cuda.set_device(first_gpu + rank)
        torch.cuda.init()  # else a device mesh takes the GPU of the rank's number
    model = named_shards(rank, world, directory)
    digest = weights.model_digest(model)
    found = []
    with RolloutClient(target) as client:
        group = senders.init_weights_update_group(client)
        for _ in range(2):
            weights.update_weights(model, client, transport="nccl", group=group)
            found.append(client.get_server_info().server.weight_version.digest == digest)
        group.close()
        weights.update_weights(model, client, transport="nccl", group=group)
        found.append(client.get_server_info().server.weight_version.digest == digest)
    return [digest, found]


def refused_shards(rank: int, world: int, directory: Path, target: str) -> list[str]:
    """A rank that cannot send, and a digest that is not the weights': every rank hears of it, and the next
    works."""
    as_host(1 + rank)
    model = named_shards(rank, world, directory)
    whole = parameters.of_model
    found = []
    with RolloutClient(target) as client:
        group = senders.init_weights_update_group(client)
        if rank == 1:
            parameters.of_model = lambda _: [(name, p.to_local().cpu()) for name, p in whole(None)]
        for digest in (None, "0123", None):
            try:
                weights.update_weights(model, client, transport="nccl", group=group, expected_digest=digest)
                found.append("updated")
            except (ValueError, FailedPreconditionError) as error:
                found.append(str(error))
            parameters.of_model = whole
    return found


def die_before_sending(rank: int, world: int, directory: Path, target: str) -> tuple[str, float]:
    """Rank 1 takes part in all but the sending. Returns what the call raised, and after how many seconds."""
    as_host(1 + rank)
    model = named_shards(rank, world, directory)
    with RolloutClient(target) as client:
        group = senders.init_weights_update_group(client)
        if rank == 1:
            senders._Sender._run = lambda self, tensors: None
        start = time.monotonic()
        try:
            weights.update_weights(model, client, transport="nccl", group=group)
        except DeadlineExceededError as error:
            return error.details, time.monotonic() - start
    return "updated", 0.0


def send_for_ever(directory: Path, target: str, sent) -> None:
    """A trainer that is to be killed, or whose service is."""
    as_host(1)
    model = load(directory).cuda()
    with RolloutClient(target) as client:
        group = senders.init_weights_update_group(client)
        while True:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.01 * torch.randn_like(parameter))
            weights.update_weights(model, client, transport="nccl", group=group)
            sent.set()


@unittest.skipUnless(torch.cuda.is_available(), "SKIPPED: no GPU")
class NcclWeightsTest(ServiceTest):
    setting = Setting("tree", tp_size=1, shards=1)

    @classmethod
    def make_model(cls):
        as_host(1)
        for shape in ("tiny-qwen2", "tiny-llama", "tiny-qwen3"):
            run_model_tool(BIN_DIR, "make", shape, str(cls.scratch / shape))

    def launch(self, kind: str, *flags: str):
        as_host(0)
        try:
            return super().launch(kind, *flags)
        finally:
            as_host(1)

    def on_gpu(self, count: int = 1) -> list[str]:
        devices = ",".join(str(i) for i in range(count))
        return [
            "--backend", "cuda", "--devices", devices, "--max_batch_tokens", "1024", "--round_fp16_weights"
        ]  # fmt: skip

    def rollout(self, *flags: str, tp_size: int = 1):
        """Client and witness, bits that the weights determine."""
        service = self.start(
            "rollout", "--num_pages", "64", "--tp_size", str(tp_size), *self.on_gpu(tp_size), *flags
        )
        self.target = service.target
        client = self.enterContext(RolloutClient(service.target))

        def sampled():
            (sample,) = client.generate(PROMPT, seed=1, max_tokens=4, ignore_eos=True)
            return sample.tokens.logprobs.tobytes()

        return client, sampled

    def tp_sizes(self) -> list[int]:
        if torch.cuda.device_count() > 1:
            return [1, 2]
        print("SKIPPED: TP 2, since there is one GPU")
        return [1]

    def scorer(self):
        service = self.start("scorer", *self.on_gpu())
        client = self.enterContext(ScorerClient(service.target))
        return client, lambda: client.score([(PROMPT, COMPLETION)])[0].tokens.logprobs.tobytes()

    def send(self, model, client, **arguments) -> senders.WeightsUpdateGroup:
        """As a trainer of one rank in this process, of another host than the service."""
        group = senders.init_weights_update_group(client)
        self.addCleanup(group.close)
        weights.update_weights(model, client, transport="nccl", group=group, **arguments)
        return group

    def test_the_bits_are_those_of_a_stream(self):
        for shape in ("tiny-qwen2", "tiny-llama", "tiny-qwen3"):
            self.model = self.scratch / shape
            for client, witness in (*(self.rollout(tp_size=n) for n in self.tp_sizes()), self.scorer()):
                for dtype in (torch.float32, torch.bfloat16, torch.float16):
                    model = stir(load(self.model, dtype)).cuda()
                    digest = weights.model_digest(model)
                    client.update_weights(shape)
                    old = witness()
                    client.update_weights_from_stream(weights.named_weights(model))
                    expected = witness()
                    self.assertNotEqual(expected, old)
                    client.update_weights(shape)
                    self.send(model, client)
                    self.assertEqual(client.get_server_info().server.weight_version.digest, digest)
                    self.assertEqual(witness(), expected, (shape, dtype))

    def test_shards_of_two_processes(self):
        for tp_size in self.tp_sizes():
            self.model = self.scratch / "tiny-qwen2"
            client, witness = self.rollout(tp_size=tp_size)
            old = witness()
            whole = stir(load(self.model))
            digest = weights.model_digest(whole)
            for backend in ("gloo", "nccl"):
                sent = on_ranks(2, send_shards, self.model, self.target, backend=backend)
                self.assertEqual(sent, [[digest, [True] * 3]] * 2, backend)
            found = witness()
            self.assertNotEqual(found, old)
            client.update_weights_from_stream(weights.named_weights(whole))
            self.assertEqual(witness(), found, tp_size)

    # INVARIANT: a trainer's ranks that wait for the first one keep no sender from its work.
    def test_shards_on_gpus_of_their_own(self):
        if torch.cuda.device_count() < 4:
            self.skipTest(f"SKIPPED: it needs 4 GPUs, and there are {torch.cuda.device_count()}")
        self.model = self.scratch / "tiny-qwen2"
        client, witness = self.rollout(tp_size=2)
        whole = stir(load(self.model))
        digest = weights.model_digest(whole)
        sent = on_ranks(2, send_shards, self.model, self.target, 2, backend="nccl")
        self.assertEqual(sent, [[digest, [True] * 3]] * 2)
        found = witness()
        client.update_weights_from_stream(weights.named_weights(whole))
        self.assertEqual(witness(), found)

    def test_what_is_refused(self):
        self.model = self.scratch / "tiny-qwen2"
        client, witness = self.rollout()
        old = witness()
        for of_rank in on_ranks(2, refused_shards, self.model, self.target):
            self.assertRegex(of_rank[0], "expected a tensor on a GPU")
            self.assertRegex(of_rank[1], "0123")
            self.assertEqual(of_rank[2], "updated")
        model = stir(load(self.model)).cuda()
        client.update_weights("tiny-qwen2")
        group = self.send(model, client)
        client.update_weights("tiny-qwen2")
        group._group_ids = [nccl.new_id()]  # of nobody: not those that the service has joined
        with self.assertRaisesRegex(FailedPreconditionError, "new group"):
            weights.update_weights(model, client, transport="nccl", group=group)
        self.assertEqual(witness(), old)
        group._num_receivers = 3
        with self.assertRaisesRegex(InvalidArgumentError, "3 groups, expected 1"):
            weights.update_weights(model, client, transport="nccl", group=group)
        group._num_receivers = 1
        self.assertEqual(witness(), old)
        weights.update_weights(model, client, transport="nccl", group=group)
        self.assertNotEqual(witness(), old)
        with self.assertRaisesRegex(ValueError, "expected a group"):
            weights.update_weights(model, client, transport="nccl")

    def test_a_silent_sender(self):
        self.model = self.scratch / "tiny-qwen2"
        client, witness = self.rollout("--weight_stream_timeout_s", str(SILENCE_S))
        old = witness()
        for details, seconds in on_ranks(2, die_before_sending, self.model, self.target):
            self.assertRegex(details, "silent for 3000 ms")
            self.assertLess(seconds, SILENCE_S + ENOUGH_S)
        self.assertEqual(witness(), old)
        self.send(stir(load(self.model)).cuda(), client)
        self.assertNotEqual(witness(), old)

    def test_a_service_that_restarts(self):
        self.model = self.scratch / "tiny-qwen2"
        client, _ = self.rollout()
        model = stir(load(self.model)).cuda()
        group = self.send(model, client)
        client, witness = self.rollout()
        old = witness()
        with self.assertRaisesRegex(FailedPreconditionError, "new group"):
            weights.update_weights(model, client, transport="nccl", group=group)
        weights.update_weights(model, client, transport="nccl", group=group)
        self.assertNotEqual(witness(), old)

    def test_a_trainer_is_killed(self):
        self.model = self.scratch / "tiny-qwen2"
        client, witness = self.rollout()
        moments = random.Random(1)
        kept, longest = 0, 0.0
        for trainer in self.trainers(KILLS):
            time.sleep(moments.random() * 0.05)
            before = client.get_server_info().server.weight_version.id
            trainer.kill()
            killed = time.monotonic()
            trainer.join()
            self.wait_until(lambda: self.is_free(client), "the update of the killed trainer has ended")
            longest = max(longest, time.monotonic() - killed)
            kept += client.get_server_info().server.weight_version.id == before
            self.assertEqual(witness(), witness())
        model = stir(load(self.model)).cuda()
        self.send(model, client)
        found = witness()
        client.update_weights_from_stream(weights.named_weights(model))
        self.assertEqual(witness(), found)
        print(f"{KILLS} trainers killed, {kept} times the weights of before served on; another update could"
              f" begin within {longest:.2f} s")  # fmt: skip

    def test_the_service_is_killed(self):
        self.model = self.scratch / "tiny-qwen2"
        moments = random.Random(2)
        model = stir(load(self.model)).cuda()
        failures = 0
        for _ in range(KILLS):
            service = self.start("rollout", "--num_pages", "64", *self.on_gpu())
            with RolloutClient(service.target) as client:
                group = self.send(model, client)
                kill = threading.Timer(moments.random() * 0.05, service.process.kill)
                kill.start()
                start = time.monotonic()
                with self.assertRaises((IsobitError, nccl.NcclError)):
                    while True:
                        weights.update_weights(model, client, transport="nccl", group=group)
                failures += 1
                self.assertLess(time.monotonic() - start, ENOUGH_S)
                kill.join()
        print(f"{failures} services killed, each ended the trainer's call with an error")

    def trainers(self, count: int):
        """Each has sent weights, and goes on."""
        # Its server has the imports, but neither CUDA nor gRPC in use.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", "transformers.models.qwen2.modeling_qwen2"])
        for _ in range(count):
            sent = context.Event()
            trainer = context.Process(target=send_for_ever, args=(self.model, self.target, sent))
            trainer.start()
            self.assertTrue(sent.wait(60), "a trainer sends")
            yield trainer

    def is_free(self, client: RolloutClient) -> bool:
        """Whether an update can begin: this one would be refused at its end."""
        try:
            client.update_weights("tiny-qwen2", expected_digest="0123")
        except AbortedError:
            return False
        except FailedPreconditionError:
            return True
        self.fail("an update of another digest")


if __name__ == "__main__":
    unittest.main()
