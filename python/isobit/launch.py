"""Runs the services as child processes, on free ports, with logs in files, and always stops them.

They end with this process, even if it is killed with SIGKILL: the kernel then sends them SIGTERM.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from isobit import binaries
from isobit.channel import ServiceClient
from isobit.errors import DeadlineExceededError

BINARIES = ("isobit-rollout", "isobit-scorer", "isobit-comparator", "isobit-model")

_START_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.02
_LOG_TAIL_LINES = 15
# Execs a command that gets SIGTERM when its parent (the first argument is its id) has ended. This runs in a
# separate interpreter, since preexec_fn is not safe with threads. The parent may have ended before prctl, so
# it is checked afterwards.
_END_WITH_PARENT = """
import os, signal, sys
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, which exec keeps
except (ImportError, AttributeError):
    pass  # no ctypes, or not Linux: the command then gets no signal
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


class ServiceError(Exception):
    """A binary is missing, or a service did not start or has ended; the message has the end of its log.

    `status`: the exit status of a service that ended, otherwise None.
    """

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


@dataclass(eq=False)
class Service:
    """One running service."""

    name: str
    process: subprocess.Popen
    log: Path
    port_file: Path
    target: str = ""  # host:port, once it listens

    def check_alive(self) -> None:
        """Checks that the process runs.

        Raises:
          ServiceError: it has ended.
        """
        if (status := self.process.poll()) is not None:
            tail = f"{self.log}:\n{self._log_tail()}"
            raise ServiceError(f"{self.name} ended with status {status}. {tail}", status)

    def _log_tail(self) -> str:
        lines = self.log.read_text("utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join(f"    {line}" for line in lines) or "    (empty)"


class Services:
    """Starts services, and stops all of them at the end of the `with` statement, whatever happened."""

    def __init__(
        self,
        bin_dir: Path | None,
        log_dir: Path,
        start_timeout_s: float = _START_TIMEOUT_S,
        launcher: Sequence[str] = (),
        stop_timeout_s: float | None = None,
        one_by_one: bool = False,
    ):
        """Prepares to start services.

        Args:
          bin_dir: the folder of the binaries; None: isobit.binaries finds them.
          log_dir: an existing folder for the logs.
          start_timeout_s: seconds that a service may take to listen.
          launcher: a command, such as prlimit, that execs the service in its own process.
          stop_timeout_s: seconds that services may take to end before they are killed.
          one_by_one: stop() waits for each service to end before it tells the next one, so that no service
            loses those that it calls.

        Raises:
          ServiceError: a binary is not in `bin_dir`.
        """
        if bin_dir is not None and (missing := [n for n in BINARIES if not (bin_dir / n).is_file()]):
            raise ServiceError(f"{bin_dir} does not have {', '.join(missing)}: build with `make build`")
        # Resolved, since a name without a slash would be searched on PATH.
        self._bin_dir = bin_dir.resolve() if bin_dir is not None else None
        self._log_dir = log_dir
        self._start_timeout_s = start_timeout_s
        self._launcher = launcher
        self._stop_timeout_s = _STOP_TIMEOUT_S if stop_timeout_s is None else stop_timeout_s
        self._one_by_one = one_by_one
        self._running: list[Service] = []
        self._bad_ends: list[str] = []

    @property
    def running(self) -> Sequence[Service]:
        """The services that were started and not stopped, in the order of their start."""
        return self._running

    def start(self, binary: str, name: str, flags: Sequence[str]) -> Service:
        """Starts `binary` and calls it `name`, also in its log file's name. Returns before it listens. If a
        flag is given twice, the later one counts."""
        path = self._bin_dir / binary if self._bin_dir is not None else binaries.path(binary)
        return self.start_command(name, [*self._launcher, str(path)], flags)

    def start_command(self, name: str, command: Sequence[str], flags: Sequence[str]) -> Service:
        """Like start(), for any command that has the flags --port and --port_file.

        If it is started in the main thread, it ends with this process. (The kernel signals the end of a
        thread: a service that a short-lived thread starts would end with that thread.)
        """
        log, port_file = self._log_dir / f"{name}.log", self._log_dir / f"{name}.port"
        port_file.unlink(missing_ok=True)
        command = [*command, "--port=0", f"--port_file={port_file}", *flags]
        if threading.current_thread() is threading.main_thread():
            command = ending_with_parent(command)
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A new session, so that Ctrl-C reaches only this process, which then stops the services in
                # order.
                start_new_session=True,
            )
        service = Service(name, process, log, port_file)
        self._running.append(service)
        return service

    def wait_listening(self, service: Service, host: str = "127.0.0.1") -> str:
        """Returns the host:port of `service` once it listens. `host`: the address to call it at, if it has a
        --host."""
        deadline = time.monotonic() + self._start_timeout_s
        # The service renames the file into place, so the file is always complete.
        while not service.port_file.is_file():
            service.check_alive()
            if time.monotonic() > deadline:
                raise ServiceError(f"{service.name} does not listen after {self._start_timeout_s:g} s")
            time.sleep(_POLL_S)
        service.target = f"{host}:{int(service.port_file.read_text())}"
        return service.target

    def wait_serving(self, service: Service, **security) -> None:
        """Returns once `service` listens and reports that it serves to a client with the arguments
        `security`."""
        target = self.wait_listening(service)
        deadline = time.monotonic() + self._start_timeout_s
        with ServiceClient(target, **security) as client:
            while True:
                try:
                    return client.wait_until_serving(timeout=1.0)
                except DeadlineExceededError as error:
                    service.check_alive()
                    if time.monotonic() > deadline:
                        raise ServiceError(f"{service.name}: {error.details}") from error

    @property
    def bad_ends(self) -> list[str]:
        """After stop(): one sentence for each service that did not exit with 0 after SIGTERM."""
        return self._bad_ends

    def check_alive(self) -> None:
        """Checks that all started services run.

        Raises:
          ServiceError: one has ended.
        """
        for service in self._running:
            service.check_alive()

    def stop(self) -> None:
        """Sends SIGTERM to all, the latest started first, and SIGKILL to those that do not end in time."""
        stopping = self._running[::-1]
        self._running = []
        try:
            for group in [[service] for service in stopping] if self._one_by_one else [stopping]:
                self._end(group)
        finally:
            # All are killed before the wait for the first one, since a second Ctrl-C may end that wait.
            left = [service for service in stopping if service.process.poll() is None]
            for service in left:
                service.process.kill()
            for service in left:
                service.process.wait()
            for service in stopping:
                service.port_file.unlink(missing_ok=True)

    def _end(self, group: Sequence[Service]) -> None:
        for service in group:
            if service.process.poll() is not None:
                self._bad_ends.append(f"{service.name} had ended with {service.process.returncode}")
            service.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + self._stop_timeout_s
        for service in group:
            self._await_end(service, deadline)

    def _await_end(self, service: Service, deadline: float) -> None:
        try:
            status = service.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._bad_ends.append(f"{service.name} did not end within {self._stop_timeout_s:g} s of SIGTERM")
            return
        if status != 0:
            self._bad_ends.append(f"{service.name} ended with status {status} after SIGTERM")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.stop()


