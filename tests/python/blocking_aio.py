"""The asyncio clients behind the interface of the synchronous ones, so that the same tests run on both.

Their event loop runs in a thread of its own.
"""

import asyncio
import inspect
import threading
from functools import partial

from isobit import aio

_loop = asyncio.new_event_loop()
threading.Thread(target=_loop.run_forever, daemon=True).start()
_END = object()


def _wait(coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, _loop).result()


def _iterate(items):
    async def following():
        return await anext(items, _END)

    try:
        while (item := _wait(following())) is not _END:
            yield item
    finally:
        _wait(items.aclose())


class _Blocking:
    """One client. A call returns its result; of an asynchronous iterator, an iterator."""

    def __init__(self, kind, *arguments, **keywords):
        self._client = kind(*arguments, **keywords)

    def __getattr__(self, name):
        method = getattr(self._client, name)

        def call(*arguments, **keywords):
            result = method(*arguments, **keywords)
            return _iterate(result) if inspect.isasyncgen(result) else _wait(result)

        return call

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


RolloutClient = partial(_Blocking, aio.RolloutClient)
ScorerClient = partial(_Blocking, aio.ScorerClient)
ComparatorClient = partial(_Blocking, aio.ComparatorClient)
