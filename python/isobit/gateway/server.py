"""Runs a gateway: listeners, worker processes, and an orderly end."""

import asyncio
import contextlib
import dataclasses
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import uvicorn

from isobit.gateway.app import make_app
from isobit.gateway.core import Core
from isobit.gateway.protocol import protocol_for
from isobit.gateway.settings import Settings

_BACKLOG = 2048
_LOG = logging.getLogger("isobit.gateway")


@dataclasses.dataclass(frozen=True)
class Tls:
    """PEM files for TLS."""

    cert: Path
    key: Path
    client_ca: Path | None = None  # only clients with a certificate of this CA can connect


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens at `host`. Other sockets made by this function may listen at the same
    port.

    Raises:
      OSError: the port is taken.
    """
    infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = infos[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.set_inheritable(True)
    except BaseException:
        listener.close()
        raise
    return listener


class _Server(uvicorn.Server):
    """One of several listeners in a process. They handle signals together."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], object]):
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self):
        yield


def serve(
    core: Core,
    listener: socket.socket,
    open_listener: socket.socket | None = None,
    tls: Tls | None = None,
    control: socket.socket | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT. A second signal ends the process at once.

    Args:
      open_listener: a plain-text listener for callers without tokens; their calls carry the gateway's own
        token.
      control: a socket to the process that started this one. This process sends a byte to it when it serves,
        and ends when it is closed.
    """
    raise_file_limit()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(_serve(core, listener, open_listener, tls, control))


async def _serve(
    core: Core,
    listener: socket.socket,
    open_listener: socket.socket | None,
    tls: Tls | None,
    control: socket.socket | None,
) -> None:
    settings = core.settings

    def tell() -> None:
        if control is not None:
            with contextlib.suppress(BrokenPipeError):  # who started this process is gone: so ends this one
                control.send(b"1")

    servers = [_server(settings, core, tls, tell)]
    sockets = [listener]
    if open_listener is not None:
        opened = dataclasses.replace(settings, access_file=None)
        servers.append(_server(opened, Core(opened, core.engine), None, lambda: None))
        sockets.append(open_listener)

    def end() -> None:
        for server in servers:
            server.force_exit = server.should_exit
            server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    if control is not None:
        control.setblocking(False)
        loop.add_reader(control, lambda: (loop.remove_reader(control), end()))
    try:
        await asyncio.gather(*(s.serve([sock]) for s, sock in zip(servers, sockets, strict=True)))
    finally:
        await core.close()


def _server(settings: Settings, core: Core, tls: Tls | None, ready: Callable[[], object]) -> _Server:
    config = uvicorn.Config(
        make_app(settings, core),
        http=protocol_for(settings),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=settings.drain_timeout_s,
        backlog=_BACKLOG,
        **_tls_options(tls),
    )
    server = _Server(config, ready)
    core.connections = lambda: len(server.server_state.connections)
    return server


def _tls_options(tls: Tls | None) -> dict:
    if tls is None:
        return {}
    options = {"ssl_certfile": str(tls.cert), "ssl_keyfile": str(tls.key)}
    if tls.client_ca is not None:
        options |= {"ssl_ca_certs": str(tls.client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options


def raise_file_limit() -> None:
    """Raises the limit of open files as far as the system allows, since each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _loop_factory():
    try:
        import uvloop
    except ImportError:  # uvloop does not exist for this system
        return None
    return uvloop.new_event_loop
