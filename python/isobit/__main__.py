"""`python -m isobit`: the command isobit, for when its script is not on PATH."""

import sys

from isobit.cli import main

if __name__ == "__main__":
    sys.exit(main())
