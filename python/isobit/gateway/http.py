"""Requests and answers of the gateway, above ASGI: bounded bodies, answers as JSON and as events, and the end
of a request whose client disconnects."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any

import msgspec
from starlette.datastructures import QueryParams
from starlette.types import Message, Receive, Scope, Send

from isobit.gateway.errors import ErrorBody, HttpError, as_http, retry_after

_JSON = b"application/json"
_DONE = b"data: [DONE]\n\n"
_LINGER_S = 2.0
_GATHER_BYTES = 64 * 1024  # pieces of a long answer are sent together, up to this size

encode = msgspec.json.Encoder().encode


class Answer:
    """An answer that is complete: bytes, or a value that becomes JSON."""

    def __init__(
        self,
        content: Any = b"",
        status: int = 200,
        headers: Mapping[str, str] | None = None,
        media_type: bytes = _JSON,
    ):
        self.status = status
        self._body = content if isinstance(content, bytes) else encode(content)
        self._headers = _head(media_type if self._body else None, headers)
        self._headers.append((b"content-length", str(len(self._body)).encode()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._body})


class LastAnswer(Answer):
    """An answer to a request whose body was not read to its end. The connection is closed after it.

    If the connection were closed at once, a client that still sends would get a reset, and might lose the
    answer. So the rest of the body is read and dropped for a while first.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self._headers})
        await send({"type": "http.response.body", "body": self._body, "more_body": True})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while (await receive()).get("more_body"):
                    pass
        await send({"type": "http.response.body"})


class LongAnswer:
    """A JSON answer that is written in pieces, so that it is never in memory as a whole."""

    status = 200

    def __init__(self, pieces: Iterable[bytes], headers: Mapping[str, str] | None = None):
        self._pieces = pieces
        self._headers = _head(_JSON, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gathered, size, begun = [], 0, False
        for piece in self._pieces:
            gathered.append(piece)
            size += len(piece)
            if size < _GATHER_BYTES:
                continue
            if not begun:
                await send({"type": "http.response.start", "status": 200, "headers": self._headers})
                begun = True
            await send({"type": "http.response.body", "body": b"".join(gathered), "more_body": True})
            gathered, size = [], 0
            await asyncio.sleep(0)  # so that a long answer does not delay others
        body = b"".join(gathered)
        if not begun:
            headers = [*self._headers, (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Events:
    """An answer of server-sent events. Its status is 200 once the first event is there. An error before that
    has a status of its own; a later one becomes an event with `error`."""

    status = 200

    def __init__(
        self,
        events: AsyncGenerator[Any, None],
        errors: ErrorBody,
        done: bytes = _DONE,
        headers: Mapping[str, str] | None = None,
    ):
        """Events are bytes, or values that become JSON. `done` is sent after the last one."""
        self._events = events
        self._errors = errors
        self._done = done
        self._head = _head(
            b"text/event-stream; charset=utf-8", {"cache-control": "no-cache"} | dict(headers or {})
        )
        self._first: list[Any] = []

    async def begin(self) -> None:
        """Waits for the first event. Raises the exception that making it raises."""
        with contextlib.suppress(StopAsyncIteration):
            self._first.append(await anext(self._events))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self._head})
            try:
                for event in self._first:
                    await send({"type": "http.response.body", "body": event_line(event), "more_body": True})
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event_line(event), "more_body": True})
            except Exception as error:
                line = event_line(self._errors(as_http(error)))
                await send({"type": "http.response.body", "body": line, "more_body": True})
            await send({"type": "http.response.body", "body": self._done})
        finally:
            await self._events.aclose()


def event_line(event: Any) -> bytes:
    return b"data: " + (event if isinstance(event, bytes) else encode(event)) + b"\n\n"


AnyAnswer = Answer | LongAnswer | Events


class BodyBudget:
    """Bounds the bytes of all request bodies that are held."""

    def __init__(self, limit: int):
        self._limit = limit
        self.used = 0

    def take(self, size: int) -> None:
        """Takes `size` bytes of the budget.

        Raises:
          HttpError: 429: there is no room now.
        """
        if self.used + size > self._limit:
            raise HttpError(
                429, f"the bodies held now have {self.used} bytes, expected at most {self._limit}", None,
                retry_after(1000),
            )  # fmt: skip
        self.used += size

    def give_back(self, size: int) -> None:
        self.used -= size


class Call:
    """One request, as a handler gets it."""

    def __init__(self, scope: Scope, body: bytes, token: str | None):
        self.scope = scope
        self.body = body
        self.token = token  # the caller's bearer token
        self.headers: dict[str, str] = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }

    @property
    def query(self) -> QueryParams:
        return QueryParams(self.scope["query_string"])

    @property
    def path_params(self) -> dict[str, Any]:
        return self.scope.get("path_params", {})

    def drop_body(self) -> int:
        """Drops the body, since a stream may last long. Returns the body's length."""
        size, self.body = len(self.body), b""
        return size

    def object(self) -> dict[str, Any]:
        """The JSON object in the body, without fields that are null; for an empty body, an empty object."""
        from isobit.gateway.fields import object_of

        return object_of(self.body)


Handler = Callable[[Call], Awaitable[AnyAnswer]]


async def read_body(
    receive: Receive, headers: list[tuple[bytes, bytes]], limit: int, timeout_s: float, budget: BodyBudget
) -> bytes:
    """Reads the body of a request. The caller must give its bytes back to `budget`.

    Raises:
      HttpError: 408: it did not arrive in time. 413: it is longer than `limit`. 415: it is compressed. 429:
        there is no room now.
      ClientGone: the client disconnected.
    """
    for name, value in headers:
        if name == b"content-length" and value.isdigit() and int(value) > limit:
            raise _too_long(limit)
        if name == b"content-encoding" and value.lower() != b"identity":
            raise HttpError(415, "content-encoding: expected a body that is not compressed")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                part = message.get("body", b"")
                if size + len(part) > limit:
                    raise _too_long(limit)
                budget.take(len(part))
                size += len(part)
                parts.append(part)
                if not message.get("more_body"):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
    except TimeoutError:
        budget.give_back(size)
        raise HttpError(408, f"the body did not arrive within {timeout_s:g} s", None, _CLOSE) from None
    except BaseException:
        budget.give_back(size)
        raise


_CLOSE = {"connection": "close"}


def _too_long(limit: int) -> HttpError:
    return HttpError(413, f"the body is longer than {limit} bytes", None, _CLOSE)


class ClientGone(Exception):
    """The client has closed its connection."""


@contextlib.asynccontextmanager
async def ends_with_client(receive: Receive, is_done: Callable[[], bool]) -> AsyncIterator[None]:
    """Cancels the code in the block when the client disconnects, and raises ClientGone."""
    task, gone = asyncio.current_task(), False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        if not is_done():
            gone = True
            task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
        raise ClientGone from None
    finally:
        watcher.cancel()


class Sender:
    """A wrapper of `send` that knows whether the answer has begun and ended."""

    def __init__(self, send: Send):
        self._send = send
        self.begun = False
        self.ended = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
        elif not message.get("more_body"):
            self.ended = True
        await self._send(message)


def error_answer(error: HttpError, errors: ErrorBody) -> Answer:
    kind = LastAnswer if error.headers.get("connection") == "close" else Answer
    return kind(errors(error), error.status, error.headers)


def _head(media_type: bytes | None, headers: Mapping[str, str] | None) -> list[tuple[bytes, bytes]]:
    head = [(b"content-type", media_type)] if media_type else []
    return head + [
        (name.encode(), value.encode("latin-1", "replace")) for name, value in (headers or {}).items()
    ]
