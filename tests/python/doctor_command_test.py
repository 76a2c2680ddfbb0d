"""`isobit doctor` on machines with and without GPUs, as a command, and on what a card computes."""

import contextlib
import json
import os
import pty
import re
import resource
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from doctor_cases import A100, BIN_DIR, CONFIGS, GB, H200, PROGRAM, examine, run, verdict_of, write
from fake_hub import FakeHub, Repository

from isobit import doctor, machine, models


class MachineTest(unittest.TestCase):
    def test_shares_of_ranks_are_the_services_own(self):
        with tempfile.TemporaryDirectory() as directory:
            for shape in ("tiny-llama", "tiny-qwen3"):
                path = Path(directory, shape)
                for command in (["make", shape, path], ["inspect", path]):
                    made = subprocess.run(
                        [BIN_DIR / "isobit-model", *command], capture_output=True, text=True, check=True
                    )
                sizes = models.shape_of(models.read_config(path / "config.json"))
                rows = re.findall(
                    r"TP (\d) rank (\d)\s+\[(\d+), (\d+)\)\s+\d+\s+(\S+ \S+\))\s+(\S+ \S+\))", made.stdout
                )
                self.assertEqual(len(rows), 15)
                for tp_size, rank, first, last, columns, vocab in rows:
                    tp_size, rank = int(tp_size), int(rank)
                    self.assertEqual(sizes._kv_heads(rank, tp_size), int(last) - int(first))
                    for size, text in ((sizes.intermediate, columns), (sizes.vocab, vocab)):
                        begin, end = map(int, re.findall(r"\d+", text))
                        self.assertIn(models._share(size, rank, tp_size) - (end - begin), range(16))

    def test_memory_of_a_gpu(self):
        report = examine("llama-3.1-8b-instruct", H200)
        self.assertTrue(report.runs)
        self.assertRegex(verdict_of(report, "gpu").text, r"^1 x NVIDIA H200 \(9\.0\)$")
        # (149 * 0.9 - 2 GiB - 16.06) GB / 128 KiB
        self.assertRegex(
            verdict_of(report, "memory").text,
            r"^TP 1: weights 16\.1 GB of 149\.0 GB .* about 88\d,000 tokens",
        )
        small = machine.Gpu("NVIDIA H100", "9.0", 20 * GB, 19 * GB, "580.1")
        report = examine("llama-3.1-8b-instruct", small, small)
        self.assertRegex(verdict_of(report, "memory").text, "no room for keys and values; a larger --tp_size")
        self.assertFalse(report.runs)
        self.assertTrue(examine("llama-3.1-8b-instruct", small, small, tp_size=2).runs)

    def test_more_ranks_than_gpus(self):
        report = examine("qwen3-0.6b", H200, H200, tp_size=4)
        self.assertIn(
            "--tp_size 4 needs 4 GPUs, but this machine has 2 Hopper GPUs", verdict_of(report, "memory").text
        )
        self.assertFalse(report.runs)

    def test_ranks_without_heads(self):
        # 3 KV heads on 8 ranks: five hold none.
        self.assertTrue(examine("smollm2-135m-float16", *[H200] * 8, tp_size=8).runs)

    def test_other_gpus(self):
        report = examine("qwen3-0.6b", A100)
        self.assertTrue(report.runs)
        self.assertEqual(verdict_of(report, "gpu").verdict, doctor.NOTE)
        self.assertRegex(verdict_of(report, "gpu").text, "A100.*need Hopper.*run on the CPU")
        self.assertIn("CPU, TP 1", verdict_of(report, "memory").text)

    def test_drivers(self):
        old = machine.Gpu("NVIDIA H100", "9.0", 85 * GB, 84 * GB, "570.86.15")
        report = examine("qwen3-0.6b", old)
        self.assertEqual(verdict_of(report, "driver").verdict, doctor.NO)
        self.assertIn("570.86.15: CUDA 13 needs 580", verdict_of(report, "driver").text)
        self.assertFalse(report.runs)

    def test_memory_of_the_host(self):
        report = examine("llama-3.1-8b-instruct", memory=(16 * GB, 64 * GB))
        self.assertRegex(
            verdict_of(report, "memory").text, r"needs 17\.1 GB, but 16\.0 GB of 64\.0 GB are free"
        )
        self.assertFalse(report.runs)
        # Ranks on a CPU share the embedding, so more of them take no more.
        self.assertTrue(examine("llama-3.1-8b-instruct", memory=(18 * GB, 64 * GB), tp_size=8).runs)
        self.assertTrue(examine("llama-3.1-8b-instruct", memory=(0, 0)).runs)

    def test_reads_nvidia_smi(self):
        line = "NVIDIA H200, 9.0, 143771, 143156, 580.159.04"
        for said, status, expected in (
            (f"{line}\n{line}", 0, [("NVIDIA H200", "9.0", 143771 << 20)] * 2),
            ("NVIDIA Thing, Mark 2, 12.1, [N/A], [N/A], 590.1", 0, [("NVIDIA Thing, Mark 2", "12.1", 0)]),
            ("No devices were found", 6, []),
            ("NVIDIA-SMI has failed", 9, "nvidia-smi: NVIDIA-SMI has failed"),
            ("nonsense", 0, "expected name,compute_cap"),
        ):
            with tempfile.TemporaryDirectory() as folder:
                program = write(folder, "nvidia-smi", f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {status}\n")
                program.chmod(0o755)
                with mock.patch.dict(os.environ, PATH=f"{folder}:{os.environ['PATH']}"):
                    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
                    if isinstance(expected, str):
                        with self.assertRaisesRegex(machine.NvidiaSmiError, expected):
                            machine.gpus()
                        continue
                    found = machine.gpus()
                    self.assertEqual([(g.name, g.compute_capability, g.total_bytes) for g in found], expected)
                    for visible, count in (
                        ("", 0),
                        ("-1", 0),
                        ("0", min(1, len(found))),
                        ("GPU-5ab", len(found)),
                    ):
                        with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=visible):
                            self.assertEqual(len(machine.gpus()), count, visible)

    def test_no_nvidia_smi(self):
        with mock.patch.dict(os.environ, PATH="/nowhere"):
            self.assertEqual(machine.gpus(), [])

    def test_host_memory_is_known_here(self):
        free, total = machine.host_memory()
        self.assertGreater(free, 0)
        self.assertGreaterEqual(total, free)


