"""What synchronous and asyncio clients share about a connection: its options, and when to wait for it."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Unpack

import grpc

from isobit.credentials import Security, endpoint
from isobit.errors import CancelledError, DeadlineExceededError, from_rpc_error
from isobit.health import HealthCheckResponse, ServingStatus
from isobit.timeouts import Deadline

# Keepalive as in common/rpc/limits.h: a server treats more frequent pings as abuse.
OPTIONS = (
    # The client sets no limits itself: the request determines the size of its response, and the server
    # refuses requests that are too long.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # So that a service that is starting is found soon after it listens.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 150),
    # In spite of its name, this is the time limit of one attempt to connect. A distant service needs several
    # round trips.
    ("grpc.min_reconnect_backoff_ms", 20_000),
)
# How long a call that follows an UnavailableError waits for the connection to come back.
_RECONNECT_S = 1.0
_HEALTH_POLL_S = 0.1
_HEALTH_ANSWER_S = 5.0


def accepts(metadata: Iterable[tuple[str, str]] | None, key: str) -> bool:
    """Whether initial metadata has `key`, with which a service accepts the first request of a call. Without
    `key` the call has ended or will end soon, since a refusal has no such metadata."""
    return any(name == key for name, _ in metadata or ())


class Client:
    """The arguments of every client. A client can be pickled and copied; the copy makes a connection of its
    own."""

    def __init__(
        self,
        target: str,
        credentials: grpc.ChannelCredentials | None = None,
        *,
        wait_if_full: bool = True,
        **security: Unpack[Security],
    ):
        """Makes a client. It connects at its first call.

        Args:
          target: host:port.
          credentials: a gRPC object, in place of the TLS arguments.
          wait_if_full: True: a call that a full queue or a quota refuses is tried again when the service
            says, as long as its timeout allows. False: it raises ResourceExhaustedError at once.
          **security: TLS and bearer tokens; see Security. Without any of them, plain text.

        Raises:
          ValueError: `target` is not host:port, arguments exclude each other, or a bearer token would go to
            another host in plain text.
          OSError: a file cannot be read.
        """
        self._endpoint = endpoint(target, OPTIONS, credentials, security)
        self._made_of = (target, credentials, wait_if_full, security)
        self.target = target
        self._wait_if_full = wait_if_full
        self._reachability = Reachability()
        self._closed = False
        self._set_up()

    def _set_up(self) -> None:
        """Makes the state that a copy does not share."""

    def __reduce__(self) -> tuple:
        if self._made_of[1] is not None:
            raise TypeError(
                f"{self!r} cannot be copied or pickled, since gRPC's credentials cannot: use the arguments"
                " tls_ca, tls_cert and tls_key in place of credentials"
            )
        return _made, (type(self), *self._made_of)

    def __repr__(self) -> str:
        _, credentials, wait_if_full, security = self._made_of
        words = [repr(self.target)]
        words += ["credentials=..."] if credentials is not None else []
        words += [] if wait_if_full else ["wait_if_full=False"]
        words += [
            f"{name}=..." if name == "token" else f"{name}={str(value)!r}" for name, value in security.items()
        ]
        return f"{type(self).__name__}({', '.join(words)})"

    def _closed_error(self) -> CancelledError:
        return CancelledError(grpc.StatusCode.CANCELLED, f"the client of {self.target} was closed")


def _made(
    kind: type[Client], target: str, credentials: None, wait_if_full: bool, security: dict[str, Any]
) -> Client:
    return kind(target, credentials, wait_if_full=wait_if_full, **security)


class Reachability:
    """Remembers whether the last call reached the service. If not, the next call first waits for the
    connection."""

    def __init__(self):
        self._lost = False

    def wait_s(self, timeout: float | None) -> float:
        """Returns how many seconds a call with this timeout first waits for the connection; 0: it does not
        wait."""
        if not self._lost:
            return 0.0
        # Half of the timeout is left for the call itself, whose error says why it cannot connect.
        return _RECONNECT_S if timeout is None else min(timeout / 2, _RECONNECT_S)

    def found(self) -> None:
        self._lost = False

    @contextlib.contextmanager
    def of_call(self) -> Iterator[None]:
        """Remembers how the call in the block ends. Raises its failure as a class of isobit.errors."""
        try:
            yield
        except grpc.RpcError as error:
            if (
                error.code() != grpc.StatusCode.DEADLINE_EXCEEDED
            ):  # a deadline says nothing about the connection
                self._lost = error.code() == grpc.StatusCode.UNAVAILABLE
            raise from_rpc_error(error) from error
        self._lost = False


class ServingWait:
    """The state of wait_until_serving: the time that is left, and the last answer of the health service."""

    def __init__(self, target: str, timeout: float | None):
        self._target = target
        self._deadline = Deadline(timeout)
        self._short = False  # less time is left than an answer may take
        self._answer = "none"

    def is_over(self) -> bool:
        return self._deadline.is_over()

    def connection_s(self) -> float:
        """Seconds to wait for a connection before the next check."""
        return self._deadline.bounded(_RECONNECT_S)

    def check_s(self) -> float:
        """The timeout of a check that starts now."""
        answer_s = self._deadline.bounded(_HEALTH_ANSWER_S)
        self._short = answer_s < _HEALTH_ANSWER_S
        return answer_s

    def pause_s(self) -> float:
        """Seconds to wait after a check that did not find a service that serves."""
        return self._deadline.bounded(_HEALTH_POLL_S)

    def is_serving(self, response: HealthCheckResponse) -> bool:
        self._answer = response.status.name
        return response.status == ServingStatus.SERVING

    def note_failure(self, error: grpc.RpcError) -> None:
        # A check that was cut short by this call's own deadline says less than the one before it.
        cut_short = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and self._short
        if not cut_short or self._answer == "none":
            self._answer = f"{error.code().name}: {error.details()}"

    def error(self) -> DeadlineExceededError:
        return DeadlineExceededError(
            grpc.StatusCode.DEADLINE_EXCEEDED,
            f"{self._target} is not serving after {self._deadline.timeout:g} s; last answer: {self._answer}",
        )
