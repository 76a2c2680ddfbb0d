"""`isobit bench`: runs isobit-bench, which reads its own flags."""

import os

import typer

from isobit.cli.command import Command


class _Passed(Command):
    """Passes all words on unchanged."""

    def parse_args(self, ctx, args):
        ctx.args = args
        return []


def bench(ctx: typer.Context) -> None:
    """Measure this machine with isobit-bench (`isobit bench --help` lists its subcommands and flags).

    Without a subcommand: `decode` if the services are those for GPUs, otherwise `cpu`.
    """
    from isobit import binaries

    path = binaries.path("isobit-bench")
    words = list(ctx.args)
    if not words or (words[0].startswith("-") and words[0] not in ("--help", "-h", "--version")):
        words.insert(0, "decode" if binaries.is_cuda(path) else "cpu")
    os.execv(path, [str(path), *words])


def register(app: typer.Typer) -> None:
    app.command("bench", cls=_Passed)(bench)
