"""Samples completions of many prompts at the same time, for isobit.RolloutClient."""

from collections.abc import Sequence
from typing import Any

from isobit import aio
from isobit.arguments import TokenIds
from isobit.channel import ServiceClient
from isobit.results import Sample


def generate_batch(
    client: ServiceClient,
    prompts: Sequence[TokenIds],
    max_concurrency: int,
    timeout: float | None,
    **arguments: Any,
) -> list[list[Sample]]:
    """See isobit.RolloutClient.generate_batch. Its calls are those of an asyncio client on a loop in the
    background. `arguments`: those of its generate for each prompt."""

    def all_of(batches: aio.RolloutClient):
        return batches.generate_batch(prompts, max_concurrency=max_concurrency, timeout=timeout, **arguments)

    return client._at_once(aio.RolloutClient, all_of)
