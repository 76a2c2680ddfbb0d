"""Attacks on the gateway over its port: it must live, hold little, and answer the next client.

python tests/gateway/attack_test.py
"""

import contextlib
import gzip
import json
import random
import socket
import threading
import unittest
from pathlib import Path

from scripted_rollout import ScriptedRollout

from isobit_tools.gateway_testing import Gateway, GatewayTest

MIB = 1 << 20
PROMPT = {"prompt": [1], "max_tokens": 5}


class AttackTest(GatewayTest):
    """One gateway for all attacks of a test; at its end it must serve, and hold nothing of them."""

    flags: tuple[str, ...] = (
        "--header_timeout_s=1", "--body_timeout_s=1", "--write_timeout_s=1", "--max_body_mb=1",
        "--max_bodies_mb=4", "--max_connections=64", "--keep_alive_s=20",
    )  # fmt: skip

    def setUp(self):
        super().setUp()
        self.rollout = self.enterContext(ScriptedRollout(lambda request: [[1]]))
        self.gateway: Gateway = self.start_gateway(self.rollout.target, None, *self.flags)
        self.gateway.post("/v1/completions", PROMPT)
        self.memory = self.resident()

    def tearDown(self):
        def holds_nothing() -> bool:
            text = self.gateway.request("GET", "/metrics")[2].decode().splitlines()
            return "isobit_gateway_connections 1" in text and "isobit_gateway_body_bytes 0" in text

        self.assertIsNone(self.gateway.process.poll(), self.gateway.log.read_text())
        self.rollout.script = lambda request: [[1]]
        self.gateway.post("/v1/completions", PROMPT)
        self.wait_until(holds_nothing, "connections or bodies are held", timeout=60)
        self.assertLess(self.resident() - self.memory, 64 * MIB)
        self.assertNotIn("Traceback", self.gateway.log.read_text())

    def resident(self) -> int:
        """Bytes of memory that the gateway has."""
        status = Path(f"/proc/{self.gateway.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) * 1024

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.gateway.port), timeout=60)
        self.addCleanup(connection.close)
        return connection

    def answer(self, connection: socket.socket) -> bytes:
        """All that comes until the gateway closes."""
        found = b""
        with contextlib.suppress(ConnectionError):
            while piece := connection.recv(65536):
                found += piece
        return found

    def send(self, data: bytes) -> bytes:
        """What `data` is answered with, when the gateway has closed."""
        connection = self.connect()
        with contextlib.suppress(ConnectionError):
            connection.sendall(data)
        return self.answer(connection)

    def send_all(self, requests: list[bytes]) -> None:
        """Sends some at a time, and waits until the gateway has closed all."""
        for i in range(0, len(requests), 32):
            held = [self.connect() for _ in requests[i : i + 32]]
            for connection, data in zip(held, requests[i : i + 32], strict=True):
                with contextlib.suppress(ConnectionError):
                    connection.sendall(data)
            for connection in held:
                self.answer(connection)
                connection.close()

    def post(self, body: bytes, *headers: str) -> bytes:
        lines = ["POST /v1/completions HTTP/1.1", "host: localhost", *headers]
        return "\r\n".join([*lines, "", ""]).encode() + body


