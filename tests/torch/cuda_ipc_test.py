"""Weights that services on a GPU read in a trainer's memory: the same bits as by stream, for whole and for
sharded models; what is refused; a trainer that is killed at any moment. Without a GPU it skips.
"""

import dataclasses
import importlib
import multiprocessing
import os
import random
import time
import unittest
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM
from weights_test import on_ranks, stir

from isobit import RolloutClient, ScorerClient
from isobit.errors import AbortedError, FailedPreconditionError, InvalidArgumentError
from isobit.launch import Setting, run_model_tool
from isobit_tools.testing import BIN_DIR, ServiceTest

weights = importlib.import_module("isobit.torch_weights")
parameters = importlib.import_module("isobit.torch_weights.parameters")
if os.environ.get("ISOBIT_TORCH_LIBRARY"):
    importlib.import_module("isobit.torch")  # the digest by the operator

KILLS = int(os.environ.get("ISOBIT_IPC_KILLS", "20"))
PROMPT, COMPLETION = [1, 2, 3], [4, 5, 6, 7]
ON_GPU = ("--backend", "cuda", "--devices", "0", "--max_batch_tokens", "1024")


def load(directory: Path, dtype=torch.float32) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def sharded(model: nn.Module, world: int, rank: int) -> nn.Module:
    """The model's parameters cut by rows, as FSDP2 holds them, without its collectives: two ranks of one GPU
    cannot join by NCCL."""
    mesh = init_device_mesh("cuda", (world,))
    holder = nn.Module()
    for name, parameter in model.named_parameters():
        rows = -(-parameter.shape[0] // world)
        local = parameter.detach()[rows * rank : rows * (rank + 1)].clone().cuda()
        shard = DTensor.from_local(local, mesh, (Shard(0),), run_check=False, shape=parameter.shape,
                                   stride=parameter.stride())  # fmt: skip
        holder.register_parameter(name.replace(".", "/"), nn.Parameter(shard))
    return holder


def send_shards(rank: int, world: int, directory: Path, target: str) -> str:
    model = sharded(stir(load(directory)), world, rank)
    named = [(name.replace("/", "."), p.detach()) for name, p in model.named_parameters()]
    parameters.of_model = lambda _: named
    digest = weights.model_digest(model)
    with RolloutClient(target) as client:
        weights.update_weights(model, client, transport="cuda_ipc")
    return digest


def send_for_ever(directory: Path, target: str, sent) -> None:
    """A trainer that is to be killed."""
    model = load(directory).cuda()
    with RolloutClient(target) as client:
        while True:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.01 * torch.randn_like(parameter))
            weights.update_weights(model, client, transport="cuda_ipc")
            sent.set()


