"""A service stops soon even if clients stay connected, and in order even if it has just started."""

import math
import os
import signal
import subprocess
import time
import unittest

from attack_case import AttackTest

from isobit.launch import Service
from isobit_tools.testing import BIN_DIR

WATCH = "/grpc.health.v1.Health/Watch"


class StopTest(AttackTest):
    def seconds_to_stop(self, service: Service) -> float:
        start = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        self.assertEqual(service.process.wait(60), 0)
        return time.monotonic() - start

    def test_neither_an_open_health_watch_nor_an_idle_client_holds_it(self):
        least = {}  # a client that holds it does so each time, a loaded machine at most sometimes
        for _ in range(3):
            for name, service in reversed(self.start_all().items()):
                self.assert_serves(name, self.channel(service))  # and stays connected
                watch = self.channel(service).unary_stream(WATCH)(b"")
                next(watch)
                least[name] = min(self.seconds_to_stop(service), least.get(name, math.inf))
            print(", ".join(f"{name}: stopped after {seconds:.2f} s" for name, seconds in least.items()))
            if max(least.values()) < 3:
                break
        self.assertLess(max(least.values()), 3, least)

    def test_a_signal_while_it_loads(self):
        for attempt in range(12):
            rollout = self.launch("rollout")
            while not rollout.port_file.exists():
                rollout.check_alive()
                time.sleep(0.0002)
            time.sleep(attempt * 0.0005)
            self.seconds_to_stop(rollout)

    def run_with(self, *flags: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess:
        """Runs a rollout that must not come up, and waits for its end."""
        return subprocess.run(
            [*launcher, str(BIN_DIR / "isobit-rollout"), "--port=0", *flags],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def test_too_little_memory_is_an_error_not_an_abort(self):
        model = (f"--model_root={self.model.parent}", f"--model={self.model.name}", "--tp_size=1")
        words = ("out of memory", "cannot start", "emory")
        for megabytes in (100, 150, 200, 300):
            with self.subTest(megabytes=megabytes):
                launcher = ("timeout", "-s", "TERM", "10", "prlimit", f"--as={megabytes << 20}")
                result = self.run_with(*model, "--kv_cache_mb=256", launcher=launcher)
                print(f"{megabytes} MiB: {result.returncode}, {result.stderr.splitlines()[-1:]}")
                self.assertGreaterEqual(result.returncode, 0, result.stderr)
                self.assertNotIn(128 + signal.SIGABRT, (result.returncode,), result.stderr)
                if result.returncode not in (0, 124):
                    self.assertTrue(any(word in result.stderr for word in words), result.stderr)

    def test_a_port_file_that_is_no_file_is_left_alone(self):
        fifo = self.log_dir / "fifo"
        os.mkfifo(fifo)
        link = self.log_dir / "link"
        link.symlink_to(self.model)
        model = (f"--model_root={self.model.parent}", f"--model={self.model.name}")
        for path in (fifo, link, self.log_dir):
            with self.subTest(path=path.name):
                kind = path.lstat().st_mode
                result = self.run_with(*model, f"--port_file={path}", launcher=("timeout", "10"))
                self.assertEqual(path.lstat().st_mode, kind)
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertIn(f"port file {path}: expected a regular file", result.stderr)


if __name__ == "__main__":
    unittest.main()
