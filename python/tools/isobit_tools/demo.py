"""The old name of isobit.demo and `isobit demo`, which works until the next release."""

import sys
from collections.abc import Sequence

from isobit.demo import *  # noqa: F403


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `isobit demo` and returns the exit status."""
    from isobit.cli import main as isobit

    return isobit(["demo", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    print("note: python -m isobit_tools.demo is now isobit demo", file=sys.stderr)
    sys.exit(main())
