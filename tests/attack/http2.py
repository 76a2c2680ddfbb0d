"""Just enough HTTP/2 to send what no gRPC library would send: hand-made frames on a plain socket."""

import select
import socket
import struct

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_INITIAL_WINDOW_SIZE = 4
_FRAME_BYTES = 16384
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

Headers = tuple[tuple[str, str], ...]  # name and value of each, in order


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def message(payload: bytes, compressed: bool = False) -> bytes:
    """`payload` with gRPC's five bytes before it."""
    return struct.pack(">BI", compressed, len(payload)) + payload


def _literal(text: str) -> bytes:
    """A string of HPACK, shorter than 127 bytes."""
    return bytes([len(text)]) + text.encode()


def _headers(path: str, encoding: str, more: Headers) -> bytes:
    fields = (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "test"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
        ("grpc-encoding", encoding),
    )
    return b"".join(b"\0" + _literal(name) + _literal(value) for name, value in (*fields, *more))


class Connection:
    """A connection whose settings have been exchanged. Use it in a `with` statement."""

    def __init__(self, target: str, timeout: float = 20.0):
        host, _, port = target.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self._next_stream = 1
        self._stream_window = 65535
        self._window = 65535  # of the connection
        self._windows: dict[int, int] = {}
        self.ended: set[int] = set()  # streams that the server has ended
        self.send(PREFACE + frame(SETTINGS, 0, 0))

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def open(self, path: str, encoding: str = "identity", more: Headers = ()) -> int:
        """Starts a call of the method at `path`, with `more` headers; returns its stream."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        self._windows[stream] = self._stream_window
        self.send(frame(HEADERS, _END_HEADERS, stream, _headers(path, encoding, more)))
        return stream

    def write(self, stream: int, data: bytes) -> None:
        """Sends `data`, the last of the stream, until the server has it all or ends the stream."""
        view = memoryview(data)
        while len(view) > 0:
            while (size := min(len(view), _FRAME_BYTES, self._window, self._windows[stream])) <= 0:
                self.read_frame()
                if stream in self.ended:
                    return
            self._window -= size
            self._windows[stream] -= size
            last = _END_STREAM if size == len(view) else 0
            self.send(frame(DATA, last, stream, bytes(view[:size])))
            view = view[size:]

    def await_end(self, stream: int) -> None:
        while stream not in self.ended:
            self.read_frame()

    def reset(self, stream: int) -> None:
        self.send(frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))

    def ping(self) -> None:
        """Waits until the server has seen everything sent so far."""
        self.send(frame(PING, 0, 0, b"attack!!"))
        while self.read_frame() != (PING, _ACK):
            pass

    def drain(self) -> None:
        """Reads what has arrived, so that the server can go on writing."""
        while self._received or select.select([self._socket], [], [], 0)[0]:
            self.read_frame()

    def read_frame(self) -> tuple[int, int]:
        """Reads and handles one frame; returns its type and flags. ConnectionError: the server has gone."""
        header = self._read(9)
        size = int.from_bytes(header[:3], "big")
        kind, flags, stream = struct.unpack(">BBI", header[3:])
        payload = self._read(size)
        if kind == SETTINGS and not flags & _ACK:
            for i in range(0, size, 6):
                name, value = struct.unpack(">HI", payload[i : i + 6])
                if name == _INITIAL_WINDOW_SIZE:
                    for opened in self._windows:
                        self._windows[opened] += value - self._stream_window
                    self._stream_window = value
            self.send(frame(SETTINGS, _ACK, 0))
        elif kind == PING and not flags & _ACK:
            self.send(frame(PING, _ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            increment = int.from_bytes(payload, "big")
            if stream == 0:
                self._window += increment
            elif stream in self._windows:
                self._windows[stream] += increment
        elif kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & _END_STREAM):
            self.ended.add(stream)
        return kind, flags

    def _read(self, size: int) -> bytes:
        while len(self._received) < size:
            more = self._socket.recv(1 << 16)
            if not more:
                raise ConnectionError("the server closed the connection")
            self._received += more
        taken, self._received = self._received[:size], self._received[size:]
        return taken

    def close(self) -> None:
        self._socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed `connection`, from which nobody else reads."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        pass
    return True
