"""Checkpoints that change, and processes that end, in the middle of a weight update.

Whatever happens, a service goes on (or starts again, if it was killed), and the weights that it serves have
the digest that it reports. ISOBIT_ATTACK_TRIES is the number of random moments, by default 20.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import tempfile
import threading
import time
import unittest
from pathlib import Path
from unittest import mock

from isobit import RolloutClient, ScorerClient
from isobit.errors import IsobitError, UnavailableError
from isobit.launch import (
    Service,
    Services,
    Setting,
    run_model_tool,
    start_rollout,
    start_scorer,
    wait_all_serving,
)

BIN_DIR = Path(os.environ["ISOBIT_BIN_DIR"])
TRIES = int(os.environ.get("ISOBIT_ATTACK_TRIES", "20"))
SETTING = Setting("tree", tp_size=2, shards=2)
PROMPT, COMPLETION = [1, 2, 3], [4, 5, 6, 7]
FILE = "model.safetensors"
# Large enough that an update takes a while, small enough that a test does not.
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
BEFORE_SWITCH = ("opened", "read", "packed", "verified", "switch")
PHASES = (*BEFORE_SWITCH, "commit", "switched")


class Models:
    """The models of all tests: a first one, and two that replace it."""

    def __init__(self, root: Path):
        self.root = root
        config = root / "shape.json"
        config.write_text(json.dumps(SHAPE))
        self.digests, self.bytes = {}, {}
        for seed, name in enumerate(("first", "a", "b")):
            run_model_tool(BIN_DIR, "make", f"--config={config}", str(root / name), f"--seed={seed}")
            self.digests[name] = run_model_tool(BIN_DIR, "verify", str(root / name)).split()[0]
            self.bytes[name] = (root / name / FILE).read_bytes()


def setUpModule():
    global models
    scratch = tempfile.TemporaryDirectory()
    unittest.addModuleCleanup(scratch.cleanup)
    models = Models(Path(scratch.name).resolve())


class Attacks:
    """Tests of both services. A subclass starts its service and says what its weights determine."""

    def setUp(self):
        self.random = random.Random(1)
        self.digests = models.digests
        self.scratch = Path(tempfile.mkdtemp(dir=models.root))
        self.victim = models.root / "victim"
        shutil.rmtree(self.victim, ignore_errors=True)
        self.victim.mkdir()
        shutil.copy(models.root / "a" / "config.json", self.victim)
        self.failpoints = self.scratch / "failpoints"
        self.arm("")
        self.enterContext(mock.patch.dict(os.environ, ISOBIT_FAILPOINTS=str(self.failpoints)))
        self.services = self.enterContext(Services(BIN_DIR, self.scratch))
        self.start("first")
        self.bits = {}
        for name in ("a", "b", "first"):
            self.client.update_weights(name)
            self.bits[self.digests[name]] = self.witness()
        self.assertEqual(len({tuple(bits) for bits in self.bits.values()}), 3)

    def start(self, model: str) -> None:
        name = f"service-{time.time_ns()}"
        self.service: Service = self.start_service(self.services, SETTING, models.root / model, name)
        wait_all_serving(self.services, [self.service])
        self.client = self.enterContext(self.client_class(self.service.target))

    def serving(self) -> tuple[int, str]:
        version = self.client.get_server_info().server.weight_version
        return version.id, version.digest

    def assert_honest(self) -> str:
        """Checks that whole weights serve, under their own digest, and returns the digest."""
        self.service.check_alive()
        _, digest = self.serving()
        self.assertIn(digest, self.bits, "a mixture serves")
        self.assertEqual(self.witness(), self.bits[digest], "weights serve under a digest that is not theirs")
        return digest

    def arm(self, failpoint: str) -> None:
        # By rename: the process reads the file at any time.
        new = self.failpoints.with_suffix(".new")
        new.write_text(failpoint)
        new.rename(self.failpoints)

    def restore_victim(self, name: str) -> None:
        new = self.victim / "new"
        new.write_bytes(models.bytes[name])
        new.rename(self.victim / FILE)

    def overwrite_victim(self, name: str) -> None:
        """Overwrites a file in place, piece by piece, with the same size."""
        contents, piece = models.bytes[name], 1 << 16
        with (self.victim / FILE).open("r+b", buffering=0) as file:
            for at in range(0, len(contents), piece):
                if at + piece >= len(contents):
                    time.sleep(0.01)  # so that even a coarse clock of file times sees this change
                file.write(contents[at : at + piece])

    def update(self, model: str, **arguments) -> IsobitError | None:
        try:
            self.client.update_weights(model, timeout=60, **arguments)
        except IsobitError as error:
            return error
        return None

    def update_under(self, attack, **arguments) -> IsobitError | None:
        """The outcome of an update to the victim while `attack` runs at a random moment."""
        outcome = []
        updating = threading.Thread(target=lambda: outcome.append(self.update("victim", **arguments)))
        updating.start()
        time.sleep(self.random.uniform(0, self.update_seconds))
        attack()
        updating.join()
        return outcome[0]

    def measure_update(self) -> None:
        self.restore_victim("a")
        start = time.monotonic()
        self.assertIsNone(self.update("victim"))
        self.update_seconds = time.monotonic() - start

    def test_truncation_at_random_moments(self):
        self.measure_update()
        refused = 0
        for _ in range(TRIES):
            self.restore_victim(self.random.choice("ab"))
            left = self.random.randrange(len(models.bytes["a"]))
            error = self.update_under(lambda left=left: os.truncate(self.victim / FILE, left))
            self.assert_honest()
            if error is not None:
                refused += 1
                self.assertEqual(error.code.name, "INVALID_ARGUMENT", error)
                self.assertIn(FILE, error.details)
        print(f"{type(self).__name__}: {refused} of {TRIES} updates refused after a truncation", flush=True)

    def test_overwriting_at_random_moments(self):
        self.measure_update()
        refused = 0
        for round in range(TRIES):
            self.restore_victim("a")
            expected = self.digests["a"] if round % 2 else ""
            error = self.update_under(lambda: self.overwrite_victim("b"), expected_digest=expected)
            digest = self.assert_honest()
            if error is not None:
                refused += 1
                self.assertIn(error.code.name, ("INVALID_ARGUMENT", "FAILED_PRECONDITION"), error)
            elif expected:
                self.assertEqual(digest, expected)
        print(f"{type(self).__name__}: {refused} of {TRIES} updates refused after an overwriting", flush=True)

    def update_stopped_at(self, phase: str, change) -> IsobitError | None:
        """The outcome of an update to the victim, while `change` runs in one of its phases."""
        outcome = []
        self.arm(f"weights.{phase} stop")
        updating = threading.Thread(target=lambda: outcome.append(self.update("victim")))
        updating.start()
        deadline = time.monotonic() + 20
        while self.process_state() != "T":
            self.assertLess(time.monotonic(), deadline, f"{phase} is not reached")
            time.sleep(0.01)
        change()
        self.arm("")
        while updating.is_alive():  # another thread of the process may have been about to stop
            self.service.process.send_signal(signal.SIGCONT)
            updating.join(0.05)
        return outcome[0]

    def process_state(self) -> str:
        stat = Path(f"/proc/{self.service.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0]

    def test_changes_while_some_tensors_are_read(self):
        self.restore_victim("a")
        self.assertIsNone(self.update_stopped_at("read", lambda: self.restore_victim("b")))
        self.assertEqual(self.assert_honest(), self.digests["a"])  # the file that was opened
        before = self.serving()
        self.restore_victim("b")
        error = self.update_stopped_at("read", lambda: os.truncate(self.victim / FILE, 1000))
        self.assertIn("ended", str(error))
        self.restore_victim("b")
        error = self.update_stopped_at("read", lambda: self.overwrite_victim("a"))
        self.assertIn(f"{FILE} was changed while it was read", str(error))
        self.assertEqual(self.serving(), before)
        self.assert_honest()

    def test_a_failure_before_the_switch_leaves_the_old_weights(self):
        before = self.serving()
        for phase in BEFORE_SWITCH:
            self.arm(f"weights.{phase} fail")
            error = self.update("a")
            self.assertIn(f"failpoint weights.{phase}", str(error))
            self.assertEqual(self.serving(), before, phase)
            self.assert_honest()
        self.arm("")
        self.assertIsNone(self.update("a"))
        self.assertEqual(self.assert_honest(), self.digests["a"])

    def test_killed_in_any_phase_it_starts_again(self):
        for phase in PHASES:
            self.arm(f"weights.{phase} kill")
            model = "b" if phase in BEFORE_SWITCH else "a"
            error = self.update(model)
            self.assertIsInstance(error, UnavailableError, phase)
            self.assertEqual(self.service.process.wait(20), -signal.SIGKILL, phase)
            self.arm("")
            self.start(model)
            self.assertEqual(self.assert_honest(), self.digests[model], phase)


class RolloutTest(Attacks, unittest.TestCase):
    start_service, client_class = staticmethod(start_rollout), RolloutClient

    def witness(self) -> list[int]:
        (sample,) = self.client.generate(PROMPT, seed=1, max_tokens=4, ignore_eos=True)
        return sample.tokens.logprobs.view("u4").tolist()


class ScorerTest(Attacks, unittest.TestCase):
    start_service, client_class = staticmethod(start_scorer), ScorerClient

    def witness(self) -> list[int]:
        (score,) = self.client.score([(PROMPT, COMPLETION)])
        return score.tokens.logprobs.view("u4").tolist()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        unittest.main()