class CommandTest(unittest.TestCase):
    """The command as a user runs it."""

    def test_exit_status_and_lines(self):
        good = run(str(CONFIGS / "qwen3-0.6b.json"))
        self.assertEqual(good.returncode, 0, good.stdout + good.stderr)
        self.assertRegex(good.stdout, r"(?m)^model +yes +Qwen3 \(Qwen3ForCausalLM\), 596 million parameters$")
        self.assertRegex(good.stdout, "runs here\n$")
        bad = run(str(CONFIGS / "qwen3.5-4b.json"))
        self.assertEqual(bad.returncode, 3)
        self.assertRegex(bad.stdout, "(?m)^model +NO +Qwen3_5.*gated delta net")
        self.assertRegex(bad.stdout, "does not run here\n$")
        self.assertNotIn("\x1b", good.stdout + bad.stdout)

    def test_it_says_that_the_services_are_missing(self):
        with tempfile.TemporaryDirectory() as empty, mock.patch.dict(os.environ, ISOBIT_BIN_DIR=empty):
            found = run(str(CONFIGS / "qwen3-0.6b.json"))
        self.assertEqual(found.returncode, 0, found.stdout + found.stderr)
        self.assertRegex(
            found.stdout, "runs here, once it has the services: isobit-model was not found. Looked in.*\n$"
        )

    def test_colours_on_a_terminal(self):
        main, side = pty.openpty()
        command = [sys.executable, "-c", PROGRAM, str(CONFIGS / "qwen3-0.6b.json")]
        with os.fdopen(main, "rb", buffering=0) as terminal:
            with subprocess.Popen(
                command, stdout=side, env={**os.environ, "TERM": "xterm-256color"}
            ) as process:
                os.close(side)
                shown = b""
                with contextlib.suppress(OSError):  # how the end of a terminal reads
                    while more := terminal.read(4096):
                        shown += more
            self.assertEqual(process.returncode, 0)
        self.assertIn(b"\x1b[32myes ", shown)
        self.assertIn(b"runs here", shown)

    def test_json(self):
        for name, status in (("llama-dynamic-rope", 3), ("qwen3-0.6b", 0)):
            found = run(str(CONFIGS / f"{name}.json"), "--json", "--tp_size", "2")
            self.assertEqual(found.returncode, status)
            report = json.loads(found.stdout)
            self.assertEqual(report["runs"], status == 0)
            self.assertEqual(report["tp_size"], 2)
            self.assertEqual(report["verdicts"][0]["name"], "model")
        self.assertEqual(report["parameters"], 596049920)
        self.assertEqual(report["kv_bytes_per_token"], [57344, 57344])

    def test_bad_usage(self):
        for words, said in (
            (["/nowhere/model"], "expected a model directory or an id"),
            ([str(CONFIGS / "empty.json"), "--tp_size", "3"], "tp_size is 3, expected 1, 2, 4 or 8"),
            ([str(CONFIGS / "empty.json"), "--revision", "main"], "is a file, which has no revisions"),
            ([], "expected MODEL, --numerics, or both"),
        ):
            wrong = run(*words)
            self.assertEqual(wrong.returncode, 2, words)
            self.assertIn(said, wrong.stderr)

    def test_it_takes_less_than_a_second(self):
        # Of processor time: others may be using the machine.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run(str(CONFIGS / "llama-3.1-8b-instruct.json"))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.assertLess(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1.0)

    def test_of_a_hub_model_it_fetches_the_config_alone(self):
        files = {"config.json": (CONFIGS / "qwen3-0.6b.json").read_bytes(), "model.safetensors": b"weights"}
        with tempfile.TemporaryDirectory() as home, FakeHub({"org/tiny": Repository(files)}) as server:
            environment = {**server.environment(Path(home)), "HF_HUB_OFFLINE": "0"}
            found = run("org/tiny", **environment)
            self.assertEqual(found.returncode, 0, found.stdout + found.stderr)
            self.assertIn("org/tiny runs here", found.stdout)
            self.assertEqual([line for line in server.requests if "config.json" not in line], [])
            missing = run("org/none", **environment)
            self.assertEqual(missing.returncode, 3)
            self.assertIn("the hub has no such model", missing.stdout)
            offline = run("org/other", **{**environment, "HF_HUB_OFFLINE": "1"})
            self.assertEqual(offline.returncode, 3)
            self.assertIn("HF_HUB_OFFLINE forbids", offline.stdout)


