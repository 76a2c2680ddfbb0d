"""Tests of vLLM's and SGLang's paths as a whole: who may call, wrong bodies, several workers.

python tests/gateway/engine_paths_test.py
"""

import json
import unittest
from typing import ClassVar

from engines import EngineTest

from isobit.gateway import sglang, vllm
from isobit.gateway.core import Core
from isobit.gateway.settings import Settings


class PathsTest(EngineTest):
    def paths(self) -> dict[str, tuple[set[str], tuple[str, ...]]]:
        """Methods and roles of all."""
        core = Core(Settings(rollout=self.rollout.target, model=self.model))
        routes = [route for module in (vllm, sglang) for route in module.routes(core)]
        return {route.path: (route.methods, route.app._roles) for route in routes}


class AccessTest(PathsTest):
    """Who may call which path."""

    def test_every_path_but_health_has_a_role(self):
        paths = {path: roles for path, (_, roles) in self.paths().items()}
        self.assertGreater(len(paths), 40)
        self.assertEqual(
            {path for path, roles in paths.items() if not roles}, {"/health_generate", "/liveness"}
        )
        for path in ("/pause", "/update_weights", "/update_weights_from_disk", "/sleep", "/abort_requests"):
            self.assertEqual(paths[path], ("admin",))


class WorkersTest(EngineTest):
    """What one worker has been told, all know."""

    def test_labels_and_updates(self):
        self.gateway.stop()
        self.gateway = self.start_gateway(self.rollout, None, f"--model_root={self.scratch}", "--workers=2")
        body = {"model_path": str(self.other), "weight_version": "step-7"}
        for _ in range(8):  # a connection each: the kernel chooses the worker
            self.assertTrue(self.gateway.post("/update_weights_from_disk", body)["success"])
        self.assertEqual(self.version(), 2)
        labels = {self.gateway.get("/get_weight_version")["weight_version"] for _ in range(16)}
        self.assertEqual(labels, {"step-7"})


class BodiesTest(PathsTest):
    """Bodies that nobody should send, to every path that takes one."""

    BODIES: ClassVar = (
        b"", b"{", b"null", b"[]", b"[[1]]", b'"x"', b"7", b"\xff\xfe", b'{"a": 1}', b"{" * 100_000,
        b'{"sampling_params": 3}', b'{"input_ids": {"a": 1}}', b'{"input_ids": [[1], 2]}',
        b'{"token_ids": "x"}',
        b'{"token_ids": [1e9]}', b'{"token_ids": [-1]}', b'{"token_ids": [5], "sampling_params": {"n": -1}}',
        b'{"input_ids": [5], "sampling_params": {"n": 100000}}', b'{"weight_dir": {}}',
        b'{"weight_dir": "\\u0000"}',
        b'{"update_info": 1}', b'{"update_info": [{}, {}]}', 
        b'{"update_info": {"names": ["a"], "shapes": []}}',
        b'{"init_info": {"master_port": "x"}}', b'{"init_info": {"master_port": 70000}}',
        b'{"init_info": []}',
        b'{"init_info": {"nccl_unique_id_b64": "AA"}}', b'{"model_path": 1}', b'{"model_path": "\\ud800"}',
        b'{"tags": 3}', b'{"tags": ["disk"]}', b'{"rid": 5}', b'{"request_ids": [1]}', b'{"mode": {}}',
        b'{"new_version": 5}', b'{"weight_version": {}}',
    )  # fmt: skip

    def test_never_the_gateways_fault(self):
        paths = sorted(path for path, (methods, _) in self.paths().items() if "POST" in methods)
        self.assertGreater(len(paths), 40)
        for path in paths:
            for body in self.BODIES:
                with self.subTest(path, body=body[:60]):
                    status, _, text = self.gateway.request("POST", path, body)
                    self.assertTrue(status == 200 or 400 <= status < 500, (status, text[:300]))
                    if status != 200:
                        self.assertEqual(json.loads(text)["error"]["code"], status)
        self.assertNotIn("Traceback", self.gateway.log.read_text())


if __name__ == "__main__":
    unittest.main()
