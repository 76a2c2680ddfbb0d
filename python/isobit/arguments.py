"""Checks of arguments: integers, numbers, token ids, directories. Errors say what was expected."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

TokenIds = Sequence[int] | np.ndarray
DraftTokenIds = TokenIds | Sequence[TokenIds]

INT32 = (-(2**31), 2**31 - 1)
UINT32 = (0, 2**32 - 1)
UINT64 = (0, 2**64 - 1)
_MAX_FLOAT = float(np.finfo(np.float32).max)


def integer(name: str, value: Any, bounds: tuple[int, int]) -> int:
    """Returns `value` as a Python integer. A bool, of any library, does not count as an integer.

    Args:
      bounds: the smallest and the largest allowed value.

    Raises:
      TypeError: `value` is not an integer.
      ValueError: `value` is out of bounds.
    """
    try:
        number = None if is_bool(value) else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise wrong_type(name, value, "an integer")
    if not bounds[0] <= number <= bounds[1]:
        raise ValueError(f"{name} is {number}, expected {bounds[0]} to {bounds[1]}")
    return number


def optional_integer(name: str, value: Any, bounds: tuple[int, int]) -> int | None:
    """Like integer(), but None stays None."""
    return None if value is None else integer(name, value, bounds)


def number(name: str, value: Any) -> float:
    """Returns `value` as a float that fits fp32.

    Raises:
      TypeError: `value` is not a number.
      ValueError: it is not finite, or does not fit fp32.
    """
    if is_bool(value) or not isinstance(value, int | float | np.integer | np.floating):
        raise wrong_type(name, value, "a number")
    if not abs(value) <= _MAX_FLOAT:  # false for NaN too
        raise ValueError(f"{name} is {value}, expected a finite number that fits fp32")
    return float(value)


def is_bool(value: Any) -> bool:
    """Whether `value` is a bool: Python's, NumPy's, or a tensor of one."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).rpartition(".")[2] == "bool"


def wrong_type(name: str, value: Any, expected: str) -> TypeError:
    return TypeError(f"{name} is {_short(value)} of type {type(value).__name__}, expected {expected}")


def token_list(token_ids: TokenIds, name: str) -> list[int]:
    """Returns `token_ids` as Python integers.

    Raises:
      TypeError: `token_ids` is not one row of integers; the message contains `name`.
      ValueError: an id does not fit into 32 bits, its size on the wire.
    """
    if _is_text(token_ids) or (_is_row(token_ids) and any(map(_is_text, token_ids))):
        raise TypeError(
            f"{name} is text, {_short(token_ids)}: expected token ids, one row of integers. The services take"
            " no text: isobit.Tokenizer(directory).encode gives the ids"
        )
    if hasattr(token_ids, "dtype"):
        return _array_list(np.asarray(token_ids), name)
    if not _is_row(token_ids):
        raise wrong_type(name, token_ids, "token ids, one row of integers")
    if set(map(type, token_ids)) <= {int}:  # the usual case, fast
        return _array_list(np.asarray(token_ids), name) if len(token_ids) else []
    if any(_is_row(row) for row in token_ids):
        raise _several_rows(name, token_ids)
    return [integer(f"{name}[{index}]", token, UINT32) for index, token in enumerate(token_ids)]


def token_rows(rows: Sequence[TokenIds], name: str, one: str) -> list[list[int]]:
    """Returns rows of token ids. `one`: the advice for a caller who passes a single row. Raises as
    token_list() does."""
    if _is_text(rows):
        return [token_list(rows, name)]  # raises
    if not isinstance(rows, Iterable) or isinstance(rows, Mapping):
        raise wrong_type(name, rows, "a sequence of rows of token ids")
    rows = list(rows)
    if rows and not _is_row(rows[0]) and not _is_text(rows[0]):
        raise TypeError(f"{name} is {_short(rows)}, expected rows of token ids: {one}")
    return [token_list(row, f"{name}[{index}]") for index, row in enumerate(rows)]


def pairs(sequences: Any, name: str) -> list[tuple[list[int], list[int]]]:
    """Returns pairs of prompt and completion. Raises as token_list() does."""
    if not isinstance(sequences, Iterable) or isinstance(sequences, str | bytes | Mapping):
        raise wrong_type(name, sequences, "a sequence of pairs of prompt and completion token ids")
    sequences = list(sequences)
    for index, pair in enumerate(sequences):
        if not _is_row(pair) or len(pair) != 2 or not all(_is_row(side) or _is_text(side) for side in pair):
            raise TypeError(
                f"{name}[{index}] is {_short(pair)}, expected a pair of prompt and completion, each a row of"
                f" token ids; one pair alone is given as [(prompt, completion)]"
            )
    return [
        (token_list(prompt, f"{name}[{index}] prompt"), token_list(completion, f"{name}[{index}] completion"))
        for index, (prompt, completion) in enumerate(sequences)
    ]


def draft_texts(draft: DraftTokenIds) -> list[list[int]]:
    """Returns the draft texts: one, or one for each sample."""
    if _is_row(draft) and len(draft) > 0 and _is_row(draft[0]):
        return [token_list(text, f"draft_token_ids[{index}]") for index, text in enumerate(draft)]
    return [token_list(draft, "draft_token_ids")]


def file_of_model(directory: str | Path, name: str) -> Path:
    """The path of the file `name` in a model directory.

    Raises:
      FileNotFoundError: the directory does not exist.
    """
    path = Path(directory) / name
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"{path} is missing: {directory} is not a directory. A model on the hub must be downloaded first"
        )
    return path


def _array_list(array: np.ndarray, name: str) -> list[int]:
    if array.ndim == 2:
        raise _several_rows(name, array)
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        if array.dtype == object and array.ndim == 1:  # such as an integer of 70 bits among others
            return [integer(f"{name}[{index}]", token, UINT32) for index, token in enumerate(array)]
        raise TypeError(
            f"{name} has shape {array.shape} and dtype {array.dtype}, expected one row of integers"
        )
    if (outside := np.flatnonzero((array < UINT32[0]) | (array > UINT32[1]))).size:
        index = outside[0]
        raise ValueError(f"{name}[{index}] is {array[index]}, expected {UINT32[0]} to {UINT32[1]}")
    return array.tolist()


def _several_rows(name: str, rows: Any) -> TypeError:
    return TypeError(
        f"{name} is {_short(rows)}, expected one row of integers; for several prompts there is generate_batch"
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str | bytes | np.str_ | np.bytes_) or (
        isinstance(value, np.ndarray) and value.dtype.kind in "US"
    )


def _is_row(value: Any) -> bool:
    if hasattr(value, "ndim"):
        return value.ndim > 0 and not _is_text(value)
    return (
        hasattr(value, "__getitem__")
        and hasattr(value, "__len__")
        and not isinstance(value, str | bytes | Mapping)
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
