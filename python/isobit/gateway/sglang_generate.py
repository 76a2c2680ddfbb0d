"""/generate: SGLang's own path, for one prompt or a list, as a whole or as events.

Each event repeats everything before it, as SGLang's do by default. So that long samples do not cost the
square of their length, the next event is sent only when a sample has grown by a 32nd.
"""

import contextlib
import dataclasses
import secrets
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import msgspec

from isobit.gateway import logprobs
from isobit.gateway.answers import digest_of, version_spans
from isobit.gateway.batches import each, merged
from isobit.gateway.control import control_of
from isobit.gateway.core import Core, check_alternatives, check_prompt, token_ids
from isobit.gateway.errors import BadRequest, not_offered, openai_body
from isobit.gateway.fields import checked, without_nulls
from isobit.gateway.generation import Completion, Ending, Piece, Prompted
from isobit.gateway.http import AnyAnswer, Call, Events, LongAnswer, encode
from isobit.gateway.notes import Notes
from isobit.gateway.prompts import encoded
from isobit.gateway.sampling import CommonFields, Count, Sampling, SamplingFields, sampling_of
from isobit.gateway.vllm_generate import within_context
from isobit.v1 import types_pb2

_DEFAULT_MAX_NEW_TOKENS = 128
_MAX_PROMPTS = 8192
_GROWTH = 32  # an event each time a sample has grown by a 32nd
_HARMLESS = (
    "background", "conversation_id", "custom_labels", "log_metrics", "no_logs", "routing_key",
)  # fmt: skip
_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "seed": "sampling_seed",
    "include_stop_str_in_output": "no_stop_trim",
}


class GenerateRequest(msgspec.Struct, kw_only=True):
    text: Any = None
    input_ids: Any = None
    sampling_params: Any = msgspec.field(default_factory=dict)
    rid: str | list[str] | None = None
    model: str | None = None
    stream: bool = False
    return_logprob: bool | list[bool] = False
    logprob_start_len: int | list[int] = -1
    top_logprobs_num: int | list[int] = 0
    return_text_in_logprobs: bool = False
    data_parallel_rank: int = 0
    routed_dp_rank: int = 0


class _Sampling(CommonFields, kw_only=True):
    """The sampling fields under SGLang's names."""

    max_new_tokens: Count | None = None
    min_new_tokens: Count | None = None
    sampling_seed: int | None = None
    no_stop_trim: bool | None = None


@dataclasses.dataclass(frozen=True)
class _Asked:
    """One checked prompt of a request."""

    prompt: list[int]
    sampling: Sampling
    request_id: str
    logprobs: bool
    score_from: int | None  # the first token of the prompt whose logprob is requested
    alternatives: int

    @property
    def generates(self) -> bool:
        return self.sampling.params.max_tokens > 0


@dataclasses.dataclass(frozen=True)
class _Job:
    core: Core
    asked: list[_Asked]
    is_list: bool  # whether the answer is a list
    with_text: bool  # whether each logprob has the text of its token
    notes: Notes
    serving: int  # the weight version when the request came


async def generate(core: Core, call: Call) -> AnyAnswer:
    request = checked(call.object(), GenerateRequest, harmless=_HARMLESS)
    job = await _checked(core, call, request)
    if request.stream:
        if any(not one.generates for one in job.asked):
            raise BadRequest("sampling_params.max_new_tokens is 0: not with stream", "stream")
        return Events(_events(job), openai_body)
    return LongAnswer(_pieces(job, await each(job.asked, lambda _, one: _computed(job, one))))


async def _checked(core: Core, call: Call, request: GenerateRequest) -> _Job:
    core.check_model(request.model)
    facts = await core.facts()
    for name in ("data_parallel_rank", "routed_dp_rank"):
        if getattr(request, name) != 0:
            raise not_offered(name, "there is rank 0 alone")
    prompts, is_list = await _prompts(core, request)
    count = len(prompts)
    samplings = _each_of(request.sampling_params, dict, count, "sampling_params")
    wants = _each_of(request.return_logprob, bool, count, "return_logprob")
    starts = _each_of(request.logprob_start_len, int, count, "logprob_start_len")
    tops = _each_of(request.top_logprobs_num, int, count, "top_logprobs_num")
    names = _request_ids(core, call, request.rid, count, is_list)
    asked = []
    for index, prompt in enumerate(prompts):
        alternatives = tops[index] if wants[index] else 0
        check_alternatives(alternatives, facts, "top_logprobs_num")
        sampling = _sampling(samplings[index], alternatives)
        place = "input_ids" if count == 1 else f"input_ids[{index}]"
        if sampling.params.max_tokens == 0 and len(prompt) == facts.context_length:
            check_prompt(prompt[1:], facts, place)  # a prompt that is only scored may fill the context
        else:
            check_prompt(prompt, facts, place)
        sampling = within_context(sampling, facts.context_length - len(prompt))
        if sampling.n > facts.max_n:
            raise BadRequest(
                f"sampling_params.n is {sampling.n}, expected at most {facts.max_n}", "sampling_params.n"
            )
        start = _start(starts[index], len(prompt)) if wants[index] else None
        if start is not None and core.engine.scorer is None:
            raise not_offered("logprob_start_len", "the gateway runs without --scorer")
        asked.append(_Asked(prompt, sampling, names[index], wants[index], start, alternatives))
    is_list = is_list or any(one.sampling.n > 1 for one in asked)
    control = control_of(core)
    # Each token reports which weights drew it.
    serving = 0 if all(one.generates for one in asked) else (await control.version()).id
    return _Job(core, asked, is_list, request.return_text_in_logprobs, control.notes, serving)


