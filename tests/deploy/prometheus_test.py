"""The life of an alert: Prometheus itself, with the rules of deploy/, scrapes real services. A flipped
bit makes it fire."""

import json
import shutil
import socket
import subprocess
import time
import unittest
import urllib.parse
import urllib.request
from pathlib import Path

import yaml

from isobit import ComparatorClient, ScorerClient
from isobit.launch import Setting, run_model_tool
from isobit_tools.testing import BIN_DIR, ServiceTest

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
DRAW = {"max_tokens": 32, "temperature": 1.0, "seed": 5, "ignore_eos": True}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class PrometheusTest(ServiceTest):
    setting = Setting("tree", tp_size=2, shards=2)

    @classmethod
    def make_model(cls):
        super().make_model()
        run_model_tool(
            BIN_DIR, "flip-bit", str(cls.model), "model.layers.1.mlp.down_proj.weight", "77", "1",
            str(cls.scratch / "flipped"),
        )  # fmt: skip

    def start_prometheus(self, targets: dict[str, str]) -> None:
        """Starts Prometheus with the configuration of deploy/, but these targets, and scrapes each second."""
        config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(DEPLOY / "prometheus" / "alerts.yaml")]
        for job in config["scrape_configs"]:
            job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
        path = self.log_dir / "prometheus.yaml"
        path.write_text(yaml.safe_dump(config))
        port = free_port()
        self.base = f"http://127.0.0.1:{port}/api/v1"
        with (self.log_dir / "prometheus.txt").open("w") as log:
            process = subprocess.Popen(
                ["prometheus", f"--config.file={path}", f"--storage.tsdb.path={self.log_dir}/data",
                 f"--web.listen-address=127.0.0.1:{port}"],
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.addCleanup(process.wait)
        self.addCleanup(process.terminate)

    def ask(self, path: str):
        try:
            with urllib.request.urlopen(self.base + path, timeout=5) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None  # not yet

    def firing(self) -> set[tuple[str, str]]:
        alerts = (self.ask("/alerts") or {"alerts": []})["alerts"]
        return {
            (alert["labels"]["alertname"], alert["labels"].get("kind", ""))
            for alert in alerts
            if alert["state"] == "firing"
        }

    def value(self, expr: str) -> float | None:
        found = (self.ask(f"/query?query={urllib.parse.quote(expr)}") or {"result": []})["result"]
        return float(found[0]["value"][1]) if found else None

    def test_a_flipped_bit_raises_the_alert(self):
        if shutil.which("prometheus") is None:
            self.skipTest("no prometheus: `make deps` installs Debian's package")
        rollout = self.start("rollout", "--metrics_port=0")
        scorer = self.start("scorer", "--metrics_port=0")
        sides = (f"--rollout={rollout.target}", f"--scorer={scorer.target}")
        comparator = self.start("comparator", *sides, "--metrics_port=0")
        self.start_prometheus({
            f"isobit-{name}": f"127.0.0.1:{Path(f'{service.port_file}.metrics').read_text().strip()}"
            for name, service in {"rollout": rollout, "scorer": scorer, "comparator": comparator}.items()
        })  # fmt: skip
        with ComparatorClient(comparator.target) as client:
            client.compare([[1, 2, 3]], n=4, **DRAW)
            self.wait_until(
                lambda: self.value("isobit_tokens_compared_total") == 128, "Prometheus has the count"
            )
            self.wait_until(lambda: self.value('sum(up{job=~"isobit-.*"})') == 3, "all are scraped")
            self.assertEqual(self.firing(), set())
            with ScorerClient(scorer.target) as update:
                update.update_weights("flipped", weight_version=1 + 1)
            begin = time.monotonic()
            client.compare([[1, 2, 3]], n=4, allow_weight_mismatch=True, **DRAW)
            self.wait_until(
                lambda: ("IsobitTokensDiffer", "bits") in self.firing(), "the alert fires", timeout=15.0
            )
            print(f"the alert fired {time.monotonic() - begin:.1f} s after the comparison began")
            total = client.get_server_info().total.statistics
        self.wait_until(
            lambda: self.value('isobit_token_mismatches_total{kind="bits"}') == total.num_unequal,
            "Prometheus has the count of the service",
        )
        self.assertNotIn(("IsobitTokensDiffer", "nan"), self.firing())
        # A new comparator has a new history.
        comparator.process.terminate()
        comparator.process.wait()
        self.wait_until(lambda: self.firing() == set(), "the alert ends", timeout=15.0)


if __name__ == "__main__":
    unittest.main()
