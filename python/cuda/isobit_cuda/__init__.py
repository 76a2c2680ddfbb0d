"""isobit's services for NVIDIA H100 and H200, in `bin`; `check` says whether this environment can start them.

python -m isobit_cuda        what the services need, and where it was found
"""

import os
import re
import subprocess
from pathlib import Path

BIN = Path(__file__).resolve().parent / "bin"
# Site-packages, where the services' run path looks for NVIDIA's wheels (the preset wheel-cuda).
_SITE = BIN.parents[1]
# What the services load that no system has by itself: the wheel that brings it, and where it puts it.
LIBRARIES = {
    "libnccl.so.2": ("nvidia-nccl-cu13>=2.28.9,<3", _SITE / "nvidia" / "nccl" / "lib"),
    "libcublas.so.13": ("nvidia-cublas>=13,<14", _SITE / "nvidia" / "cu13" / "lib"),
    "libcublasLt.so.13": ("nvidia-cublas>=13,<14", _SITE / "nvidia" / "cu13" / "lib"),
}


class MissingLibraryError(Exception):
    """A library that the services load is nowhere; the message says where it was looked for."""


def check(binary: Path = BIN / "isobit-rollout") -> dict[str, Path]:
    """Where the loader finds those of LIBRARIES that a service needs.

    Raises:
        MissingLibraryError: one is nowhere, or the loader cannot read the service.
    """
    # What the loader itself would do: run path, LD_LIBRARY_PATH and the system's cache.
    listed = subprocess.run(
        [_interpreter(binary), str(binary)],
        env=os.environ | {"LD_TRACE_LOADED_OBJECTS": "1"},  # it lists, and starts nothing
        capture_output=True,
        text=True,
        check=False,
    )
    lines = re.findall(r"^\s*(\S+) => (not found|/.+?)(?: \(0x[0-9a-f]+\))?$", listed.stdout, re.MULTILINE)
    found = dict(lines)
    if missing := [name for name, place in lines if place == "not found"]:
        raise MissingLibraryError("\n".join(_missing(name, binary) for name in missing))
    if listed.returncode != 0:
        raise MissingLibraryError(f"{binary} does not load: {(listed.stderr or listed.stdout).strip()}")
    return {name: Path(os.path.normpath(found[name])) for name in LIBRARIES if name in found}


def _interpreter(binary: Path) -> str:
    """The loader that the binary names."""
    named = re.search(rb"/lib[\w/.-]*/ld-linux-[\w.-]+", binary.read_bytes()[:4096])
    if named is None:
        raise MissingLibraryError(f"expected a program for Linux at {binary}")
    return named[0].decode()


def _missing(name: str, binary: Path) -> str:
    package, folder = LIBRARIES.get(name, ("", None))
    places = [f"LD_LIBRARY_PATH ({os.environ.get('LD_LIBRARY_PATH') or 'unset'})", "the system's libraries"]
    if folder is not None:
        places.insert(0, f"{folder} ({'without it' if folder.is_dir() else 'no such folder'})")
    hint = f": pip install '{package}'" if package else ""
    return f"{binary.name} needs {name}, which is neither in {', nor in '.join(places)}{hint}"
