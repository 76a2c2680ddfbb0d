"""verl's own classes, on a local Ray without a GPU, with isobit's rollout: its manager and client of servers,
its manager of checkpoint engines, its registries and configuration. What they bring has the scorer's bits."""

import asyncio
import importlib
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from support import bits, install_entry_points, skip

try:
    import ray
    import verl
    from hydra import compose, initialize_config_dir
    from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import Dispatch, register
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.workers.rollout import get_rollout_class
    from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager
    from verl.workers.rollout.replica import get_rollout_replica_class
except ImportError as error:
    skip(error)

from safetensors.torch import load_file

import isobit.integrations.verl as seam
from isobit import RolloutClient, ScorerClient
from isobit.launch import Setting, run_model_tool
from isobit_tools.testing import BIN_DIR, ServiceTest

PROMPT = [5, 17, 300, 42, 7]
SAMPLING = {
    "temperature": 0.8,
    "top_p": 0.95,
    "top_k": -1,
    "repetition_penalty": 1.0,
    "logprobs": True,
    "ignore_eos": True,
}


class Trainer(Worker):
    """The side of an actor's worker that verl's manager calls, without a model of verl's: its weights lie in
    a file. Both ranks walk them."""

    def __init__(self, backend: str, engine_kwargs: dict, weights: str):
        super().__init__()
        importlib.import_module("isobit.integrations.verl")  # as the entry point does where it is installed
        self._weights = weights
        self.engine = CheckpointEngineRegistry.new(
            backend, is_master=self.rank == 0, bucket_size=1 << 20, **engine_kwargs
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto"):
        walked = []

        def tensors():
            for name, tensor in load_file(self._weights).items():
                walked.append(name)
                yield name, tensor

        await self.engine.send_weights(tensors(), global_steps=global_steps)
        return {f"walked_{self.rank}": len(walked)}

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args, **kwargs):
        return getattr(self.engine, method)(*args, **kwargs)


