"""Timeouts in seconds, as every call takes them: checked once, here."""

import time

from isobit.arguments import is_bool, wrong_type

# A longer timeout is none: gRPC's clock ends before, and a call that outlives its deadline ends at once.
_LONGEST_S = 10 * 365 * 86400.0


def checked_timeout(timeout: float | None, name: str = "timeout") -> float | None:
    """`timeout` as a float; None: no limit, which infinity and more than ten years are too.

    Raises:
      TypeError: it is no number.
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
    """When a timeout that begins now is over."""

    def __init__(self, timeout: float | None):
        """Raises what checked_timeout raises."""
        self.timeout = checked_timeout(timeout)
        self._end = None if self.timeout is None else time.monotonic() + self.timeout

    def left_s(self) -> float | None:
        """The seconds that are left, 0 once it is over; None: no limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def bounded(self, seconds: float) -> float:
        """`seconds`, or what is left if that is less."""
        left = self.left_s()
        return seconds if left is None else min(seconds, left)

    def is_over(self) -> bool:
        return self.left_s() == 0
