"""The files of deploy/: every flag is one of the binary's, every metric one of docs/metrics.md, and every
validator that can be had accepts them."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
BIN_DIR = Path(os.environ["ISOBIT_BIN_DIR"])
TOOLS = Path(sys.executable).parent  # of the environment with the validators
SERVICES = ("rollout", "scorer", "comparator")
DRAIN_S = 30  # --drain_timeout_ms


def run(*command: str | Path, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, timeout=120, **options
    )


def documents(path: Path) -> list[dict]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def documented_metrics() -> set[str]:
    """The names of docs/metrics.md, and those that Prometheus makes of histograms."""
    names: set[str] = set()
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        if not line.startswith("| `isobit_"):
            continue
        found = set(re.findall(r"`(isobit_\w+)", line.split(" | ")[0]))
        if "| histogram |" in line:
            found |= {f"{name}_{part}" for name in found for part in ("bucket", "sum", "count")}
        names |= found
    return names


def known_flags(service: str) -> set[str]:
    """The flags that the binary's --help lists."""
    return set(re.findall(r"^\s*--(\w+)", run(BIN_DIR / f"isobit-{service}", "--help").stdout, re.MULTILINE))


def pod_specs(document: dict) -> list[dict]:
    """The pods that a manifest makes."""
    spec = document.get("spec", {})
    if document["kind"] == "LeaderWorkerSet":
        parts = spec["leaderWorkerTemplate"]
        return [parts["leaderTemplate"]["spec"], parts["workerTemplate"]["spec"]]
    return [spec["template"]["spec"]] if "template" in spec else []


def commands() -> list[tuple[str, list[str]]]:
    """Each command line of a service in deploy/, with the file that it stands in."""
    found = []
    compose = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())
    for service in compose["services"].values():
        if "isobit-" in str(service.get("command")):
            found.append(("compose.yaml", re.sub(r"\$\{[^}]*\}", "x", service["command"]).split()))
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for document in documents(path):
            for pod in pod_specs(document):
                found += [(path.name, container["args"]) for container in pod["containers"]]
    for path in sorted((DEPLOY / "systemd").glob("*.service")):
        start = re.search(r"^ExecStart=/usr/local/bin/(.*)$", path.read_text(), re.MULTILINE)[1]
        found.append((path.name, [word for word in start.split() if word != "$FLAGS"]))
    for path in sorted((DEPLOY / "systemd").glob("*.env.example")):
        flags = re.search(r"^FLAGS=(.*)$", path.read_text(), re.MULTILINE)[1]
        found.append((path.name, [f"isobit-{path.name.split('.')[0]}", *flags.split()]))
    return found


