"""The old name of isobit.audit.run and `isobit audit`, which works until the next release."""

import sys
from collections.abc import Sequence

from isobit.audit.run import *  # noqa: F403


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `isobit audit` and returns the exit status."""
    from isobit.cli import main as isobit

    return isobit(["audit", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    print("note: python -m isobit_tools.audit is now isobit audit", file=sys.stderr)
    sys.exit(main())
