"""A connection to one service: limits, keepalive, health and closing. It knows no message of isobit."""

import time
from typing import Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from isobit.errors import DeadlineExceededError

# Keepalive as in common/rpc/limits.h: a server takes more frequent pings for abuse.
_OPTIONS = (
    # What comes back is as long as what was asked for; the server bounds what goes in, and says so.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A service that is just starting is found soon after it listens.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2000),
)
_HEALTH_POLL_S = 0.1


class ServiceClient:
    """Base of the three clients. Use it in a `with` statement, or call close().

    It may be shared by threads.
    """

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None = None):
        """Connects lazily: nothing is sent before the first call.

        Args:
          target: host:port.
          credentials: None for plain text.
        """
        self.target = target
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=_OPTIONS)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=_OPTIONS)

    def wait_until_serving(self, timeout: float = 60.0) -> None:
        """Returns once the service reports SERVING, which it does when its weights are loaded.

        Raises:
          DeadlineExceededError: it did not within `timeout` seconds; the message tells the last answer.
        """
        health = health_pb2_grpc.HealthStub(self._channel)
        deadline = time.monotonic() + timeout
        answer = "none"
        while (left := deadline - time.monotonic()) > 0:
            try:
                response = health.Check(health_pb2.HealthCheckRequest(), timeout=min(left, 5.0))
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                answer = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
            except grpc.RpcError as error:
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
