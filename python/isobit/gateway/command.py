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
    parser = Parser(prog="python -m isobit.gateway", description="Serves a rollout by HTTP: docs/http.md.")
    add = parser.add_argument
    add("--rollout", required=True, help="host:port of the rollout's gRPC")
    add("--scorer", help="host:port of a scorer with the same weights, for prompt_logprobs and echo")
    add("--rollout_admin", help="host:port of the rollout's --admin_port, if it has one")
    add("--scorer_admin", help="as --rollout_admin")
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
    add("--max_header_kb", type=int, default=64, help="of the head of a request")
    add("--header_timeout_s", type=float, default=Settings.header_timeout_s, help="for the head of a request")
    add("--body_timeout_s", type=float, default=Settings.body_timeout_s, help="for its body")
    add(
        "--write_timeout_s", type=float, default=Settings.write_timeout_s, help="for clients that do not read"
    )
    add("--keep_alive_s", type=float, default=Settings.keep_alive_s, help="of an idle connection")
    add(
        "--drain_timeout_s",
        type=float,
        default=Settings.drain_timeout_s,
        help="for requests in hand at the end",
    )
    add(
        "--trainer_timeout_s",
        type=float,
        default=Settings.trainer_timeout_s,
        help="for a trainer to come to /init_weight_transfer_engine",
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
    """ValueError: what makes no sense or is not safe."""
    if (arguments.tls_cert is None) != (arguments.tls_key is None):
        raise ValueError("--tls_cert and --tls_key: expected both or neither")
    if arguments.tls_client_ca is not None and arguments.tls_cert is None:
        raise ValueError("--tls_client_ca: expected --tls_cert and --tls_key, too")
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    if arguments.tls_cert is None and not arguments.insecure and not is_loopback(f"{host}:1"):
        raise ValueError(f"--host {arguments.host}: expected --tls_cert and --tls_key, or --insecure")
    if arguments.workers < 1:
        raise ValueError(f"--workers is {arguments.workers}, expected 1 at least")
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
