"""What serve, pair and compare share: children that start, are watched, and end in order."""

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
from isobit.cli.app import BadUsageError, CannotRunError
from isobit.errors import DeadlineExceededError
from isobit.launch import Service, Services, stop_signals_as_exit
from isobit.screen import Progress, Screen

_POLL_S = 0.1
# How long a service lets calls in flight finish, unless told otherwise, and what it may take besides.
_DRAIN_S, _END_S = 30.0, 10.0


@contextlib.contextmanager
def children(log_dir: Path | None, screen: Screen, flags: Mapping[str, Sequence[str]]) -> Iterator[Services]:
    """Services whose logs `screen` shows. The latest ends first, and each before the next is told. `flags`,
    theirs, say how long that may take.

    A second signal while they end kills those that are left. Logs without a folder given are gone at the end,
    unless something failed.
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
    """Returns when a signal asks to stop. ServiceError: a child ended."""
    try:
        while True:
            services.check_alive()
            time.sleep(_POLL_S)
    except (KeyboardInterrupt, SystemExit):
        screen.line("stopping; once more to stop at once")


def wait_serving(
    services: Services,
    service: Service,
    screen: Screen,
    model: Path | None = None,
    host: str = "127.0.0.1",
    **security: Any,
) -> None:
    """Returns once `service` serves. ServiceError: a child ended before.

    `model`: what it reads, to show how much it has read. `host`: where it is called. `security`: how.
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
    """Returns once `is_ready`. ServiceError: a child ended before."""
    while not is_ready():
        services.check_alive()
        time.sleep(_POLL_S)


def check_free(flag: str, host: str, port: int) -> None:
    """CannotRunError: somebody listens there. A service that cannot listen would say so only after it has
    loaded."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        hint = f"; choose another with {flag}, or 0 for any free one" if port else ""
        raise CannotRunError(
            f"{flag}: cannot listen on {host}:{port}: {error.strerror or error}{hint}"
        ) from error


def free_port(host: str, wanted: int = 0) -> int:
    """`wanted`, or another port if somebody listens there."""
    for port in (wanted, 0):
        with contextlib.suppress(OSError), socket.create_server((host, port)) as server:
            return server.getsockname()[1]
    raise CannotRunError(f"cannot listen on {host}")


def dialled(host: str) -> str:
    """Where a listener at `host` is called from this machine, as a URL and gRPC write it."""
    called = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"[{called}]" if ":" in called else called


def model_directory(model: str, revision: str | None) -> Path:
    """A directory, or a hub's model that is downloaded, unless the cache has it."""
    path = Path(model).expanduser()
    if not path.is_dir():
        from isobit import hub

        with hub.terminal_bar(f"downloading {model}") as progress:
            path = hub.resolve(model, revision, progress)
    elif revision is not None:
        raise BadUsageError(f"--revision: {model} is a directory, which has none")
    if not (path / "config.json").is_file():
        raise BadUsageError(f"expected a model directory or the id of a model on the hub, got {model}")
    # Not resolved further: a hub's cache names the revision by a folder.
    return path.absolute()


def own_flags(root: Path, name: str, threads: int, binary: str) -> list[str]:
    """The flags of a service of the model `name` below `root` that a user's go before."""
    flags = [f"--model_root={root}", f"--model={name}"]
    if binaries.is_cuda(binaries.path(binary)):
        return [*flags, "--backend=cuda"]
    return [*flags, f"--threads_per_rank={max(1, min(threads, 256))}"]


def _patience_s(flags: Mapping[str, Sequence[str]]) -> float:
    """How long a service may take to end."""
    longest = _DRAIN_S
    for name, _, value in (flag.partition("=") for own in flags.values() for flag in own):
        if name in ("--drain_timeout_ms", "--drain_timeout_s"):
            with contextlib.suppress(ValueError):  # the service will say so
                longest = max(longest, float(value) / (1000 if name.endswith("_ms") else 1))
    return longest + _END_S


@contextlib.contextmanager
def _followed(services: Services, screen: Screen) -> Iterator[None]:
    """Shows what services write to their logs, line by line, while the body runs."""
    read: dict[Path, int] = {}

    def show() -> None:
        # Read from the first that started, shown from the last: those that end first are shown first.
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
    """The whole lines of its log from where `read` says on, which is moved."""
    with contextlib.suppress(OSError), service.log.open("rb") as log:
        log.seek(read.get(service.log, 0))
        whole, newline, _ = log.read().rpartition(b"\n")
        read[service.log] = read.get(service.log, 0) + len(whole) + len(newline)
        if newline:
            return [f"{service.name} | {line}" for line in whole.decode("utf-8", "replace").splitlines()]
    return []


@contextlib.contextmanager
def _told(service: Service, progress: Progress) -> Iterator[None]:
    """Tells `progress` what `service` does, and how much of its files it has read, while the body runs."""

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
    """What a service said last, without time and place."""
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
    """Where all goes that is not the result."""
    return Screen(sys.stderr)
