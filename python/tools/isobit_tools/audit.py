"""The old name of isobit.audit.run, which works until the next release."""

import sys

from isobit.audit.run import *  # noqa: F403

if __name__ == "__main__":
    print("note: python -m isobit_tools.audit is now python -m isobit.audit.run", file=sys.stderr)
    sys.exit(main())  # noqa: F405
