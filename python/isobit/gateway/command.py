"""The command line of the gateway."""

import argparse
import logging
import sys
from pathlib import Path

from isobit.command_line import Parser
from isobit.credentials import Security
from isobit.gateway import workers
from isobit.gateway.core import Core
from isobit.gateway.server import Tls, serve
from isobit.gateway.settings import MIB, Settings
from isobit.gateway.tools import PARSERS
from isobit.targets import is_loopback

_LOG = logging.getLogger("isobit.gateway")


def make_parser() -> Parser:
    parser = Parser(prog="python -m isobit.gateway", description="Serves a rollout over HTTP: docs/http.md.")
    add = parser.add_argument
    add("--rollout", required=True, help="host:port of the rollout")
    add("--scorer", help="host:port of a scorer with the same weights, for prompt_logprobs and echo")
    add("--rollout_admin", help="host:port of the rollout's --admin_port, if it has one")
    add("--scorer_admin", help="host:port of the scorer's --admin_port, if it has one")
    add("--model", required=True, type=Path, help="the model directory: tokenizer, chat template, config")
    add(
        "--served_model_name",
        action="append",
        default=[],
        help="a name of the model; may be repeated; default: that of the directory",
    )
    add("--model_root", type=Path, help="the services' --model_root: new weights must be below it")
    add(
        "--rollout_metrics",
        help="URL of the rollout's metrics, http://host:port/metrics; the gateway passes them on",
    )
    add(
        "--host",
        default="127.0.0.1",
        help="address to listen at; default: %(default)s; any but loopback needs TLS, or --insecure",
    )
    add(
        "--port",
        type=int,
        default=8000,
        help="port to listen at; 0: any free one; default: %(default)s; see --port_file",
    )
    add(
        "--port_file",
        type=Path,
        help="a file to write the port's number to; FILE.open gets that of the open port",
    )
    add("--open_port", type=int, help="a second port, at 127.0.0.1, for callers without a token")
    add("--insecure", action="store_true", help="allow plain text at any --host")
    add("--tls_cert", type=Path, help="PEM of the gateway's certificate, with its chain")
    add("--tls_key", type=Path, help="PEM of the certificate's key")
    add("--tls_client_ca", type=Path, help="PEM of a CA; only clients with a certificate of it can connect")
    add("--access_file", type=Path, help="bearer tokens and roles of callers, as the services' --access_file")
    add(
        "--workers", type=int, default=1, help="number of processes that serve the port; default: %(default)s"
    )
    add("--chat_template", type=Path, help="file with a template that replaces the model's")
    add("--tool_call_parser", default="auto", choices=PARSERS, help="the form in which the model calls tools")
    add("--max_body_mb", type=int, default=64, help="MiB of the body of one request; default: %(default)s")
    add(
        "--max_bodies_mb",
        type=int,
        default=512,
        help="MiB of all bodies that a worker holds; default: %(default)s",
    )
    add(
        "--max_connections",
        type=int,
        default=Settings.max_connections,
        help="connections of one worker; default: %(default)s",
    )
    add("--max_header_kb", type=int, default=64, help="KiB of the head of a request; default: %(default)s")
    add(
        "--header_timeout_s",
        type=float,
        default=Settings.header_timeout_s,
        help="seconds for a client to send the head of a request; default: %(default)s",
    )
    add(
        "--body_timeout_s",
        type=float,
        default=Settings.body_timeout_s,
        help="seconds for a client to send the body of a request; default: %(default)s",
    )
    add(
        "--write_timeout_s",
        type=float,
        default=Settings.write_timeout_s,
        help="seconds after which a client that does not read is cut off; default: %(default)s",
    )
    add(
        "--keep_alive_s",
        type=float,
        default=Settings.keep_alive_s,
        help="seconds after which an idle connection is closed; default: %(default)s",
    )
    add(
        "--drain_timeout_s",
        type=float,
        default=Settings.drain_timeout_s,
        help="seconds for requests to finish when the gateway ends; default: %(default)s",
    )
    add(
        "--trainer_timeout_s",
        type=float,
        default=Settings.trainer_timeout_s,
        help="seconds to wait for a trainer at /init_weight_transfer_engine; default: %(default)s",
    )
    for name, text in (
        ("tls_ca", "PEM of the CA of the services' certificates"),
        ("tls_cert", "PEM of the client certificate that the gateway shows to the services"),
        ("tls_key", "PEM of that certificate's key"),
        ("tls_server_name", "the name in the services' certificates"),
        ("token_file", "file with the gateway's own bearer token; it needs the role watch"),
    ):
        add(f"--upstream_{name}", help=text)
    add("--worker_sockets", help=argparse.SUPPRESS)
    return parser


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Returns the settings that the flags give.

    Raises:
      ValueError, OSError: flags exclude each other, or a file cannot be read.
    """
    upstream = Security()
    for name in ("tls_ca", "tls_cert", "tls_key", "tls_server_name", "token_file"):
        if (value := getattr(arguments, f"upstream_{name}")) is not None:
            upstream[name] = value
    template = arguments.chat_template
    return Settings(
        rollout=arguments.rollout,
        scorer=arguments.scorer,
        rollout_admin=arguments.rollout_admin,
        scorer_admin=arguments.scorer_admin,
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
        max_header_bytes=arguments.max_header_kb * 1024,
        max_connections=arguments.max_connections,
        header_timeout_s=arguments.header_timeout_s,
        body_timeout_s=arguments.body_timeout_s,
        write_timeout_s=arguments.write_timeout_s,
        keep_alive_s=arguments.keep_alive_s,
        drain_timeout_s=arguments.drain_timeout_s,
        trainer_timeout_s=arguments.trainer_timeout_s,
    )


def check(arguments: argparse.Namespace) -> None:
    """Checks the flags.

    Raises:
      ValueError: they are wrong or not safe.
    """
    if (arguments.tls_cert is None) != (arguments.tls_key is None):
        raise ValueError("--tls_cert and --tls_key: expected both or neither")
    if arguments.tls_client_ca is not None and arguments.tls_cert is None:
        raise ValueError("--tls_client_ca: expected --tls_cert and --tls_key, too")
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    if arguments.tls_cert is None and not arguments.insecure and not is_loopback(f"{host}:1"):
        raise ValueError(f"--host {arguments.host}: expected --tls_cert and --tls_key, or --insecure")
    if arguments.workers < 1:
        raise ValueError(f"--workers is {arguments.workers}, expected at least 1")
    for name, value in vars(arguments).items():
        if (name.startswith("max_") or name.endswith("_s")) and value <= 0:
            raise ValueError(f"--{name} is {value}, expected more than 0")


def main(words: list[str] | None = None) -> None:
    words = sys.argv[1:] if words is None else words
    parser = make_parser()
    arguments = parser.parse_args(words)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.INFO)
    try:
        check(arguments)
        workers.share_notes()
        core = Core(settings_of(arguments))
        tls = None
        if arguments.tls_cert is not None:
            tls = Tls(arguments.tls_cert, arguments.tls_key, arguments.tls_client_ca)
        sockets = None
        if not arguments.worker_sockets:
            sockets = workers.Sockets(arguments.host, arguments.port, arguments.open_port, arguments.workers)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if sockets is None:
        listener, open_listener, control = workers.inherited(arguments.worker_sockets)
        return serve(core, listener, open_listener, tls, control)
    _LOG.info("listens at %s", sockets.address)
    if arguments.workers > 1:
        sys.exit(workers.Workers(words, sockets, arguments.workers, arguments.port_file).run())
    sockets.tell(arguments.port_file)
    serve(core, *sockets.of(0), tls)
