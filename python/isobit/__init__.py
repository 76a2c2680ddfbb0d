"""The client of isobit: rollout and trainer logprobs that are equal in every bit.

Names are imported when they are first used, so that `isobit.torch` works without the client's packages.
"""

import importlib
from typing import TYPE_CHECKING, Any

from isobit import forks  # noqa: F401  before anything imports gRPC

if TYPE_CHECKING:
    from isobit.client import RolloutClient, ScorerClient
    from isobit.comparator_client import ComparatorClient
    from isobit.errors import IsobitError
    from isobit.generation_config import sampling_defaults
    from isobit.metrics import framework_metrics
    from isobit.tokenizer import Tokenizer

__all__ = [
    "ComparatorClient",
    "IsobitError",
    "RolloutClient",
    "ScorerClient",
    "Tokenizer",
    "framework_metrics",
    "sampling_defaults",
]

_MODULES = {
    "ComparatorClient": "comparator_client",
    "IsobitError": "errors",
    "RolloutClient": "client",
    "ScorerClient": "client",
    "Tokenizer": "tokenizer",
    "framework_metrics": "metrics",
    "sampling_defaults": "generation_config",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _MODULES.values():
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def _version() -> str:
    """The version of the package that is installed."""
    metadata = importlib.import_module("importlib.metadata")
    try:
        return metadata.version(__name__)
    except metadata.PackageNotFoundError as error:
        raise AttributeError(f"{__name__} is not installed, and so has no __version__") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
