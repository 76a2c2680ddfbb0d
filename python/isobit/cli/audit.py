"""`isobit audit`."""

import os
from pathlib import Path

import typer

from isobit.cli.command import BadUsageError, Command


def audit(
    file: Path = typer.Argument(..., help="The recording to audit.", show_default=False),
    model: list[Path] = typer.Option(
        [], metavar="DIR", help="Start a scorer with this model; may be repeated."
    ),
    scorer: list[str] = typer.Option(
        [], metavar="HOST:PORT", help="Use this running scorer; may be repeated."
    ),
    bin_dir: Path | None = typer.Option(None, "--bin_dir", help="The folder of isobit-scorer."),
    threads: int = typer.Option(os.cpu_count() or 1, help="Threads of a scorer that is started."),
    json: Path | None = typer.Option(None, metavar="FILE", help="Also write the report there, as JSON."),
    html: Path | None = typer.Option(None, metavar="FILE", help="Also write the report there, as HTML."),
    parquet: Path | None = typer.Option(
        None, metavar="FILE", help="Also write the recording there, as Parquet (needs pyarrow)."
    ),
    resume: bool = typer.Option(
        False, "--resume", help="Continue an audit that was stopped, from the state in FILE.audit."
    ),
    seal: bool = typer.Option(
        False,
        "--seal",
        help="First seal a recording whose writer has died; an incomplete last line is dropped.",
    ),
) -> None:
    """Compute again what a rollout sampled, and compare bit by bit.

    For each --model, a scorer is started on this machine's CPU. Exit status: 0: every sample was computed
    again, every bit is equal, and the recording ends with its seal; 3: the same, but the seal is missing; 1:
    anything else; 2: wrong arguments, or a file that cannot be read.
    """
    from isobit.audit import run

    if not (model or scorer or seal):
        raise BadUsageError("expected --model or --scorer, which compute the logprobs again, or --seal")
    for directory in model:
        if not (directory / "config.json").is_file():
            raise BadUsageError(f"--model: expected a model directory, got {directory}")
    if not file.is_file():
        raise BadUsageError(f"expected a recording, got {file}, which is not a file")
    for name, output in (("json", json), ("html", html), ("parquet", parquet)):
        if output is not None and output.exists() and output.samefile(file):
            raise BadUsageError(f"--{name}: expected a file other than the recording, got {output}")
    options = run.Options(file, model, scorer, bin_dir, threads, json, html, parquet, resume, seal)
    raise typer.Exit(run.run(options))


def register(app: typer.Typer) -> None:
    app.command("audit", cls=Command)(audit)
