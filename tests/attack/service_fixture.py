"""The three services as real processes under attack, and what the attack does to them."""

import os
import tempfile
import time
import unittest
from pathlib import Path

import grpc

from isobit_tools.services import (
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
SETTING = Setting("tree", tp_size=1, shards=1)
MIB = 1 << 20

METHODS = {
    "rollout": {
        "Generate": "GenerateRequest",
        "Abort": "AbortRequest",
        "PauseGeneration": "PauseGenerationRequest",
        "ContinueGeneration": "ContinueGenerationRequest",
        "UpdateWeights": "UpdateWeightsRequest",
        "GetServerInfo": "GetServerInfoRequest",
        "GetLoad": "GetLoadRequest",
    },
    "scorer": {
        "Score": "ScoreRequest",
        "UpdateWeights": "UpdateWeightsRequest",
        "GetServerInfo": "GetServerInfoRequest",
    },
    "comparator": {
        "Compare": "CompareRequest",
        "Record": "RecordRequest",
        "Watch": "WatchRequest",
        "GetServerInfo": "GetServerInfoRequest",
    },
}


def path_of(service: str, method: str) -> str:
    return f"/isobit.v1.{service.capitalize()}Service/{method}"


def memory_of(service: Service, what: str = "VmRSS") -> int:
    """Bytes that the process has in memory (VmRSS), or had at most (VmHWM)."""
    for line in Path(f"/proc/{service.process.pid}/status").read_text().splitlines():
        if line.startswith(what):
            return int(line.split()[1]) * 1024
    raise ValueError(what)


def call(channel: grpc.Channel, path: str, request: bytes, **options) -> tuple[grpc.StatusCode, str]:
    """The status of a call with `request` as it stands."""
    method = channel.stream_stream(path)  # bytes in, bytes out; good for every kind of method
    try:
        for _ in method(iter([request]), timeout=60, **options):
            pass
    except grpc.RpcError as error:
        return error.code(), error.details()
    return grpc.StatusCode.OK, ""


class AttackTest(unittest.TestCase):
    """Each test gets the services it starts, on a random tiny model."""

    launcher: tuple[str, ...] = ()  # what starts the services, such as ("prlimit", "--nofile=256")

    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        cls.scratch = Path(scratch.name).resolve()
        cls.model = cls.scratch / "model"
        run_model_tool(BIN_DIR, "make", "tiny-llama", str(cls.model), "--seed", "3")

    def setUp(self):
        self.log_dir = Path(tempfile.mkdtemp(dir=self.scratch))
        self.services = self.enterContext(Services(BIN_DIR, self.log_dir, launcher=self.launcher))

    def start_rollout(self, *flags: str) -> Service:
        return start_rollout(self.services, SETTING, self.model, "rollout", *flags)

    def start_all(self) -> dict[str, Service]:
        """The three services, serving, by name."""
        rollout = self.start_rollout()
        scorer = start_scorer(self.services, SETTING, self.model, "scorer")
        comparator = start_comparator(self.services, rollout, scorer, "comparator")
        wait_all_serving(self.services, (rollout, scorer, comparator))
        return {"rollout": rollout, "scorer": scorer, "comparator": comparator}

    def channel(self, service: Service) -> grpc.Channel:
        """A connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        return self.enterContext(grpc.insecure_channel(service.target, options))

    def assert_serves(self, name: str, channel: grpc.Channel) -> None:
        status = call(channel, path_of(name, "GetServerInfo"), b"")
        self.assertEqual(status, (grpc.StatusCode.OK, ""), name)

    def wait_until(self, condition, what: str, timeout: float = 20.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            self.assertLess(time.monotonic(), deadline, what)
            time.sleep(0.05)
