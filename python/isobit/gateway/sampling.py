"""Sampling parameters of the dialects: vLLM's names, types and meanings, converted to isobit's
SamplingParams.

A dialect with other names renames them first.
"""

import dataclasses
from typing import Annotated, Any

import msgspec

from isobit.gateway.errors import BadRequest
from isobit.v1 import types_pb2

_Id = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_MAX_STOPS = 64
_MAX_STOP_CHARACTERS = 256
# Larger values also mean all tokens: SGLang's 1 << 30, AReaL's 100000000.
_ALL_TOKENS = 2**31 - 1


class CommonFields(msgspec.Struct, kw_only=True):
    """Fields that say how tokens are drawn, and that have the same names in vLLM and SGLang."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: Count | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[_Id] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None


class SamplingFields(CommonFields, kw_only=True):
    """All sampling fields, under vLLM's names. A dialect's request class may inherit them."""

    seed: int | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    include_stop_str_in_output: bool | None = None


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens of a request are drawn, where they end, and how they become text."""

    params: types_pb2.SamplingParams  # without max_tokens, samples may reach the end of the context
    stop: tuple[str, ...] = ()  # texts that end a sample
    include_stop: bool = False  # the text ends with the stop string, or with the text of the stop token
    skip_special_tokens: bool = True

    @property
    def n(self) -> int:
        return self.params.n if self.params.HasField("n") else 1


def sampling_of(
    fields: SamplingFields,
    *,
    alternatives: int = 0,
    default_max_tokens: int | None = None,
    at: str = "",
    names: dict[str, str] | None = None,
) -> Sampling:
    """Returns what `fields` ask for.

    Args:
      alternatives: how many of the most likely tokens to report at each position.
      default_max_tokens: the value if the request has none; None: up to the end of the context.
      at: the place of the fields in the request, such as "sampling_params.", for errors.
      names: the dialect's names of fields that have other names here, for errors.

    Raises:
      BadRequest: a value is out of range; the message names the field.
    """
    params = types_pb2.SamplingParams()

    def named(name: str) -> str:
        return at + (names or {}).get(name, name)

    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"):
        _put(params, name, getattr(fields, name), named)
    for name in ("frequency_penalty", "n", "max_tokens", "min_tokens", "ignore_eos"):
        _put(params, name, getattr(fields, name), named)
    if fields.max_tokens is None and default_max_tokens is not None:
        params.max_tokens = default_max_tokens
    if fields.top_k is not None:
        params.top_k = _top_k(fields.top_k, named("top_k"))
    if fields.seed is not None and fields.seed != -1:  # vLLM's way to say none
        if not 0 <= fields.seed < 2**64:
            raise BadRequest(f"{named('seed')} is {fields.seed}, expected 0 to 2^64 - 1", named("seed"))
        params.seed = fields.seed
    if fields.stop_token_ids:
        params.stop_token_ids.extend(fields.stop_token_ids)
    if fields.logit_bias:
        _put_bias(params, fields.logit_bias, named("logit_bias"))
    if alternatives:
        params.logprobs = alternatives
    return Sampling(
        params=params,
        stop=_stops(fields.stop, named("stop")),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
    )


def _put(params: types_pb2.SamplingParams, name: str, value: Any, named) -> None:
    if value is None:
        return
    try:
        setattr(params, name, value)
    except (ValueError, TypeError, OverflowError):
        raise BadRequest(f"{named(name)} is {value!r}, which is out of range", named(name)) from None


def _top_k(value: int, name: str) -> int:
    if value < -1:
        raise BadRequest(f"{name} is {value}, expected a number of tokens, or 0 or -1 for all", name)
    return 0 if value >= _ALL_TOKENS else value


def _put_bias(params: types_pb2.SamplingParams, bias: dict[str, float], name: str) -> None:
    for token, value in bias.items():
        if not (token.isascii() and token.isdecimal() and int(token) < 2**32):
            raise BadRequest(f"{name}: {token[:32]!r} is no token id", name)
        params.logit_bias[int(token)] = value


def _stops(given: str | list[str] | None, name: str) -> tuple[str, ...]:
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stops) > _MAX_STOPS:
        raise BadRequest(f"{name} has {len(stops)} texts, expected at most {_MAX_STOPS}", name)
    for text in stops:
        if not 0 < len(text) <= _MAX_STOP_CHARACTERS:
            raise BadRequest(
                f"{name} has a text of {len(text)} characters, expected 1 to {_MAX_STOP_CHARACTERS}", name
            )
    return stops