class SlowTest(AttackTest):
    def test_slow_heads(self):
        for begin in (
            b"",
            b"POST /v1/compl",
            b"GET / HTTP/1.1\r\nhost: loc",
            b"GET / HTTP/1.1\r\nhost: a\r\n",
        ):
            self.assertIn(b"408", self.send(begin).partition(b"\r\n")[0])

    def test_slow_heads_after_a_request(self):
        connection = self.connect()
        connection.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
        self.assertIn(b"200", connection.recv(65536))
        connection.sendall(b"GET /version HT")
        self.assertIn(b"408", self.answer(connection))

    def test_slow_bodies(self):
        self.assertIn(b"408", self.send(self.post(b'{"prompt"', "content-length: 100")))
        chunked = self.post(b'5\r\n{"pro\r\n', "transfer-encoding: chunked")
        self.assertIn(b"408", self.send(chunked))

    def test_clients_that_do_not_read(self):
        def endless(request):
            while self.rollout_runs:
                yield [5] * 1024

        self.rollout_runs = True
        self.addCleanup(setattr, self, "rollout_runs", False)
        self.rollout.script = endless
        body = json.dumps(PROMPT | {"stream": True, "logprobs": 0, "max_tokens": 4000}).encode()
        connection = self.connect()
        connection.sendall(self.post(body, f"content-length: {len(body)}"))
        self.assertTrue(self.rollout.ended.wait(60))
        self.assertLess(self.resident() - self.memory, 128 * MIB)
        self.rollout_runs = False

    def test_clients_that_go(self):
        self.rollout.script = lambda request: [[1], None]
        for stream in (True, False):
            self.rollout.ended.clear()
            body = json.dumps(PROMPT | {"stream": stream}).encode()
            before = len(self.rollout.requests)
            connection = self.connect()
            connection.sendall(self.post(body, f"content-length: {len(body)}"))
            self.wait_until(lambda n=before: len(self.rollout.requests) > n, "no request", timeout=60)
            self.assertFalse(self.rollout.ended.is_set())
            connection.close()
            self.assertTrue(self.rollout.ended.wait(60))
        text = self.gateway.request("GET", "/metrics")[2].decode()
        self.assertIn('isobit_gateway_requests_total{path="/v1/completions",status="499"} ', text)

    def test_a_client_that_goes_within_a_body(self):
        for _ in range(20):
            connection = self.connect()
            connection.sendall(self.post(b"x" * 1000, "content-length: 100000"))
            connection.close()


class LargeTest(AttackTest):
    def test_bodies_that_are_too_long(self):
        self.assertIn(b"413", self.send(self.post(b"", "content-length: 10000000000")))
        chunk = b"10000\r\n" + b"[" * 65536 + b"\r\n"
        answer = self.send(self.post(chunk * 64, "transfer-encoding: chunked"))
        self.assertIn(b"413", answer)
        # A client that sends all before it reads has its answer, too.
        for size in (2, 16, 64):
            self.assertEqual(self.gateway.request("POST", "/v1/completions", b" " * (size * MIB))[0], 413)

    def test_many_bodies(self):
        """More bodies than all may have together: some are told to come again, none is lost."""
        body = json.dumps(PROMPT | {"user": "x" * (MIB - 100)}).encode()
        self.rollout.script = lambda request: [None, [1]]
        statuses = []

        def ask() -> None:
            statuses.append(self.gateway.request("POST", "/v1/completions", body)[0])

        threads = [threading.Thread(target=ask) for _ in range(12)]
        for thread in threads:
            thread.start()
        self.wait_until(lambda: len(statuses) >= 8, "too many bodies are taken", timeout=60)
        self.rollout.may_go_on.set()
        for thread in threads:
            thread.join()
        self.assertEqual(set(statuses), {200, 429})
        self.assertGreaterEqual(statuses.count(200), 3)

    def test_heads_that_are_too_long(self):
        for head in (
            b"GET /" + b"a" * MIB,
            b"GET / HTTP/1.1\r\nx: " + b"a" * MIB,
            b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 100000,
        ):
            self.assertIn(b"431", self.send(head).partition(b"\r\n")[0])

    def test_trailers_that_are_too_long(self):
        begin = self.post(b"2\r\n{}\r\n0\r\n", "transfer-encoding: chunked")
        answer = self.send(begin + b"x: y\r\n" * 200000)
        self.assertIn(b"431", answer.partition(b"\r\n")[0])
        chunks = self.post(b"", "transfer-encoding: chunked") + b"1;" + b"x" * 200000
        self.assertIn(b"431", self.send(chunks).partition(b"\r\n")[0])

    def test_a_body_of_small_chunks_is_fine(self):
        body = json.dumps(PROMPT | {"user": "x" * 50000}).encode()
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        answer = self.send(self.post(chunks, "transfer-encoding: chunked", "connection: close"))
        self.assertIn(b"200", answer.partition(b"\r\n")[0])

    def test_json(self):
        for body in (
            b"", b"{", b"[" * 500000, b'{"a":' * 100000, b'"\xff"', b"NaN", b"1e999", b"\x00" * 1000,
            b'{"prompt":' + b"[" * 100000 + b"]" * 100000 + b"}",
            b'{"prompt":[' + b"1," * 200000 + b"1]}",
            b'{"prompt":' + b"9" * 100000 + b"}",
            b'{"prompt":[1],"stop":' + json.dumps(["x"] * 10000).encode() + b"}",
            b'{"prompt":[1],"logit_bias":{"a":1}}',
            b'{"prompt":[1],"' + b"f" * 100000 + b'":1}',
            json.dumps(PROMPT | {"messages": 1}).encode(),
            b'{"prompt":[1],"n":100000}', b'{"prompt":[1],"n":0}', b'{"prompt":[1],"max_tokens":99999999999}',
            json.dumps({"prompt": [[1]] * 10000}).encode(),
        ):  # fmt: skip
            status, _, text = self.gateway.request("POST", "/v1/completions", body)
            self.assertEqual(status, 400, (body[:60], text))
            self.assertLess(len(text), 4096)
        chat = {"messages": [{"role": "user", "content": "x"}]}
        for more in (
            {"chat_template": "{% for i in range(10**9) %}x{% endfor %}"},
            {"chat_template": "{{ ''.__class__ }}"},
            {"messages": [{"role": "user", "content": json.loads("[" * 400 + "]" * 400)}]},
            {"chat_template_kwargs": {"x": json.loads("[" * 900 + "]" * 900)}, "chat_template": "{{ y }}"},
        ):
            status, _, text = self.gateway.request("POST", "/v1/chat/completions", chat | more)
            self.assertEqual(status, 400, text)

    def test_many_connections(self):
        held = [self.connect() for _ in range(64)]
        for connection in held:
            connection.sendall(b"GET /version HTTP/1.1\r\nhost: localhost\r\n\r\n")
            self.assertIn(b"200", connection.recv(65536))
        for _ in range(10):
            self.assertIn(b"503", self.answer(self.connect()))
        for connection in held:
            connection.close()


