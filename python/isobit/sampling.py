"""Sampling parameters as keyword arguments, with the names that users of other engines know."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from isobit.v1 import types_pb2

LogprobMode = Literal["processed", "raw"]


class SamplingOptions(TypedDict, total=False):
    """The keyword arguments of generate, score and compare. None is the same as leaving one out.

    Ranges and defaults stand in proto/isobit/v1/types.proto, in the message SamplingParams.
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


def to_proto(options: Mapping) -> types_pb2.SamplingParams:
    """The message that carries `options`.

    Raises:
      TypeError: an option has no such name, a value of the wrong type, or two names with different values.
      ValueError: a value does not fit its field, such as a negative seed.
    """
    values = {}
    for name, value in options.items():
        field = _ALIASES.get(name, name)
        if field not in _FIELDS:
            raise TypeError(f"no sampling parameter is called {name}; there are {', '.join(sorted(_FIELDS))}")
        if value is None:
            continue
        if field in values and values[field] != value:
            raise TypeError(f"{field} is given twice, as {values[field]} and {value}")
        values[field] = value
    message = types_pb2.SamplingParams()
    for field, value in values.items():
        try:
            if field == "logit_bias":
                message.logit_bias.update({int(token): float(bias) for token, bias in value.items()})
            elif field == "stop_token_ids":
                message.stop_token_ids.extend(int(token) for token in value)
            else:
                setattr(message, field, value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"sampling parameter {field}: {error}") from error
    return message


def mode_to_proto(mode: LogprobMode) -> types_pb2.LogprobMode:
    """The enum value of `mode`; ValueError for any other string."""
    modes = {"processed": types_pb2.LOGPROB_MODE_PROCESSED, "raw": types_pb2.LOGPROB_MODE_RAW}
    if mode not in modes:
        raise ValueError(f"logprob_mode is {mode!r}, expected 'processed' or 'raw'")
    return modes[mode]
