"""Tests of the demo against fake services: what it prints, when it fails, and that it stops everything."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

from isobit import launch as launcher
from isobit.launch import BINARIES, ServiceError, Services
from isobit.screen import Progress, Screen

FAKE_SERVICES = Path(__file__).resolve().parent / "fake_services.py"


def is_alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


class WithFakeServices(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.scratch = Path(scratch.name)
        self.bin_dir = self.scratch / "bin"
        self.bin_dir.mkdir()
        for name in BINARIES:
            script = self.bin_dir / name
            role = name.removeprefix("isobit-")
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{FAKE_SERVICES}" {role} "$@"\n')
            script.chmod(0o755)

    def service_pids(self) -> list[int]:
        firsts = [log.read_text().partition("\n")[0] for log in self.log_dir.glob("*.log")]
        return [int(first.removeprefix("pid ")) for first in firsts]

    def command(self, *flags: str) -> list[str]:
        """The command line of one run, whose logs are in self.log_dir."""
        self.log_dir = Path(tempfile.mkdtemp(dir=self.scratch)) / "logs"
        demo = [sys.executable, "-m", "isobit", "demo", "--offline"]
        return [*demo, f"--bin_dir={self.bin_dir}", f"--log_dir={self.log_dir}", *flags]

    def run_demo(self, *flags: str, fault: str = "") -> subprocess.CompletedProcess:
        result = subprocess.run(
            self.command(*flags),
            env={**os.environ, "ISOBIT_FAKE_FAULT": fault},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=120,
        )
        self.assertEqual([pid for pid in self.service_pids() if is_alive(pid)], [])
        return result


class DemoTest(WithFakeServices):
    def test_all_modes(self):
        result = self.run_demo()
        self.assertEqual(result.returncode, 0, result.stdout)
        self.assertEqual(len(self.service_pids()), 11)
        self.assertRegex(result.stdout, r"\n  tree +640 +0 +0 +0 +0 ")
        self.assertRegex(result.stdout, r"\n  batch_invariant +640 +640 +1\.50e-08 ")
        self.assertRegex(result.stdout, r"\n  vanilla +640 +640 +1\.50e-08 ")
        self.assertIn("refused: FAILED_PRECONDITION: rollout has digest aa, scorer bb", result.stdout)
        self.assertIn("320 of 320 tokens unequal with the check off", result.stdout)
        self.assertNotIn("FAIL  ", result.stdout)
        self.assertNotIn("\x1b", result.stdout)  # not a terminal: no control sequences
        self.assertEqual(list(self.log_dir.glob("flipped-*/")), [])

    def test_json(self):
        for fault, passed in (("", True), ("tree_gap", False)):
            done = subprocess.run(
                self.command("--json", "--modes", "tree", "vanilla"),
                env={**os.environ, "ISOBIT_FAKE_FAULT": fault},
                stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120,
            )  # fmt: skip
            found = json.loads(done.stdout)  # and nothing else is there
            self.assertEqual((found["passed"], done.returncode), (passed, 0 if passed else 1), done.stderr)
            self.assertEqual(list(found["modes"]), ["tree", "vanilla"])
            self.assertEqual(found["modes"]["tree"]["unequal"], 0 if passed else 640)
            self.assertEqual(all(check["passed"] for check in found["checks"]), passed)
            self.assertIn("checks failed", done.stderr)

    def test_prompts_file(self):
        prompts = self.scratch / "prompts.txt"
        prompts.write_text("1 2 3\n\n 4\n")
        flags = ("--prompts", str(prompts), "--min_tokens_compared=160", "--modes", "tree")
        result = self.run_demo(*flags)
        self.assertEqual(result.returncode, 0, result.stdout)
        self.assertEqual(result.stdout.count("> 1 2 3\n"), 3)
        prompts.write_text("\n")
        self.assertIn("has no prompt", self.run_demo(*flags).stdout)

    def test_each_fault_fails(self):
        cases = {
            "tree_gap": (1, "FAIL  tree: 640 tokens compared, 640 unequal"),
            "too_few": (1, "FAIL  tree: 32 tokens compared, expected at least 500"),
            "no_contrast": (1, "FAIL  vanilla: 640 tokens compared, 0 unequal"),
            "flip_unseen": (1, "FAIL  flipped bit: 0 of 320 tokens unequal"),
            "comparator_fails": (3, "error: INTERNAL: the logits are not finite"),
            "scorer_dies": (3, "model.safetensors is truncated"),
        }
        for fault, (status, message) in cases.items():
            with self.subTest(fault=fault):
                result = self.run_demo("--modes", "tree", "vanilla", fault=fault)
                self.assertEqual(result.returncode, status, result.stdout)
                self.assertIn(message, result.stdout)

    def test_missing_binary(self):
        (self.bin_dir / "isobit-scorer").unlink()
        result = self.run_demo()
        self.assertEqual(result.returncode, 3)
        self.assertIn(f"{self.bin_dir} does not have isobit-scorer: build with `make build`", result.stdout)

    def test_stop_signals_stop_the_services(self):
        for number, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
            with (
                self.subTest(signal=number.name),
                subprocess.Popen(
                    self.command("--keep_running", "--modes", "tree"), stdout=subprocess.PIPE, text=True
                ) as demo,
            ):
                while demo.stdout.readline() != "Ctrl-C stops them.\n":
                    self.assertIsNone(demo.poll())
                pids = self.service_pids()
                self.assertTrue(any(map(is_alive, pids)))
                demo.send_signal(number)
                demo.stdout.read()
                self.assertEqual(demo.wait(60), status)
                self.assertFalse(any(map(is_alive, pids)))


class ServicesTest(WithFakeServices):
    def setUp(self):
        super().setUp()
        self.log_dir = self.scratch / "logs"
        self.log_dir.mkdir()

    def test_a_service_deaf_to_sigterm_is_killed(self):
        with (
            mock.patch.dict(os.environ, ISOBIT_FAKE_FAULT="deaf"),
            mock.patch.object(launcher, "_STOP_TIMEOUT_S", 0.3),
            Services(self.bin_dir, self.log_dir) as services,
        ):
            service = services.start("isobit-scorer", "scorer", [])
            services.wait_listening(service)
        self.assertEqual(service.process.returncode, -signal.SIGKILL)
        self.assertEqual(services.bad_ends, ["scorer did not end within 0.3 s of SIGTERM"])

    def test_a_service_that_does_not_listen_is_given_up(self):
        (self.bin_dir / "isobit-scorer").write_text("#!/bin/sh\nexec sleep 60\n")
        with (
            self.assertRaisesRegex(ServiceError, r"scorer does not listen after 0\.3 s"),
            Services(self.bin_dir, self.log_dir, start_timeout_s=0.3) as services,
        ):
            services.wait_listening(services.start("isobit-scorer", "scorer", []))

    def test_binaries_in_the_current_folder_are_found(self):
        with contextlib.chdir(self.bin_dir), Services(Path("."), self.log_dir) as services:
            services.wait_listening(services.start("isobit-scorer", "scorer", []))
        self.assertEqual(services.bad_ends, [])

    def test_a_service_that_ended_early_is_told(self):
        with Services(self.bin_dir, self.log_dir) as services:
            service = services.start("isobit-scorer", "scorer", [])
            services.wait_listening(service)
            service.process.kill()
            service.process.wait()
            with self.assertRaisesRegex(ServiceError, r"scorer ended with status -9(.|\n)*pid \d+"):
                service.check_alive()
        self.assertEqual(
            services.bad_ends, ["scorer had ended with -9", "scorer ended with status -9 after SIGTERM"]
        )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class ScreenTest(unittest.TestCase):
    def test_bar_is_drawn_and_erased(self):
        stream = Terminal()
        screen = Screen(stream)
        with mock.patch("isobit.screen._BAR_AFTER_S", 0.0), screen.progress("work", 4) as progress:
            progress.done = 1
            while "1/4" not in stream.getvalue():
                time.sleep(0.01)
            screen.line("a line")
        self.assertRegex(stream.getvalue(), r"work .*━.* 1/4  \d+ s")
        self.assertIn("a line\n", stream.getvalue())
        before, erased, after = stream.getvalue().rpartition("\x1b[2K")
        self.assertTrue(erased)
        self.assertIn("work", before)
        self.assertNotIn("work", after)

    def test_short_work_shows_no_bar(self):
        stream = Terminal()
        with Screen(stream).progress("work", 4):
            time.sleep(0.3)
        self.assertEqual(stream.getvalue(), "")

    def test_without_rich_it_is_plain(self):
        stream = Terminal()
        with mock.patch("importlib.util.find_spec", return_value=None):
            screen = Screen(stream)
        with screen.progress("work", 4):
            screen.table(("mode", "n"), [("tree", "640")])
        self.assertEqual(stream.getvalue(), "work ...\n  mode    n\n  ----  ---\n  tree  640\n")

    def test_bytes_have_sizes_and_a_rate(self):
        progress = Progress("reading", 4_000_000_000, in_bytes=True)
        progress.started -= 2.0
        progress.done = 1_000_000_000
        self.assertRegex(progress.text(), r"^1\.00/4\.00 GB  0\.[45]\d GB/s  2 s$")

    def test_table_aligns(self):
        stream = io.StringIO()
        Screen(stream).table(("mode", "n"), [("tree", "640"), ("a", "1")])
        self.assertEqual(stream.getvalue(), "  mode    n\n  ----  ---\n  tree  640\n  a       1\n")
        stream = Terminal()
        Screen(stream).table(("mode", "n"), [("tree", "640"), ("a", "1")])
        self.assertRegex(stream.getvalue(), r"tree +640")


if __name__ == "__main__":
    unittest.main()
