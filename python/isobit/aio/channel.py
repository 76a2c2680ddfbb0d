"""An asyncio connection to one service: health, calls, closing. It does not know isobit's messages."""

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Coroutine, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, Self, TypeVar

import grpc
from google.protobuf.message import Message

from isobit import forks
from isobit.connection import Client, ServingWait, accepts
from isobit.errors import ResourceExhaustedError
from isobit.health import HealthCheckRequest, HealthStub
from isobit.retry import aretried, pause_s
from isobit.timeouts import Deadline, checked_timeout

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_COULD_NOT_WRITE = "Internal error from Core"


async def in_threads(items: Iterable[_Item]) -> AsyncGenerator[_Item, None]:
    """Yields the items. Each is made in a thread when it is needed, so that the event loop goes on. An item
    None means that there is nothing yet. No code waits for the thread: if the caller is interrupted while an
    item is made, the caller ends at once."""
    loop, end = asyncio.get_running_loop(), object()
    wanted: SimpleQueue[asyncio.Future | None] = SimpleQueue()

    def make() -> None:
        iterator = iter(items)
        while (answer := wanted.get()) is not None:
            try:
                outcome = next(iterator, end), None
            except BaseException as error:
                outcome = None, error
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(_settle, answer, *outcome)

    # A daemon, unlike those of asyncio.to_thread, whose end the loop and the interpreter wait for.
    threading.Thread(target=contextvars.copy_context().run, args=(make,), daemon=True).start()
    try:
        while True:
            wanted.put(answer := loop.create_future())
            if (item := await answer) is end:
                return
            if item is not None:
                yield item
    finally:
        wanted.put(None)


async def amap(
    make: Callable[[_Item], _Result], items: Iterable[_Item] | AsyncIterable[_Item]
) -> AsyncGenerator[_Result, None]:
    """Yields what `make` makes of each item."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield make(item)
    else:
        for item in items:
            yield make(item)


def _settle(answer: asyncio.Future, result: Any, error: BaseException | None) -> None:
    if answer.done():  # no caller waits any more
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)


@contextlib.contextmanager
def _quiet_reader(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Suppresses asyncio's log of two harmless errors while gRPC may bind itself to `loop`. gRPC wakes each
    of its loops for every event. One loop hands the event on, and raises RuntimeError if the loop of the
    event was closed; the others raise BlockingIOError."""
    add_reader = loop.add_reader

    def add_quiet_reader(file: Any, callback: Callable[..., Any], *arguments: Any) -> Any:
        def read(*arguments: Any) -> None:
            try:
                callback(*arguments)
            except BlockingIOError:
                pass
            except RuntimeError as error:
                if str(error) != "Event loop is closed":
                    raise

        return add_reader(file, read, *arguments)

    try:
        loop.add_reader = add_quiet_reader
    except AttributeError:  # a loop whose methods cannot be replaced
        yield
        return
    try:
        yield
    finally:
        del loop.add_reader


@contextlib.contextmanager
def _true_status(call: grpc.aio.Call) -> Iterator[None]:
    """Raises the status that the service gave `call`. If a request could not be written because the call had
    ended, grpc.aio replaces this status by one of its own (https://github.com/grpc/grpc/issues/36066)."""
    given = []

    def note(call: grpc.aio.Call) -> None:
        code, details, trailing = (_now(of()) for of in (call.code, call.details, call.trailing_metadata))
        given.append(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details))

    call.add_done_callback(note)  # called for each status
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.details() == _COULD_NOT_WRITE and given:
            raise given[0] from None
        raise


