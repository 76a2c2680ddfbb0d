"""Finds the binaries of the services: in wheels, in a checkout, or in ISOBIT_BIN_DIR."""

import importlib.util
import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_BUILT = _PACKAGE.parents[1] / "build" / "release" / "bin"
_IS_CHECKOUT = (_PACKAGE.parents[1] / "CMakePresets.json").exists()


class BinaryNotFoundError(Exception):
    """A binary was not found; the message lists the places that were searched."""


def path(name: str) -> Path:
    """The path of the binary `name`, such as "isobit-rollout".

    If ISOBIT_BIN_DIR is set, only that folder is searched. Otherwise the order is: the package isobit_cuda if
    the machine has a GPU, the package isobit, a checkout's build/release/bin.

    Raises:
      BinaryNotFoundError: none of these has the binary; or isobit_cuda has it, and a library that it needs is
        missing.
    """
    places = _candidates()
    for _, folder in places:
        if os.access(found := folder / name, os.X_OK) and found.is_file():
            if is_cuda(found):
                _check_libraries(found)
            return found
    looked = "; ".join(f"{what}: {folder}" for what, folder in places)
    raise BinaryNotFoundError(f"{name} was not found. Looked in {looked}. {_hint()}")


def _check_libraries(binary: Path) -> None:
    """Checks that the libraries are there, since the loader's own message does not say where it looked."""
    from isobit_cuda import MissingLibraryError, check

    try:
        check(binary)
    except MissingLibraryError as error:
        raise BinaryNotFoundError(str(error)) from error


def is_cuda(binary: Path) -> bool:
    """Whether `binary` belongs to isobit_cuda, and so should run on GPUs."""
    folder = _cuda_folder()
    return folder is not None and binary.parent == folder


def gpu_is_there() -> bool:
    """Whether this process can probably see an NVIDIA GPU. Does not use CUDA."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _candidates() -> list[tuple[str, Path]]:
    if given := os.environ.get("ISOBIT_BIN_DIR"):
        return [("ISOBIT_BIN_DIR", Path(given).resolve())]
    places = [("the package isobit", _PACKAGE / "bin")]
    if _IS_CHECKOUT:
        places.append(("the checkout's build", _BUILT))
    if gpu_is_there() and (folder := _cuda_folder()) is not None:
        places.insert(0, ("the package isobit_cuda", folder))
    return places


def _cuda_folder() -> Path | None:
    spec = importlib.util.find_spec("isobit_cuda")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).resolve() / "bin"


def _hint() -> str:
    if os.environ.get("ISOBIT_BIN_DIR"):
        return "Unset ISOBIT_BIN_DIR, or set it to a folder that has the services."
    return "Install isobit's wheel for x86-64 Linux, run `make build` in a checkout, or set ISOBIT_BIN_DIR."
