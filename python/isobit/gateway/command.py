"""The command line of the gateway, and its worker processes.

One process listens itself. Of several, each has a socket of its own at the same port, among which the kernel
shares out connections; this process holds the sockets, starts a worker again that has died, and passes
signals on.
"""

import argparse
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from isobit.command_line import Parser
from isobit.credentials import Security
from isobit.gateway.server import Tls, listen, serve
from isobit.gateway.settings import MIB, Settings
from isobit.gateway.tools import PARSERS
from isobit.targets import is_loopback

_LOG = logging.getLogger("isobit.gateway")
_DIES_TOO_SOON_S = 5.0


def make_parser() -> Parser:
    parser = Parser(prog="python -m isobit.gateway", description="Serves a rollout by HTTP: docs/http.md.")
    add = parser.add_argument
    add("--rollout", required=True, help="host:port of the rollout's gRPC")
    add("--scorer", help="host:port of a scorer with the same weights, for prompt_logprobs and echo")
    add("--model", required=True, type=Path, help="directory of the model: tokenizer, chat template, config")
    add("--served_model_name", action="append", default=[], help="a name of the model; may be repeated")
    add("--model_root", type=Path, help="as the services' --model_root: where weights may come from")
    add(
        "--rollout_metrics",
        help="address of the rollout's metrics, to be passed on: http://host:port/metrics",
    )
    add("--host", default="127.0.0.1", help="another one needs --tls_cert and --tls_key, or --insecure")
    add("--port", type=int, default=8000, help="0 takes a free one; see --port_file")
    add(
        "--port_file",
        type=Path,
        help="gets the port's number; that of the open port under its name and .open",
    )
    add("--open_port", type=int, help="port at 127.0.0.1 for callers that send no token")
    add("--insecure", action="store_true", help="plain text at any --host")
    add("--tls_cert", type=Path, help="PEM of the gateway's certificate, with its chain")
    add("--tls_key", type=Path, help="PEM of its key")
    add("--tls_client_ca", type=Path, help="PEM of the CA whose clients alone can connect")
    add("--access_file", type=Path, help="who may call, as the services' --access_file")
    add("--workers", type=int, default=1, help="processes at the same port")
    add("--chat_template", type=Path, help="file with a template in place of the model's")
    add("--tool_call_parser", default="auto", choices=PARSERS, help="how the model writes calls of tools")
    add("--max_body_mb", type=int, default=64, help="of one request")
    add("--max_bodies_mb", type=int, default=512, help="of all requests that a worker has in hand")
    add("--max_connections", type=int, default=Settings.max_connections, help="of one worker")
    add("--keep_alive_s", type=float, default=Settings.keep_alive_s, help="of an idle connection")
    add(
        "--drain_timeout_s",
        type=float,
        default=Settings.drain_timeout_s,
        help="for requests in hand at the end",
    )
    for name, text in (
        ("tls_ca", "PEM of the CA of the services' certificates"),
        ("tls_cert", "PEM of the gateway's own certificate there"),
        ("tls_key", "PEM of its key"),
        ("tls_server_name", "the name in the services' certificates"),
        ("token_file", "file with the gateway's own token at the services; it needs the role watch"),
    ):
        add(f"--upstream_{name}", help=text)
    add("--worker_sockets", help=argparse.SUPPRESS)
    return parser


def settings_of(arguments: argparse.Namespace) -> Settings:
    """ValueError or OSError: flags that do not go together, or a file that is not there."""
    upstream = Security()
    for name in ("tls_ca", "tls_cert", "tls_key", "tls_server_name", "token_file"):
        if (value := getattr(arguments, f"upstream_{name}")) is not None:
            upstream[name] = value
    template = arguments.chat_template
    return Settings(
        rollout=arguments.rollout,
        scorer=arguments.scorer,
        model=arguments.model,
        served_model_names=tuple(arguments.served_model_name),
        model_root=arguments.model_root,
        rollout_metrics=arguments.rollout_metrics,
        upstream=upstream,
        access_file=arguments.access_file,
        chat_template=None if template is None else template.read_text("utf-8"),
        tool_call_parser=arguments.tool_call_parser,
        max_body_bytes=arguments.max_body_mb * MIB,
        max_bodies_bytes=arguments.max_bodies_mb * MIB,
        max_connections=arguments.max_connections,
        keep_alive_s=arguments.keep_alive_s,
        drain_timeout_s=arguments.drain_timeout_s,
    )


