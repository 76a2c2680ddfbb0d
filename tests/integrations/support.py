"""What the tests of the frameworks' seams share: a tokenizer for tiny models, bits, skipping loudly."""

import os
import sys
import tomllib
from pathlib import Path

import numpy as np

VOCABULARY = 499
ROOT = Path(__file__).resolve().parents[2]

# TRL says at each use of rollout_func and of trl.experimental that they may change.
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


def skip(error: ImportError) -> None:
    """Ends the program of a test whose framework is not installed, as skipped; with ISOBIT_REQUIRE_FRAMEWORKS
    as failed."""
    if os.environ.get("ISOBIT_REQUIRE_FRAMEWORKS"):
        raise error
    print(f"SKIPPED: NO TESTS RAN, as {os.path.basename(sys.argv[0])} cannot import what it tests: {error}")
    sys.exit(0)


def install_entry_points(folder: Path) -> None:
    """Makes `folder` a place of packages where verl's search for plugins finds isobit."""
    project = tomllib.loads((ROOT / "python" / "pyproject.toml").read_text())["project"]
    lines = [f"{k} = {v}\n" for k, v in project["entry-points"]["verl.plugins"].items()]
    info = folder / "isobit-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: isobit\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[verl.plugins]\n" + "".join(lines))


def bits(values) -> list[int]:
    return np.asarray(values, dtype=np.float32).view(np.uint32).tolist()


def word_tokenizer():
    """A tokenizer of transformers with one word for each id of a tiny model: w000, w001, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i:03}": i for i in range(VOCABULARY)}, unk_token="w000"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="w001", pad_token="w000", padding_side="left"
    )
