"""Timeouts in seconds, as arguments of every call: checked here."""

import time

from isobit.arguments import is_bool, wrong_type

# A longer timeout counts as no limit, since gRPC's clock cannot hold it, and the call would end at once.
_LONGEST_S = 10 * 365 * 86400.0


def checked_timeout(timeout: float | None, name: str = "timeout") -> float | None:
    """Returns `timeout` as a float. None means no limit; so do infinity and more than ten years.

    Raises:
      TypeError: `timeout` is not a number.
      ValueError: it is NaN or negative.
    """
    if timeout is None:
        return None
    try:
        seconds = None if is_bool(timeout) or isinstance(timeout, str | bytes) else float(timeout)
    except (TypeError, ValueError):
        seconds = None
    if seconds is None:
        raise wrong_type(name, timeout, "seconds or None")
    if not seconds >= 0:  # true for NaN
        raise ValueError(f"{name} is {timeout}, expected 0 or more seconds, or None for no limit")
    return None if seconds > _LONGEST_S else seconds


class Deadline:
    """The time at which a timeout that begins now ends."""

    def __init__(self, timeout: float | None):
        """Raises as checked_timeout does."""
        self.timeout = checked_timeout(timeout)
        self._end = None if self.timeout is None else time.monotonic() + self.timeout

    def left_s(self) -> float | None:
        """The seconds that are left; 0 once the deadline has passed; None: no limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def bounded(self, seconds: float) -> float:
        """Returns `seconds`, or the time that is left if that is less."""
        left = self.left_s()
        return seconds if left is None else min(seconds, left)

    def is_over(self) -> bool:
        return self.left_s() == 0
