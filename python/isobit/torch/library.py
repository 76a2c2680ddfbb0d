"""Finds and loads libisobit_torch.so, which registers the operators `torch.ops.isobit.*`."""

import functools
import importlib.util
import os
from pathlib import Path

import torch

NAME = "libisobit_torch.so"
# The same with the kernels for GPUs, for a PyTorch with this CUDA version; it computes on CPUs as well.
CUDA_NAME, CUDA = "libisobit_torch_cuda.so", "13."


def candidates() -> list[Path]:
    """Returns where the library may be: only $ISOBIT_TORCH_LIBRARY if it is set; otherwise the package
    isobit-torch, then the build folder of a checkout."""
    if named := os.environ.get("ISOBIT_TORCH_LIBRARY"):
        return [Path(named)]
    spec = importlib.util.find_spec("isobit_torch")
    packaged = spec.submodule_search_locations if spec and spec.submodule_search_locations else []
    built = Path(__file__).resolve().parents[3] / "build" / "torch" / "lib"
    names = [CUDA_NAME, NAME] if (torch.version.cuda or "").startswith(CUDA) else [NAME]
    return [*(Path(folder) / name for folder in packaged for name in names), built / NAME]


@functools.cache
def load() -> Path:
    """Loads the operators, once, and returns the library's path.

    Raises:
        FileNotFoundError: there is no library; the message lists the places that were searched.
        OSError: it cannot be loaded into this PyTorch (2.10 or later is required).
    """
    paths = candidates()
    found = next((path for path in paths if path.exists()), None)
    if found is None:
        places = ", ".join(str(path) for path in paths)
        raise FileNotFoundError(
            f"expected the operators of isobit at {places}; `pip install 'isobit[torch]'` brings them; in a "
            f"checkout `make build-torch` builds them"
        )
    torch.ops.load_library(str(found))
    return found
