"""The typer application and its commands."""

import difflib
import importlib.util
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from isobit.cli.command import Command
from isobit.cli.status import BAD_USAGE


class Group(TyperGroup):
    """The commands. For an unknown command, the error names a similar one."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            near = difflib.get_close_matches(name, self.list_commands(ctx), 1)
            ctx.fail(f"unknown command {name}" + "".join(f"; did you mean {one}?" for one in near))
        return super().resolve_command(ctx, args)


def make_app() -> typer.Typer:
    """Makes the application. A command imports what it computes with only when it runs."""
    from isobit.cli import audit, bench, compare, convert, demo, localise, pair, serve, version

    terminal = sys.stdout.isatty() and sys.stderr.isatty()
    app = typer.Typer(
        cls=Group,
        help="Sample from language models and score the samples, with logprobs that are equal in every bit.",
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode="rich" if terminal else None,
        pretty_exceptions_enable=False,
        no_args_is_help=False,
        invoke_without_command=True,
    )
    app.callback(invoke_without_command=True)(_no_command)
    _add_doctor(app)
    for module in (serve, pair, demo, compare, audit, localise, bench, convert, version):
        module.register(app)
    return app


def _no_command(
    ctx: typer.Context,
    shown: bool = typer.Option(False, "--version", help="Show the version and exit.", is_eager=True),
) -> None:
    if shown:
        from isobit.cli.version import version_text

        print(f"isobit {version_text()}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        print(ctx.get_help(), file=sys.stderr)
        raise typer.Exit(BAD_USAGE)


def _add_doctor(app: typer.Typer) -> None:
    """Adds the command doctor, whose module defines its own signature."""
    if importlib.util.find_spec("isobit.cli.doctor") is None:
        return
    from isobit.cli.doctor import doctor

    app.command("doctor", cls=Command)(doctor)
