"""Samples completions of many prompts at the same time, for isobit.aio.RolloutClient."""

import asyncio
from collections.abc import Sequence
from typing import Any

from isobit.arguments import UINT32, TokenIds, integer, token_rows
from isobit.results import Sample
from isobit.timeouts import Deadline


async def generate_batch(
    client: Any, prompts: Sequence[TokenIds], max_concurrency: int, timeout: float | None, **arguments: Any
) -> list[list[Sample]]:
    """See isobit.aio.RolloutClient.generate_batch. `arguments`: those of its generate for each prompt."""
    slots = asyncio.Semaphore(integer("max_concurrency", max_concurrency, (1, UINT32[1])))
    rows = token_rows(prompts, "prompts", "generate takes a single prompt")
    deadline = Deadline(timeout)

    async def one(prompt: TokenIds) -> list[Sample]:
        async with slots:
            return await client.generate(prompt, timeout=deadline.left_s(), **arguments)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt)) for prompt in rows]
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
