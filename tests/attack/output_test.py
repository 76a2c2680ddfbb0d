"""Whoever reads a service's log may stop, or go away: the service works on and ends as it would otherwise.

ISOBIT_BIN_DIR=build/release/bin python tests/attack/output_test.py
"""

import os
import signal
import subprocess
import threading
import unittest
from pathlib import Path

from isobit import ComparatorClient, RolloutClient, ScorerClient
from isobit.launch import Service, start_comparator
from isobit_tools.testing import BIN_DIR, ServiceTest, http_get, http_url, metric_values

PROMPT = [3, 17, 42]
UPDATES = 400  # whose lines are more than a pipe holds


class OutputTest(ServiceTest):
    """Both outputs of the services are the FIFO `self.fifo`."""

    launcher = ("sh", "-c", 'exec "$@" > "$LOG_FIFO" 2>&1', "sh")

    def setUp(self):
        super().setUp()
        self.fifo = self.log_dir / "fifo"
        os.mkfifo(self.fifo)
        os.environ["LOG_FIFO"] = str(self.fifo)
        self.reader = os.open(self.fifo, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(lambda: self.reader is None or os.close(self.reader))

    def lose_the_reader(self):
        os.close(self.reader)
        self.reader = None

    def read_all(self) -> threading.Event:
        """Reads the FIFO from now on; `self.text` has what came. The event: its writers are gone."""
        self.text, ended = b"", threading.Event()
        os.set_blocking(self.reader, True)

        def read():
            while piece := os.read(self.reader, 1 << 16):
                self.text += piece
            ended.set()

        threading.Thread(target=read, daemon=True).start()
        return ended

    def works(self, service: Service, kind: str, updates: int = 3) -> None:
        if kind == "rollout":
            with RolloutClient(service.target) as client:
                for _ in range(updates):
                    client.update_weights("model", timeout=60)
                [sample] = client.generate(PROMPT, max_tokens=4, ignore_eos=True)
                self.assertEqual(len(sample.tokens.token_ids), 4)
        else:
            with ScorerClient(service.target) as client:
                for _ in range(updates):
                    client.update_weights("model", timeout=60)
                client.score([(PROMPT, [5])], timeout=60)

    def stop(self, service: Service) -> None:
        service.process.send_signal(signal.SIGTERM)
        self.assertEqual(service.process.wait(60), 0)
        self.services._running.remove(service)

    # INVARIANT: no service dies of a log without a reader.
    def test_the_reader_goes_away(self):
        # The library of the metrics' port ignores SIGPIPE, for all.
        rollout, scorer = self.start("rollout"), self.start("scorer")
        counting = self.start("rollout", "--metrics_port=0")
        comparator = start_comparator(self.services, rollout, scorer, "comparator")
        self.services.wait_serving(comparator)
        self.lose_the_reader()
        for service, kind in ((rollout, "rollout"), (scorer, "scorer"), (counting, "rollout")):
            self.works(service, kind)
        dropped = metric_values(http_get(http_url(counting, "metrics")))["isobit_log_lines_dropped_total"]
        self.assertGreater(dropped, 2)
        with ComparatorClient(comparator.target) as client:
            self.assertTrue(client.compare([PROMPT], max_tokens=4))
        for service in (comparator, counting, scorer, rollout):
            self.stop(service)

    # INVARIANT: no service waits for the reader of its log.
    def test_nobody_reads(self):
        for kind in ("rollout", "scorer"):
            with self.subTest(kind):
                service = self.start(kind)
                self.works(service, kind, UPDATES)
                self.stop(service)

    def test_a_reader_that_comes_back_gets_the_rest(self):
        service = self.start("rollout", "--metrics_port=0")
        self.works(service, "rollout", UPDATES)
        ended = self.read_all()
        self.stop(service)
        self.assertTrue(ended.wait(60))
        lines = self.text.decode().splitlines()
        self.assertIn("stopped", lines[-1])
        self.assertEqual(sum("serving weights" in line for line in lines), UPDATES + 1, "the queue held them")

    def test_the_end_is_told_though_nobody_read_before(self):
        """A start that fails says why, whether the pipe is read late or never."""
        flags = ["--model_root", str(self.scratch), "--model=none", "--tp_size=1"]
        for reads in (True, False):
            source, output = os.pipe()
            process = subprocess.Popen([BIN_DIR / "isobit-rollout", *flags], stdout=output, stderr=output)
            os.set_blocking(output, False)
            os.close(output)
            self.assertIn(process.wait(60), (1, 2))
            if reads:
                self.assertIn(b"none", os.read(source, 1 << 16))
            os.close(source)

    def test_an_output_that_is_closed_or_full(self):
        """A closed one gets no socket's number; one at its limit of size ends nothing."""
        for output in (">&- 2>&- <&-", f"> {self.log_dir}/full 2>&1"):
            with self.subTest(output):
                self.services._launcher = ("sh", "-c", f'ulimit -f 8; exec "$@" {output}', "sh")
                service = self.start("rollout")
                self.works(service, "rollout", 40)
                self.stop(service)

    def test_an_audit_log_that_is_a_fifo(self):
        audit = self.log_dir / "audit"
        os.mkfifo(audit)
        service = self.start("rollout", f"--audit_log={audit}", "--metrics_port=0")
        self.works(service, "rollout", 2)
        reader = os.open(audit, os.O_RDONLY | os.O_NONBLOCK)
        self.addCleanup(os.close, reader)
        self.works(service, "rollout", 1)
        self.assertEqual(os.read(reader, 1 << 16).count(b"UpdateWeights"), 1)
        lost = metric_values(http_get(http_url(service, "metrics")))["isobit_audit_lines_lost_total"]
        self.assertEqual(lost, 2)

    def test_a_record_file_that_is_no_file_of_ours(self):
        for name, make in (("fifo2", os.mkfifo), ("link", lambda path: path.symlink_to(self.fifo))):
            path = self.log_dir / name
            make(path)
            result = subprocess.run(
                [BIN_DIR / "isobit-comparator", "--rollout=127.0.0.1:1", "--scorer=127.0.0.1:1",
                 f"--record_file={path}"],
                capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            self.assertNotEqual(result.returncode, 0)
            self.assertIn(f"{path}: expected a regular file or none", result.stderr)

    def test_a_port_file_leads_nowhere_else(self):
        """Nobody's link under the name of the file that is renamed is followed."""
        port_file = self.log_dir / "port"
        victim = self.log_dir / "victim"
        victim.write_text("kept")
        script = 'ln -s "$1" "$2.partial.$$"; exec "$3" --rollout=h:1 --scorer=h:1 --port=0 --port_file="$2"'
        service = subprocess.Popen(
            ["sh", "-c", script, "sh", victim, port_file, BIN_DIR / "isobit-comparator"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            self.wait_until(port_file.exists, "no port file", 60)
        finally:
            service.terminate()
            service.wait(60)
        self.assertGreater(int(Path(port_file).read_text()), 0)
        self.assertEqual(victim.read_text(), "kept")


if __name__ == "__main__":
    unittest.main()
