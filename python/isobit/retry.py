"""Repeats a call that a full queue or a quota has refused, if the service says that this is useful.

The clients do this themselves, within the timeout of each call. Code that calls a service in another way may
use `retried` or `aretried`.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from isobit.errors import ResourceExhaustedError
from isobit.timeouts import Deadline

_Result = TypeVar("_Result")

# Up to this fraction of the service's hint is added at random, so that callers that were refused together do
# not come back together.
_SPREAD = 0.5


def pause_s(error: ResourceExhaustedError, deadline: Deadline) -> float:
    """Returns how many seconds to wait before the call that ended with `error` is tried again.

    Raises:
      ResourceExhaustedError: `error` itself, if the service gave no hint, so that another try is useless; or
        if the deadline is earlier than the time in the hint.
    """
    if error.retry_after_ms is None:
        raise error
    hint = error.retry_after_ms / 1000
    left = deadline.left_s()
    if left is not None and left <= hint:
        raise error
    # Some of the time that is left is reserved for the next try.
    spread = hint * _SPREAD if left is None else min(hint * _SPREAD, (left - hint) / 2)
    return hint + random.uniform(0, spread)


def retried(
    call: Callable[[float | None], _Result],
    timeout: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> _Result:
    """Returns the result of `call`. While `call` raises ResourceExhaustedError with a hint, it is called
    again after that time, as long as `timeout` allows.

    Args:
      call: gets the seconds that are left, or None.
      timeout: in seconds; None: no limit.

    Raises:
      ResourceExhaustedError: it has no hint, or no time is left for another try.
    """
    deadline = Deadline(timeout)
    while True:
        try:
            return call(deadline.left_s())
        except ResourceExhaustedError as error:
            seconds = pause_s(error, deadline)
        sleep(seconds)


async def aretried(
    call: Callable[[float | None], Awaitable[_Result]],
    timeout: float | None = None,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> _Result:
    """Like retried, for asyncio."""
    deadline = Deadline(timeout)
    while True:
        try:
            return await call(deadline.left_s())
        except ResourceExhaustedError as error:
            seconds = pause_s(error, deadline)
        await sleep(seconds)