class NumericsTest(unittest.TestCase):
    """What doctor makes of isobit-numerics; tests/tools has the program's own tests."""

    def answer(self, *different: int) -> dict:
        devices = [
            {
                "device": i,
                "name": "NVIDIA H200",
                "compute_capability": "9.0",
                "instructions": [{"instruction": "wgmma", "steps": 1003520, "different": count}],
                "computes_contract": count == 0,
            }
            for i, count in enumerate(different)
        ]
        return {"devices": devices, "computes_contract": not any(different)}

    def run_with(self, said: str, status: int, *words: str) -> subprocess.CompletedProcess:
        with tempfile.TemporaryDirectory() as folder:
            program = write(
                folder, "isobit-numerics", f"#!/bin/sh\ncat <<'END'\n{said}\nEND\nexit {status}\n"
            )
            program.chmod(0o755)
            return run("--numerics", *words, ISOBIT_BIN_DIR=folder)

    def test_a_card_that_computes_the_contract(self):
        found = self.run_with(json.dumps(self.answer(0)), 0)
        self.assertEqual(found.returncode, 0, found.stdout + found.stderr)
        self.assertRegex(
            found.stdout, r"H200, computes the contract \(C1\): 0 of 1,003,520 steps of wgmma differ"
        )

    def test_a_card_that_does_not(self):
        found = self.run_with(json.dumps(self.answer(0, 7)), 1)
        self.assertEqual(found.returncode, 1)
        self.assertRegex(found.stdout, r"GPU 1, .* does not compute the contract \(C1\): 7 of 1,003,520")
        found = self.run_with(json.dumps(self.answer(7)), 1, str(CONFIGS / "qwen3-0.6b.json"))
        self.assertEqual(found.returncode, 1)
        self.assertRegex(
            found.stdout, "runs here, but a GPU does not compute the contract, once it has the services: "
        )
        found = self.run_with(json.dumps(self.answer(7)), 1, "--json")
        self.assertEqual(found.returncode, 1)
        self.assertFalse(json.loads(found.stdout)["numerics"]["computes_contract"])

    def test_no_gpu(self):
        found = self.run_with(json.dumps({"error": "no NVIDIA GPU on this machine"}), 3)
        self.assertEqual(found.returncode, 3)
        self.assertIn("not run: no NVIDIA GPU on this machine", found.stdout)

    def test_no_program(self):
        with tempfile.TemporaryDirectory() as folder:
            found = run("--numerics", ISOBIT_BIN_DIR=folder, PATH="/nowhere")
        self.assertEqual(found.returncode, 3)
        self.assertIn("not run: this machine has no NVIDIA GPU", found.stdout)

    def test_a_program_that_says_nothing(self):
        found = self.run_with("", 139)
        self.assertEqual(found.returncode, 3)
        self.assertIn("not run: ", found.stdout)


if __name__ == "__main__":
    unittest.main()
