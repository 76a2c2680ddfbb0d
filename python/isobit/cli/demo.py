"""`isobit demo`."""

from pathlib import Path

import typer

from isobit.cli.command import BadUsageError, CannotRunError, Command
from isobit.cli.status import DIFFERENT, FINE

_MODEL = "models/smollm2-135m-instruct"  # where `make model` puts it
_MODES = ["tree", "batch_invariant", "vanilla"]  # isobit.demo.MODES, without what it imports


class _DemoCommand(Command):
    many = ("modes",)


def demo(
    model: str = typer.Option(_MODEL, help="A directory, or the id of a model on the hub."),
    offline: bool = typer.Option(
        False, "--offline", help="Use a small random model, with token ids as prompts."
    ),
    modes: list[str] = typer.Option(_MODES, metavar="MODE", help="Which of the three modes to run."),
    prompts: Path | None = typer.Option(
        None, metavar="FILE", help="Prompts, one per line (token ids if there is no tokenizer)."
    ),
    max_tokens: int = typer.Option(48, "--max_tokens", help="The largest number of tokens in a completion."),
    min_tokens_compared: int = typer.Option(
        500,
        "--min_tokens_compared",
        metavar="N",
        help="The demo fails if fewer tokens are compared in `tree`.",
    ),
    tp_size: int = typer.Option(4, "--tp_size", help="Tensor-parallel size of the rollout."),
    shards: int = typer.Option(2, help="Shards of the scorer."),
    bin_dir: Path | None = typer.Option(None, "--bin_dir", help="The folder of the services."),
    log_dir: Path | None = typer.Option(
        None, "--log_dir", help="A new folder for the services' logs; default: logs/demo-TIME."
    ),
    keep_running: bool = typer.Option(
        False, "--keep_running", help="Afterwards, keep services running in the first mode."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Show which numerics modes are equal in every bit: all three services, with a small model.

    Exit status: 0: every check passed; 1: a check failed; 3: it cannot run here.
    """
    from isobit import demo as work
    from isobit.cli import running
    from isobit.launch import stop_signals_as_exit

    if unknown := [mode for mode in modes if mode not in _MODES]:
        raise BadUsageError(f"--modes: expected some of {', '.join(_MODES)}, got {unknown[0]}")
    if not offline and model == _MODEL and not Path(model).is_dir():
        raise CannotRunError(
            f"{model} does not exist: give a --model, or --offline, which uses a random one; in a checkout"
            " `make model` makes it"
        )
    directory = Path(model) if offline else running.model_directory(model, None)
    options = work.Options(
        directory, offline, modes, prompts, max_tokens, min_tokens_compared, tp_size, shards, bin_dir,
        log_dir, keep_running, as_json,
    )  # fmt: skip
    with stop_signals_as_exit():
        try:
            failures = work.run(options)
        except ValueError as error:  # the prompts are wrong
            raise BadUsageError(str(error)) from error
    raise typer.Exit(DIFFERENT if failures else FINE)


def register(app: typer.Typer) -> None:
    app.command("demo", cls=_DemoCommand)(demo)
