"""`isobit audit`."""

import os
from pathlib import Path

import typer

from isobit.cli.app import BadUsageError, Command


def audit(
    file: Path = typer.Argument(..., help="A recording.", show_default=False),
    model: list[Path] = typer.Option([], metavar="DIR", help="Weights; may be repeated."),
    scorer: list[str] = typer.Option([], metavar="HOST:PORT", help="One that runs; may be repeated."),
    bin_dir: Path | None = typer.Option(None, "--bin_dir", help="Where isobit-scorer is."),
    threads: int = typer.Option(os.cpu_count() or 1, help="Of a scorer that is started."),
    json: Path | None = typer.Option(None, metavar="FILE", help="Write the report there, too."),
    html: Path | None = typer.Option(None, metavar="FILE", help="Write the report there, too."),
    parquet: Path | None = typer.Option(
        None, metavar="FILE", help="Write the recording there as Parquet (needs pyarrow)."
    ),
    resume: bool = typer.Option(
        False, "--resume", help="Go on with what this user's FILE.audit says is done."
    ),
    seal: bool = typer.Option(
        False,
        "--seal",
        help="First seal a recording whose writer died, without a last line that is not whole.",
    ),
) -> None:
    """Compute again what a rollout sampled, and compare bit by bit.

    A scorer of this machine's CPU is started for each --model. Exit status: 0: every sample was computed
    again, every bit was equal, and the recording ends with its seal; 3: only the seal lacks; 1: anything
    else; 2: wrong arguments, and files that cannot be read.
    """
    from isobit.audit import run

    if not (model or scorer or seal):
        raise BadUsageError("expected --model or --scorer, which say what computes, or --seal")
    for directory in model:
        if not (directory / "config.json").is_file():
            raise BadUsageError(f"--model: expected a model directory, got {directory}")
    if not file.is_file():
        raise BadUsageError(f"expected a recording, got {file}, which is no file")
    for name, output in (("json", json), ("html", html), ("parquet", parquet)):
        if output is not None and output.exists() and output.samefile(file):
            raise BadUsageError(f"--{name}: expected another file than the recording, got {output}")
    options = run.Options(file, model, scorer, bin_dir, threads, json, html, parquet, resume, seal)
    raise typer.Exit(run.run(options))


def register(app: typer.Typer) -> None:
    app.command("audit", cls=Command)(audit)
