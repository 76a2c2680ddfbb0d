"""What every call shares: checked arguments, mapped errors, cancellation, and completeness of streams."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from isobit.errors import IncompleteStreamError, rpc_errors

TokenIds = Sequence[int] | np.ndarray

_Response = TypeVar("_Response")


def token_list(token_ids: TokenIds, name: str) -> list[int]:
    """`token_ids` as Python integers; TypeError names `name` unless it is one row of integers."""
    array = np.asarray(token_ids)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise TypeError(
            f"{name} has shape {array.shape} and dtype {array.dtype}, expected one row of integers"
        )
    return array.tolist()


def enum_value(enum, prefix: str, name: str | None) -> int:
    """The value of the enum called `prefix` + NAME; 0, the unset value, for None."""
    if name is None:
        return 0
    choices = {full.removeprefix(prefix).lower(): value for full, value in enum.items() if value != 0}
    if name not in choices:
        raise ValueError(f"{enum.DESCRIPTOR.name} is {name!r}, expected one of {', '.join(choices)}")
    return choices[name]


def unary(call, request, timeout: float):
    with rpc_errors():
        return call(request, timeout=timeout)


def events(call: Iterable[_Response]) -> Iterator[_Response]:
    """The responses of a stream; the call is cancelled when the caller stops reading early."""
    try:
        with rpc_errors():
            yield from call
    finally:
        call.cancel()


def in_order(results: dict[int, _Response], wanted: int, what: str) -> list[_Response]:
    if missing := [index for index in range(wanted) if index not in results]:
        raise IncompleteStreamError(f"the stream ended without {what} {missing} of {wanted}")
    return [results[index] for index in range(wanted)]
