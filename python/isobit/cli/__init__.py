"""The command `isobit`, also as `python -m isobit`. isobit.cli.app has the commands, one module for each.

Exit status: 0: success; 1: a difference was found; 2: bad usage; 3: it cannot run here, or a service failed;
128 + N: signal N ended it before its work was done. docs/operations.md lists the few exceptions.
"""

import sys
from collections.abc import Sequence

from isobit.cli.status import CANNOT_RUN, FINE


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line, by default that of this process, and returns the exit status."""
    from isobit.cli.app import make_app

    try:
        make_app()(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="isobit")
    except SystemExit as end:  # how typer ends, always
        return end.code if isinstance(end.code, int) else CANNOT_RUN
    return FINE
