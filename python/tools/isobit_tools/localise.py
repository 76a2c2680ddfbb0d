"""The old name of isobit.localise and `isobit localise`, which works until the next release."""

import sys
from collections.abc import Sequence

from isobit.localise import *  # noqa: F403


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `isobit localise` and returns the exit status."""
    from isobit.cli import main as isobit

    return isobit(["localise", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    print("note: python -m isobit_tools.localise is now isobit localise", file=sys.stderr)
    sys.exit(main())
