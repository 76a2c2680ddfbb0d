"""`isobit localise`."""

from pathlib import Path

import typer

from isobit.cli.command import BadUsageError, Command
from isobit.cli.status import DIFFERENT, FINE


def localise(
    comparator: str = typer.Option(..., metavar="HOST:PORT", help="The comparator between the two services."),
    tokens: str | None = typer.Option(
        None, metavar="ID,ID,...", help="The ids of prompt and completion; only the ops are compared."
    ),
    recording: Path | None = typer.Option(
        None, metavar="FILE", help="A recording; --line chooses the sample."
    ),
    line: int = typer.Option(1, help="The line of the recording, from 1."),
    scorer_sampling: str | None = typer.Option(
        None,
        "--scorer_sampling",
        metavar="JSON",
        help="The scorer's sampling parameters; default: the rollout's.",
    ),
    scorer_mode: str | None = typer.Option(
        None, "--scorer_mode", help="The scorer's logprob mode, processed or raw; default: the rollout's."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the finding as JSON."),
    tls_ca: str | None = typer.Option(None, "--tls_ca", help="The CA of the comparator's certificate (PEM)."),
    token_file: str | None = typer.Option(
        None, "--token_file", help="A file with a bearer token that has the role admin."
    ),
    timeout_s: float | None = typer.Option(
        None, "--timeout_s", help="The limit of the call; default: none, since the computation may take long."
    ),
) -> None:
    """Say where and why a rollout and a scorer first compute different bits for a sequence.

    Exit status: 0: nothing differs; 1: a bit differs; 3: the services could not be asked.
    """
    from isobit import localise as work

    if (tokens is None) == (recording is None):
        raise BadUsageError("expected either --tokens or --recording")
    if scorer_mode not in (None, "processed", "raw"):
        raise BadUsageError(f"--scorer_mode: expected processed or raw, got {scorer_mode}")
    security = {name: it for name, it in (("tls_ca", tls_ca), ("token_file", token_file)) if it}
    options = work.Options(
        comparator, tokens, recording, line, scorer_sampling, scorer_mode, security, timeout_s
    )
    try:
        found = work.localise(options)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise BadUsageError(str(error)) from error
    print(work.json_of(found) if as_json else work.text_of(found))
    raise typer.Exit(FINE if work.is_equal(found) else DIFFERENT)


def register(app: typer.Typer) -> None:
    app.command("localise", cls=Command)(localise)
