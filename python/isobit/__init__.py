"""Client of isobit: rollout and trainer logprobs that are equal in every bit."""

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
