"""How each command reads its arguments, and how its errors are reported."""

import importlib
import sys
from collections.abc import Collection
from typing import Any

import typer
from typer.core import TyperCommand

from isobit.cli import spelling
from isobit.cli.service_flags import ServiceFlags
from isobit.cli.status import BAD_USAGE, CANNOT_RUN

# Releases of typer and click have `UsageError` under different names; this finds it in all of them.
UsageError = typer.BadParameter.__mro__[1]
# Beside the module of errors, whether that is click's or typer's own.
_CompletionItem = importlib.import_module(
    f"{UsageError.__module__.rpartition('.')[0]}.shell_completion"
).CompletionItem

# Where a command keeps the flags that it passes on to services.
SERVICE_FLAGS = "isobit.service_flags"


class Command(TyperCommand):
    """A command that takes flags in all the spellings of isobit.cli.spelling, and reports an error in one
    line.

    `services`: the flags it passes on. `many`: those of its own flags that take all words up to the next
    flag.
    """

    services: ServiceFlags | None = None
    many: tuple[str, ...] = ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:  # shell completion: the last word is not complete yet
            ctx.ignore_unknown_options = self.services is not None
            return super().parse_args(ctx, args)
        options = self.get_params(ctx)
        own = {flag[2:] for option in options for flag in option.opts if flag.startswith("--")}
        try:
            line = spelling.respell(args, own | self._passed_on(args, own))
            words = line.words
            if self.services:
                words, ctx.meta[SERVICE_FLAGS] = self.services.split(words, own)
        except spelling.WrongFlagError as error:
            raise UsageError(str(error), ctx) from error
        except _expected() as error:  # a service's --help could not be read
            raise _ended(error) from error
        for note in line.notes:
            print(f"note: {note}", file=sys.stderr)
        return super().parse_args(ctx, _one_each(words, self.many))

    def _passed_on(self, args: list[str], own: Collection[str]) -> set[str]:
        """Returns the flags of the services. The services are not asked if all flags are the command's
        own."""
        flags = [word.partition("=")[0][2:].replace("-", "_") for word in args if word.startswith("-")]
        return set(self.services.names()) if self.services and not own.issuperset(flags) else set()

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """With the flags of services that begin so; those with a service's name before only once it is there,
        as there are as many again for each service."""
        found = super().shell_complete(ctx, incomplete)
        if self.services is None or not incomplete.startswith("--"):
            return found
        own = {item.value for item in found}
        hidden = tuple(f"--{name}_" for name in self.services.services if f"--{name}_" not in incomplete)
        try:
            flags = [f"--{name}" for name in sorted(self.services.names())]
        except _expected():  # they cannot be asked
            return found
        wanted = [flag for flag in flags if flag.startswith(incomplete) and not flag.startswith(hidden)]
        return found + [_CompletionItem(flag) for flag in wanted if flag not in own]

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("\ninterrupted", file=sys.stderr)
            raise typer.Exit(130) from None
        except _expected() as error:
            raise _ended(error) from error


def _one_each(words: list[str], many: tuple[str, ...]) -> list[str]:
    """Turns `--modes a b` into `--modes a --modes b`, for the flags in `many`."""
    result: list[str] = []
    flag = ""
    count = 0  # of the words that followed `flag`
    for word in words:
        if word.startswith("-"):
            flag, count = (word, 0) if word[2:] in many else ("", 0)
            result.append(word)
            continue
        if flag and count:
            result.append(flag)
        count += 1
        result.append(word)
    return result


class CannotRunError(Exception):
    """A command cannot do here what was asked; the message says why, and what would help."""


class BadUsageError(Exception):
    """Arguments that exclude each other, or a file that is not what was expected."""


def _expected() -> tuple[type[BaseException], ...]:
    """Returns the exceptions that are reported in one line. Those of modules that are not loaded are left
    out, since they cannot have been raised."""
    found: list[type[BaseException]] = [CannotRunError, BadUsageError, OSError]
    for module, name in (
        ("isobit.binaries", "BinaryNotFoundError"),
        ("isobit.errors", "IsobitError"),
        ("isobit.launch", "ServiceError"),
    ):
        if module in sys.modules:
            found.append(getattr(sys.modules[module], name))
    return tuple(found)


def _ended(error: BaseException) -> typer.Exit:
    print(f"error: {error}", file=sys.stderr)
    return typer.Exit(_status_of(error))


def _status_of(error: BaseException) -> int:
    if isinstance(error, BadUsageError) or getattr(error, "status", None) == BAD_USAGE:
        return BAD_USAGE
    errors = sys.modules.get("isobit.errors")
    if errors is not None and isinstance(error, errors.InvalidArgumentError):
        return BAD_USAGE
    return CANNOT_RUN
