"""For tests: the trainer's side of weights by broadcast, without torch and without NCCL.

A StoreServer speaks the protocol of torch's TCPStore and holds a group's id in the form in which vLLM's
trainer stores it. A TcpGroup is rank 0 of a group of TCP connections, which a service on CPUs joins in place
of an NCCL group (docs/API.md, "Weights by broadcast").
"""

import contextlib
import ctypes
import pickle
import socket
import struct
import sys
import threading
import types
from collections.abc import Iterable

ID_BYTES = 128
_MODULE = "vllm.distributed.device_communicators.pynccl_wrapper"
_VALIDATE, _SET, _GET, _ADD, _CHECK, _WAIT, _PING = 0, 1, 3, 4, 5, 6, 13
_MAGIC = 0x3C85F7CE


class ncclUniqueId(ctypes.Structure):  # vLLM's class name, which is in its pickle
    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


def pickled_id(unique_id: bytes, protocol: int | None = None) -> bytes:
    """Returns what vLLM's trainer puts into its store. Python pickles only classes that it can import, so
    this makes stand-ins for vLLM's module and its parent packages meanwhile, unless they exist."""
    if _MODULE in sys.modules:
        return pickle.dumps(sys.modules[_MODULE].ncclUniqueId.from_buffer_copy(unique_id), protocol)
    parts = _MODULE.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    played = {name: types.ModuleType(name) for name in names if name not in sys.modules}
    played[_MODULE].ncclUniqueId = ncclUniqueId
    ncclUniqueId.__module__ = _MODULE
    sys.modules.update(played)
    try:
        return pickle.dumps(ncclUniqueId.from_buffer_copy(unique_id), protocol)
    finally:
        for name in played:
            del sys.modules[name]


class _Listener:
    """Serves connections on a loopback port, each in a thread, until it is closed."""

    def __init__(self):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._connections: list[socket.socket] = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self) -> None:
        for one in (self._socket, *self._connections):
            with contextlib.suppress(OSError):  # not connected, or closed by the other side
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def _accept(self) -> socket.socket:
        connection, _ = self._socket.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connections.append(connection)
        return connection


def _read(connection: socket.socket, count: int) -> bytes:
    found = b""
    while len(found) < count:
        part = connection.recv(count - len(found))
        if not part:
            raise ConnectionError(f"the other side closed, {count - len(found)} bytes before the end")
        found += part
    return found


class StoreServer(_Listener):
    """A store with `values`. Clients can add values."""

    def __init__(self, values: dict[bytes, bytes] | None = None):
        super().__init__()
        self.values = dict(values or {})
        self.errors: list[str] = []  # unknown queries, and clients that did not validate themselves
        self._changed = threading.Condition()
        threading.Thread(target=self._serve, daemon=True).start()

    def set(self, key: bytes, value: bytes) -> None:
        with self._changed:
            self.values[key] = value
            self._changed.notify_all()

    def put_id(self, unique_id: bytes, protocol: int | None = None) -> None:
        """Stores the id as the first object that rank 0 broadcasts."""
        self.set(b"/broadcast_from/0/0", pickled_id(unique_id, protocol))

    def wait_workers(self, count: int, timeout: float = 30.0) -> None:
        """Waits until this many workers have come, this process included. A trainer's store returns at that
        point."""
        with self._changed:
            if not self._changed.wait_for(lambda: int(self.values.get(b"init/", b"0")) + 1 >= count, timeout):
                raise TimeoutError(f"{self.values.get(b'init/')} workers came, expected {count}")

    def _serve(self) -> None:
        while True:
            try:
                connection = self._accept()
            except OSError:
                return  # closed
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            if _read(connection, 5) != struct.pack("<BI", _VALIDATE, _MAGIC):
                self.errors.append("a client did not validate itself")
                connection.close()
                return
            while True:
                self._query(connection, _read(connection, 1)[0])
        except OSError:
            pass  # the client has gone

    def _query(self, connection: socket.socket, query: int) -> None:
        if query == _PING:
            connection.sendall(_read(connection, 4))
        elif query == _SET:
            key, value = self._text(connection), self._text(connection)
            self.set(key, value)
        elif query == _GET:
            value = self.values[self._text(connection)]
            connection.sendall(struct.pack("<Q", len(value)) + value)
        elif query == _ADD:
            key, delta = self._text(connection), struct.unpack("<q", _read(connection, 8))[0]
            with self._changed:
                total = int(self.values.get(key, b"0")) + delta
                self.values[key] = str(total).encode()
                self._changed.notify_all()
            connection.sendall(struct.pack("<q", total))
        elif query in (_CHECK, _WAIT):
            count = struct.unpack("<Q", _read(connection, 8))[0]
            keys = {self._text(connection) for _ in range(count)}
            with self._changed:
                if query == _WAIT:
                    self._changed.wait_for(lambda: keys <= self.values.keys())
                missing = not keys <= self.values.keys()
            connection.sendall(bytes([missing]))
        else:
            self.errors.append(f"query {query}")
            connection.close()

    @staticmethod
    def _text(connection: socket.socket) -> bytes:
        return _read(connection, struct.unpack("<Q", _read(connection, 8))[0])


class TcpGroup(_Listener):
    """Rank 0 of a group of `world_size` ranks."""

    def __init__(self, world_size: int = 2):
        super().__init__()
        self.world_size = world_size
        self.unique_id = f"isobit-tcp 127.0.0.1:{self.port}".encode().ljust(ID_BYTES, b"\0")

    def join(self) -> None:
        """Waits until all ranks have joined."""
        ranks = set()
        while len(self._connections) < self.world_size - 1:
            hello = _read(self._accept(), ID_BYTES + 8)
            rank, size = struct.unpack("<II", hello[ID_BYTES:])
            if hello[:ID_BYTES] != self.unique_id or size != self.world_size or rank in ranks:
                raise ConnectionError(f"a rank says that it is {rank} of {size}")
            ranks.add(rank)
        for connection in self._connections:
            connection.sendall(b"\1")

    def broadcast(self, data: bytes | memoryview) -> None:
        for connection in self._connections:
            connection.sendall(struct.pack("<Q", len(data)))
            connection.sendall(data)

    def broadcast_packed(self, tensors: Iterable[bytes], buffer_size_bytes: int) -> None:
        """Broadcasts as vLLM's packed_nccl_broadcast_producer does: a broadcast ends with the tensor that
        makes it longer than the size."""
        parts: list[bytes] = []
        for tensor in tensors:
            parts.append(tensor)
            if sum(map(len, parts)) > buffer_size_bytes:
                self.broadcast(b"".join(parts))
                parts = []
        if parts:
            self.broadcast(b"".join(parts))

    def broadcast_each(self, tensors: Iterable[bytes]) -> None:
        for tensor in tensors:
            self.broadcast(tensor)
