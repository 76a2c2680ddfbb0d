"""What serve, pair and compare share: starting services as child processes, watching them, and ending them in
order."""

import contextlib
import math
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from isobit import binaries
from isobit.channel import ServiceClient
from isobit.cli.command import BadUsageError, CannotRunError
from isobit.errors import DeadlineExceededError
from isobit.launch import Service, Services, stop_signals_as_exit
from isobit.screen import Progress, Screen

_POLL_S = 0.1
# How long a service lets calls in flight finish by default, and how much time it may take besides.
_DRAIN_S, _END_S = 30.0, 10.0


@contextlib.contextmanager
def children(log_dir: Path | None, screen: Screen, flags: Mapping[str, Sequence[str]]) -> Iterator[Services]:
    """Yields a Services object whose logs `screen` shows. At the end the services are stopped one by one, the
    latest started first. `flags`: the flags of each service, which say how long its end may take.

    A second signal during the end kills the services that are left. Without `log_dir` the logs are deleted at
    the end, unless a service failed.
    """
    logs = log_dir or Path(tempfile.mkdtemp(prefix="isobit-"))
    logs.mkdir(parents=True, exist_ok=True)
    services = Services(None, logs, math.inf, stop_timeout_s=_patience_s(flags), one_by_one=True)
    with stop_signals_as_exit(), _followed(services, screen), services:
        yield services
    for text in services.bad_ends:
        screen.line(f"note: {text}")
    if log_dir is None and not services.bad_ends:
        shutil.rmtree(logs, ignore_errors=True)


def watch(services: Services, screen: Screen) -> None:
    """Returns when a signal asks to stop.

    Raises:
      ServiceError: a service ended by itself.
    """
    try:
        while True:
            services.check_alive()
            time.sleep(_POLL_S)
    except (KeyboardInterrupt, SystemExit):
        screen.line("stopping; press Ctrl-C again to stop at once")


def wait_serving(
    services: Services,
    service: Service,
    screen: Screen,
    model: Path | None = None,
    host: str = "127.0.0.1",
    **security: Any,
) -> None:
    """Returns once `service` reports that it serves.

    Args:
      model: the directory that the service reads; the progress shows how much it has read.
      host: the address to call it at.
      security: the arguments of a client for the call.

    Raises:
      ServiceError: a service ended before that.
    """
    size = sum(file.stat().st_size for file in model.glob("*.safetensors")) if model else None
    with screen.progress(f"{service.name}: starting", size, in_bytes=True) as progress:
        target = services.wait_listening(service, host)
        with _told(service, progress), ServiceClient(target, **security) as client:
            while True:
                try:
                    return client.wait_until_serving(timeout=1.0)
                except DeadlineExceededError:
                    services.check_alive()


def wait_until(services: Services, is_ready: Callable[[], bool]) -> None:
    """Returns once `is_ready` returns true.

    Raises:
      ServiceError: a service ended before that.
    """
    while not is_ready():
        services.check_alive()
        time.sleep(_POLL_S)


