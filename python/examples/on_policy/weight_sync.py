"""How weights come from the trainer to the services, and to whoever wants them as a model directory."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from isobit import RolloutClient, ScorerClient


def write_model(weights: dict[str, Tensor], like: Path, folder: Path) -> None:
    """Makes `folder` a model directory of these weights, with config, tokenizer and template of `like`."""
    folder.mkdir(exist_ok=True)
    for file in like.iterdir():
        if file.suffix in (".json", ".jinja", ".txt") and not file.name.endswith(".index.json"):
            shutil.copy(file, folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def send_weights(
    weights: dict[str, Tensor],
    services: Sequence[RolloutClient | ScorerClient],
    version: int,
    like: Path,
    model_root: Path,
    name: str,
) -> str:
    """Lets every service serve `weights` as `version`; rank 0 calls it.

    They go through the folder `name` below `model_root`, which the services know by that name, too.

    Args:
        like: the model directory from which the run began.

    Returns:
        The weights' digest, as the services computed it from what they read. A service that reads anything
        else than the first one refuses it.
    """
    folder = model_root / name
    digest = ""
    try:
        write_model(weights, like, folder)
        for service in services:
            response = service.update_weights(name, weight_version=version, expected_digest=digest)
            digest = response.current.digest
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return digest
