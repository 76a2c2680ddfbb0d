"""Tests of how clients connect to distant, late, absent and restarted services, faked in this process.

python tests/python/connection_test.py        (in an environment where the package `isobit` is installed)
"""

import asyncio
import contextlib
import math
import socket
import threading
import time
import unittest
from concurrent import futures

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

import isobit
from isobit.errors import DeadlineExceededError, UnavailableError
from isobit.health import HealthCheckRequest, HealthCheckResponse, ServingStatus
from isobit.v1 import rollout_pb2, rollout_pb2_grpc, types_pb2

LATENCY_S = 0.15
SOON_S = 0.3


class FakeRollout(rollout_pb2_grpc.RolloutServiceServicer):
    def GetLoad(self, request, context):
        return rollout_pb2.GetLoadResponse()

    def Generate(self, request, context):
        complete = rollout_pb2.GenerateComplete(finish_reason=types_pb2.FINISH_REASON_LENGTH)
        yield rollout_pb2.GenerateResponse(request_id="r", complete=complete)


def serve(port: int) -> tuple[grpc.Server, int]:
    """A rollout that serves at 127.0.0.1:port (0: any), and its port."""
    servicer = health.HealthServicer()
    servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    server = grpc.server(futures.ThreadPoolExecutor(8))
    rollout_pb2_grpc.add_RolloutServiceServicer_to_server(FakeRollout(), server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server, port


class HealthTest(unittest.TestCase):
    def test_messages_are_those_of_the_health_protocol(self):
        self.assertEqual(HealthCheckRequest().to_wire(), health_pb2.HealthCheckRequest().SerializeToString())
        statuses = health_pb2.HealthCheckResponse.ServingStatus
        self.assertEqual(
            {name: status.value for name, status in ServingStatus.__members__.items()}, dict(statuses.items())
        )
        for name, number in statuses.items():
            wire = health_pb2.HealthCheckResponse(status=number).SerializeToString()
            self.assertEqual(HealthCheckResponse.from_wire(wire).status.name, name)
        self.assertEqual(HealthCheckResponse.from_wire(b"\x08\x63").status, ServingStatus.UNKNOWN)
        with self.assertRaises(DecodeError):
            HealthCheckResponse.from_wire(b"\x08")


@contextlib.contextmanager
def reserved_port():
    """A port of 127.0.0.1 that refuses connections until a server of this process listens there."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@contextlib.contextmanager
def distant(port: int, latency_s: float):
    """The port of a proxy to 127.0.0.1:port that delivers every byte `latency_s` late, either way."""

    async def pump(reader, writer):
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                loop.call_later(latency_s, writer.write, data)
        loop.call_later(latency_s, writer.close)

    async def connect(reader, writer):
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:  # nobody serves there yet
            return writer.close()
        with contextlib.suppress(asyncio.CancelledError):  # by the end of the test
            await asyncio.gather(pump(reader, upstream_writer), pump(upstream_reader, writer))
        writer.close()
        upstream_writer.close()

    loop = asyncio.new_event_loop()
    proxy = loop.run_until_complete(asyncio.start_server(connect, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield proxy.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        proxy.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
        loop.run_until_complete(asyncio.sleep(0))  # what was closed goes
        loop.close()


class ConnectionTest(unittest.TestCase):
    clients = isobit  # what has the client classes

    def start(self, port: int = 0) -> int:
        server, port = serve(port)
        self.addCleanup(lambda: server.stop(None).wait())
        return port

    def test_distant_services_are_reached_by_fresh_clients(self):
        failed = []
        with distant(self.start(), LATENCY_S) as port:
            for attempt in range(5):
                with self.clients.RolloutClient(f"127.0.0.1:{port}") as client:
                    try:
                        client.get_load(timeout=30)
                        self.assertEqual(len(list(client.generate([1], stream=True, timeout=30))), 1)
                    except UnavailableError as error:
                        failed.append(f"client {attempt}: {error}")
        self.assertEqual(failed, [])

    def test_waiting_for_a_connection_ends_with_the_timeout(self):
        with (
            distant(self.start(), 60) as port,
            self.clients.RolloutClient(f"127.0.0.1:{port}") as client,
        ):
            start = time.monotonic()
            with self.assertRaises(DeadlineExceededError):
                client.get_load(timeout=0.5)
            self.assertLess(time.monotonic() - start, 30)

    def seconds_late(self, delay: float, through=contextlib.nullcontext) -> float:
        """Starts a service after `delay` s; returns how many seconds later wait_until_serving returns:
        the least of a few tries, since a loaded machine can make any of them late.
        """
        late = math.inf
        for _ in range(5):
            late = min(late, self.seconds_late_once(delay, through))
            if late < SOON_S:
                break
        return late

    def seconds_late_once(self, delay: float, through) -> float:
        served = []

        def start(port: int) -> None:
            self.start(port)
            served.append(time.monotonic())

        with (
            reserved_port() as port,
            through(port) as proxy,
            self.clients.RolloutClient(f"127.0.0.1:{proxy}") as client,
        ):
            starter = threading.Timer(delay, start, [port])
            starter.start()
            client.wait_until_serving(timeout=30)
            returned = time.monotonic()
            starter.join()
            client.get_load(timeout=30)
        return returned - served[0]

    def test_wait_until_serving_returns_as_soon_as_the_service_serves(self):
        late = [self.seconds_late(delay) for delay in (1.1, 2.4)]
        self.assertLess(max(late), SOON_S, f"seconds late: {late}")

    def test_wait_until_serving_finds_a_service_behind_a_proxy(self):
        late = [self.seconds_late(delay, lambda port: distant(port, 0)) for delay in (1.3, 2.9)]
        self.assertLess(max(late), SOON_S, f"seconds late: {late}")

    def test_a_refused_connection_is_reported_at_once(self):
        with reserved_port() as port, self.clients.ScorerClient(f"127.0.0.1:{port}") as client:
            for _ in range(2):
                start = time.monotonic()
                with self.assertRaisesRegex(UnavailableError, f"127.0.0.1:{port}.*refused"):
                    client.get_server_info(timeout=60)
                self.assertLess(time.monotonic() - start, 30)

    def test_a_service_that_is_back_answers_the_next_call(self):
        with reserved_port() as port, self.clients.RolloutClient(f"127.0.0.1:{port}") as client:
            for _ in range(3):
                with self.assertRaises(UnavailableError):
                    client.get_load(timeout=0.5)
            self.start(port)
            client.get_load(timeout=30)
            client.get_load(timeout=30)

    def test_a_closed_client_refuses_every_call(self):
        with reserved_port() as port:
            client = self.clients.RolloutClient(f"127.0.0.1:{port}")
            with self.assertRaises(UnavailableError):
                client.get_load(timeout=0.5)  # so that the next call would wait for the connection
            client.close()
            client.close()
            for call in (
                client.wait_until_serving,
                client.get_load,
                lambda: client.generate([1]),
                lambda: next(client.generate([1], stream=True)),
            ):
                with self.assertRaisesRegex(ValueError, "closed"):
                    call()


if __name__ == "__main__":
    unittest.main()
