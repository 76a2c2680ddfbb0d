"""An event loop in a thread of this package: synchronous clients make many calls at the same time on it.

A thread for each call would cost more: gRPC wakes every waiting thread ten times a second, and at some
hundreds of threads that takes all of the interpreter's time.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from isobit import forks

_Result = TypeVar("_Result")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_made_in = forks.NEVER


def run(coroutine: Coroutine[Any, Any, _Result]) -> _Result:
    """Returns the result of `coroutine`. If the caller is interrupted, the coroutine is cancelled."""
    future = asyncio.run_coroutine_threadsafe(coroutine, _running_loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def _running_loop() -> asyncio.AbstractEventLoop:
    """Returns the loop of this process. It runs until the process ends."""
    global _loop, _made_in
    with _lock:
        if _loop is None or not forks.is_own(_made_in):
            _loop, _made_in = asyncio.new_event_loop(), forks.generation()
            # A daemon thread: neither an interrupt nor the end of the interpreter waits for it.
            threading.Thread(target=_loop.run_forever, name="isobit", daemon=True).start()
        return _loop
