"""The old name of isobit.convert.smollm2, which works until the next release."""

import sys

from isobit.convert.gguf import *  # noqa: F403
from isobit.convert.smollm2 import *  # noqa: F403

if __name__ == "__main__":
    print("note: python -m isobit_tools.smollm2 is now python -m isobit.convert.smollm2", file=sys.stderr)
    sys.exit(main())  # noqa: F405
