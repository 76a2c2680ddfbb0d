"""A connection to one service: limits, keepalive, health, calls, closing. It knows no message of isobit."""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from isobit.credentials import Security, connect
from isobit.errors import DeadlineExceededError, from_rpc_error

# Keepalive as in common/rpc/limits.h: a server treats more frequent pings as abuse.
_OPTIONS = (
    # No limits of the client's own: a response is as long as its request makes it, and the server refuses
    # requests that are too long.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A service that is just starting is found soon after it listens.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 150),
    # In spite of its name, the time that one attempt has to connect: a distant service needs several
    # round trips.
    ("grpc.min_reconnect_backoff_ms", 20_000),
)
# How long a call that follows an UnavailableError waits for the connection to come back.
_RECONNECT_S = 1.0
_HEALTH_POLL_S = 0.1
_HEALTH_ANSWER_S = 5.0

_Response = TypeVar("_Response")


def open_channel(
    target: str, credentials: grpc.ChannelCredentials | None = None, **security: Unpack[Security]
) -> grpc.Channel:
    """A channel to `target` (host:port) that connects at the first call; by default in plain text."""
    return connect(target, _OPTIONS, credentials, security)


class ServiceClient:
    """Base of the three clients. Use it in a `with` statement, or call close().

    A call waits for a connection that is coming up as long as its timeout allows. It raises
    UnavailableError at once if the service refuses the connection; the next call after that gives the
    connection a second to come back. Threads may share a client.
    """

    def __init__(
        self, target: str, credentials: grpc.ChannelCredentials | None = None, **security: Unpack[Security]
    ):
        """Connects lazily: nothing is sent before the first call.

        Args:
          target: host:port.
          credentials: a gRPC object, in place of the TLS arguments.
          **security: TLS and bearer tokens; see Security. Without any of them, plain text.
        """
        self.target = target
        self._channel = open_channel(target, credentials, **security)
        self._lost = False  # the last call found the service unavailable

    def wait_until_serving(self, timeout: float = 60.0) -> None:
        """Returns once the service reports SERVING, which it does when its weights are loaded.

        Raises:
          DeadlineExceededError: it did not within `timeout` seconds; the message has the last answer.
        """
        health = health_pb2_grpc.HealthStub(self._channel)
        deadline = time.monotonic() + timeout
        answer = "none"
        while (left := deadline - time.monotonic()) > 0:
            self._await_connection(min(left, _RECONNECT_S))
            left = max(0.0, deadline - time.monotonic())
            try:
                response = health.Check(health_pb2.HealthCheckRequest(), timeout=min(left, _HEALTH_ANSWER_S))
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    self._lost = False
                    return
                answer = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
            except grpc.RpcError as error:
                # A check that this call's own deadline has cut short says less than the one before it.
                cut_short = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and left < _HEALTH_ANSWER_S
                if not cut_short or answer == "none":
                    answer = f"{error.code().name}: {error.details()}"
            time.sleep(min(_HEALTH_POLL_S, max(0.0, deadline - time.monotonic())))
        raise DeadlineExceededError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            f"{self.target} is not serving after {timeout:g} s; last answer: {answer}",
        )

    def close(self) -> None:
        """Cancels the calls in flight and closes the connection."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _unary(self, call: Callable[..., _Response], request, timeout: float) -> _Response:
        """The response to `request`, or to an iterator of requests."""
        with self._connection(timeout) as left:
            return call(request, timeout=left)

    def _stream(
        self, call: Callable[..., Iterator[_Response]], request, timeout: float | None
    ) -> Iterator[_Response]:
        """The responses of a stream; the call is cancelled when the caller stops reading early."""
        with self._connection(timeout) as left:
            responses = call(request, timeout=left)
            try:
                yield from responses
            finally:
                responses.cancel()

    @contextlib.contextmanager
    def _connection(self, timeout: float | None) -> Iterator[float | None]:
        """Yields what is left of `timeout` for a call, and raises its failure as a class of isobit.errors."""
        start = time.monotonic()
        if self._lost:
            # Half of the timeout is left to the call, whose error says why it cannot connect.
            self._await_connection(_RECONNECT_S if timeout is None else min(timeout / 2, _RECONNECT_S))
        try:
            yield None if timeout is None else max(0.0, timeout - (time.monotonic() - start))
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:  # it says nothing about the connection
                self._lost = error.code() == grpc.StatusCode.UNAVAILABLE
            raise from_rpc_error(error) from error
        self._lost = False

    def _await_connection(self, timeout: float) -> None:
        """Returns once connected, or after `timeout` seconds.

        While calls fail at once, nothing polls the channel, and it would notice a new connection only every
        5 s. This polls it.
        """
        ready = grpc.channel_ready_future(self._channel)
        try:
            with contextlib.suppress(grpc.FutureTimeoutError):
                ready.result(timeout=timeout)
        finally:
            ready.cancel()  # ends the polling