async def _prompts(core: Core, request: GenerateRequest) -> tuple[list[list[int]], bool]:
    """Returns the prompts, and whether they came as a list."""
    if (request.text is None) == (request.input_ids is None):
        raise BadRequest("text and input_ids: expected one of them", "input_ids")
    if request.input_ids is not None:
        given = request.input_ids
        if isinstance(given, list) and given and isinstance(given[0], list):
            if len(given) > _MAX_PROMPTS:
                raise BadRequest(f"input_ids: expected at most {_MAX_PROMPTS} prompts", "input_ids")
            return [token_ids(row, f"input_ids[{index}]") for index, row in enumerate(given)], True
        return [token_ids(given, "input_ids")], False
    texts = [request.text] if isinstance(request.text, str) else request.text
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise BadRequest("text: expected a text or a list of texts", "text")
    if len(texts) > _MAX_PROMPTS:
        raise BadRequest(f"text: expected at most {_MAX_PROMPTS} prompts", "text")
    return [await encoded(core, text, True) for text in texts], isinstance(request.text, list)


def _each_of(value: Any, kind: type, count: int, name: str) -> list[Any]:
    """Returns one value for each prompt. `value` is one for all prompts, or a list."""
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count or not all(isinstance(item, kind) for item in values):
        raise BadRequest(
            f"{name}: expected {kind.__name__}, or a list with one for each of {count} prompts", name
        )
    return values


def _request_ids(
    core: Core, call: Call, given: str | list[str] | None, count: int, is_list: bool
) -> list[str]:
    if isinstance(given, list):
        return _each_of(given, str, count, "rid")
    if not is_list:
        return [core.request_id(call, given)]
    name = given or secrets.token_hex(16)
    return [f"{name}_{index}" for index in range(count)]


def _sampling(given: dict[str, Any], alternatives: int) -> Sampling:
    at = "sampling_params."
    # In SGLang null means no limit, and a missing limit means 128.
    default = None if "max_new_tokens" in given else _DEFAULT_MAX_NEW_TOKENS
    given = without_nulls(given, "sampling_params")
    if isinstance(custom := given.pop("custom_params", None), dict):
        for name, value in custom.items():
            if value not in (None, False):
                raise not_offered(f"{at}custom_params.{name[:64]}")
    elif custom is not None:
        raise BadRequest(f"{at}custom_params: expected an object", f"{at}custom_params")
    fields = msgspec.structs.asdict(checked(given, _Sampling, at))
    for name, own in _NAMES.items():
        fields[name] = fields.pop(own)
    return sampling_of(
        SamplingFields(**fields), alternatives=alternatives, default_max_tokens=default, at=at, names=_NAMES
    )


def _start(given: int, length: int) -> int | None:
    if given == -1 or given >= length:
        return None
    if given < -1:
        raise BadRequest(f"logprob_start_len is {given}, expected -1 or more", "logprob_start_len")
    return given


@dataclasses.dataclass
class _Scored:
    """The logprobs of the prompt's tokens from `start` on."""

    start: int
    tokens: types_pb2.TokenLogprobs  # of all tokens of the prompt except the first


async def _computed(job: _Job, asked: _Asked) -> tuple[list[Completion], _Scored | None]:
    core = job.core
    if asked.generates:
        samples = await core.whole(await _prompted(job, asked))
    else:
        samples = [
            Completion(index, ending=Ending(index, "length", None, None, ""))
            for index in range(asked.sampling.n)
        ]
    return samples, await _scored(job, asked, samples[0].ending)


async def _prompted(job: _Job, asked: _Asked) -> Prompted:
    return await job.core.prompted(asked.prompt, asked.sampling, request_id=asked.request_id)


async def _scored(job: _Job, asked: _Asked, ending: Ending | None) -> _Scored | None:
    if asked.score_from is None:
        return None
    tokens = types_pb2.TokenLogprobs()
    if len(asked.prompt) > 1:
        digest = await digest_of(job.core, ending)
        (tokens,) = await job.core.scored([asked.prompt], asked.alternatives, "logprob_start_len", digest)
    return _Scored(asked.score_from, tokens)


