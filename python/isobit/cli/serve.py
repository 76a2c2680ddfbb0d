"""`isobit serve`: a rollout, and the HTTP gateway before it."""

import importlib.util
import json
import os
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from isobit.cli.app import SERVICE_FLAGS, BadUsageError, CannotRunError, Command
from isobit.cli.service_flags import GATEWAY, ServiceFlags, command_of

if TYPE_CHECKING:
    from isobit.credentials import Security
    from isobit.launch import Service

_HELP = """Serve a model: HTTP as OpenAI, vLLM and SGLang speak it, and gRPC.

Any flag of isobit-rollout and of the gateway may be given, too, also by vLLM's and SGLang's names: it goes to
each that has it, or with rollout_ or gateway_ before its name to that one. The flags of TLS are the
gateway's. One Ctrl-C or SIGTERM ends all in order, with status 0; a second one at once. If a part ends by
itself, all end, with status 3.
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
    model: str | None = typer.Option(None, "--model", help="The same.", show_default=False),
    revision: str | None = typer.Option(None, help="Of a model on the hub: a branch, tag or commit."),
    host: str = typer.Option("127.0.0.1", help="Of HTTP; any but loopback needs TLS, or --insecure."),
    port: int = typer.Option(8000, min=0, max=65535, help="Of HTTP; 0: any free one."),
    grpc_host: str = typer.Option("127.0.0.1", "--grpc_host", help="Of gRPC, likewise."),
    grpc_port: int = typer.Option(7001, "--grpc_port", min=0, max=65535, help="Of gRPC; 0: any free one."),
    served_model_name: list[str] = typer.Option(
        [], "--served_model_name", help="Names of the model; default: MODEL as it was given."
    ),
    no_http: bool = typer.Option(False, "--no_http", help="Serve gRPC alone."),
    model_root: Path | None = typer.Option(
        None, "--model_root", help="Where new weights may be read from; default: the folder that MODEL is in."
    ),
    log_dir: Path | None = typer.Option(None, "--log_dir", help="Keep the services' logs there."),
    as_json: bool = typer.Option(False, "--json", help="Print the addresses as JSON once all serve."),
) -> None:
    from isobit.cli import running

    given = one_model(model_, model)
    if not no_http and importlib.util.find_spec("isobit.gateway") is None:
        raise CannotRunError("the gateway is not installed: reinstall isobit, or use --no_http")
    flags: dict[str, list[str]] = ctx.meta[SERVICE_FLAGS]
    if no_http and (wrong := [flag for flag in flags[GATEWAY] if flag not in flags["rollout"]]):
        raise BadUsageError(f"{wrong[0]} is the gateway's, which --no_http leaves out")
    if not no_http:
        _check_access(flags[GATEWAY])
        running.check_free("--port", host, port)
    running.check_free("--grpc_port", grpc_host, grpc_port)
    screen = running.screen_for_notes()
    directory = running.model_directory(given, revision)
    if not no_http and not (directory / "tokenizer.json").is_file():
        raise CannotRunError(
            f"{directory} has no tokenizer.json, which HTTP needs; --no_http serves gRPC alone"
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
    """The services' --model_root and --model. BadUsageError: the model is not below the root."""
    if root is None:
        return directory.parent, directory.name
    try:
        return root.absolute(), str(directory.relative_to(root.absolute()))
    except ValueError as error:
        raise BadUsageError(f"--model_root: expected a folder above {directory}, got {root}") from error


def _check_access(flags: list[str]) -> None:
    """BadUsageError: the rollout, which has the same access file, would not tell the gateway about itself."""
    given = {flag.partition("=")[0] for flag in flags}
    if "--access_file" in given and not given & {"--upstream_token_file", "--upstream_tls_cert"}:
        raise BadUsageError(
            "--access_file: expected --upstream_token_file, too, with the gateway's own token, which has the"
            " role watch (`python -m isobit.token gateway watch --token_file FILE` makes one)"
        )


def _upstream(flags: list[str]) -> "Security":
    """How the gateway is told to reach the rollout, for our own calls."""
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
    """Whether the gateway answers, and has found the rollout. Its certificate is of no interest here."""
    context = ssl.create_default_context() if url.startswith("https") else None
    if context is not None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5, context=context):
            return True
    except urllib.error.HTTPError as error:
        return error.code in (401, 403)
    except ssl.SSLError:  # it wants a client's certificate
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