def _now(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of a coroutine that never has to wait."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("expected a call that has ended")


class ServiceClient(Client):
    """Base of the three clients. Use it in an `async with` statement, or await close().

    Connections, timeouts and errors are as for isobit.channel.ServiceClient. Any number of tasks of one event
    loop may share a client; another event loop needs another client.
    """

    _stub_type: Callable[[grpc.aio.Channel], Any]

    def _set_up(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop of the first call
        self._opened_in = forks.NEVER
        self._calls: set[grpc.aio.Call] = set()  # in flight

    async def wait_until_serving(self, timeout: float | None = 60.0) -> None:
        """Returns once the service reports SERVING, which it does when its weights are loaded.

        Raises:
          DeadlineExceededError: the service did not report SERVING within `timeout` seconds; the message has
            its last answer.
        """
        self._open()
        wait = ServingWait(self.target, timeout)
        while not wait.is_over():
            await self._await_connection(wait.connection_s())
            call = self._health.Check(HealthCheckRequest(), timeout=wait.check_s(), metadata=self._metadata())
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
        if not self._is_open():
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
        timeout: float | None,
        on_start: Callable[[grpc.aio.Call], None] = lambda call: None,
    ):
        """Returns the response to `request`. An asynchronous iterator of requests is sent only once, without
        a second try. on_start: called with the call before the first request is taken from the iterator."""

        async def once(left: float | None):
            call = await self._start(method, request, left)
            on_start(call)
            with self._reachability.of_call(), self._in_flight(call), _true_status(call):
                return await call

        if self._wait_if_full and isinstance(request, Message):
            return await aretried(once, timeout, self._pause)
        return await once(timeout)

    async def _upload(
        self, method: str, requests: AsyncIterable, timeout: float | None, accepted: str | None = None
    ):
        """Returns the response to `requests`. If they raise an exception, the call ends and raises it.
        accepted: a metadata key; the second request is made once the service has accepted the first one by
        initial metadata with this key."""
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

    def _stream(
        self,
        method: str,
        request,
        timeout: float | None,
        convert: Callable[..., Iterable[_Item]],
        waits: bool = True,
    ) -> AsyncGenerator[_Item, None]:
        """Yields what `convert` makes of each response. Closing the iterator cancels the call. waits: try
        again after a refusal that says when to; False raises every refusal."""
        return self._responses(method, request, checked_timeout(timeout), convert, waits)

    async def _responses(
        self, method: str, request, timeout: float | None, convert, waits: bool
    ) -> AsyncGenerator[Any, None]:
        deadline, begun = Deadline(timeout), False
        while True:
            try:
                call = await self._start(method, request, deadline.left_s())
                with self._reachability.of_call(), self._in_flight(call):
                    async for response in call:
                        begun = True
                        for item in convert(response):
                            yield item
                    return
            except ResourceExhaustedError as error:
                if begun or not (waits and self._wait_if_full):
                    raise
                seconds = pause_s(error, deadline)
            await self._pause(seconds)

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self._closed:
            raise self._closed_error()

    async def _whole(
        self, items: AsyncGenerator[_Item, None], assemble: Callable[[list[_Item]], _Result]
    ) -> _Result:
        """Returns what `assemble` makes of all items of a stream."""
        return assemble([item async for item in items])

    async def _start(self, method: str, request, timeout: float | None) -> grpc.aio.Call:
        """Waits for the connection, then sends `request` with the rest of `timeout`."""
        deadline = Deadline(timeout)
        self._open()
        if wait_s := self._reachability.wait_s(deadline.left_s()):
            await self._await_connection(wait_s)
        make = getattr(self._stub, method)
        return forks.guarded(make(request, timeout=deadline.left_s(), metadata=self._metadata()))

    @contextlib.contextmanager
    def _in_flight(self, call: grpc.aio.Call) -> Iterator[None]:
        """Lets close() find `call`. If the block ends before the call does, cancels the call."""
        self._calls.add(call)
        try:
            yield
        except asyncio.CancelledError:
            # gRPC raises this also for a call that close() cancelled. Then the task itself was not cancelled.
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
        """Opens the channel at the first call, since gRPC ties a channel to the event loop that runs then."""
        forks.check()
        if self._closed:
            raise ValueError(f"the client of {self.target} is closed")
        if self._is_open():
            return self._check_loop()
        self._loop, to = asyncio.get_running_loop(), self._endpoint
        with _quiet_reader(self._loop):
            if to.credentials is None:
                channel = grpc.aio.insecure_channel(to.target, options=to.options)
            else:
                channel = grpc.aio.secure_channel(to.target, to.credentials, options=to.options)
        self._channel, self._opened_in = forks.guarded(channel), forks.generation()
        self._health = HealthStub(channel)
        self._stub = self._stub_type(channel)

    def _is_open(self) -> bool:
        """Whether a call of this process has opened the channel."""
        return self._loop is not None and forks.is_own(self._opened_in)

    def _check_loop(self) -> None:
        if asyncio.get_running_loop() is not self._loop:
            raise RuntimeError(
                f"the client of {self.target} belongs to another event loop, that of its first call: expected"
                " one client for each event loop"
            )

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return self._endpoint.token.metadata() if self._endpoint.token else ()
