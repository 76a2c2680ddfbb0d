"""The old name of isobit.cli, which works until the next release."""

import sys

from isobit.cli import main

if __name__ == "__main__":
    print("note: python -m isobit_tools.cli is now isobit", file=sys.stderr)
    sys.exit(main())
