"""Finds and loads libisobit_torch.so, which registers the operators `torch.ops.isobit.*`."""

import functools
import os
from pathlib import Path

import torch

NAME = "libisobit_torch.so"


def candidates() -> list[Path]:
    """Where the library may lie: $ISOBIT_TORCH_LIBRARY alone if it is set; else this folder, as in a wheel,
    and the build folders of a checkout."""
    if named := os.environ.get("ISOBIT_TORCH_LIBRARY"):
        return [Path(named)]
    folder = Path(__file__).resolve().parent
    return [folder / NAME, folder.parents[2] / "build" / "torch" / "lib" / NAME]


@functools.cache
def load() -> Path:
    """Loads the operators, once, and returns the library's path.

    Raises:
        FileNotFoundError: there is no library; the message lists where it was looked for.
        OSError: it does not load into this PyTorch (2.10 is the oldest).
    """
    paths = candidates()
    found = next((path for path in paths if path.exists()), None)
    if found is None:
        places = ", ".join(str(path) for path in paths)
        raise FileNotFoundError(
            f"expected the operators of isobit at {places}; `make build-torch` builds them"
        )
    torch.ops.load_library(str(found))
    return found
