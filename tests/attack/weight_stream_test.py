"""kill -9 while weights are streamed: of the sender, and of the service, at random moments.

Whatever happens, whole weights serve under their own digest, and the next stream works.
ISOBIT_ATTACK_TRIES is the number of moments of each kind and service, by default 10.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

from changed_weights_test import BIN_DIR, SETTING, Models

from isobit import RolloutClient, ScorerClient
from isobit.errors import AbortedError, IsobitError, UnavailableError
from isobit.launch import Services, start_rollout, start_scorer, wait_all_serving
from isobit_tools.bf16_files import bf16_tensors

TRIES = int(os.environ.get("ISOBIT_ATTACK_TRIES", "10"))
PROMPT, COMPLETION = [1, 2, 3], [4, 5, 6, 7]
CLIENTS = {"rollout": RolloutClient, "scorer": ScorerClient}


def setUpModule():
    global models
    scratch = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(scratch.cleanup)
    models = Models(Path(scratch.name).resolve())


class Sender:
    """A process that sends weights once, when told to."""

    def __init__(self, kind: str, target: str, model: Path):
        command = [sys.executable, __file__, "--send", kind, target, str(model)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def send_and_die(self, after: float) -> None:
        assert self._process.stdout.readline() == "ready\n"
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        time.sleep(after)
        self.end()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def send(kind: str, target: str, model: str) -> None:
    tensors = bf16_tensors(Path(model))
    with CLIENTS[kind](target) as client:
        client.get_server_info()
        print("ready", flush=True)
        sys.stdin.readline()
        client.update_weights_from_stream(tensors)


class Kills:
    """Tests of both services. A subclass starts its service and says what its weights determine."""

    def setUp(self):
        self.random = random.Random(1)
        self.tensors = {name: bf16_tensors(models.root / name) for name in models.digests}
        self.scratch = Path(tempfile.mkdtemp(dir=models.root))
        self.services = self.enterContext(Services(BIN_DIR, self.scratch))
        self.start()
        self.bits, self.seconds = {}, float("inf")  # of the fastest stream
        for name in ("a", "b", "first"):
            start = time.monotonic()
            response = self.client.update_weights_from_stream(self.tensors[name])
            self.seconds = min(self.seconds, time.monotonic() - start)
            self.assertEqual(response.current.digest, models.digests[name])
            self.bits[models.digests[name]] = self.witness()
        self.assertEqual(len(set(self.bits.values())), 3)

    def start(self) -> None:
        name = f"service-{time.time_ns()}"
        self.service = self.start_service(self.services, SETTING, models.root / "first", name)
        wait_all_serving(self.services, [self.service])
        self.client = self.enterContext(CLIENTS[self.kind](self.service.target))

    def moment(self) -> float:
        return self.random.uniform(0, 1.1 * self.seconds)

    def assert_honest(self) -> str:
        self.service.check_alive()
        digest = self.client.get_server_info().server.weight_version.digest
        self.assertIn(digest, self.bits, "a mixture serves")
        self.assertEqual(self.witness(), self.bits[digest], "weights serve under a digest that is not theirs")
        return digest

    def update_when_free(self, name: str) -> None:
        """The service has given a dead sender up after a moment."""
        deadline = time.monotonic() + 30
        while True:
            try:
                response = self.client.update_weights_from_stream(self.tensors[name])
                break
            except AbortedError:
                self.assertLess(time.monotonic(), deadline, "a dead sender's update is never given up")
                time.sleep(0.02)
        self.assertEqual(response.current.digest, models.digests[name])
        self.assertEqual(self.witness(), self.bits[response.current.digest])

    def test_senders_are_killed(self):
        switched = 0
        names = ("a", "b")
        sender = Sender(self.kind, self.service.target, models.root / names[0])
        for i in range(TRIES):
            model = models.root / names[(i + 1) % 2]
            following = Sender(self.kind, self.service.target, model)  # starts meanwhile
            sender.send_and_die(self.moment())
            sender = following
            switched += self.assert_honest() == models.digests[names[i % 2]]
            self.update_when_free("first")
        sender.end()
        print(f"{type(self).__name__}: {switched} of {TRIES} killed senders had sent everything", flush=True)

    def test_services_are_killed(self):
        answered = 0
        for i in range(TRIES):
            outcome: list[IsobitError | None] = []

            def update(name="ab"[i % 2], outcome=outcome):
                try:
                    self.client.update_weights_from_stream(self.tensors[name], timeout=60)
                    outcome.append(None)
                except IsobitError as error:
                    outcome.append(error)

            sending = threading.Thread(target=update)
            sending.start()
            time.sleep(self.moment())
            self.service.process.kill()
            self.assertEqual(self.service.process.wait(20), -signal.SIGKILL)
            sending.join(60)
            self.assertEqual(len(outcome), 1, "the sender hangs")
            if outcome[0] is None:
                answered += 1
            else:
                self.assertIsInstance(outcome[0], UnavailableError)
            self.start()
            self.assertEqual(self.assert_honest(), models.digests["first"])
            self.update_when_free("b")
        print(f"{type(self).__name__}: {answered} of {TRIES} killed services had answered", flush=True)


class RolloutTest(Kills, unittest.TestCase):
    kind, start_service = "rollout", staticmethod(start_rollout)

    def witness(self) -> bytes:
        (sample,) = self.client.generate(PROMPT, seed=1, max_tokens=4, ignore_eos=True)
        return sample.tokens.logprobs.tobytes()


class ScorerTest(Kills, unittest.TestCase):
    kind, start_service = "scorer", staticmethod(start_scorer)

    def witness(self) -> bytes:
        (score,) = self.client.score([(PROMPT, COMPLETION)])
        return score.tokens.logprobs.tobytes()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--send"]:
        send(*sys.argv[2:])
    else:
        with contextlib.suppress(KeyboardInterrupt):
            unittest.main()
