"""Sampling parameters as keyword arguments, under the names that other engines use."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypedDict

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from isobit.arguments import INT32, UINT32, UINT64, integer, number, wrong_type
from isobit.v1 import types_pb2

LogprobMode = Literal["processed", "raw"]


class SamplingOptions(TypedDict, total=False):
    """The keyword arguments of generate, score and compare. None is the same as leaving the argument out,
    except for max_tokens: other engines take None as no limit, but without max_tokens a service generates 16
    tokens.

    The message SamplingParams in proto/isobit/v1/types.proto documents ranges and defaults. Types are strict:
    an integer may be NumPy's, but 1.0 and True are not integers.
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
_STOP_STRINGS = ("stop", "stop_strings", "stop_sequences")
_INTEGERS = {
    FieldDescriptor.TYPE_INT32: INT32,
    FieldDescriptor.TYPE_UINT32: UINT32,
    FieldDescriptor.TYPE_UINT64: UINT64,
}
# Names of vLLM, SGLang, OpenAI and transformers, with what to use here instead.
_ELSEWHERE = {
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "max_length": "max_tokens, which does not count the prompt",
    "min_length": "min_tokens, which does not count the prompt",
    "num_return_sequences": "n",
    "num_samples": "n",
    "best_of": "n",
    "top_logprobs": "logprobs",
    "num_logprobs": "logprobs",
    "random_seed": "seed",
    "sampling_seed": "seed",
    "eos_token_id": "stop_token_ids",
    "do_sample": "temperature=0, which is greedy",
    "greedy": "temperature=0",
    "prompt_logprobs": "ScorerClient.score(..., prompt_logprobs=True)",
    "echo": "ScorerClient.score(..., prompt_logprobs=True)",
    "sampling_params": "its parameters as keyword arguments: **sampling_params",
    "generation_config": "isobit.sampling_defaults(directory), as keyword arguments",
    "messages": "Tokenizer.encode_chat(messages), as token ids",
    "prompt": "prompt_token_ids",
    "prompts": "generate_batch(prompts)",
    "input_ids": "prompt_token_ids",
    "skip_special_tokens": "Tokenizer.decode(..., skip_special_tokens=...)",
    "streaming": "stream=True",
    "num_generations": "n",
}
# Arguments that are not sampling parameters. If one is misspelt, Python passes it as a sampling parameter.
_OF_CALLS = (
    "allow_weight_mismatch", "chunk_interval_ms", "determinism", "draft_token_ids", "entropy", "gap_detail",
    "logprob_mode", "max_concurrency", "prompt_logprobs", "request_id", "speculation", "stream", "timeout",
    "timeout_ms", "weight_version",
)  # fmt: skip


def to_proto(options: Mapping) -> types_pb2.SamplingParams:
    """Returns the message for `options`.

    Raises:
      TypeError: an option is unknown, a value has a wrong type, or one option is given twice with different
        values.
      ValueError: a value does not fit its field (a negative seed, NaN, or more than the type can hold), or
        max_tokens is None.
    """
    values = {}
    for name, value in options.items():
        field = _ALIASES.get(name, name)
        if value is None and (field in _FIELDS or name in _STOP_STRINGS):
            if field == "max_tokens":
                raise ValueError(
                    f"{name} is None, which elsewhere means no limit: expected a number, such as the model's"
                    " context length minus the prompt's tokens; without it, the limit is 16"
                )
            continue
        if name in _STOP_STRINGS:
            raise TypeError(
                f"{name}: the services know no stop strings, only token ids: use stop_token_ids, or read"
                " generate(stream=True), decode it with Tokenizer.stream() and close the iterator when the"
                " string appears"
            )
        if field not in _FIELDS:
            raise TypeError(_unknown(name))
        checked = _checked(field, value)
        if field in values and values[field] != checked:
            raise TypeError(f"{field} is given twice, as {values[field]} and {checked}")
        values[field] = checked
    return types_pb2.SamplingParams(**values)


def mode_to_proto(mode: LogprobMode) -> types_pb2.LogprobMode:
    """Returns the enum value of `mode`.

    Raises:
      ValueError: `mode` is neither "processed" nor "raw".
    """
    modes = {"processed": types_pb2.LOGPROB_MODE_PROCESSED, "raw": types_pb2.LOGPROB_MODE_RAW}
    if mode not in modes:
        raise ValueError(f"logprob_mode is {mode!r}, expected 'processed' or 'raw'")
    return modes[mode]


def _unknown(name: str) -> str:
    """Returns an error message for an unknown parameter, with the one that may be meant."""
    text = f"no sampling parameter is called {name}"
    if meant := _ELSEWHERE.get(name):
        return f"{text}: use {meant}"
    if near := difflib.get_close_matches(name.lower(), {*_FIELDS, *_ALIASES, *_OF_CALLS}, 1, 0.7):
        return f"{text}: did you mean {near[0]}? There are {', '.join(sorted(_FIELDS))}"
    return f"{text}; there are {', '.join(sorted(_FIELDS))}"


def _checked(field: str, value):
    """Returns `value`, converted to the type of `field`."""
    if field == "stop_token_ids":
        if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
            raise wrong_type(field, value, "a sequence of integers")
        return [integer(f"{field}[{index}]", token, UINT32) for index, token in enumerate(value)]
    if field == "logit_bias":
        if not isinstance(value, Mapping):
            raise wrong_type(field, value, "a mapping of token ids to numbers")
        return {
            integer(f"a key of {field}", token, UINT32): number(f"{field}[{token}]", bias)
            for token, bias in value.items()
        }
    kind = _FIELDS[field].type
    if kind == FieldDescriptor.TYPE_BOOL:
        if not isinstance(value, bool | np.bool_):
            raise wrong_type(field, value, "True or False")
        return bool(value)
    return (
        number(field, value) if kind == FieldDescriptor.TYPE_FLOAT else integer(field, value, _INTEGERS[kind])
    )
