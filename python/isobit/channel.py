"""A synchronous connection to one service: health, calls, closing. It knows no message of isobit."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, Full, Queue
from typing import Any, Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from isobit.connection import OPTIONS, Reachability, ServingWait, accepts
from isobit.credentials import Security, connect
from isobit.errors import CancelledError

_Response = TypeVar("_Response")
_Result = TypeVar("_Result")


def open_channel(
    target: str, credentials: grpc.ChannelCredentials | None = None, **security: Unpack[Security]
) -> grpc.Channel:
    """A channel to `target` (host:port) that connects at the first call; by default in plain text."""
    return connect(target, OPTIONS, credentials, security)


def _put(queue: Queue, item: Any, response: grpc.Future) -> bool:
    """Whether `item` is in the queue; false if the call has ended."""
    while not response.done():
        with contextlib.suppress(Full):
            queue.put(item, timeout=0.1)
            return True
    return False


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
        # Made now, since gRPC crashes when a stub is made for a channel that is closed.
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._reachability = Reachability()
        self._closed = False

    def wait_until_serving(self, timeout: float = 60.0) -> None:
        """Returns once the service reports SERVING, which it does when its weights are loaded.

        Raises:
          DeadlineExceededError: it did not within `timeout` seconds; the message has the last answer.
        """
        wait = ServingWait(self.target, timeout)
        while wait.left_s() > 0:
            self._await_connection(wait.connection_s())
            try:
                response = self._health.Check(health_pb2.HealthCheckRequest(), timeout=wait.check_s())
                if wait.is_serving(response):
                    self._reachability.found()
                    return
            except grpc.RpcError as error:
                wait.note_failure(error)
            time.sleep(wait.pause_s())
        raise wait.error()

    def close(self) -> None:
        """Cancels the calls in flight and closes the connection."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _unary(self, call: Callable[..., _Response], request, timeout: float) -> _Response:
        """The response to `request`, or to an iterator of requests."""
        with self._connection(timeout) as left:
            return call(request, timeout=left)

    def _upload(self, call: grpc.StreamUnaryMultiCallable, requests: Iterable, timeout: float, accepted: str):
        """The response to `requests`, which are made on the caller's thread, a few ahead of the wire. The
        second is made once the service has accepted the first, by initial metadata with the key `accepted`. A
        None among them says that there is nothing to send yet."""
        with self._connection(timeout) as left:
            queue = Queue(maxsize=4)
            response = call.future(iter(queue.get, None), timeout=left)
            has_accepted = False
            try:
                for request in requests:
                    if request is None and not response.done():
                        continue  # there is none yet
                    if request is None or not _put(queue, request, response):
                        break  # the service has answered: it wants no more
                    if not has_accepted and not accepts(response.initial_metadata(), accepted):
                        break  # it has refused them
                    has_accepted = True
                else:
                    _put(queue, None, response)
                return response.result()
            except grpc.FutureCancelledError:
                raise CancelledError(
                    grpc.StatusCode.CANCELLED, f"the client of {self.target} was closed"
                ) from None
            finally:
                response.cancel()
                with contextlib.suppress(Empty):  # nobody waits for the queue any more, after this
                    while True:
                        queue.get_nowait()
                queue.put(None)

    def _stream(
        self,
        call: Callable[..., Iterator[_Response]],
        request,
        timeout: float | None,
        convert: Callable[[_Response], Iterable[_Result]],
    ) -> Iterator[_Result]:
        """What `convert` makes of each response; a caller that stops reading early cancels the call."""
        with self._connection(timeout) as left:
            responses = call(request, timeout=left)
            try:
                for response in responses:
                    yield from convert(response)
            finally:
                responses.cancel()

    @contextlib.contextmanager
    def _connection(self, timeout: float | None) -> Iterator[float | None]:
        """Yields what is left of `timeout` for a call, and raises its failure as a class of isobit.errors."""
        start = time.monotonic()
        if wait_s := self._reachability.wait_s(timeout):
            self._await_connection(wait_s)
        with self._reachability.of_call():
            yield None if timeout is None else max(0.0, timeout - (time.monotonic() - start))

    def _await_connection(self, timeout: float) -> None:
        """Returns once connected, or after `timeout` seconds.

        While calls fail at once, nothing polls the channel, and it would notice a new connection only every
        5 s. A call that waits for a connection polls it. (So does channel_ready_future, on a thread that
        lives on for a while and prints an error if the channel is closed meanwhile.)
        """
        if self._closed:
            raise ValueError(f"the client of {self.target} is closed")
        with contextlib.suppress(grpc.RpcError):
            self._health.Check(health_pb2.HealthCheckRequest(), timeout=timeout, wait_for_ready=True)
