"""Reads the weights of a model directory without torch, for tests and experiments that send weights."""

import json
from pathlib import Path

import numpy as np


def bf16_tensors(directory: Path) -> dict[str, np.ndarray]:
    """Returns the bits of bfloat16 (uint16) of all tensors by name, in the order of the files.

    Raises:
      ValueError: a tensor has another dtype.
    """
    tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        blob = np.fromfile(file, np.uint8)
        begin = 8 + int.from_bytes(blob[:8].tobytes(), "little")
        entries = json.loads(blob[8:begin].tobytes())
        entries.pop("__metadata__", None)
        for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
            if entry["dtype"] != "BF16":
                raise ValueError(f"{file}: {name}: expected BF16, got {entry['dtype']}")
            first, end = (begin + offset for offset in entry["data_offsets"])
            tensors[name] = blob[first:end].copy().view(np.uint16).reshape(entry["shape"])
    return tensors
