"""The services' metrics: Prometheus's own check accepts them, docs/metrics.md lists just these, and the
figures are those of the work done."""

import re
import shutil
import subprocess
import threading
import time
import unittest
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from isobit import ComparatorClient, RolloutClient
from isobit.launch import Setting
from isobit_tools.testing import ServiceTest, http_get, http_url, metric_values

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
LETTERS = {"rollout": "R", "scorer": "S", "comparator": "C", "fast path": "F"}


def documented() -> dict[str, set[str]]:
    """The metrics of each service that the page lists, a histogram by its base name."""
    found: dict[str, set[str]] = {service: set() for service in LETTERS}
    for line in PAGE.read_text().splitlines():
        if not line.startswith("| `isobit_"):
            continue
        names, services = line.replace("\\|", "").strip("|").split(" | ")[:2]
        for service, letter in LETTERS.items():
            if letter in services.split():
                found[service] |= set(re.findall(r"`(isobit_\w+)", names))
    return found


class MetricsTest(ServiceTest):
    setting = Setting("tree", tp_size=2, shards=2)

    def start_with_metrics(self):
        rollout = self.start("rollout", "--metrics_port=0", "--speculation=history,lookup")
        scorer = self.start("scorer", "--metrics_port=0")
        comparator = self.start(
            "comparator", f"--rollout={rollout.target}", f"--scorer={scorer.target}", "--metrics_port=0"
        )
        return {"rollout": rollout, "scorer": scorer, "comparator": comparator}

    def test_metrics(self):
        services = self.start_with_metrics()
        with ComparatorClient(services["comparator"].target) as client:
            result = client.compare([[1, 2, 3], [4, 5]], n=2, max_tokens=16, seed=3, ignore_eos=True)
        self.assertEqual(result.summary.statistics.num_tokens, 64)
        with RolloutClient(services["rollout"].target) as client:
            client.generate([7, 8, 9], max_tokens=8, ignore_eos=True)
        # The comparator asks the sides once a second.
        url = http_url(services["comparator"], "metrics")
        self.wait_until(
            lambda: metric_values(http_get(url)).get('isobit_weight_version{side="scorer"}') == 1,
            "the comparator knows the scorer's version",
        )
        values = {}
        for name, service in services.items():
            text = http_get(http_url(service, "metrics"))
            self.check_by_promtool(text)
            served = {re.match(r"# TYPE (\w+)", line)[1] for line in re.findall("# TYPE .*", text)}
            with self.subTest(name):
                self.assertEqual(served, documented()[name], "docs/metrics.md lists what is served")
            values[name] = metric_values(text)
        self.check_values(**values)

    def test_metrics_of_the_fast_path(self):
        rollout = self.start("rollout", "--metrics_port=0", "--speculation=fast_path")
        text = http_get(http_url(rollout, "metrics"))
        self.check_by_promtool(text)
        served = set(re.findall(r"# TYPE (\w+)", text))
        self.assertEqual(served - documented()["rollout"], documented()["fast path"])

    def check_values(self, rollout, scorer, comparator):
        self.assertEqual(comparator["isobit_tokens_compared_total"], 64)
        for kind in ("bits", "nan", "missing"):
            self.assertEqual(comparator[f'isobit_token_mismatches_total{{kind="{kind}"}}'], 0)
        for side in ("rollout", "scorer"):
            self.assertEqual(comparator[f'isobit_side_reachable{{side="{side}"}}'], 1)
        self.assertEqual(rollout["isobit_tokens_generated_total"], 72)
        self.assertEqual(rollout["isobit_time_to_first_token_seconds_count"], 5, "of each sample")
        self.assertEqual(rollout["isobit_time_per_output_token_seconds_count"], 5)
        self.assertGreater(rollout["isobit_time_to_first_token_seconds_sum"], 0)
        self.assertGreaterEqual(rollout["isobit_steps_total"], 8 + 16)
        for part in ("schedule", "launch", "wait", "commit"):
            self.assertGreater(rollout[f'isobit_step_seconds_total{{part="{part}"}}'], 0)
        for part in ("forward", "draw"):
            self.assertGreater(rollout[f'isobit_step_device_seconds_total{{part="{part}"}}'], 0)
        self.assertEqual(scorer["isobit_tokens_scored_total"], 64)
        self.assertGreaterEqual(scorer["isobit_passes_total"], 1)
        self.assertGreater(scorer["isobit_pass_seconds_total"], 0)
        self.assertGreater(scorer["isobit_gather_seconds_total"], 0, "two shards gather")
        self.assertEqual(scorer["isobit_requests_waiting"], 0)

    def check_by_promtool(self, text: str) -> None:
        promtool = shutil.which("promtool")
        self.assertIsNotNone(promtool, "Debian's package prometheus has promtool; `make deps` installs it")
        run = subprocess.run(
            [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        self.assertEqual((run.returncode, run.stdout, run.stderr), (0, "", ""))

    def test_health(self):
        rollout = self.start("rollout", "--metrics_port=0")
        self.assertEqual(http_get(http_url(rollout, "metrics", "/healthz")), "alive\n")
        self.assertEqual(http_get(http_url(rollout, "metrics", "/readyz")), "serving\n")
        # While a call is in flight, a service that was told to stop still answers.
        with RolloutClient(rollout.target) as client:
            stream = client.generate([1, 2], n=64, max_tokens=1900, ignore_eos=True, stream=True)
            next(stream)
            rollout.process.terminate()
            self.wait_until(lambda: self.ready_status(rollout) == 503, "it is not ready any more")
            self.assertEqual(http_get(http_url(rollout, "metrics", "/healthz")), "alive\n")

    def ready_status(self, service) -> int:
        try:
            http_get(http_url(service, "metrics", "/readyz"))
        except urllib.error.HTTPError as error:
            error.close()
            return error.code
        return 200

    def test_old_connections_take_no_more_calls(self):
        """Clients connect anew, and no call ends."""
        rollout = self.start("rollout", "--metrics_port=0", "--max_connection_age_s=1")
        url = http_url(rollout, "metrics")
        name = 'isobit_connections_accepted_total{listener="main"}'
        with RolloutClient(rollout.target) as client, RolloutClient(rollout.target) as other:
            long = other.generate([1, 2], n=16, max_tokens=1000, ignore_eos=True, stream=True, seed=1)
            next(long)
            begin = time.monotonic()
            before = metric_values(http_get(url))[name]

            def has_connected_anew() -> bool:
                self.assertEqual(len(client.generate([3], max_tokens=2, ignore_eos=True)), 1)
                return metric_values(http_get(url))[name] > before

            self.wait_until(has_connected_anew, "the client has connected anew")
            self.assertGreater(time.monotonic() - begin, 0.5, "not before the age")
            *_, end = long
            self.assertEqual(end.finish_reason, "length", "a stream older than the age goes on")

    def test_preemptions_and_shared_pages(self):
        rollout = self.start("rollout", "--metrics_port=0", "--num_pages=40", "--page_size=4")
        url = http_url(rollout, "metrics")
        shared, used = [], []
        ends = threading.Event()

        def generate(client: RolloutClient) -> None:
            while not ends.is_set():  # one request may end before its pages are looked at
                client.generate(list(range(1, 33)), n=4, max_tokens=60, ignore_eos=True)

        def seen() -> bool:
            values = metric_values(http_get(url))
            shared.append(values["isobit_kv_pages_shared"])
            used.append(values["isobit_kv_pages_used_ratio"])
            return max(shared) >= 1 and max(used) > 0.5

        with RolloutClient(rollout.target) as client, ThreadPoolExecutor(1) as pool:
            generating = pool.submit(generate, client)
            try:
                self.wait_until(seen, "samples of a prompt share its pages, and take more than half of all")
            finally:
                ends.set()
            generating.result()
        self.assertLessEqual(max(shared), 8)
        self.assertLessEqual(max(used), 1)
        values = metric_values(http_get(url))
        self.assertEqual(values["isobit_kv_pages_used_ratio"], 0)
        self.assertEqual(values["isobit_kv_pages_shared"], 0)
        self.assertGreater(values["isobit_preemptions_total"], 0, "4 x 23 pages do not fit into 40")


if __name__ == "__main__":
    unittest.main()
