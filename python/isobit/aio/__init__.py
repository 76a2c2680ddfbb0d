"""The clients of `isobit` for asyncio: the same names, arguments, results and errors.

    async with aio.RolloutClient("localhost:7001") as rollout:
        await rollout.wait_until_serving()
        (sample,) = await rollout.generate(prompt_ids, max_tokens=64, seed=1)
        async for event in rollout.generate(prompt_ids, stream=True, max_tokens=64, seed=1):
            ...

A failed call raises a class of isobit.errors. If a task is cancelled, its call raises asyncio.CancelledError
as usual, and ends on the server, too.
"""

from isobit.aio.client import RolloutClient, ScorerClient
from isobit.aio.comparator_client import ComparatorClient

__all__ = ["ComparatorClient", "RolloutClient", "ScorerClient"]
