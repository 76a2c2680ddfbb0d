"""Fuzzes the converter of GGUF files with atheris: any file must give a model or a ConversionError.

    python tests/fuzz/gguf_fuzz.py [libFuzzer's flags] [corpus]       (needs the extra `fuzz`)

The converter accepts one file only, and checks its digest before it reads it; this leaves the check out.
"""

import contextlib
import logging
import os
import sys
import tempfile
from pathlib import Path

os.environ["TQDM_DISABLE"] = "1"  # before tqdm is imported

import atheris
import numpy as np

# Every line of these counts as coverage. The package's other modules are as they always are, for speed.
with atheris.instrument_imports(
    include=["gguf.gguf_reader", "gguf.quants", "isobit.convert.bounded_gguf", "isobit.convert.gguf"]
):
    from isobit.convert import bounded_gguf, gguf  # noqa: F401


class FileInMemory(bytes):
    """A file's content in place of its path: writing and mapping a file takes longer than most inputs."""

    def __str__(self) -> str:
        return "model.gguf"


def convert(scratch: Path, data: bytes) -> None:
    """Converts a file of `data` into `scratch`, a directory in memory."""
    # Any other error is a finding.
    with contextlib.suppress(gguf.ConversionError):
        gguf.convert(FileInMemory(data), scratch)


def main() -> None:
    logging.disable()  # gguf warns of each duplicate key
    np.memmap = lambda file, mode: np.frombuffer(file, np.uint8)
    with tempfile.TemporaryDirectory(prefix="gguf_fuzz-", dir="/dev/shm") as scratch:
        directory = Path(scratch)
        # A longer header has more of the same, and reading takes microseconds for each element of an array.
        flags = [*sys.argv, "-max_len=8192"]
        atheris.Setup(flags, lambda data: convert(directory, data))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
