"""An asyncio connection to one service: health, calls, closing. It knows no message of isobit."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Iterable, Iterator
from typing import Any, Self, TypeVar, Unpack

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from isobit.connection import OPTIONS, Reachability, ServingWait, accepts
from isobit.credentials import Security, endpoint
from isobit.errors import CancelledError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_COULD_NOT_WRITE = "Internal error from Core"


async def in_threads(items: Iterable[_Item]) -> AsyncGenerator[_Item, None]:
    """The items, each of which is made in a thread, so that the event loop goes on. A None among them says
    that there is nothing yet."""
    iterator, end = iter(items), object()
    while (item := await asyncio.to_thread(next, iterator, end)) is not end:
        if item is not None:
            yield item


@contextlib.contextmanager
def _true_status(call: grpc.aio.Call) -> Iterator[None]:
    """Raises the status that the service gave `call`. If a request could not be written because the call had
    ended, grpc.aio puts one of its own in its place (https://github.com/grpc/grpc/issues/36066)."""
    given = []

    def note(call: grpc.aio.Call) -> None:
        code, details, trailing = (_now(of()) for of in (call.code, call.details, call.trailing_metadata))
        given.append(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details))

    call.add_done_callback(note)  # at each status
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.details() == _COULD_NOT_WRITE and given:
            raise given[0] from None
        raise


def _now(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("expected a call that has ended")


class ServiceClient:
    """Base of the three clients. Use it in an `async with` statement, or await close().

    Connections, timeouts and errors are those of isobit.channel.ServiceClient. Any number of tasks of one
    event loop may share a client; another event loop needs another client.
    """

    _stub_type: Callable[[grpc.aio.Channel], Any]

    def __init__(
        self, target: str, credentials: grpc.ChannelCredentials | None = None, **security: Unpack[Security]
    ):
        """Connects lazily: it needs no running event loop, and nothing is sent before the first call.

        Args:
          target: host:port.
          credentials: a gRPC object, in place of the TLS arguments.
          **security: TLS and bearer tokens; see Security. Without any of them, plain text.
        """
        self.target = target
        self._endpoint = endpoint(target, OPTIONS, credentials, security)
        self._reachability = Reachability()
        self._loop: asyncio.AbstractEventLoop | None = None  # that of the first call
        self._calls: set[grpc.aio.Call] = set()  # in flight
        self._closed = False

    async def wait_until_serving(self, timeout: float = 60.0) -> None:
        """Returns once the service reports SERVING, which it does when its weights are loaded.

        Raises:
          DeadlineExceededError: it did not within `timeout` seconds; the message has the last answer.
        """
        self._open()
        wait = ServingWait(self.target, timeout)
        while wait.left_s() > 0:
            await self._await_connection(wait.connection_s())
            call = self._health.Check(
                health_pb2.HealthCheckRequest(), timeout=wait.check_s(), metadata=self._metadata()
            )
            try:
                with self._in_flight(call):
                    if wait.is_serving(await call):
                        self._reachability.found()
                        return
            except grpc.RpcError as error:
                wait.note_failure(error)
            await asyncio.sleep(wait.pause_s())
        raise wait.error()

    async def close(self) -> None:
        """Closes the connection. Calls in flight are cancelled, and raise isobit.errors.CancelledError."""
        if self._loop is None:  # no call has opened a channel
            self._closed = True
            return
        self._check_loop()
        self._closed = True
        for call in list(self._calls):
            call.cancel()
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_) -> None:
        await self.close()

    async def _unary(
        self,
        method: str,
        request,
        timeout: float,
        on_start: Callable[[grpc.aio.Call], None] = lambda call: None,
    ):
        """The response to `request`, or to an asynchronous iterator of requests. on_start: gets the call,
        before any request is asked for."""
        call = await self._start(method, request, timeout)
        on_start(call)
        with self._reachability.of_call(), self._in_flight(call), _true_status(call):
            return await call

    async def _upload(
        self, method: str, requests: AsyncIterable, timeout: float, accepted: str | None = None
    ):
        """The response to `requests`. An exception that they raise ends the call, and is raised here.
        accepted: the second is made once the service has accepted the first, by initial metadata with this
        key."""
        raised, started = [], []

        async def watched() -> AsyncGenerator[Any, None]:
            has_accepted = accepted is None
            try:
                async for request in requests:
                    yield request
                    if not has_accepted and not accepts(await started[0].initial_metadata(), accepted):
                        await started[0].code()  # the service has refused them
                        return
                    has_accepted = True
            except Exception as error:
                raised.append(error)
                raise

        try:
            return await self._unary(method, watched(), timeout, started.append)
        except asyncio.CancelledError:
            # gRPC cancels a call whose requests fail, and would hide why.
            if raised and not asyncio.current_task().cancelling():
                raise raised[0] from None
            raise

    async def _stream(
        self, method: str, request, timeout: float | None, convert: Callable[..., Iterable[_Item]]
    ) -> AsyncGenerator[_Item, None]:
        """What `convert` makes of each response; a caller that closes the iterator cancels the call."""
        call = await self._start(method, request, timeout)
        with self._reachability.of_call(), self._in_flight(call):
            async for response in call:
                for item in convert(response):
                    yield item

    async def _whole(
        self, items: AsyncGenerator[_Item, None], assemble: Callable[[list[_Item]], _Result]
    ) -> _Result:
        """What `assemble` makes of all items of a stream."""
        return assemble([item async for item in items])

    async def _start(self, method: str, request, timeout: float | None) -> grpc.aio.Call:
        """Sends `request` with what is left of `timeout` when the connection is there."""
        self._open()
        start = time.monotonic()
        if wait_s := self._reachability.wait_s(timeout):
            await self._await_connection(wait_s)
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - start))
        return getattr(self._stub, method)(request, timeout=left, metadata=self._metadata())

    @contextlib.contextmanager
    def _in_flight(self, call: grpc.aio.Call) -> Iterator[None]:
        """Lets close() find `call`, and cancels it when the block ends before the call does."""
        self._calls.add(call)
        try:
            yield
        except asyncio.CancelledError:
            # gRPC raises it also for a call that close() cancelled. Nobody cancelled the task then.
            if self._closed and not asyncio.current_task().cancelling():
                raise self._closed_error() from None
            raise
        finally:
            self._calls.discard(call)
            call.cancel()

    async def _await_connection(self, timeout: float) -> None:
        """Returns once connected, or after `timeout` seconds."""
        # UsageError: the client was closed meanwhile.
        with contextlib.suppress(TimeoutError, grpc.aio.UsageError):
            async with asyncio.timeout(timeout):
                await self._channel.channel_ready()
        if self._closed:
            raise self._closed_error()

    def _open(self) -> None:
        """Opens the channel at the first call: gRPC ties it to the event loop that runs then."""
        if self._closed:
            raise ValueError(f"the client of {self.target} is closed")
        if self._loop is not None:
            return self._check_loop()
        self._loop = asyncio.get_running_loop()
        to = self._endpoint
        if to.credentials is None:
            self._channel = grpc.aio.insecure_channel(to.target, options=to.options)
        else:
            self._channel = grpc.aio.secure_channel(to.target, to.credentials, options=to.options)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._stub = self._stub_type(self._channel)

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                f"the client of {self.target} belongs to another event loop, that of its first call: expected"
                " one client for each event loop"
            )

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return self._endpoint.token.metadata() if self._endpoint.token else ()

    def _closed_error(self) -> CancelledError:
        return CancelledError(grpc.StatusCode.CANCELLED, f"the client of {self.target} was closed")
