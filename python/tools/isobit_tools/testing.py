"""A test case that starts its own services: real processes on a random tiny model.

ISOBIT_BIN_DIR is the folder of the binaries.
"""

import os
import tempfile
import time
import unittest
import urllib.request
from collections.abc import Callable
from pathlib import Path

from isobit.launch import (
    Service,
    Services,
    Setting,
    run_model_tool,
    start_comparator,
    start_rollout,
    start_scorer,
    wait_all_serving,
)

BIN_DIR = Path(os.environ["ISOBIT_BIN_DIR"])


def http_url(service: Service, port: str, path: str = "/metrics", scheme: str = "http") -> str:
    """Returns the URL of `path` at `service`. `port`: "metrics" or "http", the suffix of the port file that
    has the port."""
    return f"{scheme}://127.0.0.1:{int(Path(f'{service.port_file}.{port}').read_text())}{path}"


def http_get(url: str, context=None, **headers: str) -> str:
    """Returns the text that `url` answers. Raises urllib.error.HTTPError if the status is an error."""
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=20, context=context) as answer:
        return answer.read().decode()


def metric_values(text: str) -> dict[str, float]:
    """Returns the values on a page of metrics, by name and labels as written there."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


class ServiceTest(unittest.TestCase):
    """The services that a test starts are stopped when the test ends.

    A class has one directory, `scratch`, with one model in it, `model`. Each test has its own `services` and
    `log_dir`.
    """

    setting = Setting("tree", tp_size=1, shards=1)
    launcher: tuple[str, ...] = ()  # a command that starts the services, such as ("prlimit", "--nofile=256")

    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.scratch = Path(scratch.name).resolve()
        cls.model = cls.scratch / "model"
        cls.make_model()

    @classmethod
    def make_model(cls) -> None:
        run_model_tool(BIN_DIR, "make", "tiny-llama", str(cls.model), "--seed", "3")

    def setUp(self):
        self.log_dir = Path(tempfile.mkdtemp(dir=self.scratch))
        self.services = self.enterContext(Services(BIN_DIR, self.log_dir, launcher=self.launcher))

    def launch(self, kind: str, *flags: str) -> Service:
        """Starts a "rollout", a "scorer" or a "comparator". Returns before it listens. If a flag is given
        twice, the later one counts."""
        name = f"{kind}-{len(list(self.log_dir.glob('*.log')))}"
        if kind == "comparator":
            return self.services.start("isobit-comparator", name, flags)
        start = {"rollout": start_rollout, "scorer": start_scorer}[kind]
        return start(self.services, self.setting, self.model, name, *flags)

    def start(self, kind: str, *flags: str, **security) -> Service:
        """Starts a service and waits until it serves. `security`: the arguments of a client for it."""
        service = self.launch(kind, *flags)
        self.services.wait_serving(service, **security)
        return service

    def start_all(self) -> dict[str, Service]:
        """Starts the three services and returns them by kind, once they serve."""
        rollout, scorer = self.launch("rollout"), self.launch("scorer")
        comparator = start_comparator(self.services, rollout, scorer, "comparator")
        wait_all_serving(self.services, (rollout, scorer, comparator))
        return {"rollout": rollout, "scorer": scorer, "comparator": comparator}

    def wait_until(self, condition: Callable[[], object], what: str, timeout: float = 120.0) -> None:
        """Fails with the message `what` if `condition` does not become true within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not condition():
            self.assertLess(time.monotonic(), deadline, what)
            time.sleep(0.02)
