"""python -m isobit_cuda: what the services for GPUs need, and where it is; status 3: they cannot run."""

import subprocess
import sys
from pathlib import Path

from isobit_cuda import BIN, MissingLibraryError, check


def main() -> int:
    try:
        for name, path in check().items():
            print(f"{name}: {path}")
    except MissingLibraryError as error:
        print(f"isobit_cuda: {error}", file=sys.stderr)
        return 3
    version = subprocess.run(
        [BIN / "isobit-rollout", "--version"], capture_output=True, text=True, check=False
    )
    print(version.stdout.strip() or version.stderr.strip())
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        print("isobit_cuda: no NVIDIA GPU here: expected /dev/nvidia0 or another one", file=sys.stderr)
        return 3
    return version.returncode


if __name__ == "__main__":
    sys.exit(main())
