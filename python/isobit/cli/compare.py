"""`isobit compare`: compares prompts through a running comparator, or through one that it starts between two
services."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from isobit.cli.command import SERVICE_FLAGS, BadUsageError, Command
from isobit.cli.service_flags import ServiceFlags
from isobit.cli.status import DIFFERENT, FINE

if TYPE_CHECKING:
    from isobit.comparison import Found
    from isobit.screen import Screen

_HELP = """Generate from prompts, score every completion, and compare bit by bit.

Give --comparator for a comparator that is running. Or give --rollout and --scorer: then a comparator is
started between the two, and flags of isobit-comparator, such as --upstream_token_file, are passed on to it.
Without PROMPT and --prompts, a few built-in prompts are compared. Exit status: 0: no bit differs; 1: a bit
differs; 3: the services could not be asked.
"""


class _CompareCommand(Command):
    services = ServiceFlags("comparator", taken=("rollout", "scorer"))


def compare(
    ctx: typer.Context,
    prompt: list[str] = typer.Argument(
        None, metavar="[PROMPT]...", help="Text, with --model; otherwise token ids in one word: '1 2 3'."
    ),
    comparator: str | None = typer.Option(None, metavar="HOST:PORT", help="A running comparator."),
    rollout: str | None = typer.Option(None, metavar="HOST:PORT", help="A running rollout; with --scorer."),
    scorer: str | None = typer.Option(None, metavar="HOST:PORT", help="A running scorer; with --rollout."),
    model: str | None = typer.Option(
        None, help="A directory, or the id of a model on the hub, for its tokenizer."
    ),
    revision: str | None = typer.Option(None, help="A branch, tag or commit of a model on the hub."),
    prompts: Path | None = typer.Option(None, metavar="FILE", help="More prompts, one per line."),
    max_tokens: int = typer.Option(
        64, "--max_tokens", min=1, help="The largest number of tokens in a completion."
    ),
    temperature: float = typer.Option(1.0, min=0.0, help="Sampling temperature; 0 is greedy."),
    top_p: float = typer.Option(1.0, "--top_p", help="Nucleus sampling; 1 is off."),
    seed: int = typer.Option(1, help="The seed of the samples."),
    n: int = typer.Option(1, min=1, help="The number of samples of each prompt."),
    allow_weight_mismatch: bool = typer.Option(
        False, "--allow_weight_mismatch", help="Compare even if the weights of the two sides differ."
    ),
    tls_ca: str | None = typer.Option(None, "--tls_ca", help="The CA of the comparator's certificate (PEM)."),
    token_file: str | None = typer.Option(
        None, "--token_file", help="A file with the bearer token for the comparator."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    from isobit.cli import running

    own = (rollout is not None, scorer is not None)
    if own[0] != own[1] or own[0] == (comparator is not None):
        raise BadUsageError("expected either --comparator, or --rollout and --scorer")
    flags: list[str] = ctx.meta[SERVICE_FLAGS]["comparator"]
    if comparator is not None and flags:
        raise BadUsageError(
            f"{flags[0]} is a flag for a comparator that is started here: give --rollout and --scorer"
        )
    screen = running.screen_for_notes()
    directory = running.model_directory(model, revision) if model else None
    asked = {
        "max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed, "n": n,
        "allow_weight_mismatch": allow_weight_mismatch,
    }  # fmt: skip
    given = (prompt or [], prompts, directory)
    if comparator is not None:
        security = {name: it for name, it in (("tls_ca", tls_ca), ("token_file", token_file)) if it}
        found = _compare(comparator, given, screen, security, asked)
    else:
        with running.children(None, screen, {"comparator": flags}) as services:
            targets = [f"--rollout={rollout}", f"--scorer={scorer}"]
            service = services.start("isobit-comparator", "comparator", [*targets, *flags])
            running.wait_serving(services, service, screen)
            found = _compare(service.target, given, screen, {}, asked)
    print(found.json() if as_json else found.line())
    raise typer.Exit(FINE if found.is_equal else DIFFERENT)


def _compare(target: str, given: tuple, screen: "Screen", security: dict, asked: dict) -> "Found":
    from isobit import ComparatorClient, comparison

    with ComparatorClient(target, **security) as client:
        info = client.get_server_info()
        try:
            prompts = comparison.prompts_of(*given, info.rollout.server.model.vocab_size)
        except ValueError as error:
            raise BadUsageError(str(error)) from error
        found = comparison.compare(client, prompts, screen, **asked)
        comparison.show(found, prompts, screen)
    return found


def register(app: typer.Typer) -> None:
    app.command("compare", cls=_CompareCommand, help=_HELP)(compare)