@unittest.skipUnless(torch.cuda.is_available(), "SKIPPED: no GPU")
class CudaIpcTest(ServiceTest):
    setting = Setting("tree", tp_size=1, shards=1)

    @classmethod
    def make_model(cls):
        for shape in ("tiny-qwen2", "tiny-llama", "tiny-qwen3"):
            run_model_tool(BIN_DIR, "make", shape, str(cls.scratch / shape))

    def both(self, *flags: str):
        """Client and witness, bits that the weights determine, of each service."""
        rollout = self.start("rollout", *ON_GPU, "--num_pages", "64", *flags)
        scorer = self.start("scorer", *ON_GPU)
        self.target = rollout.target
        client = self.enterContext(RolloutClient(rollout.target))
        other = self.enterContext(ScorerClient(scorer.target))

        def sampled():
            (sample,) = client.generate(PROMPT, seed=1, max_tokens=4, ignore_eos=True)
            return sample.tokens.logprobs.tobytes()

        def scored():
            return other.score([(PROMPT, COMPLETION)])[0].tokens.logprobs.tobytes()

        return (client, sampled), (other, scored)

    def test_the_bits_are_those_of_a_stream(self):
        for shape in ("tiny-qwen2", "tiny-llama", "tiny-qwen3"):
            self.model = self.scratch / shape
            for client, witness in self.both():
                for dtype in (torch.float32, torch.bfloat16):
                    model = stir(load(self.model, dtype)).cuda()
                    digest = weights.model_digest(model)
                    self.assertEqual(digest, weights.model_digest(model.cpu()), "GPU and CPU")
                    model.cuda()
                    client.update_weights(shape)
                    old = witness()
                    client.update_weights_from_stream(weights.named_weights(model))
                    expected = witness()
                    self.assertNotEqual(expected, old)
                    client.update_weights(shape)
                    weights.update_weights(model, client, transport="cuda_ipc")
                    self.assertEqual(client.get_server_info().server.weight_version.digest, digest)
                    self.assertEqual(witness(), expected, (shape, dtype))

    def test_shards_of_two_processes(self):
        self.model = self.scratch / "tiny-qwen2"
        (client, witness), _ = self.both()
        old = witness()
        digests = on_ranks(2, send_shards, self.model, self.target)
        whole = stir(load(self.model))
        self.assertEqual(digests, [weights.model_digest(whole)] * 2)
        found = witness()
        self.assertNotEqual(found, old)
        client.update_weights_from_stream(weights.named_weights(whole))
        self.assertEqual(witness(), found)

    def test_while_the_rollout_sleeps(self):
        self.model = self.scratch / "tiny-qwen2"
        (client, witness), _ = self.both()
        model = stir(load(self.model)).cuda()
        client.sleep("kv_cache_and_weights")
        weights.update_weights(model, client, transport="cuda_ipc")
        client.wake_up()
        found = witness()
        client.update_weights_from_stream(weights.named_weights(model))
        self.assertEqual(witness(), found)

    def test_what_is_refused(self):
        self.model = self.scratch / "tiny-qwen2"
        model = load(self.model).cuda()
        held = weights.held_weights(model)
        outside = dataclasses.replace(held.blocks[0], offset=1 << 40)
        count = len(held.handles)
        cases = (
            (FailedPreconditionError, "expected 0123", {}, "0123"),
            (InvalidArgumentError, "this host", {"handles": [bytes(64)] * count}, ""),
            (InvalidArgumentError, "expected 64", {"handles": [b"x"] * count}, ""),
            (InvalidArgumentError, "the memory has", {"blocks": [outside, *held.blocks[1:]]}, ""),
            (InvalidArgumentError, "0 of its", {"blocks": held.blocks[1:]}, ""),
        )
        for client, witness in self.both():
            before = client.get_server_info().server.weight_version
            old = witness()
            for kind, message, fault, digest in cases:
                wrong = dataclasses.replace(held, **fault)
                with self.subTest(message=message), self.assertRaisesRegex(kind, message):
                    client.update_weights_from_tensor(wrong, expected_digest=digest)
                self.assertEqual(client.get_server_info().server.weight_version, before)
                self.assertEqual(witness(), old)
            client.update_weights_from_tensor(held, expected_digest=weights.model_digest(model))
        with self.assertRaisesRegex(ValueError, "expected a tensor on a GPU"):
            weights.held_weights(load(self.model))

    def test_a_trainer_is_killed(self):
        self.model = self.scratch / "tiny-qwen2"
        (client, witness), _ = self.both()
        moments = random.Random(1)
        kept = 0
        # Its server has the imports, but neither CUDA nor gRPC in use.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", "transformers.models.qwen2.modeling_qwen2"])
        for _ in range(KILLS):
            sent = context.Event()
            trainer = context.Process(target=send_for_ever, args=(self.model, self.target, sent))
            trainer.start()
            self.assertTrue(sent.wait(60), "a trainer sends")
            time.sleep(moments.random() * 0.05)
            before = client.get_server_info().server.weight_version.id
            trainer.kill()
            trainer.join()
            self.wait_until(lambda: self.is_free(client), "the update of the killed trainer has ended")
            after = client.get_server_info().server.weight_version.id
            kept += after == before
            self.assertEqual(witness(), witness())
        model = stir(load(self.model)).cuda()
        weights.update_weights(model, client, transport="cuda_ipc")
        found = witness()
        client.update_weights_from_stream(weights.named_weights(model))
        self.assertEqual(witness(), found)
        print(f"{KILLS} trainers killed, {kept} times the weights of before served on")

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