class VerlTest(ServiceTest):
    setting = Setting("tree", tp_size=2, shards=1)

    @classmethod
    def make_model(cls):
        run_model_tool(BIN_DIR, "make", "tiny-qwen3", str(cls.model), "--seed", "3")
        run_model_tool(BIN_DIR, "make", "tiny-qwen3", str(cls.scratch / "other"), "--seed", "4")

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        ray.init(
            address="local",
            num_cpus=64,
            include_dashboard=False,
            object_store_memory=100 << 20,
            _temp_dir=cls.enterClassContext(tempfile.TemporaryDirectory(prefix="ray")),
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(sys.path)}},
        )
        cls.addClassCleanup(ray.shutdown)

    def setUp(self):
        super().setUp()
        services = self.launch("rollout"), self.launch("rollout"), self.launch("scorer")
        for service in services:
            self.services.wait_serving(service)
        self.targets = [service.target for service in services[:2]]
        self.rollouts = [self.enterContext(RolloutClient(target)) for target in self.targets]
        self.scorer = self.enterContext(ScorerClient(services[2].target))

    def config(self, **changes):
        """verl's own configuration of a PPO trainer, with the overrides that the page names."""
        settings = f"{{targets:[{','.join(self.targets)}],model_root:{self.scratch},model:{self.model.name}}}"
        rollout = "actor_rollout_ref.rollout"
        overrides = {
            f"{rollout}.name": "isobit",
            f"{rollout}.nnodes": 1,
            f"{rollout}.n_gpus_per_node": 2,
            f"{rollout}.tensor_model_parallel_size": 1,
            f"{rollout}.prompt_length": 16,
            f"{rollout}.response_length": 12,
            f"{rollout}.checkpoint_engine.backend": "isobit",
            f"+{rollout}.engine_kwargs.isobit": settings,
            f"+{rollout}.checkpoint_engine.engine_kwargs.isobit": settings,
            "actor_rollout_ref.model.path": self.model,
        } | {f"{rollout}.{name}": value for name, value in changes.items()}
        folder = Path(verl.__file__).parent / "trainer" / "config"
        with initialize_config_dir(str(folder), version_base=None):
            return compose("ppo_trainer", [f"{name}={value}" for name, value in overrides.items()])

    def start(self, config):
        manager = LLMServerManager.create(config)
        self.addCleanup(lambda: [ray.kill(server) for server in manager.server_handles])
        return manager, LLMServerClient(config, load_balancer_handle=manager.global_load_balancer)

    def test_client_manager_and_weights(self):
        config = self.config()
        manager, client = self.start(config)
        self.assertEqual(sorted(manager.server_addresses), sorted(self.targets))

        async def generate(count: int):
            return await asyncio.gather(
                *(
                    client.generate(f"r{i}", prompt_ids=PROMPT, sampling_params=dict(SAMPLING, seed=i))
                    for i in range(count)
                )
            )

        def check(outputs) -> list[int]:
            options = {"temperature": 0.8, "top_p": 0.95}
            scores = self.scorer.score([(PROMPT, o.token_ids) for o in outputs], **options)
            for output, score in zip(outputs, scores, strict=True):
                self.assertEqual(len(output.token_ids), 12)
                self.assertEqual(output.stop_reason, "completed")
                self.assertEqual(bits(output.log_probs), bits(score.tokens.logprobs))
            return [bit for output in outputs for bit in bits(output.log_probs)]

        before = asyncio.run(generate(6))
        old = check(before)

        engine = config.actor_rollout_ref.rollout.checkpoint_engine
        workers = RayWorkerGroup(
            RayResourcePool([2], use_gpu=False),
            RayClassWithInitArgs(
                ray.remote(Trainer),
                backend=engine.backend,
                engine_kwargs=dict(engine.engine_kwargs.isobit),
                weights=str(self.scratch / "other" / "model.safetensors"),
            ),
            device_name="cpu",
        )
        self.addCleanup(lambda: [ray.kill(worker) for worker in workers.workers])
        managed = CheckpointEngineManager(seam_config(config), workers, manager.rollout_replicas)
        metrics = managed.update_weights(global_steps=7)
        self.assertEqual(metrics["walked_0"], metrics["walked_1"])
        versions = [rollout.get_server_info().server.weight_version for rollout in self.rollouts]
        self.assertEqual([version.id for version in versions], [7, 7])

        self.scorer.update_weights("other")
        self.assertEqual(self.scorer.get_server_info().server.weight_version.digest, versions[0].digest)
        after = asyncio.run(generate(6))
        self.assertNotEqual(check(after), old, "control: other weights")
        for output in after:
            fields = output.extra_fields
            self.assertEqual([fields[f"{w}global_steps"] for w in ("", "min_", "max_")], [7, 7, 7])
        print(f"verl: {6 * 12} logprobs before and after an update equal the scorer's, steps {fields}")

        # As fit() does: it begins with step 0, repeats a step, and goes back to one after a crash.
        for step in (7, 0, 0, 1, 80, 51):
            managed.update_weights(global_steps=step)
            for output in asyncio.run(generate(2)):
                fields = output.extra_fields
                self.assertEqual([fields[f"{w}global_steps"] for w in ("", "min_", "max_")], [step] * 3)

    def test_abort_and_resume(self):
        manager, client = self.start(self.config(response_length=200))

        async def run():
            waiting = asyncio.create_task(
                client.generate("long", prompt_ids=PROMPT, sampling_params={"ignore_eos": True})
            )
            while not any(r.get_load().num_running_requests for r in self.rollouts):
                self.assertFalse(waiting.done(), waiting)
                await asyncio.sleep(0.001)
            for replica in manager.rollout_replicas:
                await replica.abort_all_requests(reject_request=True)
            aborted = await waiting
            rejected = await client.generate("late", prompt_ids=PROMPT, sampling_params={})
            for replica in manager.rollout_replicas:
                await replica.sleep()
                await replica.wake_up()
                await replica.clear_kv_cache()
                await replica.resume_generation()
            resumed = await client.generate("new", prompt_ids=PROMPT, sampling_params={"max_tokens": 3})
            return aborted, rejected, resumed

        aborted, rejected, resumed = asyncio.run(run())
        self.assertEqual(aborted.stop_reason, "aborted")
        self.assertLess(len(aborted.token_ids), 200)
        self.assertEqual((rejected.stop_reason, rejected.token_ids), ("aborted", []))
        self.assertEqual((resumed.stop_reason, len(resumed.token_ids)), ("completed", 3))

    def test_full_determinism(self):
        _, client = self.start(self.config(full_determinism=True))

        def draw(request: str):
            return asyncio.run(client.generate(request, prompt_ids=PROMPT, sampling_params={})).token_ids

        first = draw("a")
        self.assertEqual(draw("a"), first)
        self.assertNotEqual(draw("b"), first)

    def test_server_adapter(self):
        config = self.config().actor_rollout_ref
        tensors = load_file(self.scratch / "other" / "model.safetensors")
        for rank in (0, 1):
            with mock.patch.dict(os.environ, RANK=str(rank)):
                adapter = get_rollout_class("isobit")(config.rollout, config.model, None)
            self.assertEqual((adapter.replica_rank, adapter.is_leader_rank), (rank, True))
            asyncio.run(adapter.update_weights(iter(tensors.items()), global_steps=3))
        versions = [rollout.get_server_info().server.weight_version for rollout in self.rollouts]
        self.assertEqual([version.id for version in versions], [3, 3])
        with self.assertRaisesRegex(ValueError, "expected named_tensors, got delta_flush"):
            asyncio.run(adapter.update_weights(iter(()), wire_format="delta_flush"))

    def test_what_isobit_has_not_is_refused(self):
        _, client = self.start(self.config())

        def generate(**changes):
            options = {"prompt_ids": PROMPT, "sampling_params": {}} | changes
            return asyncio.run(client.generate("r", **options))

        for changes, expected in (
            ({"sampling_params": {"best_of": 2}}, "best_of=2"),
            ({"image_data": ["x"]}, "expected only text"),
            ({"prompt_ids": [1] * 400, "sampling_params": {}}, "leaves no room"),
        ):
            with self.assertRaisesRegex(ValueError, expected):
                generate(**changes)
        with self.assertRaisesRegex(ValueError, "expected .*targets.*, got address"):
            seam.Settings.of({"address": "x"}, "rollout.engine_kwargs.isobit")
        with self.assertRaisesRegex(ValueError, "replica 2: expected a target for each replica, got only 2"):
            seam.Settings.of({"targets": self.targets}, "here").target(2)

    def test_verl_finds_the_plugin(self):
        """By the entry point that the package declares: verl alone is imported."""
        with tempfile.TemporaryDirectory() as folder:
            install_entry_points(Path(folder))
            code = (
                "import verl\n"
                "from verl.checkpoint_engine import CheckpointEngineRegistry as engines\n"
                "from verl.workers.rollout import get_rollout_class\n"
                "from verl.workers.rollout.replica import get_rollout_replica_class as replicas\n"
                "found = replicas('isobit'), engines.get('isobit'), get_rollout_class('isobit')\n"
                "print([c.__module__ + '.' + c.__name__ for c in found])"
            )
            environment = os.environ | {"PYTHONPATH": os.pathsep.join([folder, *sys.path])}
            output = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
        names = ("Replica", "CheckpointEngine", "ServerAdapter")
        self.assertIn(str([f"isobit.integrations.verl.{name}" for name in names]), output)
        self.assertIs(get_rollout_replica_class("isobit"), seam.Replica)


def seam_config(config):
    """The checkpoint engine's section as verl's manager takes it."""
    from verl.utils.config import omega_conf_to_dataclass

    return omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)


if __name__ == "__main__":
    unittest.main()
