"""What the frameworks' seams do by themselves, beside a real rollout: requests that do not fit, requests
without a limit, full queues, resumed samples, rewards of every form, the steps of a trainer that starts anew.

It needs no framework: what one would hand over has the same interface here. NeMo-RL's seam needs torch, so
that its tests are in scorer_and_generate_test.py, as those of slime's bits.
"""

import asyncio
import importlib
import os
import subprocess
import sys
import tempfile
import types
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

from isobit import RolloutClient
from isobit.integrations.weights import send_weights
from isobit.weights import checkpoint_name, digest_of
from isobit_tools.testing import ServiceTest

CONTEXT = 64
VOCABULARY = 499


class Array(np.ndarray):
    """As much of a torch tensor as the seams need."""

    def detach(self):
        return self

    cpu = detach


def arrays(**shapes):
    return {name: np.ones(shape, np.float32).view(Array) for name, shape in shapes.items()}


class NamesTest(unittest.TestCase):
    def test_wrappers_are_left_out(self):
        name = "model.layers.0.self_attn.q_proj.weight"
        for wrapped in (
            name,
            f"_orig_mod.{name}",
            f"module.{name}",
            f"module.module.{name}",
            f"module._orig_mod.{name}",
            f"_orig_mod.module.{name}",
            f"_fsdp_wrapped_module._orig_mod.{name}",
            f"_forward_module.{name}",
            "model.layers.0._orig_mod._checkpoint_wrapped_module._fsdp_wrapped_module.self_attn.q_proj.weight",
            "_fsdp_wrapped_module.model._fsdp_wrapped_module.layers.0.self_attn._orig_mod.q_proj.weight",
        ):
            self.assertEqual(checkpoint_name(wrapped), name)
        self.assertEqual(checkpoint_name("model.module.weight"), "model.module.weight")

    def test_services_get_the_names_of_a_checkpoint(self):
        sent = []
        client = types.SimpleNamespace(update_weights_from_stream=lambda named, **_: sent.append(named))
        send_weights([client], arrays(**{"module._orig_mod.a": 3, "b": (2, 3)}).items())
        self.assertEqual(list(sent[0]), ["a", "b"])
        with self.assertRaisesRegex(ValueError, r"_orig_mod\.a: expected one tensor of the name a, got two"):
            send_weights([client], arrays(**{"a": 3, "_orig_mod.a": 3}).items())
        self.assertEqual(digest_of(arrays(**{"_orig_mod.a": 3})), digest_of(arrays(a=3)))


async def as_async(items):
    for item in items:
        yield item


class VerlTest(ServiceTest):
    """verl's classes are stand-ins; make test-verl runs the real ones."""

    def setUp(self):
        super().setUp()
        registry = types.SimpleNamespace(register=lambda *_: lambda cls: cls)
        members = {
            "verl": {},
            "verl.workers": {},
            "verl.workers.rollout": {},
            "verl.checkpoint_engine": {},
            "verl.workers.rollout.replica": {
                "RolloutReplica": object,
                "RolloutReplicaRegistry": registry,
                "TokenOutput": lambda **fields: types.SimpleNamespace(**fields),
                "RolloutMode": None,
            },
            "verl.workers.rollout.base": {"BaseRollout": object, "_ROLLOUT_REGISTRY": {}},
            "verl.workers.rollout.utils": {"ensure_async_iterator": as_async},
            "verl.checkpoint_engine.base": {
                "CheckpointEngine": object,
                "CheckpointEngineRegistry": registry,
            },
            "ray": {"remote": lambda cls: cls},
        }
        modules = {}
        for name, content in members.items():
            modules[name] = types.ModuleType(name)
            modules[name].__dict__.update(content, __path__=[])
        self.enterContext(mock.patch.dict(sys.modules, modules))
        sys.modules.pop("isobit.integrations.verl", None)
        self.seam = importlib.import_module("isobit.integrations.verl")
        self.addCleanup(sys.modules.pop, "isobit.integrations.verl", None)

    def test_versions_of_steps(self):
        version_of, step_of = self.seam.version_of_step, self.seam.step_of_version
        present, seen = 1, []
        for step in (0, 0, 1, 2, 80, 80, 51, 52, 0, None, 53, 2**32 - 1, 0):
            version = version_of(step, present)
            self.assertGreater(version, present)
            seen.append(step_of(version))
            present = version
        self.assertEqual(seen, [0, 0, 1, 2, 80, 80, 51, 52, 0, 0, 53, 2**32 - 1, 0])
        self.assertEqual(version_of(7, 1), 7, "a step that grows is the version")
        for step in (-1, 2**32):
            with self.assertRaisesRegex(ValueError, f"global_steps: expected 0 to 4294967295, got {step}"):
                version_of(step, 1)

    def test_a_trainer_may_begin_repeat_and_go_back(self):
        target = self.start("rollout", f"--max_context={CONTEXT}").target
        with RolloutClient(target) as client:
            shape = client.get_server_info().server.model
        self.assertGreater(shape.num_layers, 0)
        engine = self.seam.CheckpointEngine(0, is_master=True, targets=[target])
        weights = self.tensors()
        server = self.seam.Server(
            types.SimpleNamespace(
                engine_kwargs={"isobit": {"targets": [target]}},
                prompt_length=1000,
                response_length=1000,
                max_model_len=None,
                repetition_penalty=1.0,
                ignore_eos=True,
                full_determinism=False,
                seed=0,
            ),
            0,
        )

        async def run():
            steps = []
            for step in (0, 0, 1, 80, 51, None):
                await engine.send_weights(weights.items(), global_steps=step)
                output = await server.generate([3, 17, 42], {"max_tokens": 4}, f"r{len(steps)}")
                fields = output.extra_fields
                self.assertEqual(fields["min_global_steps"], fields["max_global_steps"])
                steps.append((fields["global_steps"], fields["max_global_steps"]))
            whole = await server.generate([3, 17, 42], {}, "whole")
            return steps, len(whole.token_ids)

        steps, tokens = asyncio.run(run())
        self.assertEqual(steps, [(step, step) for step in (0, 0, 1, 80, 51, 51)])
        self.assertEqual(tokens, CONTEXT - 3, "the config's limits are above the rollout's context")

    def tensors(self):
        """The served model's, as float32."""
        from safetensors import safe_open

        found = {}
        with safe_open(str(self.model / "model.safetensors"), "np") as file:
            for name in file.keys():  # noqa: SIM118  no mapping
                found[name] = np.zeros(file.get_slice(name).get_shape(), np.float32).view(Array)
        return found


class PluginTest(unittest.TestCase):
    def test_a_plugin_that_cannot_be_imported_is_seen(self):
        """verl logs it at level debug alone."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "grpc.py").write_text("raise ImportError('grpc is broken on purpose')\n")
            program = (
                "import importlib, logging\n"
                "try:\n    importlib.import_module('isobit.integrations.verl')\n"
                "except Exception as error:\n    logging.getLogger('verl').debug('failed: %s', error)\n"
            )
            path = os.pathsep.join([folder, *sys.path])
            result = subprocess.run(
                [sys.executable, "-c", program],
                env=os.environ | {"PYTHONPATH": path},
                capture_output=True,
                text=True,
                check=True,
            )
        self.assertRegex(result.stderr, "isobit's plugin for verl cannot be imported.*broken on purpose")


if __name__ == "__main__":
    unittest.main()
