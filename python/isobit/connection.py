"""What the synchronous and the asyncio clients know of a connection: its options, and when to wait for it."""

import contextlib
import time
from collections.abc import Iterable, Iterator

import grpc
from grpc_health.v1 import health_pb2

from isobit.errors import DeadlineExceededError, from_rpc_error

# Keepalive as in common/rpc/limits.h: a server treats more frequent pings as abuse.
OPTIONS = (
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


def accepts(metadata: Iterable[tuple[str, str]] | None, key: str) -> bool:
    """Whether initial metadata has `key`, by which a service accepts a call's first request. Without it the
    call has ended, or is about to: a refusal brings none."""
    return any(name == key for name, _ in metadata or ())


class Reachability:
    """Whether the last call found the service: if not, the next call first waits for the connection."""

    def __init__(self):
        self._lost = False

    def wait_s(self, timeout: float | None) -> float:
        """How long a call of `timeout` seconds first waits for the connection; 0: not at all."""
        if not self._lost:
            return 0.0
        # Half of the timeout is left to the call, whose error says why it cannot connect.
        return _RECONNECT_S if timeout is None else min(timeout / 2, _RECONNECT_S)

    def found(self) -> None:
        self._lost = False

    @contextlib.contextmanager
    def of_call(self) -> Iterator[None]:
        """Remembers how the call in the block ends, and raises its failure as a class of isobit.errors."""
        try:
            yield
        except grpc.RpcError as error:
            if error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:  # it says nothing about the connection
                self._lost = error.code() == grpc.StatusCode.UNAVAILABLE
            raise from_rpc_error(error) from error
        self._lost = False


class ServingWait:
    """The state of wait_until_serving: the time that is left, and the last answer of the health service."""

    def __init__(self, target: str, timeout: float):
        self._target = target
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._short = False  # the check has less time than an answer may take
        self._answer = "none"

    def left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def connection_s(self) -> float:
        """How long to wait for a connection before the next check."""
        return min(self.left_s(), _RECONNECT_S)

    def check_s(self) -> float:
        """The timeout of a check that starts now."""
        left = self.left_s()
        self._short = left < _HEALTH_ANSWER_S
        return min(left, _HEALTH_ANSWER_S)

    def pause_s(self) -> float:
        """How long to wait after a check that found no service that serves."""
        return min(_HEALTH_POLL_S, self.left_s())

    def is_serving(self, response: health_pb2.HealthCheckResponse) -> bool:
        self._answer = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
        return response.status == health_pb2.HealthCheckResponse.SERVING

    def note_failure(self, error: grpc.RpcError) -> None:
        # A check that this call's own deadline has cut short says less than the one before it.
        cut_short = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and self._short
        if not cut_short or self._answer == "none":
            self._answer = f"{error.code().name}: {error.details()}"

    def error(self) -> DeadlineExceededError:
        return DeadlineExceededError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            f"{self._target} is not serving after {self._timeout:g} s; last answer: {self._answer}",
        )
