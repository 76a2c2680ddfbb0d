"""Checks the arguments of calls before they are sent, and that a stream brought all it had to bring."""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from isobit.errors import IncompleteStreamError

TokenIds = Sequence[int] | np.ndarray

_MAX_TOKEN_ID = 2**32 - 1

_Response = TypeVar("_Response")


def token_list(token_ids: TokenIds, name: str) -> list[int]:
    """`token_ids` as Python integers.

    Raises:
      TypeError: `token_ids` is not one row of integers; the message names `name`.
      ValueError: an id does not fit the 32 bits that it has on the wire.
    """
    array = np.asarray(token_ids)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise TypeError(
            f"{name} has shape {array.shape} and dtype {array.dtype}, expected one row of integers"
        )
    if (outside := np.flatnonzero((array < 0) | (array > _MAX_TOKEN_ID))).size:
        index = outside[0]
        raise ValueError(f"{name}[{index}] is {array[index]}, expected 0 to {_MAX_TOKEN_ID}")
    return array.tolist()


def enum_value(enum, prefix: str, name: str | None) -> int:
    """The value of the enum called `prefix` + NAME; 0, the unset value, for None."""
    if name is None:
        return 0
    choices = {full.removeprefix(prefix).lower(): value for full, value in enum.items() if value != 0}
    if name not in choices:
        raise ValueError(f"{enum.DESCRIPTOR.name} is {name!r}, expected one of {', '.join(choices)}")
    return choices[name]


def in_order(results: dict[int, _Response], wanted: int, what: str) -> list[_Response]:
    if missing := [index for index in range(wanted) if index not in results]:
        raise IncompleteStreamError(f"the stream ended without {what} {missing} of {wanted}")
    return [results[index] for index in range(wanted)]
