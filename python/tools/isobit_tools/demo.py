"""The old name of isobit.demo, which works until the next release."""

import sys

from isobit.demo import *  # noqa: F403

if __name__ == "__main__":
    print("note: python -m isobit_tools.demo is now python -m isobit.demo", file=sys.stderr)
    sys.exit(main())  # noqa: F405