class ProtocolTest(AttackTest):
    flags = (*AttackTest.flags, "--keep_alive_s=1")

    def test_no_http(self):
        source = random.Random(5)
        self.send_all([source.randbytes(source.randint(1, 2000)) + b"\r\n\r\n\r\n" for _ in range(96)])
        for data in (
            b"\x16\x03\x01\x02\x00\x01" * 100,
            b"GET / HTTP/9.9\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ):
            self.assertIn(b"400", self.send(data).partition(b"\r\n")[0])

    def test_damaged_requests(self):
        body = json.dumps(PROMPT).encode()
        whole = self.post(body, f"content-length: {len(body)}", "connection: close")
        source, all_damaged = random.Random(7), []
        for _ in range(192):
            damaged = bytearray(whole)
            for _ in range(source.randint(1, 4)):
                damaged[source.randrange(len(damaged))] = source.randrange(256)
            all_damaged.append(bytes(damaged))
        self.send_all(all_damaged)

    def test_two_lengths(self):
        for headers in (
            ("content-length: 5", "transfer-encoding: chunked"),
            ("content-length: 5", "content-length: 6"),
            ("content-length: -1",),
            ("transfer-encoding: chunked, identity",),
        ):
            answer = self.send(self.post(b"0\r\n\r\n", *headers))
            self.assertIn(b"400", answer.partition(b"\r\n")[0], headers)

    def test_headers_of_no_use(self):
        body = json.dumps(PROMPT).encode()
        for headers in ({"range": "bytes=0-1,2-3"}, {"expect": "100-continue"}, {"accept_encoding": "gzip"}):
            status, found, text = self.gateway.request("POST", "/v1/completions", body, **headers)
            self.assertEqual(status, 200, headers)
            self.assertNotIn("content-encoding", found)
            json.loads(text)
        for protocol in ("websocket", "h2c"):
            answer = self.send(self.post(b"", f"upgrade: {protocol}", "connection: upgrade"))
            self.assertIn(b"speaks only HTTP/1.1", answer)
        packed = gzip.compress(b" " * 100 * MIB)
        status = self.gateway.request("POST", "/v1/completions", packed, content_encoding="gzip")[0]
        self.assertEqual(status, 415)
        self.assertEqual(self.gateway.request("HEAD", "/v1/models")[0], 200)

    def test_requests_in_a_row(self):
        body = json.dumps(PROMPT).encode()
        one = self.post(body, f"content-length: {len(body)}")
        last = self.post(body, f"content-length: {len(body)}", "connection: close")
        answer = self.send(one * 30 + last)
        self.assertEqual(answer.count(b"HTTP/1.1 200"), 31)


if __name__ == "__main__":
    unittest.main()
