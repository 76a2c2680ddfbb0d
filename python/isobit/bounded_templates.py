"""Renders chat templates in worker processes, so that no template can take more than half a second of
processor time or 320 MiB.

The workers (isobit.template_worker) are started when they are needed, render one text at a time each, and
live as long as this process. `render` is thread-safe.
"""

import atexit
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from isobit import template_worker

_MAX_WORKERS = 4  # at the same time; further threads wait for a worker
_MAX_ANSWER = 4 * template_worker.MAX_CHARACTERS + (16 << 20)  # bytes
# In wall-clock time, for machines that give the worker no processor time. Otherwise CPU_SECONDS ends it long
# before.
_TIMEOUT_S = 60.0
# Packages come from this process's own sys.path. The worker's folder must not be on it, since it has modules
# with names of the standard library.
_START = "import runpy, sys; sys.path[:] = sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"


class _Worker:
    """One process. Not thread-safe."""

    def __init__(self):
        if not sys.executable:
            raise RuntimeError("sys.executable is empty, expected the Python that renders chat templates")
        path = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _START, template_worker.__file__, *path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # Ctrl-C must not reach the worker
        )
        os.set_blocking(self._process.stdin.fileno(), False)
        os.set_blocking(self._process.stdout.fileno(), False)
        try:
            ready = self._exchange(b"")
        except BaseException:
            self.end()
            raise
        if ready is None:
            raise RuntimeError(
                f"the process that renders chat templates, {sys.executable}, ended at its start with status"
                f" {self.end()}"
            )

    def render(self, request: bytes) -> bytes | None:
        """Returns the answer, or None if the process has ended."""
        try:
            return self._exchange(len(request).to_bytes(8) + request)
        except TimeoutError as error:
            raise ValueError(f"the chat template was not rendered within {_TIMEOUT_S:g} s") from error

    def lives(self) -> bool:
        return self._process.poll() is None

    def end(self) -> int:
        """Ends the process at once; returns its status."""
        self._process.kill()
        self.let_go()
        return self._process.wait()

    def let_go(self) -> None:
        """Closes the pipes."""
        self._process.stdin.close()
        self._process.stdout.close()

    def _exchange(self, request: bytes) -> bytes | None:
        deadline = time.monotonic() + _TIMEOUT_S
        to, source = self._process.stdin.fileno(), self._process.stdout.fileno()
        poll = select.poll()
        poll.register(source, select.POLLIN)
        if request:
            poll.register(to, select.POLLOUT)
        unsent, answer, size = memoryview(request), bytearray(), None
        while size is None or len(answer) < size:
            events = dict(poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
            if not events:
                raise TimeoutError
            if to in events:
                try:
                    unsent = unsent[os.write(to, unsent) :]
                except BrokenPipeError:
                    return None
                if not unsent:
                    poll.unregister(to)
            if source in events:
                piece = os.read(source, 1 << 20)
                if not piece:
                    return None
                answer += piece
                if size is None and len(answer) >= 8:
                    size = 8 + int.from_bytes(answer[:8])
                    if size > _MAX_ANSWER:
                        return None
        return bytes(answer[8:])


class _Pool:
    """Workers that wait for work, and the number of those that may work at the same time."""

    def __init__(self):
        self.places = threading.Semaphore(_MAX_WORKERS)
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()

    def take(self) -> _Worker:
        with self._lock:
            worker = self._idle.pop() if self._idle else None
        if worker is not None and worker.lives():
            return worker
        if worker is not None:
            self.end(worker)
        worker = _Worker()
        self._all.add(worker)
        return worker

    def give_back(self, worker: _Worker) -> None:
        with self._lock:
            self._idle.append(worker)

    def end(self, worker: _Worker) -> int:
        """Ends `worker` and returns its status."""
        self._all.discard(worker)
        return worker.end()

    def end_all(self) -> None:
        while self._idle:
            self.end(self._idle.pop())

    def let_go(self) -> None:
        for worker in self._all:
            worker.let_go()


_pool = _Pool()
atexit.register(lambda: _pool.end_all())


def _begin_anew() -> None:
    """Runs in a forked child, where the workers and the lock still belong to the parent."""
    global _pool
    _pool.let_go()
    _pool = _Pool()


os.register_at_fork(after_in_child=_begin_anew)


def render(template: str, variables: Mapping[str, Any]) -> tuple[str, list[tuple[int, int]]]:
    """Returns the text that the Jinja `template` gives, and the spans of characters between its {% generation
    %} tags.

    Raises:
      TypeError: the variables are not plain data, so they cannot be passed to another process.
      ValueError: the template is not valid or fails, or it takes more time, memory or text than is allowed.
      RuntimeError: no worker can be started.
    """
    try:
        request = pickle.dumps((template, _plain(variables)), protocol=5)
    except RecursionError as error:
        raise ValueError("the variables of the chat template are nested too deeply") from error
    except Exception as error:
        raise TypeError(f"the variables of the chat template: expected plain data: {error}") from error
    pool = _pool
    with pool.places:
        worker = pool.take()
        try:
            answer = worker.render(request)
        except BaseException:  # also at an interrupt, since the worker's answer is still to come
            pool.end(worker)
            raise
        if answer is None:
            raise ValueError(_cause_of_end(pool.end(worker)))
        pool.give_back(worker)
    head, text = answer.split(b"\n", 1)
    head = json.loads(head)
    if "spans" in head:
        return text.decode("utf-8", "surrogatepass"), [tuple(span) for span in head["spans"]]
    if "unread" in head:
        raise TypeError(f"the variables of the chat template: expected plain data: {head['unread']}")
    raise ValueError(head["refused"])


def _cause_of_end(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"the chat template takes more than {template_worker.CPU_SECONDS:g} s of processor time"
    if status == template_worker.OUT_OF_MEMORY:
        return f"the chat template takes more than {template_worker.MEMORY_BYTES >> 20} MiB of memory"
    return f"the chat template ended the process that renders it, with status {status}"


def _plain(value: Any) -> Any:
    """Returns `value` with all mappings as dicts, since another process may not know their type."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value