def _pieces(job: _Job, found: Sequence[tuple[list[Completion], _Scored | None]]) -> Iterator[bytes]:
    """Yields the JSON of the answer, one sample at a time."""
    separator = b"[" if job.is_list else b""
    for asked, (samples, scored) in zip(job.asked, found, strict=True):
        for sample in samples:
            yield separator + encode(_result(job, asked, sample, scored))
            separator = b","
    if job.is_list:
        yield b"]"


def _result(job: _Job, asked: _Asked, sample: Completion, scored: _Scored | None = None) -> dict[str, Any]:
    """SGLang's object for a sample, with the tokens so far."""
    label = job.notes.read().label  # a label may have been set since the request came
    versions = sample.weight_versions
    ending = sample.ending
    meta = {
        "id": asked.request_id,
        "finish_reason": None if ending is None else _finish_reason(ending, len(sample.token_ids)),
        "prompt_tokens": len(asked.prompt),
        "completion_tokens": len(sample.token_ids),
        "cached_tokens": 0 if ending is None else ending.cached_tokens,
        "weight_version": label(versions[-1]) if versions else _without_tokens(job, ending),
        "weight_versions": version_spans(job.core, versions),
    }
    if asked.logprobs:
        meta |= _output_logprobs(job, asked, sample)
        meta |= _input_logprobs(job, asked, scored)
    return {"text": sample.text, "output_ids": sample.token_ids.tolist(), "meta_info": meta}


def _without_tokens(job: _Job, ending: Ending | None) -> str:
    complete = None if ending is None else ending.complete
    return job.notes.read().label(job.serving if complete is None else complete.weight_version.id)


def _finish_reason(ending: Ending, length: int) -> dict[str, Any]:
    if ending.finish_reason == "length":
        return {"type": "length", "length": length}
    if ending.finish_reason == "abort":
        return {
            "type": "abort",
            "message": ending.abort_reason or "Aborted",
            "status_code": None,
            "err_type": None,
        }
    matched = ending.stop_reason if isinstance(ending.stop_reason, str) else ending.stop_token_id
    return {"type": "stop", "matched": matched}


def _triple(job: _Job, token: int, value: float | None) -> list[Any]:
    return [value, token, job.core.texts.text_of(token) if job.with_text else None]


def _output_logprobs(job: _Job, asked: _Asked, sample: Completion) -> dict[str, Any]:
    values = logprobs.checked(sample.logprobs)
    found = {
        "output_token_logprobs": [
            _triple(job, token, value) for token, value in zip(sample.token_ids, values, strict=True)
        ],
        "output_token_logprobs_length": len(values),
    }
    if asked.alternatives:
        found["output_top_logprobs"] = _tops(job, sample.top)
    return found


def _input_logprobs(job: _Job, asked: _Asked, scored: _Scored | None) -> dict[str, Any]:
    if scored is None:
        return {"input_token_logprobs": []}
    values = [None, *logprobs.checked(scored.tokens.logprobs)]
    found = {
        "input_token_logprobs": [
            _triple(job, token, value)
            for token, value in list(zip(asked.prompt, values, strict=True))[scored.start :]
        ]
    }
    if asked.alternatives:
        found["input_top_logprobs"] = [None, *_tops(job, scored.tokens.top)][scored.start :]
    return found


def _tops(job: _Job, top: Sequence[types_pb2.TopLogprobs]) -> list[list[list[Any]]]:
    return [
        [
            _triple(job, token, value)
            for token, value in zip(row.token_ids, row.logprobs, strict=True)
            if value > float("-inf")  # a filter has excluded it otherwise
        ]
        for row in top
    ]


async def _events(job: _Job) -> AsyncGenerator[bytes, None]:
    """Yields events; each has the tokens of a sample so far."""
    so_far: dict[tuple[int, int], Completion] = {}
    sent: dict[tuple[int, int], int] = {}  # the number of tokens in the last event
    scored = await each(job.asked, lambda _, one: _scored(job, one, None))
    wanted = [await _prompted(job, one) for one in job.asked]
    sources = [lambda one=one: job.core.streamed(one) for one in wanted]
    async with contextlib.aclosing(merged(sources)) as events:
        async for number, event in events:
            asked, key = job.asked[number], (number, event.index)
            sample = so_far.setdefault(key, Completion(event.index))
            if isinstance(event, Piece):
                sample.add(event)
                if len(sample.token_ids) <= sent.get(key, 0) * (_GROWTH + 1) // _GROWTH:
                    continue
            else:
                sample.ending = event
                sample.text += event.text
            sent[key] = len(sample.token_ids)
            result = _result(job, asked, sample, scored[number])
            if job.is_list:
                result["index"] = number * asked.sampling.n + event.index
            yield encode(result)
            if sample.ending is not None:
                so_far[key] = Completion(event.index)  # frees the memory of the old one
