"""HTTP under attack: who may read metrics and page, TLS as at the gRPC port, new certificates, ports
full of callers who send half a request, and the names by which the ports may be called."""

import json
import socket
import ssl
import time
import unittest
import urllib.error
import warnings
from pathlib import Path

from certificates import Authority
from guarded_services import GuardedServicesTest, token_hash

from isobit_tools.testing import http_get, http_url


class HttpTest(GuardedServicesTest):
    def setUp(self):
        super().setUp()
        self.ca = Authority(self.log_dir, "the-ca")

    def status(self, url: str, **options) -> int:
        try:
            http_get(url, **options)
        except urllib.error.HTTPError as error:
            error.close()
            return error.code
        return 200

    def context(self, pair=None, ca=None) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=(ca or self.ca).cert)
        if pair is not None:
            context.load_cert_chain(pair.cert, pair.key)
        return context

    def test_roles(self):
        access = self.write_access()
        rollout = self.start("rollout", access, "--metrics_port=0", token="token-watch")
        comparator = self.start(
            "comparator", access, "--metrics_port=0", "--http_port=0", token="token-watch"
        )
        pages = [
            http_url(rollout, "metrics"),
            http_url(comparator, "metrics"),
            http_url(comparator, "http"),
            http_url(comparator, "http", "/events"),
        ]
        for url in pages:
            with self.subTest(url):
                self.assertEqual(self.status(url), 401)
                for header in ("token-watch", "Basic dG9rZW4=", "Bearer wrong", "Bearer ", "Bearer"):
                    self.assertEqual(self.status(url, Authorization=header), 401, header)
                for role in ("generate", "score", "compare"):
                    self.assertEqual(self.status(url, Authorization=f"Bearer token-{role}"), 403, role)
                if "events" in url:
                    continue  # without an end
                for role in ("watch", "admin"):
                    self.assertEqual(self.status(url, Authorization=f"Bearer token-{role}"), 200, role)
        # Two such headers count as an invalid one.
        address = ("127.0.0.1", int(Path(f"{rollout.port_file}.metrics").read_text()))
        header = "Authorization: Bearer token-watch\r\n"
        for count, expected in ((1, b" 200 "), (2, b" 401 ")):
            with socket.create_connection(address, timeout=10) as connection:
                request = f"GET /metrics HTTP/1.1\r\nHost: localhost\r\n{header * count}\r\n"
                connection.sendall(request.encode())
                self.assertIn(expected, connection.recv(100))
        # What the page consists of tells nothing, and must load before a token can be asked for.
        for path in ("/", "/page.js", "/page.css"):
            self.assertEqual(self.status(http_url(comparator, "http", path)), 200)

    def test_tls_and_certificates(self):
        serving = self.ca.sign_server()
        watcher = self.ca.sign("prometheus", "DNS:prometheus.local")
        unknown = self.ca.sign("somebody")
        stranger = Authority(self.log_dir, "stranger")
        access = self.write_access(
            {"name": "prometheus", "roles": ["watch"], "certificates": ["prometheus.local"]},
            {"name": "token", "roles": ["generate"], "token_sha256": [token_hash("t")]},
        )
        service = self.start(
            "rollout",
            f"--tls_cert={serving.cert}",
            f"--tls_key={serving.key}",
            f"--tls_client_ca={self.ca.cert}",
            access,
            "--metrics_port=0",
            tls_ca=self.ca.cert,
            tls_cert=watcher.cert,
            tls_key=watcher.key,
        )
        url = http_url(service, "metrics", scheme="https")
        self.assertEqual(self.status(url, context=self.context(watcher)), 200)
        self.assertEqual(self.status(url, context=self.context(unknown)), 401)
        token = {"Authorization": "Bearer t"}
        self.assertEqual(self.status(url, context=self.context(watcher), **token), 403, "the token counts")
        for name, context in {
            "no certificate": self.context(),
            "a stranger's certificate": self.context(stranger.sign("prometheus", "DNS:prometheus.local")),
            "another authority": self.context(watcher, stranger),
        }.items():
            with self.subTest(name), self.assertRaises((urllib.error.URLError, OSError)):
                http_get(url, context=context)
        with self.subTest("plain text"), self.assertRaises((urllib.error.URLError, OSError)):
            http_get(url.replace("https", "http"))
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.load_verify_locations(self.ca.cert)
        old.load_cert_chain(watcher.cert, watcher.key)
        with warnings.catch_warnings(action="ignore"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with self.subTest("TLS 1.1"), self.assertRaises((urllib.error.URLError, OSError)):
            http_get(url, context=old)

        # Broken files change nothing; good ones serve from the next connection on.
        serving.cert.write_text("no PEM")
        time.sleep(0.2)
        self.assertEqual(self.status(url, context=self.context(watcher)), 200)
        stranger.sign_server().move_to(serving)
        time.sleep(0.2)
        self.assertEqual(self.status(url, context=self.context(watcher, stranger)), 200)
        with self.assertRaises((urllib.error.URLError, OSError)):
            http_get(url, context=self.context(watcher))

    def test_a_port_full_of_halves(self):
        """Probes and metrics are answered while anonymous callers send half a request, again and again."""
        service = self.start("rollout", self.write_access(), "--metrics_port=0", token="token-watch")
        address = ("127.0.0.1", int(Path(f"{service.port_file}.metrics").read_text()))
        halves = []
        try:
            for text in (b"", b"GET /metrics HTTP/1.1\r\nX: ", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n"):
                for _ in range(200):
                    halves.append(socket.create_connection(address))
                    halves[-1].sendall(text)
                self.assertIn("alive", http_get(http_url(service, "metrics", "/healthz")))
                self.assertEqual(self.status(http_url(service, "metrics", "/readyz")), 200)
                metrics = http_get(http_url(service, "metrics"), Authorization="Bearer token-watch")
                self.assertIn("isobit_tokens_generated_total 0", metrics)
        finally:
            for connection in halves:
                connection.close()

    def test_names(self):
        """DNS rebinding: a page of another site must not read a port of this host by that site's name."""
        service = self.start("comparator", "--http_port=0", "--metrics_port=0", "--http_hosts=page.example,b")
        for port, path in (("http", "/"), ("http", "/events"), ("http", "/metrics"), ("metrics", "/metrics")):
            url = http_url(service, port, path)
            for host in ("rebound.example", "rebound.example:8080", "127.0.0.1.rebound.example"):
                self.assertEqual(self.status(url, Host=host), 421, (path, host))
            if path != "/events":
                for host in ("page.example:8080", "B", "localhost", "[::1]:8080"):
                    self.assertEqual(self.status(url, Host=host), 200, (path, host))

    def test_bad_flags(self):
        taken = self.start("rollout", "--metrics_port=0")
        port = Path(f"{taken.port_file}.metrics").read_text().strip()
        self.assertIn("cannot listen", self.refusal("comparator", f"--metrics_port={port}"))
        self.assertIn("metrics_port is 65536", self.refusal("comparator", "--metrics_port=65536"))
        self.assertIn("http_port is -1", self.refusal("comparator", "--http_port=-1"))
        (self.log_dir / "file.metrics").mkdir()
        self.assertIn(
            "expected a regular file",
            self.refusal("rollout", "--metrics_port=0", f"--port_file={self.log_dir}/file"),
        )

    def test_events_are_json(self):
        comparator = self.start("comparator", "--http_port=0")
        address = ("127.0.0.1", int(Path(f"{comparator.port_file}.http").read_text()))
        with socket.create_connection(address, timeout=10) as connection:
            connection.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            text = b""
            while b"\n\ndata" not in text.replace(b"\r\n", b"") and b'"state"' not in text:
                text += connection.recv(65536)
            self.assertIn(b"text/event-stream", text)
            body = text.split(b"data: ", 1)[1].split(b"\n\n")[0]
            self.assertEqual(json.loads(body)["state"], "waiting")


if __name__ == "__main__":
    unittest.main()
