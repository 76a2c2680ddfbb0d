"""Too many connections: each service keeps serving those it has, logs it, and recovers."""

import resource
import socket
import time
import unittest

from attack_case import AttackTest
from http2 import PREFACE, SETTINGS, Connection, frame, is_closed

from isobit.launch import Service

LIMIT = 256
CAP = LIMIT // 2


def connect(service: Service) -> socket.socket:
    host, _, port = service.target.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


class DescriptorsTest(AttackTest):
    launcher = ("prlimit", f"--nofile={LIMIT}:{LIMIT}")

    def test_connections_beyond_the_limit(self):
        for name, service in self.start_all().items():
            with self.subTest(service=name):
                self.exhaust(name, service)

    def exhaust(self, name: str, service: Service) -> None:
        client = self.channel(service)
        self.assert_serves(name, client)
        idle = [connect(service) for _ in range(2 * LIMIT)]
        try:
            self.assert_serves(name, client)
            time.sleep(1)
            closed = sum(map(is_closed, idle))
        finally:
            for connection in idle:
                connection.close()
        self.wait_until(lambda: self.is_taken(service), "no new connection is served")
        self.assert_serves(name, self.channel(service))
        print(f"{name}: {len(idle)} idle connections, {closed} closed at once, then served again")
        # The client has a connection too, and the comparator to rollout and scorer.
        self.assertGreaterEqual(closed, len(idle) - CAP, "beyond the cap, none hangs")
        self.assertLess(closed, len(idle) - CAP + 10)
        self.assertIn("connections refused", service.log.read_text())

    def is_taken(self, service: Service) -> bool:
        try:
            with Connection(service.target, timeout=2) as connection:
                connection.ping()
        except OSError:
            return False
        return True

    def test_a_connection_that_says_nothing_is_closed(self):
        rollout = self.start_all()["rollout"]
        client = self.channel(rollout)
        self.assert_serves("rollout", client)
        silent, half, no_settings, http1 = (connect(rollout) for _ in range(4))
        half.sendall(PREFACE[:10])
        no_settings.sendall(PREFACE)
        http1.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with Connection(rollout.target) as idle:  # after its handshake it may be idle
            idle.ping()
            for what, connection in {
                "silent": silent,
                "half a preface": half,
                "no settings": no_settings,
                "HTTP/1": http1,
            }.items():
                self.wait_until(lambda c=connection: is_closed(c), what)
                connection.close()
            idle.send(frame(SETTINGS, 0, 0))
            idle.ping()
        self.assert_serves("rollout", client)


class RaisedLimitTest(AttackTest):
    launcher = ("prlimit", f"--nofile={LIMIT}:{4 * LIMIT}")

    def test_the_soft_limit_becomes_the_hard_one(self):
        for name, service in self.start_all().items():
            with self.subTest(service=name):
                limits = resource.prlimit(service.process.pid, resource.RLIMIT_NOFILE)
                self.assertEqual(limits, (4 * LIMIT, 4 * LIMIT))


if __name__ == "__main__":
    unittest.main()
