"""The command `isobit`: isobit.cli.app has its commands, one module each; `python -m isobit` is the same.

Exit status: 0: fine; 1: a difference was found; 2: bad usage; 3: it cannot run here, or a service failed;
128 + N: signal N ended it before its work was done. docs/operations.md has the few exceptions.
"""

import sys
from collections.abc import Sequence

FINE, DIFFERENT, BAD_USAGE, CANNOT_RUN = range(4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line, by default this process's, and returns the exit status."""
    from isobit.cli.app import make_app

    try:
        make_app()(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="isobit")
    except SystemExit as end:  # how typer ends, always
        return end.code if isinstance(end.code, int) else CANNOT_RUN
    return FINE