def check(arguments: argparse.Namespace) -> None:
    """ValueError: what makes no sense or is not safe."""
    if (arguments.tls_cert is None) != (arguments.tls_key is None):
        raise ValueError("--tls_cert and --tls_key: expected both or neither")
    if arguments.tls_client_ca is not None and arguments.tls_cert is None:
        raise ValueError("--tls_client_ca: expected --tls_cert and --tls_key, too")
    open_to_all = arguments.tls_cert is None and not arguments.insecure
    if open_to_all and not is_loopback(
        f"[{arguments.host}]:1" if ":" in arguments.host else f"{arguments.host}:1"
    ):
        raise ValueError(f"--host {arguments.host}: expected --tls_cert and --tls_key, or --insecure")
    if arguments.workers < 1:
        raise ValueError(f"--workers is {arguments.workers}, expected 1 at least")
    for name in ("max_body_mb", "max_bodies_mb", "max_connections", "keep_alive_s", "drain_timeout_s"):
        if getattr(arguments, name) <= 0:
            raise ValueError(f"--{name} is {getattr(arguments, name)}, expected more than 0")


def main(words: list[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else words
    parser = make_parser()
    arguments = parser.parse_args(words)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    try:
        check(arguments)
        settings = settings_of(arguments)
        tls = (
            Tls(arguments.tls_cert, arguments.tls_key, arguments.tls_client_ca)
            if arguments.tls_cert
            else None
        )
        if arguments.worker_sockets:
            listeners = [socket.socket(fileno=int(number)) for number in arguments.worker_sockets.split(",")]
            return serve(settings, *listeners[:1], *(listeners[1:] or [None]), tls)
        sockets = _Sockets(arguments)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    _LOG.info("listens at %s", sockets.address)
    if arguments.workers == 1:
        sockets.tell(arguments.port_file)
        return serve(settings, *sockets.of(0), tls)
    sys.exit(_Workers(words, sockets, arguments).run())


class _Sockets:
    """The listening sockets: of each worker one at the port, and one at the open port if there is one."""

    def __init__(self, arguments: argparse.Namespace):
        self._main = _several(arguments.host, arguments.port, arguments.workers)
        self._open = []
        if arguments.open_port is not None:
            self._open = _several("127.0.0.1", arguments.open_port, arguments.workers)

    @property
    def address(self) -> str:
        places = [self._main[0].getsockname(), *(s.getsockname() for s in self._open[:1])]
        return " and ".join(f"{place[0]}:{place[1]}" for place in places)

    def of(self, worker: int) -> tuple[socket.socket, socket.socket | None]:
        return self._main[worker], self._open[worker] if self._open else None

    def tell(self, path: Path | None) -> None:
        """Writes the numbers of the ports."""
        if path is None:
            return
        if self._open:
            _write_whole(path.with_name(f"{path.name}.open"), self._open[0].getsockname()[1])
        _write_whole(path, self._main[0].getsockname()[1])


def _several(host: str, port: int, count: int) -> list[socket.socket]:
    """ValueError: somebody else listens there."""
    try:
        with socket.create_server((host, port)):  # without SO_REUSEPORT: it is free
            pass
        first = listen(host, port)
    except OSError as error:
        raise ValueError(f"cannot listen at {host}:{port}: {error}") from error
    return [first, *(listen(host, first.getsockname()[1]) for _ in range(count - 1))]


def _write_whole(path: Path, number: int) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(f"{number}\n")
    part.replace(path)


class _Workers:
    """The worker processes."""

    def __init__(self, words: list[str], sockets: _Sockets, arguments: argparse.Namespace):
        self._words = words
        self._sockets = sockets
        self._arguments = arguments
        self._running: dict[int, tuple[subprocess.Popen, float]] = {}
        self._signal: int | None = None

    def run(self) -> int:
        """Returns the exit status once all have ended."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        for worker in range(self._arguments.workers):
            self._start(worker)
        self._sockets.tell(self._arguments.port_file)
        status = 0
        while self._running:
            pid, raw = os.wait()
            for worker, (process, since) in list(self._running.items()):
                if process.pid != pid:
                    continue
                process.returncode = os.waitstatus_to_exitcode(raw)
                del self._running[worker]
                if self._signal is not None:
                    status = status or abs(process.returncode)
                elif time.monotonic() - since < _DIES_TOO_SOON_S:
                    _LOG.error("worker %d ends at its start, with status %d", worker, process.returncode)
                    status = status or abs(process.returncode) or 1
                    self._pass_on(signal.SIGTERM, None)
                else:
                    _LOG.error(
                        "worker %d has died with status %d: starting another", worker, process.returncode
                    )
                    self._start(worker)
        return status

    def _start(self, worker: int) -> None:
        own = [listener.fileno() for listener in self._sockets.of(worker) if listener is not None]
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "isobit.gateway",
                *self._words,
                f"--worker_sockets={','.join(map(str, own))}",
            ],
            pass_fds=own,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for this process, which passes it on
        )
        self._running[worker] = process, time.monotonic()

    def _pass_on(self, number: int, _frame) -> None:
        self._signal = number
        for process, _ in list(self._running.values()):
            process.send_signal(number)
