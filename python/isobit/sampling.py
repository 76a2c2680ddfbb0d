"""Sampling parameters as keyword arguments, with the names that other engines use."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypedDict

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from isobit.v1 import types_pb2

LogprobMode = Literal["processed", "raw"]


class SamplingOptions(TypedDict, total=False):
    """The keyword arguments of generate, score and compare. None is the same as leaving one out.

    proto/isobit/v1/types.proto has ranges and defaults, in the message SamplingParams. Types are
    strict: an integer may be NumPy's, but 1.0 and True are not integers.
    """

    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    n: int | None
    max_tokens: int | None
    max_new_tokens: int | None  # the same as max_tokens
    min_tokens: int | None
    min_new_tokens: int | None  # the same as min_tokens
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    logprobs: int | None


_ALIASES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
_FIELDS = types_pb2.SamplingParams.DESCRIPTOR.fields_by_name
_STOP_STRINGS = ("stop", "stop_strings")
_INTEGERS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}
_TOKEN_ID = _INTEGERS[FieldDescriptor.TYPE_UINT32]
_MAX_FLOAT = float(np.finfo(np.float32).max)


def to_proto(options: Mapping) -> types_pb2.SamplingParams:
    """The message that carries `options`.

    Raises:
      TypeError: there is no such option, a value has the wrong type, or one option is given twice with
        different values.
      ValueError: a value does not fit its field: a negative seed, NaN, or more than the type can hold.
    """
    values = {}
    for name, value in options.items():
        field = _ALIASES.get(name, name)
        if value is None and (field in _FIELDS or name in _STOP_STRINGS):
            continue
        if name in _STOP_STRINGS:
            raise TypeError(
                f"{name}: stop strings belong to the client, as the services know token ids alone: use"
                " stop_token_ids, or read generate(stream=True), decode it with Tokenizer.stream() and close"
                " the iterator when the string appears"
            )
        if field not in _FIELDS:
            raise TypeError(f"no sampling parameter is called {name}; there are {', '.join(sorted(_FIELDS))}")
        checked = _checked(field, value)
        if field in values and values[field] != checked:
            raise TypeError(f"{field} is given twice, as {values[field]} and {checked}")
        values[field] = checked
    return types_pb2.SamplingParams(**values)


def mode_to_proto(mode: LogprobMode) -> types_pb2.LogprobMode:
    """The enum value of `mode`; ValueError for any other string."""
    modes = {"processed": types_pb2.LOGPROB_MODE_PROCESSED, "raw": types_pb2.LOGPROB_MODE_RAW}
    if mode not in modes:
        raise ValueError(f"logprob_mode is {mode!r}, expected 'processed' or 'raw'")
    return modes[mode]


def _checked(field: str, value):
    """`value`, converted to the type of `field`."""
    if field == "stop_token_ids":
        if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
            raise _wrong_type(field, value, "a sequence of integers")
        return [_integer(f"{field}[{index}]", token, _TOKEN_ID) for index, token in enumerate(value)]
    if field == "logit_bias":
        if not isinstance(value, Mapping):
            raise _wrong_type(field, value, "a mapping of token ids to numbers")
        return {
            _integer(f"a key of {field}", token, _TOKEN_ID): _number(f"{field}[{token}]", bias)
            for token, bias in value.items()
        }
    kind = _FIELDS[field].type
    if kind == FieldDescriptor.TYPE_BOOL:
        if not isinstance(value, bool | np.bool_):
            raise _wrong_type(field, value, "True or False")
        return bool(value)
    return (
        _number(field, value)
        if kind == FieldDescriptor.TYPE_FLOAT
        else _integer(field, value, _INTEGERS[kind])
    )


def _integer(name: str, value, bounds: tuple[int, int]) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise _wrong_type(name, value, "an integer")
    if not bounds[0] <= number <= bounds[1]:
        raise ValueError(f"{name} is {number}, expected {bounds[0]} to {bounds[1]}")
    return number


def _number(name: str, value) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise _wrong_type(name, value, "a number")
    if not abs(value) <= _MAX_FLOAT:  # false for NaN too
        raise ValueError(f"{name} is {value}, expected a finite number that fits fp32")
    return float(value)


def _wrong_type(name: str, value, expected: str) -> TypeError:
    return TypeError(f"{name} is {value!r} of type {type(value).__name__}, expected {expected}")
