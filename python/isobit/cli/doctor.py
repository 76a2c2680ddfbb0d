"""`isobit doctor`: will a model run here, and does this GPU compute the contract? isobit.doctor finds the
answers."""

import dataclasses
import json as json_format
import sys

import typer

_FINE, _DIFFERENT, _BAD_USAGE, _CANNOT_RUN = range(4)
_MARKS = {"yes": ("yes ", "green"), "no": ("NO  ", "bold red"), "note": ("note", "yellow")}


def doctor(
    model: str | None = typer.Argument(
        None,
        metavar="MODEL",
        help="A directory, a config.json, or the id of a model on the hub.",
        show_default=False,
    ),
    revision: str | None = typer.Option(None, help="A branch, tag or commit of a model on the hub."),
    tp_size: int = typer.Option(1, "--tp_size", help="Tensor-parallel size of the rollout: 1, 2, 4 or 8."),
    numerics: bool = typer.Option(
        False,
        "--numerics",
        help="Run a million single tensor-core steps on each GPU, and compare them with the contract.",
    ),
    ignore_config_fields: str = typer.Option(
        "",
        "--ignore_config_fields",
        metavar="A,B",
        help="The same as the services' flag.",
        show_default=False,
    ),
    json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Say whether a model runs on this machine, from its config.json alone.

    Prints one line each for model, context, dtype, GPU, driver and memory. With --numerics, MODEL may be left
    out. Exit status: 0: it runs here; 1: with --numerics, a GPU does not compute the contract; 2: bad usage;
    3: it does not run here, or --numerics cannot.
    """
    from isobit import doctor as work
    from isobit import hub

    if model is None and not numerics:
        _refuse("expected MODEL, --numerics, or both")
    try:
        if model is None:
            report = work.Report("", tp_size=tp_size)
            work.judge_gpus(report)
        else:
            fields = [name for name in ignore_config_fields.split(",") if name]
            report = work.examine(model, revision, tp_size, fields)
    except (hub.NotAModelError, ValueError) as error:
        _refuse(str(error))
    runs = report.runs
    computes = work.ask_numerics(report) if numerics else True
    if json:
        print(json_format.dumps({**dataclasses.asdict(report), "runs": runs}, indent=2))
    else:
        _print(report)
        if model is not None:
            also = "" if computes is not False else ", but a GPU does not compute the contract"
            if runs and (missing := work.missing_services()):
                also += f", once it has the services: {missing}"
            _say(f"{model} {'runs here' if runs else 'does not run here'}{also}", "bold")
    if computes is False:
        raise typer.Exit(_DIFFERENT)
    raise typer.Exit(_FINE if runs and computes else _CANNOT_RUN)


def _refuse(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(_BAD_USAGE)


def _print(report) -> None:
    width = max(len(verdict.name) for verdict in report.verdicts)
    for verdict in report.verdicts:
        mark, style = _MARKS[verdict.verdict]
        _say(f"{verdict.name:<{width}}  ", "", (mark, style), f"  {verdict.text}")


def _say(text: str, style: str, *more: str | tuple[str, str]) -> None:
    """Prints one line. Parts with a style have it only on a terminal."""
    if not sys.stdout.isatty():
        print(text + "".join(part if isinstance(part, str) else part[0] for part in more))
        return
    from rich.console import Console
    from rich.text import Text

    Console(soft_wrap=True, highlight=False).print(Text.assemble((text, style), *more))
