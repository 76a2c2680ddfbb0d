"""A synchronous connection to one service: health, calls, closing. It does not know isobit's messages."""

import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from queue import Empty, Full, Queue
from typing import Any, Self, TypeVar

import grpc
from google.protobuf.message import Message

from isobit import background, forks
from isobit.connection import Client, ServingWait, accepts
from isobit.credentials import connect
from isobit.errors import ResourceExhaustedError
from isobit.health import HealthCheckRequest, HealthStub
from isobit.retry import pause_s, retried
from isobit.timeouts import Deadline, checked_timeout

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def _put(queue: Queue, item: Any, response: grpc.Future) -> bool:
    """Puts `item` into the queue. Returns False if the call ended first."""
    while not response.done():
        with contextlib.suppress(Full):
            queue.put(item, timeout=0.1)
            return True
    return False


class ServiceClient(Client):
    """Base of the three clients. Use it in a `with` statement, or call close().

    A call waits for a connection that is being established as long as its timeout allows. If the service
    refuses the connection, the call raises UnavailableError at once; the next call after that gives the
    connection one second to come back. Threads may share a client. A timeout of None or infinity means no
    limit.
    """

    _stub_type: Callable[[grpc.Channel], Any] | None = None

    def _set_up(self) -> None:
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._opened_in = forks.NEVER
        self._closing = threading.Event()
        self._asynchronous: Any = None  # a client of isobit.aio, for many calls at the same time

    @property
    def _stub(self) -> Any:
        """The methods of the service."""
        return self._open()[0]

    @property
    def _health(self) -> HealthStub:
        return self._open()[1]

    def _open(self) -> tuple[Any, HealthStub]:
        """Returns the stubs of a channel. The first call opens the channel; the first call in a forked child
        opens another one."""
        forks.check()
        if self._closed:
            raise ValueError(f"the client of {self.target} is closed")
        with self._lock:
            if self._channel is None or not forks.is_own(self._opened_in):
                channel = forks.guarded(connect(self._endpoint))
                # Made now, since gRPC crashes if a stub is made for a closed channel.
                stub = self._stub_type(channel) if self._stub_type else None
                self._stubs = stub, HealthStub(channel)
                self._channel, self._opened_in = channel, forks.generation()
            return self._stubs

    def wait_until_serving(self, timeout: float | None = 60.0) -> None:
        """Returns once the service reports SERVING, which it does when its weights are loaded.

        Raises:
          DeadlineExceededError: the service did not report SERVING within `timeout` seconds; the message has
            its last answer.
        """
        wait = ServingWait(self.target, timeout)
        while not wait.is_over():
            self._await_connection(wait.connection_s())
            try:
                response = self._health.Check(HealthCheckRequest(), timeout=wait.check_s())
                if wait.is_serving(response):
                    self._reachability.found()
                    return
            except grpc.RpcError as error:
                wait.note_failure(error)
            self._pause(wait.pause_s())
        raise wait.error()

    def close(self) -> None:
        """Cancels the calls in flight and closes the connection."""
        self._closed = True
        self._closing.set()
        if self._asynchronous is not None and self._asynchronous._is_open():
            background.run(self._asynchronous.close())
        if self._channel is not None and forks.is_own(self._opened_in):
            self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _unary(self, method: str, request, timeout: float | None):
        """Returns the response to `request`. An iterator of requests is sent only once, without a second
        try."""
        call = getattr(self._stub, method)

        def once(left: float | None):
            with self._connection(left) as left:
                return call(request, timeout=left)

        if self._wait_if_full and isinstance(request, Message):
            return retried(once, timeout, self._pause)
        return once(timeout)

    def _upload(self, method: str, requests: Iterable, timeout: float | None, accepted: str | None = None):
        """Returns the response to `requests`. With a metadata key `accepted`, they are made on the caller's
        thread, a few ahead of what was sent; the second one once the service has accepted the first one by
        initial metadata with this key. There a request None means that there is nothing to send yet."""
        if accepted is None:
            return self._unary(method, iter(requests), timeout)
        call = getattr(self._stub, method)
        with self._connection(timeout) as left:
            queue = Queue(maxsize=4)
            response = call.future(iter(queue.get, None), timeout=left)
            has_accepted = False
            try:
                for request in requests:
                    if request is None and not response.done():
                        continue  # nothing to send yet
                    if request is None or not _put(queue, request, response):
                        break  # the service has answered, so it takes no more
                    if not has_accepted and not accepts(response.initial_metadata(), accepted):
                        break  # the service has refused the begin
                    has_accepted = True
                else:
                    _put(queue, None, response)
                return response.result()
            except grpc.FutureCancelledError:
                raise self._closed_error() from None
            finally:
                response.cancel()
                with contextlib.suppress(Empty):  # after this no thread waits for the queue
                    while True:
                        queue.get_nowait()
                queue.put(None)

    def _stream(
        self,
        method: str,
        request,
        timeout: float | None,
        convert: Callable[..., Iterable[_Item]],
        waits: bool = True,
    ) -> Iterator[_Item]:
        """Yields what `convert` makes of each response. Closing the iterator early cancels the call. waits:
        try again after a refusal that says when to; False raises every refusal."""
        call = getattr(self._stub, method)
        return self._responses(call, request, checked_timeout(timeout), convert, waits)

    def _responses(self, call, request, timeout: float | None, convert, waits: bool) -> Iterator[Any]:
        deadline, begun = Deadline(timeout), False
        while True:
            try:
                with self._connection(deadline.left_s()) as left:
                    responses, opened_in = forks.guarded(call(request, timeout=left)), forks.generation()
                    try:
                        for response in responses:
                            begun = True
                            yield from convert(response)
                        return
                    finally:
                        if forks.is_own(opened_in):
                            responses.cancel()
            except ResourceExhaustedError as error:
                if begun or not (waits and self._wait_if_full):
                    raise
                seconds = pause_s(error, deadline)
            self._pause(seconds)

    def _whole(self, items: Iterable[_Item], assemble: Callable[[Iterable[_Item]], _Result]) -> _Result:
        """Returns what `assemble` makes of all items of a stream."""
        return assemble(items)

    def _at_once(self, kind: type, work: Callable[[Any], Coroutine[Any, Any, _Result]]) -> _Result:
        """Returns the result of `work`, which gets an asyncio client with the same arguments as this
        client."""
        forks.check()
        with self._lock:
            if self._closed:
                raise ValueError(f"the client of {self.target} is closed")
            if self._asynchronous is None:
                self._asynchronous = kind(
                    *self._made_of[:2], wait_if_full=self._wait_if_full, **self._made_of[3]
                )
        return background.run(work(self._asynchronous))

    def _pause(self, seconds: float) -> None:
        """Waits for `seconds`. Raises CancelledError if the client is closed meanwhile."""
        if self._closing.wait(seconds):
            raise self._closed_error()

    @contextlib.contextmanager
    def _connection(self, timeout: float | None) -> Iterator[float | None]:
        """Yields the rest of `timeout` that is left for a call, and raises its failure as a class of
        isobit.errors."""
        deadline = Deadline(timeout)
        forks.check()
        if wait_s := self._reachability.wait_s(deadline.left_s()):
            self._await_connection(wait_s)
        with self._reachability.of_call():
            yield deadline.left_s()

    def _await_connection(self, timeout: float) -> None:
        """Returns once connected, or after `timeout` seconds.

        While every call fails at once, gRPC polls the channel only every 5 s and notices a new connection
        late. A call that waits for a connection makes gRPC poll it. (So does channel_ready_future, but on a
        thread that lives on for a while, and prints an error if the channel is closed meanwhile.)
        """
        check = self._health.Check
        with contextlib.suppress(grpc.RpcError):
            check(HealthCheckRequest(), timeout=timeout, wait_for_ready=True)
