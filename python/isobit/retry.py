"""Tries a call again that a full queue or a quota has refused, when the service says that this is of use.

The clients do so by themselves, within the timeout of each call. What calls a service in another way may use
`retried` or `aretried`.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from isobit.errors import ResourceExhaustedError
from isobit.timeouts import Deadline

_Result = TypeVar("_Result")

# Of the service's hint. Callers that were refused together come back apart.
_SPREAD = 0.5


def pause_s(error: ResourceExhaustedError, deadline: Deadline) -> float:
    """How long to wait before the call that `error` ended is tried again.

    Raises:
      ResourceExhaustedError: `error` itself: the service gave no hint, so that another try is of no use, or
        the deadline is over before the time that it named.
    """
    if error.retry_after_ms is None:
        raise error
    hint = error.retry_after_ms / 1000
    left = deadline.left_s()
    if left is not None and left <= hint:
        raise error
    # Some of what is left is the next try's.
    spread = hint * _SPREAD if left is None else min(hint * _SPREAD, (left - hint) / 2)
    return hint + random.uniform(0, spread)


def retried(
    call: Callable[[float | None], _Result],
    timeout: float | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> _Result:
    """What `call` returns. While it raises ResourceExhaustedError with a hint, it is called again after that
    time, as often as `timeout` seconds allow; None: without end.

    Args:
      call: gets the seconds that are left, or None.

    Raises:
      ResourceExhaustedError: without a hint, or when no time is left for another try.
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
    """As retried, for asyncio."""
    deadline = Deadline(timeout)
    while True:
        try:
            return await call(deadline.left_s())
        except ResourceExhaustedError as error:
            seconds = pause_s(error, deadline)
        await sleep(seconds)