@dataclass(frozen=True)
class Setting:
    """How to run a rollout and a scorer."""

    numerics: str
    tp_size: int
    shards: int


def start_rollout(services: Services, setting: Setting, model: Path, name: str, *flags: str) -> Service:
    own = [*_model_flags(model), f"--numerics={setting.numerics}", f"--tp_size={setting.tp_size}"]
    return services.start("isobit-rollout", name, [*own, *flags])


def start_scorer(services: Services, setting: Setting, model: Path, name: str, *flags: str) -> Service:
    own = [*_model_flags(model), f"--numerics={setting.numerics}", f"--shards={setting.shards}"]
    return services.start("isobit-scorer", name, [*own, *flags])


def start_comparator(services: Services, rollout: Service, scorer: Service, name: str) -> Service:
    """Waits until two services listen, and starts a comparator between them."""
    targets = [
        f"--rollout={services.wait_listening(rollout)}",
        f"--scorer={services.wait_listening(scorer)}",
    ]
    return services.start("isobit-comparator", name, targets)


def wait_all_serving(services: Services, trio: Sequence[Service]) -> None:
    for service in trio:
        services.wait_serving(service)


def ending_with_parent(command: Sequence[str]) -> list[str]:
    """Returns `command` wrapped so that it gets SIGTERM when the thread that starts it ends, or this process,
    however it ends."""
    return [sys.executable, "-ISc", _END_WITH_PARENT, str(os.getpid()), *command]


def run_model_tool(bin_dir: Path | None, *arguments: str) -> str:
    """Runs isobit-model and returns what it printed."""
    tool = binaries.path("isobit-model") if bin_dir is None else bin_dir.resolve() / "isobit-model"
    result = subprocess.run(
        [str(tool), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise ServiceError(f"isobit-model {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout.strip()


@contextlib.contextmanager
def stop_signals_as_exit() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP raise SystemExit, as Ctrl-C raises KeyboardInterrupt, so that
    cleanup runs."""

    def leave(number: int, _frame) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _model_flags(model: Path) -> list[str]:
    return [f"--model_root={model.parent}", f"--model={model.name}"]
