"""A trainer's weights in the services: plain models and FSDP2's, tied weights, every dtype; and the digest
that a trainer computes from its shards. isobit.torch_weights needs no operators, nor does this test."""

import copy
import importlib
import tempfile
import traceback
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers import AutoModelForCausalLM

from isobit import RolloutClient, ScorerClient, weight_digest
from isobit.calls import held_weight_chunks
from isobit.errors import FailedPreconditionError, InvalidArgumentError
from isobit.integrations.weights import SharedDirectory, send_weights
from isobit.launch import Setting, run_model_tool
from isobit.weights import HeldWeights, digest_of
from isobit_tools.testing import BIN_DIR, ServiceTest

weights = importlib.import_module("isobit.torch_weights")
parameters, ranks, updates = (
    importlib.import_module(f"isobit.torch_weights.{name}") for name in ("parameters", "ranks", "update")
)

PROMPT = [1, 2, 3]


def run_rank(rank: int, world: int, folder: str, backend: str, work, args) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
        result = work(rank, world, *args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        result = RuntimeError(f"rank {rank} of {world}:\n{traceback.format_exc()}")
    torch.save(result, Path(folder) / f"{rank}.pt")


def on_ranks(world: int, work, *args: Any, backend: str = "gloo") -> list[Any]:
    """The results of work(rank, world, *args), in rank order. New processes, since gRPC cannot be forked."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(run_rank, (world, folder, backend, work, args), nprocs=world, start_method="spawn")
        results = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def load(directory: Path, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)


def shard(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def fused(state: dict) -> dict:
    """The tensors, q, k and v of each layer as rows of one."""
    state = dict(state)
    for query in [name for name in state if name.endswith("q_proj.weight")]:
        names = [query, query.replace("q_proj", "k_proj"), query.replace("q_proj", "v_proj")]
        parts = torch.cat([state[name] for name in names]).split([len(state[name]) for name in names])
        state.update(zip(names, parts, strict=True))
    return state


def stir(model: nn.Module) -> nn.Module:
    """Other values, which bf16 has not; the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * 0.01
    return model


def tell(rank: int, world: int, folder: str) -> list[Any]:
    """What ranks tell each other where their group seems to be NCCL's, in two worlds, and the groups made."""
    found = []
    with mock.patch.object(dist, "get_backend", lambda: "nccl"):
        for number in range(2):
            dist.destroy_process_group()
            store = f"file://{folder}/{number}"
            dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
            for _ in range(2):
                found.append((ranks.told_by_all(rank), ranks.told_by_first(f"by {rank}")))
            found.append((ranks._cpu_group() is not dist.group.WORLD, len(ranks._cpu_groups)))
    return found


def sync(rank: int, world: int, directory: Path, targets: list[str], bad_digest: bool) -> list[Any]:
    model = shard(stir(load(directory)))
    found = [weights.model_digest(model)]
    for target, kind in zip(targets, (RolloutClient, ScorerClient), strict=True):
        client = kind(target) if rank == 0 else None
        try:
            weights.update_weights(model, client, expected_digest="00" if bad_digest else found[0])
            found.append("updated")
        except FailedPreconditionError as error:
            found.append(error.details)
    try:  # every rank learns of a refusal, and none waits for another
        weights.update_weights(model, RolloutClient(targets[0]) if rank == 0 else None, weight_version=1)
    except InvalidArgumentError as error:
        found.append(error.details)
    return found


SHAPES = [(8,), (7,), (3,), (), (12, 24), (5, 24), (3, 8), (12, 22), (6, 4, 8)]


def placed_digests(rank: int, world: int) -> list[tuple[str, str]]:
    """The digests of the same tensors, whole and placed in every way that this many ranks allow."""
    generator = torch.Generator().manual_seed(3)
    pairs = []
    meshes = {(world,): init_device_mesh("cpu", (world,))}
    if world == 4:
        meshes[(2, 2)] = init_device_mesh("cpu", (2, 2))
    for shape in SHAPES:
        whole = nn.Module()
        whole.weight = nn.Parameter(torch.randn(shape, generator=generator))
        expected = weights.model_digest(whole)
        ways = [(Replicate(),)]
        if len(shape) > 0:
            ways.append((Shard(0),))
        if len(shape) > 1 and shape[-1] % (4 * world) == 0:
            ways.append((Shard(len(shape) - 1),))
        two = [(Replicate(), way) for (way,) in ways]
        if shape == (12, 24):
            two.append((Shard(0), Shard(0)))
        for dims, mesh in meshes.items():
            for placements in ways if len(dims) == 1 else two:
                placed = nn.Module()
                placed.weight = nn.Parameter(distribute_tensor(whole.weight.detach(), mesh, placements))
                pairs.append((weights.model_digest(placed), expected))
                ((_, gathered),) = weights.named_weights(placed)
                assert torch.equal(gathered, whole.weight.detach().to(torch.bfloat16)), (shape, placements)
    return pairs


class WeightsTest(unittest.TestCase):
    def test_any_placement_has_the_digest_of_the_whole(self):
        for world in (2, 4):
            for pairs in on_ranks(world, placed_digests):
                self.assertGreater(len(pairs), 20)
                for placed, whole in pairs:
                    self.assertEqual(placed, whole)
                self.assertGreater(len({whole for _, whole in pairs}), 5, "control")

    def test_rounds_as_the_services_do(self):
        bits = np.random.default_rng(1).integers(0, 1 << 32, 100_000, dtype=np.uint32)
        bits[:1000] |= 0x7F800000  # NaN and infinity
        values = bits.view(np.float32)
        rounded = parameters.rounded(torch.from_numpy(values)).view(torch.uint16).numpy()
        self.assertEqual(rounded.tolist(), weight_digest.bf16_bits(values).tolist())

    def test_wrappers_leave_the_names_alone(self):
        plain = nn.Sequential(nn.Linear(4, 4))
        digest = weights.model_digest(plain)
        self.assertEqual(weights.model_digest(torch.compile(plain)), digest)
        self.assertEqual([spec.name for spec in weights.named_weights(plain).specs], ["0.bias", "0.weight"])
        with self.assertRaisesRegex(TypeError, "0.weight: expected float32, bfloat16 or float16"):
            weights.named_weights(copy.deepcopy(plain).double())

    # On NCCL a rank that waits keeps its GPU busy.
    def test_ranks_of_nccl_tell_each_other_on_the_cpu(self):
        with tempfile.TemporaryDirectory() as folder:
            of_ranks = on_ranks(2, tell, folder)
        of_world = [([0, 1], "by 0"), ([0, 1], "by 0"), (True, 1)]
        self.assertEqual(of_ranks, [of_world * 2] * 2)


class SharedTest(unittest.TestCase):
    """Weights that a service reads in place, without a GPU or a service."""

    def share(self, update, expected_digest: str | None = None) -> tuple[list[str], Exception | None]:
        """The order of what happens, and what update(expected_digest) raised."""
        events = []

        def update_weights_from_tensor(held, expected_digest):
            update(events, expected_digest)

        client = mock.Mock(update_weights_from_tensor=update_weights_from_tensor)
        with (
            mock.patch.object(updates, "held_weights", lambda model: events.append("held")),
            mock.patch.object(updates, "model_digest", lambda model: events.append("digest") or "0123"),
        ):
            failure = updates._share(nn.Linear(1, 1), client, expected_digest, {})
        return events, failure

    def test_the_service_reads_while_the_digest_is_computed(self):
        def update(events, expected_digest):
            chunks = held_weight_chunks(HeldWeights([], [], []), None, expected_digest, None)
            self.assertTrue(next(chunks).HasField("begin"))
            events.append("begun")
            self.assertEqual(next(chunks).end.expected_digest, "0123")

        self.assertEqual(self.share(update), (["held", "begun", "digest"], None))
        self.assertEqual(self.share(update, "0123"), (["held", "begun"], None))

    def test_no_rank_computes_the_digest_of_refused_weights(self):
        told = self.enterContext(
            mock.patch.object(updates, "told_by_first", mock.Mock(side_effect=lambda told: told))
        )
        error = ValueError("refused")

        def update(events, expected_digest):
            raise error

        self.assertEqual(self.share(update), (["held"], error))
        told.assert_called_once_with(False)  # the other ranks wait for it


class ServicesTest(ServiceTest):
    setting = Setting("tree", tp_size=2, shards=2)

    @classmethod
    def make_model(cls):
        for shape in ("tiny-qwen2", "tiny-llama"):
            run_model_tool(BIN_DIR, "make", shape, str(cls.scratch / shape))

    def digest_of_saved(self, model) -> str:
        """What isobit-model says of the model's own checkpoint."""
        folder = tempfile.mkdtemp(dir=self.scratch)
        model.save_pretrained(folder)
        return run_model_tool(BIN_DIR, "verify", folder).split()[0]

    def test_plain_models(self):
        for shape in ("tiny-qwen2", "tiny-llama"):
            self.model = self.scratch / shape
            service = self.start("rollout")
            with RolloutClient(service.target) as rollout:
                for dtype in (torch.bfloat16, torch.float32):
                    model = stir(load(self.model, dtype))
                    digest = weights.model_digest(model)
                    self.assertEqual(digest, self.digest_of_saved(model))
                    self.assertEqual(digest, digest_of(weights.named_weights(model)))
                    response = rollout.update_weights_from_stream(weights.named_weights(model))
                    self.assertEqual(response.current.digest, digest, (shape, dtype))
                    # Of tied weights the state dict has both names.
                    response = rollout.update_weights_from_stream(model.state_dict())
                    self.assertEqual(response.current.digest, digest, (shape, dtype))
                    # One that was copied has them as two tensors.
                    copies = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                    self.assertEqual(digest_of(copies), digest)
                    response = rollout.update_weights_from_stream(copies)
                    self.assertEqual(response.current.digest, digest, (shape, dtype))
                    # A directory takes them, too, and matrices that share their memory.
                    for one in (model.state_dict(), copies, fused(model.state_dict())):
                        for directory in (SharedDirectory(self.scratch, shape), None):
                            (response,) = send_weights([rollout], one.items(), directory=directory)
                            self.assertEqual(response.current.digest, digest, (shape, dtype, directory))
                    weights.update_weights(model, rollout)
                    self.assertEqual(rollout.get_server_info().server.weight_version.digest, digest)

    def test_fsdp2(self):
        for shape in ("tiny-qwen2", "tiny-llama"):
            self.model = self.scratch / shape
            expected = self.digest_of_saved(stir(load(self.model)))
            services = self.launch("rollout"), self.launch("scorer")
            for service in services:
                self.services.wait_serving(service)
            targets = [service.target for service in services]
            with RolloutClient(targets[0]) as rollout, ScorerClient(targets[1]) as scorer:

                def serving(rollout=rollout, scorer=scorer):
                    return [c.get_server_info().server.weight_version.digest for c in (rollout, scorer)]

                old = serving()
                for found in on_ranks(2, sync, self.model, targets, True):
                    self.assertEqual(found[0], expected)
                    self.assertIn(expected, found[1])
                    self.assertIn("expected 00", found[2])
                self.assertEqual(serving(), old)
                for found in on_ranks(2, sync, self.model, targets, False):
                    self.assertEqual(found[:3], [expected, "updated", "updated"])
                    self.assertIn("weight_version", found[3])
                self.assertEqual(serving(), [expected, expected])
                rollout.generate(PROMPT, max_tokens=2)


if __name__ == "__main__":
    unittest.main()
