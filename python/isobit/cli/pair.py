"""`isobit pair`: a rollout, a scorer, a comparator with its page, and a first comparison."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from isobit.cli.command import SERVICE_FLAGS, BadUsageError, Command
from isobit.cli.service_flags import ServiceFlags
from isobit.cli.status import DIFFERENT, FINE

if TYPE_CHECKING:
    from isobit.comparison import Found
    from isobit.launch import Service, Services
    from isobit.screen import Screen

_HELP = """Start a rollout, a scorer and a comparator with its page, and compare a few prompts.

Prints how many tokens differ and the address of the page, and runs until Ctrl-C; with --once it ends after
the comparison. All flags of isobit-rollout, isobit-scorer and isobit-comparator are accepted, too. A flag
goes to each service that has it; with rollout_, scorer_ or comparator_ before its name, only to that one.
Exit status: 0: no bit differs; 1: a bit differs; 3: it cannot run here.
"""
# The rollout's fraction of a GPU that both share; the scorer uses the rest.
_ROLLOUT_SHARE = "--gpu_memory_fraction=0.5"
_PORTS = {"rollout": 7001, "scorer": 7002, "comparator": 7003, "page": 8080}


class _PairCommand(Command):
    services = ServiceFlags(
        "rollout", "scorer", "comparator", taken=("rollout", "scorer", "http_port", "rollout_port")
    )


def pair(
    ctx: typer.Context,
    model_: str | None = typer.Argument(
        None, metavar="MODEL", help="A directory, or the id of a model on the hub.", show_default=False
    ),
    model: str | None = typer.Option(None, "--model", help="The same as MODEL.", show_default=False),
    revision: str | None = typer.Option(None, help="A branch, tag or commit of a model on the hub."),
    once: bool = typer.Option(False, "--once", help="End after the comparison."),
    prompts: Path | None = typer.Option(
        None, metavar="FILE", help="Prompts, one per line (token ids if there is no tokenizer)."
    ),
    max_tokens: int = typer.Option(
        64, "--max_tokens", min=1, help="The largest number of tokens in a completion."
    ),
    temperature: float = typer.Option(1.0, min=0.0, help="Sampling temperature; 0 is greedy."),
    rollout_port: int | None = typer.Option(
        None, "--rollout_port", help="Port of the rollout; default: 7001, or a free one if it is taken."
    ),
    scorer_port: int | None = typer.Option(
        None, "--scorer_port", help="Port of the scorer; default: 7002, or a free one."
    ),
    comparator_port: int | None = typer.Option(
        None, "--comparator_port", help="Port of the comparator; default: 7003, or a free one."
    ),
    page_port: int | None = typer.Option(
        None, "--page_port", help="Port of the page for a browser; default: 8080, or a free one."
    ),
    log_dir: Path | None = typer.Option(
        None, "--log_dir", help="Write the services' logs there, and keep them."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result and the addresses as JSON."),
) -> None:
    from isobit import comparison
    from isobit.cli import running
    from isobit.cli.serve import one_model

    given = one_model(model_, model)
    flags: dict[str, list[str]] = ctx.meta[SERVICE_FLAGS]
    wanted = {
        "rollout": rollout_port, "scorer": scorer_port, "comparator": comparator_port, "page": page_port,
    }  # fmt: skip
    ports = {name: _port(name, port) for name, port in wanted.items()}
    screen = running.screen_for_notes()
    directory = running.model_directory(given, revision)
    try:
        asked = comparison.prompts_of((), prompts, directory, 0)
    except ValueError as error:
        raise BadUsageError(f"--prompts: {error}") from error
    with running.children(log_dir, screen, flags) as services:
        comparator, addresses = _start(services, screen, directory, ports, flags)
        found = _compare(comparator, asked, screen, max_tokens, temperature)
        _tell(found, {} if once else addresses, as_json)
        if not once:
            running.watch(services, screen)
    raise typer.Exit(FINE if found.is_equal else DIFFERENT)


def _port(name: str, wanted: int | None) -> int:
    """Returns a free port.

    Raises:
      CannotRunError: the port that the user named is taken.
    """
    from isobit.cli import running

    if wanted is None:
        return running.free_port("127.0.0.1", _PORTS[name])
    running.check_free(f"--{name}_port", "127.0.0.1", wanted)
    return wanted


def _start(
    services: "Services",
    screen: "Screen",
    model: Path,
    ports: dict[str, int],
    flags: dict[str, list[str]],
) -> tuple["Service", dict[str, str]]:
    """Starts the services. Returns the comparator and the addresses of all, once all serve."""
    from isobit import binaries
    from isobit.cli import running

    on_gpus = binaries.is_cuda(binaries.path("isobit-rollout")) or "--backend=cuda" in flags["rollout"]

    def start(kind: str, *own: str) -> "Service":
        binary = f"isobit-{kind}"
        common = running.own_flags(model.parent, model.name, os.cpu_count() or 1, binary)
        return services.start(binary, kind, [*common, f"--port={ports[kind]}", *own, *flags[kind]])

    rollout = start("rollout", "--tp_size=1", *([_ROLLOUT_SHARE] if on_gpus else []))
    if on_gpus:  # the rollout takes a fraction of the memory that is free, so it starts first
        running.wait_serving(services, rollout, screen, model)
    scorer = start("scorer", "--shards=1")
    for service in (rollout, scorer):
        running.wait_serving(services, service, screen, model)
    own = [f"--rollout={rollout.target}", f"--scorer={scorer.target}", f"--port={ports['comparator']}"]
    own.append(f"--http_port={ports['page']}")
    if (model / "tokenizer.json").is_file():
        own.append(f"--tokenizer={model / 'tokenizer.json'}")
    comparator = services.start("isobit-comparator", "comparator", [*own, *flags["comparator"]])
    running.wait_serving(services, comparator, screen)
    trio = {"rollout": rollout, "scorer": scorer, "comparator": comparator}
    page = int(Path(f"{comparator.port_file}.http").read_text())
    return comparator, {"page": f"http://127.0.0.1:{page}", **{name: it.target for name, it in trio.items()}}


def _compare(
    service: "Service", prompts: Any, screen: "Screen", max_tokens: int, temperature: float
) -> "Found":
    from isobit import ComparatorClient, comparison

    with ComparatorClient(service.target) as client:
        found = comparison.compare(
            client, prompts, screen, max_tokens=max_tokens, temperature=temperature, seed=1
        )
    comparison.show(found, prompts, screen)
    return found


def _tell(found: "Found", addresses: dict[str, str], as_json: bool) -> None:
    if as_json:
        print(json.dumps({**json.loads(found.json()), **addresses}), flush=True)
        return
    lines = [f"  {name:<10}  {address}" for name, address in addresses.items()]
    print("\n".join([found.line(), *lines, *(["Ctrl-C stops everything."] if lines else [])]), flush=True)


def register(app: typer.Typer) -> None:
    app.command("pair", cls=_PairCommand, help=_HELP)(pair)
