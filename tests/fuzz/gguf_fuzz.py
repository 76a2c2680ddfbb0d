"""Fuzzes the converter of GGUF files with atheris: whatever the file holds, a model or a ConversionError.

    python tests/fuzz/gguf_fuzz.py [libFuzzer's flags] [corpus]       (needs the extra `fuzz`)

The converter itself takes one file alone, whose digest it checks before it reads it; here that check is
left out.
"""

import contextlib
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["gguf", "isobit.smollm2"]):
    import gguf  # noqa: F401  (instrumented before the converter imports it)

    from isobit import smollm2


def convert(scratch: Path, data: bytes) -> None:
    """Converts `data` in `scratch`, a directory in memory."""
    path = scratch / "model.gguf"
    path.write_bytes(data)
    # Another error than this one is a finding.
    with contextlib.suppress(smollm2.ConversionError):
        smollm2.convert(path, scratch)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="gguf_fuzz-", dir="/dev/shm") as scratch:
        atheris.Setup(sys.argv, lambda data: convert(Path(scratch), data))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
