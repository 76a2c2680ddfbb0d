"""Where the services' binaries are: in wheels, in a checkout, or where ISOBIT_BIN_DIR says."""

import importlib.util
import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_BUILT = _PACKAGE.parents[1] / "build" / "release" / "bin"
_IS_CHECKOUT = (_PACKAGE.parents[1] / "CMakePresets.json").exists()


class BinaryNotFoundError(Exception):
    """A binary is nowhere; the message says where it was looked for."""


def path(name: str) -> Path:
    """The binary `name`, such as "isobit-rollout".

    ISOBIT_BIN_DIR, where it is set, is the only place. Otherwise the package isobit_cuda comes first on a
    machine with a GPU, then the package isobit, then a checkout's build/release/bin.

    Raises:
      BinaryNotFoundError: none of these has it, or it is isobit_cuda's and a library of it is nowhere.
    """
    places = _places()
    for _, folder in places:
        if os.access(found := folder / name, os.X_OK) and found.is_file():
            if is_cuda(found):
                _check_libraries(found)
            return found
    looked = "; ".join(f"{what}: {folder}" for what, folder in places)
    raise BinaryNotFoundError(f"{name} is not there. Looked in {looked}. {_hint()}")


def _check_libraries(binary: Path) -> None:
    """The loader's own message would not say where it looked."""
    from isobit_cuda import MissingLibraryError, check

    try:
        check(binary)
    except MissingLibraryError as error:
        raise BinaryNotFoundError(str(error)) from error


def is_cuda(binary: Path) -> bool:
    """Whether `binary` is of isobit_cuda, so that it should run on GPUs."""
    folder = _cuda_folder()
    return folder is not None and binary.parent == folder


def gpu_is_there() -> bool:
    """Whether this process may see an NVIDIA GPU, judged without CUDA."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return False
    return any(Path("/dev").glob("nvidia[0-9]*"))


def _places() -> list[tuple[str, Path]]:
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
