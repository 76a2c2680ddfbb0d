"""Whole runs of python/examples/on_policy/train.py beside the services: the same weights, masters and moments
for any number of processes, tensor-parallel size and stops in between, and no unequal logprob.

ISOBIT_ON_POLICY_STEPS: how many steps each run has (default 6).
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

import torch
from support import same_bits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from isobit.launch import Setting, run_model_tool, start_comparator, wait_all_serving
from isobit_tools.testing import BIN_DIR, ServiceTest

TRAIN = Path(__file__).resolve().parents[2] / "python" / "examples" / "on_policy" / "train.py"
STEPS = int(os.environ.get("ISOBIT_ON_POLICY_STEPS", "6"))
STOPPED_IN = STEPS // 2  # the step after whose line the signal comes
# Small packs, so that a batch has several slots and lanes without a pack.
FLAGS = (
    "--device=cpu", "--lr=3e-3", "--prompts=6", "--samples=4", "--max_tokens=12",
    "--pack_tokens=48", f"--steps={STEPS}", "--save_every=100",
)  # fmt: skip


class OnPolicyTest(ServiceTest):
    @classmethod
    def make_model(cls) -> None:
        run_model_tool(BIN_DIR, "make", "tiny-qwen3", str(cls.model), "--seed", "3")

    def addresses(self, numerics: str, tp_size: int) -> list[str]:
        """The flags that name three new services."""
        self.setting = Setting(numerics, tp_size, shards=1)
        rollout, scorer = self.launch("rollout"), self.launch("scorer")
        comparator = start_comparator(self.services, rollout, scorer, f"comparator-{tp_size}")
        trio = {"rollout": rollout, "scorer": scorer, "comparator": comparator}
        wait_all_serving(self.services, list(trio.values()))
        return [
            *(f"--{kind}={service.target}" for kind, service in trio.items()),
            f"--model={self.model}",
        ]

    def command(self, processes: int, flags: list[str]) -> list[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        return [sys.executable, *(torchrun if processes else []), str(TRAIN), *FLAGS, *flags]

    def train(self, processes: int, *flags: str, status: int = 0) -> str:
        """Runs train.py to its end, by torchrun unless processes is 0. Returns what it printed."""
        result = subprocess.run(
            self.command(processes, list(flags)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.assertEqual(result.returncode == 0, status == 0, result.stdout)
        return result.stdout

    def train_until(self, processes: int, number: signal.Signals, *flags: str) -> str:
        """The same, with a signal after step STOPPED_IN."""
        with subprocess.Popen(
            self.command(processes, list(flags)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            printed = []
            for line in process.stdout:
                printed.append(line)
                if line.startswith(f"step {STOPPED_IN}/"):
                    process.send_signal(number)
        text = "".join(printed)
        if number == signal.SIGKILL:
            return text
        self.assertRegex(text, r"stopped after step \d+; --resume goes on")
        if not processes:
            self.assertEqual(process.returncode, 0, text)
        return text

    def folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.scratch)) / "run"

    def rows(self, folder: Path) -> list[dict]:
        """The metrics of each step, but for the seconds."""
        lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
        return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]

    def state(self, folder: Path) -> dict[str, torch.Tensor]:
        """Masters and moments at the end."""
        whole = folder / "whole.pt"
        dcp_to_torch_save(folder / "checkpoints" / f"step-{STEPS:08}", whole)
        saved = torch.load(whole)
        tensors = {f"master of {name}": tensor for name, tensor in saved["model"].items()}
        for name, state in saved["optimizer"]["state"].items():
            tensors |= {f"{kind} of {name}": state[kind] for kind in ("exp_avg", "exp_avg_sq", "step")}
        return tensors

    def assert_same_run(self, folder: Path, expected: Path) -> None:
        self.assertEqual(self.rows(folder), self.rows(expected))
        ours, theirs = self.state(folder), self.state(expected)
        self.assertEqual(ours.keys(), theirs.keys())
        self.assertEqual([name for name in theirs if not same_bits(ours[name], theirs[name])], [])
        models = [(f / "model" / "model.safetensors").read_bytes() for f in (folder, expected)]
        self.assertEqual(*models)

    def assert_on_policy(self, folder: Path) -> None:
        rows = self.rows(folder)
        self.assertEqual([row["step"] for row in rows], list(range(1, STEPS + 1)))
        for row in rows:
            self.assertGreater(row["compared"], 200)
            self.assertEqual((row["unequal"], row["max_abs_dlogp"], row["kl"]), (0, 0.0, 0.0), row)
        self.assertEqual(len({row["weights_digest"] for row in rows}), STEPS)
        board = EventAccumulator(str(folder / "tensorboard")).Reload()
        self.assertEqual(
            [(e.step, e.value) for e in board.Scalars("unequal")], [(r["step"], 0.0) for r in rows]
        )
        self.assertGreater(min(event.value for event in board.Scalars("seconds/train")), 0)

    # INVARIANT: the run is a function of its recipe: neither processes nor the rollout's ranks nor a stop,
    # after which both are others, change a bit.
    def test_whole_run(self):
        expected = self.folder()
        services = {tp_size: self.addresses("tree", tp_size) for tp_size in (1, 2, 4)}
        self.train(1, *services[1], f"--output={expected}", "--models_every=2")
        self.assert_on_policy(expected)
        models = sorted((expected / "models").iterdir())
        self.assertEqual([path.name for path in models], [f"step-{n:08}" for n in range(0, STEPS + 1, 2)])
        first, *digests = [
            run_model_tool(BIN_DIR, "verify", str(p)).split()[0] for p in (self.model, *models)
        ]
        self.assertEqual(digests, [first, *(row["weights_digest"] for row in self.rows(expected)[1::2])])
        rewards = [row["reward"] for row in self.rows(expected)]
        self.assertGreater(rewards[-1], rewards[0])
        for processes, tp_size in ((2, 2), (4, 4)):
            with self.subTest(processes=processes, tp_size=tp_size):
                folder = self.folder()
                self.train(processes, *services[tp_size], f"--output={folder}", "--lanes_per_pass=1")
                self.assert_same_run(folder, expected)
        with self.subTest("resumed"):
            folder = self.folder()
            self.train_until(2, signal.SIGTERM, *services[4], f"--output={folder}")
            self.assertIn(len(self.rows(folder)), range(STOPPED_IN, STEPS))
            self.train(1, *services[2], f"--output={folder}", "--resume")
            self.assert_same_run(folder, expected)
            self.assert_on_policy(folder)

    # INVARIANT: the same of a run whose batches are a step old, and that was killed and stopped.
    def test_one_step_off(self):
        expected, folder = self.folder(), self.folder()
        services = self.addresses("tree", 2)
        flags = ("--one_step_off", "--algorithm=reinforce")
        said = self.train(2, *services, *flags, f"--output={expected}", "--metrics_port=0")
        self.assertRegex(said, r"metrics at http://127\.0\.0\.1:\d+/metrics\n")
        self.assert_on_policy(expected)
        self.assertEqual([row["staleness"] for row in self.rows(expected)], [0.0] + [1.0] * (STEPS - 1))
        again = (*services, *flags, f"--output={folder}", f"--save_every={STOPPED_IN - 1}")
        self.train_until(0, signal.SIGKILL, *again)
        self.assertGreaterEqual(len(self.rows(folder)), STOPPED_IN)  # more than what was saved
        self.train_until(0, signal.SIGINT, *again, "--resume")
        said = self.train(0, *again, "--resume")
        self.assertRegex(said, r"goes on after step \d+\n")
        self.assert_same_run(folder, expected)

    def test_vanilla_differs(self):
        """The control of all above, and what a gap does."""
        services = self.addresses("vanilla", 2)
        folders = {processes: self.folder() for processes in (1, 2)}
        for processes, folder in folders.items():
            self.train(processes, *services, "--numerics=vanilla", f"--output={folder}")
            self.assertGreater(min(row["unequal"] for row in self.rows(folder)), 0)
            self.assertGreater(self.rows(folder)[0]["kl"], 0)
        first, second = (self.state(folder) for folder in folders.values())
        self.assertFalse(all(same_bits(first[name], second[name]) for name in first), "control")

        folder = self.folder()
        said = self.train(0, *services, "--numerics=vanilla", "--on_gap=stop", f"--output={folder}", status=1)
        found = re.search(
            r"^error: step 1: (\d+) of \d+ tokens have another logprob .* the first is prompt 0", said, re.M
        )
        self.assertGreater(int(found[1]), 0, said)
        self.assertFalse((folder / "checkpoints").exists())
        said = self.train(0, *services, f"--output={self.folder()}", status=1)
        self.assertIn("error: --numerics: expected the rollout's, vanilla, got tree", said)


if __name__ == "__main__":
    unittest.main()
