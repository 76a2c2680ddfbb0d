"""Worker processes of a gateway, and their listening sockets.

If there is one process, it listens itself. If there are several, each has a socket of its own at the same
port, and the kernel distributes connections among them. The first process then holds the sockets, restarts a
worker that has died, and passes signals on.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from isobit.gateway.server import listen

# This variable names the descriptor of a memory file with the notes that all workers and listeners share.
NOTES = "ISOBIT_GATEWAY_NOTES_FD"
_LOG = logging.getLogger("isobit.gateway")


def inherited(numbers: str) -> tuple[socket.socket, socket.socket | None, socket.socket]:
    """Returns the sockets that Workers passed to this worker process. The last one leads to the process that
    started it: the worker sends a byte to it when it serves, and it is closed when that process has ended."""
    *listeners, control = (socket.socket(fileno=int(number)) for number in numbers.split(","))
    return listeners[0], listeners[1] if len(listeners) > 1 else None, control


def share_notes() -> None:
    """Makes the file that NOTES names, with an empty JSON object, unless the process that started this one
    has made it."""
    if NOTES not in os.environ:
        descriptor = os.memfd_create("isobit-gateway-notes")
        os.pwrite(descriptor, b"{}", 0)
        os.environ[NOTES] = str(descriptor)


class Sockets:
    """The listening sockets: one at the port for each worker, and likewise at the open port if there is
    one."""

    def __init__(self, host: str, port: int, open_port: int | None, workers: int):
        """Opens the sockets.

        Raises:
          ValueError: another process listens at a port.
        """
        self._main = _several(host, port, workers)
        self._open = [] if open_port is None else _several("127.0.0.1", open_port, workers)

    @property
    def address(self) -> str:
        places = [self._main[0].getsockname(), *(s.getsockname() for s in self._open[:1])]
        return " and ".join(f"{place[0]}:{place[1]}" for place in places)

    def of(self, worker: int) -> tuple[socket.socket, socket.socket | None]:
        return self._main[worker], self._open[worker] if self._open else None

    def tell(self, path: Path | None) -> None:
        """Writes the port numbers to the file."""
        if path is None:
            return
        if self._open:
            _write_whole(path.with_name(f"{path.name}.open"), self._open[0].getsockname()[1])
        _write_whole(path, self._main[0].getsockname()[1])


def _several(host: str, port: int, count: int) -> list[socket.socket]:
    """Returns `count` sockets at one port.

    Raises:
      ValueError: another process listens there.
    """
    try:
        with socket.create_server(
            (host, port)
        ):  # without SO_REUSEPORT, so this succeeds only if the port is free
            pass
        first = listen(host, port)
    except OSError as error:
        raise ValueError(f"cannot listen at {host}:{port}: {error}") from error
    return [first, *(listen(host, first.getsockname()[1]) for _ in range(count - 1))]


def _write_whole(path: Path, number: int) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(f"{number}\n")
    part.replace(path)


class Workers:
    """The worker processes."""

    def __init__(self, words: list[str], sockets: Sockets, count: int, port_file: Path | None):
        """`words`: the command line of each worker."""
        self._words = words
        self._sockets = sockets
        self._count = count
        self._port_file = port_file
        self._running: dict[int, tuple[subprocess.Popen, socket.socket]] = {}
        self._signal: int | None = None

    def run(self) -> int:
        """Runs the workers. Returns the exit status once all have ended."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        for worker in range(self._count):
            self._start(worker)
        self._sockets.tell(self._port_file)
        status = 0
        while self._running:
            pid, raw = os.wait()
            ended = os.waitstatus_to_exitcode(raw)
            for worker, (process, control) in list(self._running.items()):
                if process.pid == pid:
                    process.returncode = ended
                    del self._running[worker]
                    status = status or self._after(worker, ended, control)
        return status

    def _after(self, worker: int, ended: int, control: socket.socket) -> int:
        """Handles the end of a worker. Returns the exit status for the whole gateway that follows from it."""
        with control:
            has_served = bool(control.recv(1))
        if self._signal is not None:
            # It is no error if a signal ends a worker that has not begun to serve.
            return 0 if ended == -self._signal and not has_served else abs(ended)
        if has_served:
            _LOG.error("worker %d died with status %d: starting it again", worker, ended)
            self._start(worker)
            return 0
        _LOG.error("worker %d ended with status %d before it served", worker, ended)
        self._pass_on(signal.SIGTERM, None)
        return abs(ended) or 1

    def _start(self, worker: int) -> None:
        control, of_worker = socket.socketpair()
        own = [*(listener for listener in self._sockets.of(worker) if listener is not None), of_worker]
        numbers = [listener.fileno() for listener in own]
        with of_worker:
            process = subprocess.Popen(
                [sys.executable, "-m", "isobit.gateway", *self._words,
                 f"--worker_sockets={','.join(map(str, numbers))}"],
                pass_fds=[*numbers, int(os.environ[NOTES])],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C reaches only this process, which passes it on
            )  # fmt: skip
        self._running[worker] = process, control
        if self._signal is not None:  # a signal came meanwhile
            process.send_signal(self._signal)

    def _pass_on(self, number: int, _frame) -> None:
        self._signal = number
        for process, _ in list(self._running.values()):
            process.send_signal(number)
