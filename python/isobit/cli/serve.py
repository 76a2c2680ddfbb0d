"""`isobit serve`: a rollout, and an HTTP gateway in front of it."""

import importlib.util
import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from isobit.cli.command import SERVICE_FLAGS, BadUsageError, CannotRunError, Command
from isobit.cli.service_flags import GATEWAY, ServiceFlags, command_of

if TYPE_CHECKING:
    from isobit.credentials import Security
    from isobit.launch import Service

_HELP = """Serve a model over HTTP, with the APIs of OpenAI, vLLM and SGLang, and over gRPC.

All flags of isobit-rollout and of the gateway are accepted, too, also under the names of vLLM and SGLang. A
flag goes to each of the two that has it; with rollout_ or gateway_ before its name, only to that one. The
flags for TLS go to the gateway. Ctrl-C or SIGTERM ends both in order, with status 0; a second one ends them
at once. If one of the two ends by itself, the other is ended, too, with status 3.
"""


class _ServeCommand(Command):
    services = ServiceFlags(
        "rollout",
        GATEWAY,
        taken=("rollout", "served_model_name"),
        only={name: GATEWAY for name in ("tls_cert", "tls_key", "tls_client_ca")},
    )
    many = ("served_model_name",)


def serve(
    ctx: typer.Context,
    model_: str | None = typer.Argument(
        None, metavar="MODEL", help="A directory, or the id of a model on the hub.", show_default=False
    ),
    model: str | None = typer.Option(None, "--model", help="The same as MODEL.", show_default=False),
    revision: str | None = typer.Option(None, help="A branch, tag or commit of a model on the hub."),
    host: str = typer.Option(
        "127.0.0.1", help="Address for HTTP; any but loopback needs TLS, or --insecure."
    ),
    port: int = typer.Option(8000, min=0, max=65535, help="Port for HTTP; 0: any free one."),
    grpc_host: str = typer.Option(
        "127.0.0.1", "--grpc_host", help="Address for gRPC; any but loopback needs TLS, or --insecure."
    ),
    grpc_port: int = typer.Option(
        7001, "--grpc_port", min=0, max=65535, help="Port for gRPC; 0: any free one."
    ),
    served_model_name: list[str] = typer.Option(
        [], "--served_model_name", help="A name of the model; may be repeated; default: MODEL as given."
    ),
    no_http: bool = typer.Option(False, "--no_http", help="Serve gRPC only."),
    model_root: Path | None = typer.Option(
        None,
        "--model_root",
        help="New weights must be below this folder; default: the folder that contains MODEL.",
    ),
    log_dir: Path | None = typer.Option(
        None, "--log_dir", help="Write the services' logs there, and keep them."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the addresses as JSON once all serve."),
) -> None:
    from isobit.cli import running

    given = one_model(model_, model)
    if not no_http and importlib.util.find_spec("isobit.gateway") is None:
        raise CannotRunError("the gateway is not installed: reinstall isobit, or use --no_http")
    flags: dict[str, list[str]] = ctx.meta[SERVICE_FLAGS]
    if no_http and (wrong := [flag for flag in flags[GATEWAY] if flag not in flags["rollout"]]):
        raise BadUsageError(f"{wrong[0]} is a flag of the gateway, which --no_http leaves out")
    if not no_http:
        _check_access(flags[GATEWAY])
        running.check_free("--port", host, port)
    running.check_free("--grpc_port", grpc_host, grpc_port)
    screen = running.screen_for_notes()
    directory = running.model_directory(given, revision)
    if not no_http and not (directory / "tokenizer.json").is_file():
        raise CannotRunError(
            f"{directory} has no tokenizer.json, which HTTP needs; --no_http serves gRPC only"
        )
    root, name = _below_root(directory, model_root)
    with running.children(log_dir, screen, flags) as services:
        rollout = services.start(
            "isobit-rollout",
            "rollout",
            [
                *running.own_flags(root, name, os.cpu_count() or 1, "isobit-rollout"),
                "--tp_size=1", "--metrics_port=0", f"--host={grpc_host}", f"--port={grpc_port}",
                *flags["rollout"],
            ],
        )  # fmt: skip
        called = running.dialled(grpc_host)
        running.wait_serving(services, rollout, screen, directory, called, **_upstream(flags[GATEWAY]))
        addresses = {"model": str(directory), "grpc": rollout.target}
        if not no_http:
            names = served_model_name or [given]
            own = [*_gateway_flags(rollout, directory, root, names), f"--host={host}", f"--port={port}"]
            gateway = services.start_command("gateway", command_of(GATEWAY), [*own, *flags[GATEWAY]])
            scheme = "https" if any(flag.startswith("--tls_cert=") for flag in flags[GATEWAY]) else "http"
            with screen.progress("gateway: starting"):
                url = f"{scheme}://{services.wait_listening(gateway, running.dialled(host))}"
                running.wait_until(services, lambda: _answers(url))
            addresses["http"] = url
        _tell(given, addresses, as_json)
        running.watch(services, screen)


def one_model(argument: str | None, option: str | None) -> str:
    if (argument is None) == (option is None):
        raise BadUsageError("expected one MODEL: a directory, or the id of a model on the hub")
    return argument or option or ""


def _below_root(directory: Path, root: Path | None) -> tuple[Path, str]:
    """Returns the services' --model_root and --model.

    Raises:
      BadUsageError: the model is not below the root.
    """
    if root is None:
        return directory.parent, directory.name
    try:
        return root.absolute(), str(directory.relative_to(root.absolute()))
    except ValueError as error:
        raise BadUsageError(f"--model_root: expected a folder above {directory}, got {root}") from error


def _check_access(flags: list[str]) -> None:
    """Checks that the rollout, which uses the same access file, lets the gateway ask for its description.

    Raises:
      BadUsageError: the gateway would have no bearer token.
    """
    given = {flag.partition("=")[0] for flag in flags}
    if "--access_file" in given and not given & {"--upstream_token_file", "--upstream_tls_cert"}:
        raise BadUsageError(
            "--access_file: also give --upstream_token_file, a file with the gateway's own token, which needs"
            " the role watch (`python -m isobit.token gateway watch --token_file FILE` makes one)"
        )


def _upstream(flags: list[str]) -> "Security":
    """Returns the arguments of a client for this command's own calls to the rollout, from the gateway's
    flags."""
    security: Any = {}
    for flag in flags:
        name, _, value = flag.partition("=")
        if name.startswith("--upstream_"):
            security[name.removeprefix("--upstream_")] = value
    return security


def _gateway_flags(rollout: "Service", model: Path, root: Path, names: list[str]) -> list[str]:
    flags = [f"--rollout={rollout.target}", f"--model={model}", f"--model_root={root}"]
    metrics = Path(f"{rollout.port_file}.metrics")
    if metrics.is_file():
        host = rollout.target.rpartition(":")[0]
        flags.append(f"--rollout_metrics=http://{host}:{int(metrics.read_text())}/metrics")
    return [*flags, *(f"--served_model_name={name}" for name in names)]


def _answers(url: str) -> bool:
    """Whether the gateway answers and has found the rollout. Its certificate is not checked."""
    context = ssl.create_default_context() if url.startswith("https") else None
    if context is not None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5, context=context):
            return True
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)
    except ssl.SSLError:  # it requires a client certificate
        return True
    except OSError as error:
        return isinstance(getattr(error, "reason", None), ssl.SSLError)


def _tell(given: str, addresses: dict[str, str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(addresses), flush=True)
        return
    lines = [f"serving {given}"]
    lines += [f"  HTTP  {addresses['http']}"] if "http" in addresses else []
    print("\n".join([*lines, f"  gRPC  {addresses['grpc']}", "Ctrl-C stops it."]), flush=True)


def register(app: typer.Typer) -> None:
    app.command("serve", cls=_ServeCommand, help=_HELP)(serve)
