"""How weights come from the trainer to the services: the one place that knows."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor
from transformers import PreTrainedModel

from isobit import RolloutClient, ScorerClient


def send_weights(
    weights: dict[str, Tensor],
    model: PreTrainedModel,
    services: Sequence[RolloutClient | ScorerClient],
    version: int,
    model_root: Path,
    name: str,
) -> str:
    """Lets every service serve `weights` as `version`; rank 0 calls it.

    The weights go through the folder `name` below `model_root`, which the services know by that name, too.

    Returns:
        The weights' digest, as the services computed it from what they read. A service with another digest
        than the first's refuses the weights.
    """
    folder = model_root / name
    digest = ""
    try:
        model.save_pretrained(folder, state_dict=weights)
        for service in services:
            response = service.update_weights(name, weight_version=version, expected_digest=digest)
            digest = response.current.digest
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return digest
