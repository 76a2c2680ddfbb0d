"""Several prompts in one request: they run at the same time, within bounds, and the first failure ends them
all."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_AT_ONCE = 256  # calls in flight for one request
_QUEUED = 256  # events that wait for the client of one request


async def each(items: Sequence[_Item], work: Callable[[int, _Item], Awaitable[_Result]]) -> list[_Result]:
    """Returns what `work` makes of each item and its index, in order. The first failure cancels the rest."""
    if len(items) == 1:
        return [await work(0, items[0])]
    slots = asyncio.Semaphore(_AT_ONCE)

    async def one(index: int, item: _Item) -> _Result:
        async with slots:
            return await work(index, item)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(index, item)) for index, item in enumerate(items)]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


async def merged(
    sources: Sequence[Callable[[], AsyncGenerator[_Item, None]]],
) -> AsyncGenerator[tuple[int, _Item], None]:
    """Yields the items of all sources as they come, each with the index of its source. Closing it closes all
    sources."""
    if len(sources) == 1:
        async with contextlib.aclosing(sources[0]()) as items:
            async for item in items:
                yield 0, item
        return
    queue: asyncio.Queue[Any] = asyncio.Queue(_QUEUED)
    end = object()

    async def read(index: int, source: Callable[[], AsyncGenerator[_Item, None]]) -> None:
        async with contextlib.aclosing(source()) as items:
            async for item in items:
                await queue.put((index, item))

    async def read_all() -> None:
        try:
            await each(sources, read)
            await queue.put(end)
        except Exception as error:
            await queue.put(error)

    reader = asyncio.create_task(read_all())
    try:
        while (item := await queue.get()) is not end:
            if isinstance(item, Exception):
                raise item
            yield item
    finally:
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