def check_free(flag: str, host: str, port: int) -> None:
    """Checks that a port is free, since a service that cannot listen says so only after it has loaded its
    model.

    Raises:
      CannotRunError: another process listens on the port.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        hint = f"; choose another with {flag}, or 0 for any free one" if port else ""
        raise CannotRunError(
            f"{flag}: cannot listen on {host}:{port}: {error.strerror or error}{hint}"
        ) from error


def free_port(host: str, wanted: int = 0) -> int:
    """Returns `wanted`, or another free port if a process listens on it."""
    for port in (wanted, 0):
        with contextlib.suppress(OSError), socket.create_server((host, port)) as server:
            return server.getsockname()[1]
    raise CannotRunError(f"cannot listen on {host}")


def dialled(host: str) -> str:
    """Returns the address at which this machine calls a listener at `host`, as in URLs and gRPC targets."""
    called = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{called}]" if ":" in called else called


def model_directory(model: str, revision: str | None) -> Path:
    """Returns a model directory: `model` itself, or the snapshot of a model on the hub, which is downloaded
    unless the cache has it."""
    path = Path(model).expanduser()
    if not path.is_dir():
        from isobit import hub

        with hub.terminal_bar(f"downloading {model}") as progress:
            path = hub.resolve(model, revision, progress)
    elif revision is not None:
        raise BadUsageError(f"--revision: {model} is a directory, which has no revisions")
    if not (path / "config.json").is_file():
        raise BadUsageError(f"expected a model directory or the id of a model on the hub, got {model}")
    # Links are not resolved: in a hub's cache, the folder's name is the revision.
    return path.absolute()


def own_flags(root: Path, name: str, threads: int, binary: str) -> list[str]:
    """The flags that a command gives a service of the model `name` below `root`. The user's flags follow
    them, and so override them."""
    flags = [f"--model_root={root}", f"--model={name}"]
    if binaries.is_cuda(binaries.path(binary)):
        return [*flags, "--backend=cuda"]
    return [*flags, f"--threads_per_rank={max(1, min(threads, 256))}"]


def _patience_s(flags: Mapping[str, Sequence[str]]) -> float:
    """Seconds that a service may take to end."""
    longest = _DRAIN_S
    for name, _, value in (flag.partition("=") for own in flags.values() for flag in own):
        if name in ("--drain_timeout_ms", "--drain_timeout_s"):
            with contextlib.suppress(ValueError):  # the service itself will report it
                longest = max(longest, float(value) / (1000 if name.endswith("_ms") else 1))
    return longest + _END_S


@contextlib.contextmanager
def _followed(services: Services, screen: Screen) -> Iterator[None]:
    """Shows what services write to their logs, line by line, while the body runs."""
    read: dict[Path, int] = {}

    def show() -> None:
        # Read in the order of starting, and shown in the reverse order, which is that of ending.
        lines: list[str] = []
        for service in list(seen):
            lines = [*_new_lines(service, read), *lines]
        for line in lines:
            screen.line(line)

    def follow() -> None:
        while not over.wait(_POLL_S):
            seen.update(dict.fromkeys(services.running))
            show()

    over = threading.Event()
    seen: dict[Service, None] = {}
    follower = threading.Thread(target=follow, daemon=True)
    follower.start()
    try:
        yield
    finally:
        over.set()
        follower.join()
        show()


def _new_lines(service: Service, read: dict[Path, int]) -> list[str]:
    """Returns the complete lines of a log from the offset in `read` on, and moves that offset."""
    with contextlib.suppress(OSError), service.log.open("rb") as log:
        log.seek(read.get(service.log, 0))
        whole, newline, _ = log.read().rpartition(b"\n")
        read[service.log] = read.get(service.log, 0) + len(whole) + len(newline)
        if newline:
            return [f"{service.name} | {line}" for line in whole.decode("utf-8", "replace").splitlines()]
    return []


@contextlib.contextmanager
def _told(service: Service, progress: Progress) -> Iterator[None]:
    """While the body runs, shows in `progress` what `service` does and how much of its files it has read."""

    def tell() -> None:
        while not over.wait(_POLL_S):
            progress.label = f"{service.name}: {_doing(service.log)}"
            progress.done = min(_bytes_read(service.process.pid), progress.total or 0)

    over = threading.Event()
    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def _doing(log: Path) -> str:
    """The last message of a service, without time and place."""
    with contextlib.suppress(OSError):
        lines = log.read_text("utf-8", errors="replace").splitlines()
        if lines and len(words := lines[-1].split(" ", 3)) == 4:
            return words[3].partition(":")[0][:40]
    return "starting"


def _bytes_read(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/io").read_text("ascii").split()[1])
    return 0


def screen_for_notes() -> Screen:
    """The screen for everything except a command's result."""
    return Screen(sys.stderr)
