"""The demo of the training loop: what it checks, and a short run of all of it."""

import argparse
import io
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from isobit.screen import Screen
from isobit_tools.train_demo import TrainDemo

STEPS = 4


def metrics(unequal: int, **changes) -> list[dict]:
    """Of a run whose reward rises."""
    rows = [
        {
            "step": step,
            "reward": step / 10,
            "compared": 100,
            "unequal": unequal,
            "kl": 1e-4 * unequal,
            "max_abs_dlogp": 0.1 * unequal,
            "weights_digest": f"{step:064}",
        }
        for step in range(1, STEPS + 1)
    ]
    return [*rows[:-1], rows[-1] | changes]


class ChecksTest(unittest.TestCase):
    def failures(self, *runs: list[dict]) -> tuple[int, str]:
        """What the demo says of four runs with these metrics."""
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        said = io.StringIO()
        arguments = argparse.Namespace(model=None, steps=STEPS, processes=2, tp_size=2, shards=1)
        demo = TrainDemo(arguments, [], Screen(said), folder, folder / "random-model")
        for run, steps in zip(demo._runs, runs, strict=True):
            run.steps = steps
        demo._check_all()
        demo._report()
        self.assertEqual((folder / "on_policy.png").read_bytes()[:4], b"\x89PNG")
        return demo.failures, said.getvalue()

    def test_all_hold(self):
        failures, said = self.failures(metrics(0), metrics(0), metrics(3), metrics(2))
        self.assertEqual(failures, 0, said)
        self.assertRegex(said, r"\n  tree +2 +2 +4 +400 +0 +0 +0 +0\.100 to 0\.400 ")
        self.assertRegex(said, r"\n  vanilla +2 +2 +4 +400 +12 +3\.00e-01 +3\.00e-04 ")

    def test_each_fault_is_seen(self):
        good = [metrics(0), metrics(0), metrics(3), metrics(2)]
        for run, bad, message in (
            (0, metrics(0, kl=1e-9), "tree: 400 tokens of 4 steps compared, 0 unequal"),
            (1, metrics(1), "tree, other cut: 400 tokens of 4 steps compared, 4 unequal"),
            (0, metrics(0, reward=0.15), "the reward rose from 0.100 to 0.150"),
            (1, metrics(0, weights_digest="f" * 64), "both cuts end with the weights"),
            (2, metrics(0), "vanilla: 0 of 400 tokens unequal"),
        ):
            failures, said = self.failures(*good[:run], bad, *good[run + 1 :])
            self.assertEqual(failures, 1, said)
            self.assertRegex(said, f"FAIL  .*{message}")


class DemoTest(unittest.TestCase):
    def test_short(self):
        with tempfile.TemporaryDirectory() as scratch:
            logs = Path(scratch) / "logs"
            demo = [sys.executable, "-m", "isobit_tools.train_demo", f"--log_dir={logs}"]
            result = subprocess.run(
                [*demo, f"--bin_dir={os.environ['ISOBIT_BIN_DIR']}", "--steps=8", "--lr=3e-3"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            self.assertEqual(result.returncode, 0, result.stdout)
            self.assertIn("0 checks failed", result.stdout)
            self.assertTrue((logs / "on_policy.png").is_file())


if __name__ == "__main__":
    unittest.main()
