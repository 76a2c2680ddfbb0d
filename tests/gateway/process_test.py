"""Tests of a gateway as a process: workers, signals, connections that stay.

python tests/gateway/process_test.py
"""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import unittest
from pathlib import Path

from scripted_rollout import ScriptedRollout

from isobit_tools.gateway_testing import Gateway, GatewayTest

STREAM = json.dumps({"prompt": [1], "max_tokens": 5, "stream": True})


def children(pid: int) -> list[int]:
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


class ProcessTest(GatewayTest):
    def setUp(self):
        super().setUp()
        self.rollout = self.enterContext(ScriptedRollout(lambda request: [[1]]))

    def begin_stream(self, gateway: Gateway) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """A stream whose first event has come; the rest comes when the rollout may go on."""
        self.rollout.script = lambda request: [[1], None, [2]]
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        self.addCleanup(connection.close)
        connection.request("POST", "/v1/completions", STREAM)
        answer = connection.getresponse()
        self.assertTrue(answer.readline().startswith(b"data: {"))
        return connection, answer

    def test_requests_in_hand_finish_after_sigterm(self):
        for workers in (1, 2):
            self.rollout.may_go_on.clear()
            gateway = self.start_gateway(self.rollout.target, None, f"--workers={workers}")
            _, answer = self.begin_stream(gateway)
            gateway.process.send_signal(signal.SIGTERM)

            def refuses(port: int = gateway.port) -> bool:
                try:
                    socket.create_connection(("127.0.0.1", port), timeout=20).close()
                except OSError:
                    return True
                return False

            if workers == 1:  # of several, the parent holds the sockets to its end
                self.wait_until(refuses, "new connections are taken")
            self.rollout.may_go_on.set()
            self.assertTrue(answer.read().endswith(b"data: [DONE]\n\n"))
            self.assertEqual(gateway.process.wait(60), 0, gateway.log.read_text())

    def test_a_signal_while_workers_begin_is_no_failure(self):
        for _ in range(3):  # at moments of its own while two workers import what they need
            gateway = self.start_gateway(self.rollout.target, None, "--workers=2")
            gateway.process.send_signal(signal.SIGTERM)
            self.assertEqual(gateway.process.wait(60), 0, gateway.log.read_text())

    def test_a_second_signal_ends_at_once(self):
        gateway = self.start_gateway(self.rollout.target)
        _, answer = self.begin_stream(gateway)
        idle = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        self.addCleanup(idle.close)
        idle.request("GET", "/version")
        idle.getresponse().read()
        gateway.process.send_signal(signal.SIGINT)
        self.assertEqual(idle.sock.recv(1), b"")  # the first signal has closed what was idle
        gateway.process.send_signal(signal.SIGINT)
        self.assertEqual(gateway.process.wait(60), 0, gateway.log.read_text())
        try:
            rest = answer.read()
        except (http.client.HTTPException, ConnectionError):
            return
        self.assertIn(b'"error"', rest)  # if there was time to say so

    def test_the_drain_has_an_end(self):
        gateway = self.start_gateway(self.rollout.target, None, "--drain_timeout_s=0.2")
        self.begin_stream(gateway)
        self.assertEqual(gateway.stop(), 0, gateway.log.read_text())
        self.assertTrue(self.rollout.ended.wait(20))

    def test_workers(self):
        gateway = self.start_gateway(self.rollout.target, None, "--workers=2")
        self.assertEqual(gateway.post("/v1/completions", {"prompt": [1]})["usage"]["completion_tokens"], 1)
        first = children(gateway.process.pid)
        self.assertEqual(len(first), 2)
        for _ in range(32):  # the kernel shares connections out by their ports: both serve
            self.assertEqual(gateway.request("GET", "/health")[0], 200)
        os.kill(first[0], signal.SIGKILL)
        self.wait_until(
            lambda: len(set(children(gateway.process.pid)) - set(first)) == 1, "no other is started"
        )
        for _ in range(32):
            self.assertEqual(gateway.request("GET", "/health")[0], 200)
        last = children(gateway.process.pid)
        self.assertEqual(gateway.stop(), 0, gateway.log.read_text())
        self.wait_until(lambda: all(map(is_gone, last)), "a worker stays")

    def test_workers_end_with_the_process_that_started_them(self):
        """Whatever they do: while they begin, serve, and have a stream in hand."""
        for when in ("begin", "serve", "stream"):
            with self.subTest(when):
                gateway = self.start_gateway(
                    self.rollout.target, None, "--workers=2", "--drain_timeout_s=0.5"
                )
                workers = children(gateway.process.pid)
                self.assertEqual(len(workers), 2)
                if when == "serve":
                    self.assertEqual(gateway.request("GET", "/health")[0], 200)
                elif when == "stream":
                    self.begin_stream(gateway)
                gateway.process.kill()
                gateway.process.wait()
                self.wait_until(lambda workers=workers: all(map(is_gone, workers)), "a worker stays")
                socket.create_server(("127.0.0.1", gateway.port)).close()  # the port is free
                self.assertNotIn("error:", gateway.log.read_text())

    def test_a_port_that_is_taken(self):
        gateway = self.start_gateway(self.rollout.target)
        command = [sys.executable, "-m", "isobit.gateway", f"--rollout={self.rollout.target}"]
        for workers in (1, 2):
            result = subprocess.run(
                [*command, f"--model={self.model}", f"--port={gateway.port}", f"--workers={workers}"],
                capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            self.assertEqual(result.returncode, 2)
            self.assertIn(f"cannot listen at 127.0.0.1:{gateway.port}", result.stderr)

    def test_connections_stay(self):
        gateway = self.start_gateway(self.rollout.target)
        connection = http.client.HTTPConnection("127.0.0.1", gateway.port, timeout=60)
        self.addCleanup(connection.close)
        for _ in range(3):
            # A GET with a body, as some clients send: what follows must not be read as part of it.
            connection.request("GET", "/health", b"{}", {"content-type": "application/json"})
            self.assertEqual(connection.getresponse().read(), b"")
            connection.request("POST", "/v1/completions", STREAM)
            self.assertTrue(connection.getresponse().read().endswith(b"data: [DONE]\n\n"))
        text = gateway.request("GET", "/metrics")[2].decode()
        self.assertIn("isobit_gateway_connections 2\n", text)


if __name__ == "__main__":
    unittest.main()
