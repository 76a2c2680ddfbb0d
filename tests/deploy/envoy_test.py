"""A fleet behind Envoy with the configuration of deploy/: data calls go to any replica, a lost replica is
retried elsewhere, and control calls do not pass."""

import shutil
import subprocess
import sys
import unittest
from pathlib import Path

import yaml

from isobit import RolloutClient
from isobit.errors import IsobitError, UnimplementedError
from isobit.launch import Setting
from isobit_tools.testing import ServiceTest, http_get, http_url, metric_values

CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "envoy" / "envoy.yaml"
ENVOY = Path(sys.executable).parent / "envoy"
DRAW = {"max_tokens": 24, "ignore_eos": True, "temperature": 0.9, "n": 2}


class EnvoyTest(ServiceTest):
    setting = Setting("tree", tp_size=1, shards=1)

    def start_envoy(self, rollouts) -> str:
        """Starts Envoy before these replicas. Its host:port."""
        config = yaml.safe_load(CONFIG.read_text())
        listener = config["static_resources"]["listeners"][0]
        listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": 0}
        (cluster,) = config["static_resources"]["clusters"]
        template = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]
        endpoints = []
        for rollout in rollouts:
            host, port = rollout.target.split(":")
            address = {"socket_address": {"address": host, "port_value": int(port)}}
            endpoints.append({**template, "endpoint": {"address": address}})
        cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = endpoints
        cluster["health_checks"][0] |= {"interval": "0.5s", "timeout": "0.5s"}
        admin = self.log_dir / "admin.txt"
        config["admin"] = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}}
        path = self.log_dir / "envoy.yaml"
        path.write_text(yaml.safe_dump(config))
        with (self.log_dir / "envoy.txt").open("w") as log:
            process = subprocess.Popen(
                [ENVOY, "-c", path, "--admin-address-path", admin, "--use-dynamic-base-id"],
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.addCleanup(process.wait)
        self.addCleanup(process.terminate)
        self.wait_until(lambda: admin.is_file() and admin.read_text(), "Envoy has started")
        base = f"http://{admin.read_text().strip()}"

        def listening() -> str | None:
            found = [line for line in http_get(f"{base}/listeners").splitlines() if "::127.0.0.1:" in line]
            return found[0].split("::")[1] if found else None

        self.wait_until(listening, "Envoy listens")
        self.wait_until(
            lambda: f"membership_healthy: {len(rollouts)}" in http_get(f"{base}/stats"),
            "all replicas are healthy",
        )
        return listening()

    def test_a_fleet(self):
        if not ENVOY.is_file():
            self.skipTest("no envoy: the extra `deploy` of python/tools installs it")
        self.assertIsNotNone(shutil.which(str(ENVOY)))
        replicas = [self.start("rollout", "--metrics_port=0") for _ in range(2)]
        with RolloutClient(self.start_envoy(replicas)) as fleet:
            whole = [self.bits(fleet, seed) for seed in range(20)]
            shares = [
                metric_values(http_get(http_url(replica, "metrics")))["isobit_tokens_generated_total"]
                for replica in replicas
            ]
            self.assertEqual(sum(shares), 20 * 2 * 24)
            self.assertGreater(min(shares), 0, "both replicas have work")
            with self.assertRaises(UnimplementedError):
                fleet.update_weights("model", weight_version=2)
            # One is lost. Whoever gets a request gives the same tokens and bits.
            replicas[0].process.kill()
            replicas[0].process.wait()
            for seed in range(20):
                self.assertEqual(self.bits(fleet, seed), whole[seed])
            replicas[1].process.kill()
            replicas[1].process.wait()
            with self.assertRaises(IsobitError):
                self.bits(fleet, 0)

    def bits(self, client: RolloutClient, seed: int) -> list:
        samples = client.generate([1, 2, 3], seed=seed, timeout=20, **DRAW)
        return [(s.tokens.token_ids.tolist(), s.tokens.logprobs.tobytes()) for s in samples]


if __name__ == "__main__":
    unittest.main()
