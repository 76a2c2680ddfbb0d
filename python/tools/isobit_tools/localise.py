"""The old name of isobit.localise, which works until the next release."""

import sys

from isobit.localise import *  # noqa: F403

if __name__ == "__main__":
    print("note: python -m isobit_tools.localise is now python -m isobit.localise", file=sys.stderr)
    sys.exit(main())  # noqa: F405