class FactsTest(unittest.TestCase):
    """What the files say of isobit is true."""

    def test_flags_exist(self):
        known = {service: known_flags(service) for service in SERVICES}
        checked = 0
        for file, (binary, *words) in commands():
            service = binary.removeprefix("isobit-")
            for word in words:
                flag = re.fullmatch(r"--(\w+)(=\S*)?", word)
                with self.subTest(file=file, word=word):
                    self.assertIsNotNone(flag, "a flag and its value are one word")
                    self.assertIn(flag[1], known[service])
                    checked += 1
        self.assertGreater(checked, 80)

    def test_metrics_are_documented(self):
        known = documented_metrics()
        for path in (*(DEPLOY / "prometheus").glob("*.yaml"), DEPLOY / "grafana" / "isobit.json"):
            used = set(re.findall(r"\bisobit_[a-z0-9_]+", path.read_text()))
            with self.subTest(path.name):
                self.assertLessEqual(used, known)
        self.assertGreater(len(known), 40)

    def test_ports_agree(self):
        """What is scraped, probed and exposed is where the services listen."""
        for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
            for document in documents(path):
                for pod in pod_specs(document):
                    self.check_ports(pod["containers"][0], path.name)

    def check_ports(self, container: dict, file: str) -> None:
        flags = dict(word[2:].split("=", 1) for word in container["args"][1:])
        listening = {flags[name] for name in ("port", "metrics_port", "http_port") if name in flags}
        ports = {port["name"]: str(port["containerPort"]) for port in container.get("ports", [])}
        ports.pop("group", None)
        with self.subTest(file):
            self.assertEqual(set(ports.values()), listening)
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                if probe in container:
                    self.assertEqual(ports[container[probe]["httpGet"]["port"]], flags["metrics_port"])
                    self.assertIn(container[probe]["httpGet"]["path"], ("/readyz", "/healthz"))

    def test_stops_are_longer_than_the_drain(self):
        for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
            for document in documents(path):
                for pod in pod_specs(document):
                    self.assertGreater(pod["terminationGracePeriodSeconds"], DRAIN_S, path.name)
        for path in (DEPLOY / "systemd").glob("*.service"):
            self.assertGreater(int(re.search(r"TimeoutStopSec=(\d+)", path.read_text())[1]), DRAIN_S)
        compose = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())
        for name in SERVICES:
            self.assertGreater(int(compose["services"][name]["stop_grace_period"].rstrip("s")), DRAIN_S)

    def test_images_are_pinned(self):
        text = "".join(
            path.read_text()
            for path in DEPLOY.rglob("*")
            if path.suffix == ".yaml" or path.name == "Dockerfile"
        )
        stages = set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE))  # of the Dockerfile itself
        images = re.findall(r"^\s*(?:image:|FROM) (\S+)", text, re.MULTILINE)
        images = [image for image in images if image not in stages]
        self.assertGreater(len(images), 8)
        for image in images:
            name, _, tag = image.rpartition(":")
            with self.subTest(image):
                self.assertTrue(name)
                self.assertRegex(tag, r"\d")
                self.assertNotIn(".", name.split("/")[0], "no registry's host name")

    def test_secrets_of_the_manifests_are_in_the_example(self):
        example = DEPLOY / "kubernetes" / "secrets.example.yaml"
        made = {(document["kind"], document["metadata"]["name"]) for document in documents(example)}
        used = set()
        for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
            for document in documents(path):
                for pod in pod_specs(document):
                    for volume in pod["volumes"]:
                        if "secret" in volume:
                            used.add(("Secret", volume["secret"]["secretName"]))
                        if "configMap" in volume:
                            used.add(("ConfigMap", volume["configMap"]["name"]))
        self.assertEqual(used, made)

    def test_envoy_passes_data_calls_alone(self):
        envoy = yaml.safe_load((DEPLOY / "envoy" / "envoy.yaml").read_text())
        proto = (ROOT / "proto" / "isobit" / "v1" / "rollout.proto").read_text()
        manager = envoy["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
        routes = manager["route_config"]["virtual_hosts"][0]["routes"]
        paths = [route["match"].get("path") or route["match"].get("prefix") for route in routes]
        self.assertEqual(paths, ["/isobit.v1.RolloutService/Generate", "/grpc.health.v1.Health/"])
        self.assertIn("rpc Generate(", proto)
        clusters = {cluster["name"] for cluster in envoy["static_resources"]["clusters"]}
        self.assertEqual({route["route"]["cluster"] for route in routes}, clusters)


class ValidatorsTest(unittest.TestCase):
    def accept(self, *command: str | Path, **options) -> None:
        result = run(*command, **options)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_dockerfile(self):
        self.accept(TOOLS / "hadolint", DEPLOY / "docker" / "Dockerfile")

    def test_envoy(self):
        self.accept(TOOLS / "envoy", "--mode", "validate", "-c", DEPLOY / "envoy" / "envoy.yaml")

    def test_compose(self):
        self.accept(
            TOOLS / "check-jsonschema",
            "--builtin-schema",
            "vendor.compose-spec",
            DEPLOY / "docker" / "compose.yaml",
        )

    def test_kubernetes(self):
        for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
            if path.name in ("kustomization.yaml", "scorer_nodes.yaml"):  # kinds of others
                continue
            with self.subTest(path.name):
                self.accept(TOOLS / "kubernetes-validate", "--strict", "--no-warn", path)
        kustomization = documents(DEPLOY / "kubernetes" / "kustomization.yaml")[0]
        for name in kustomization["resources"]:
            self.assertTrue((DEPLOY / "kubernetes" / name).is_file(), name)

    def test_pods_of_the_leader_worker_set(self):
        """Their parts by the schema of pods; the set's own fields have none here."""
        (document,) = documents(DEPLOY / "kubernetes" / "scorer_nodes.yaml")
        for pod in pod_specs(document):
            with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
                yaml.safe_dump(
                    {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}, file
                )
                file.flush()
                self.accept(TOOLS / "kubernetes-validate", "--strict", "--no-warn", file.name)

    def test_systemd(self):
        if shutil.which("systemd-analyze") is None:
            self.skipTest("no systemd-analyze: Debian's package systemd has it")
        with tempfile.TemporaryDirectory() as folder:
            for path in (DEPLOY / "systemd").glob("*.service"):
                # The binaries are not installed here.
                text = re.sub(r"/usr/local/bin/isobit-\w+", "/bin/true", path.read_text())
                (Path(folder) / path.name).write_text(text)
                self.accept("systemd-analyze", "verify", Path(folder) / path.name)
                # Exposure in tenths: 0 is least.
                self.accept(
                    "systemd-analyze", "security", "--offline=yes", "--threshold=25", Path(folder) / path.name
                )

    def test_prometheus(self):
        self.accept("promtool", "check", "config", "prometheus.yaml", cwd=DEPLOY / "prometheus")
        self.accept("promtool", "check", "rules", "alerts.yaml", cwd=DEPLOY / "prometheus")
        self.accept("promtool", "test", "rules", "alerts_test.yaml", cwd=DEPLOY / "prometheus")

    def test_every_alert_is_tested_both_ways(self):
        rules = documents(DEPLOY / "prometheus" / "alerts.yaml")[0]["groups"][0]["rules"]
        fires, silent = set(), set()
        for test in documents(DEPLOY / "prometheus" / "alerts_test.yaml")[0]["tests"]:
            for case in test["alert_rule_test"]:
                (fires if case["exp_alerts"] else silent).add(case["alertname"])
        names = {rule["alert"] for rule in rules}
        self.assertEqual((fires, silent), (names, names))

    def test_dashboard(self):
        dashboard = json.loads((DEPLOY / "grafana" / "isobit.json").read_text())
        panels = dashboard["panels"]
        self.assertEqual(len({panel["id"] for panel in panels}), len(panels))
        taken: set[tuple[int, int]] = set()
        for panel in panels:
            place = panel["gridPos"]
            cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                     for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
            self.assertFalse(cells & taken, f"{panel['title']} lies over another")
            self.assertLessEqual(place["x"] + place["w"], 24)
            taken |= cells
        expressions = [target["expr"] for panel in panels for target in panel["targets"]]
        expressions += [annotation["expr"] for annotation in dashboard["annotations"]["list"]]
        rules = [{"record": f"isobit:x{i}", "expr": expr} for i, expr in enumerate(expressions)]
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}, file)
            file.flush()
            self.accept("promtool", "check", "rules", file.name)


if __name__ == "__main__":
    unittest.main()
