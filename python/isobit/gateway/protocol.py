"""uvicorn's HTTP protocol with limits that it lacks: on connections, on the head of a request, and on the
time that a client takes to send a request or to read an answer."""

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from isobit.gateway.errors import HttpError, openai_body
from isobit.gateway.settings import Settings

_REASONS = {
    400: b"Bad Request",
    408: b"Request Timeout",
    431: b"Request Header Fields Too Large",
    503: b"Service Unavailable",
}


def protocol_for(settings: Settings) -> type[HttpToolsProtocol]:
    """Returns the class for a gateway's connections."""

    class Protocol(_BoundedProtocol):
        bounds = settings

    return Protocol


class _BoundedProtocol(HttpToolsProtocol):
    bounds: Settings
    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _in_head = True  # the next bytes belong to a head
    _head_bytes = 0  # bytes of this head so far
    _excess_bytes = 0  # bytes of chunk headers and trailers, beyond those that the body's bytes justify

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.bounds.max_connections:
            self._refuse(503, f"{self.bounds.max_connections} connections are open, which is the limit")
            return
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_timer is None:
                self._begin_head()
        else:
            self._excess_bytes += len(data)
        super().data_received(data)
        if max(self._in_head and self._head_bytes, self._excess_bytes) > self.bounds.max_header_bytes:
            self._refuse(431, f"the head of the request has more than {self.bounds.max_header_bytes} bytes")

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        # A chunk of one byte needs five more.
        self._excess_bytes -= 8 * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True
        self._excess_bytes = 0

    def _should_upgrade(self) -> bool:
        return True  # so that the base class calls handle_websocket_upgrade

    def handle_websocket_upgrade(self) -> None:
        self._refuse(400, "upgrade: the gateway speaks only HTTP/1.1")

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.bounds.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    def _begin_head(self) -> None:
        self._head_timer = self.loop.call_later(self.bounds.header_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._refuse(408, f"the head of a request did not arrive within {self.bounds.header_timeout_s:g} s")

    def _refuse(self, status: int, message: str) -> None:
        """Answers without calling the application, and closes the connection."""
        self._stop_timers()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = json.dumps(openai_body(HttpError(status, message))).encode()
            self.transport.write(
                b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
                b"connection: close\r\n\r\n%s" % (status, _REASONS[status], len(body), body)
            )
        self.transport.close()

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._head_timer = self._write_timer = None
