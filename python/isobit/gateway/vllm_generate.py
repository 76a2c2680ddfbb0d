"""/inference/v1/generate: vLLM's path that takes and returns tokens.

Clients read its logprobs in two forms, so an entry has both: `token`, "token_id:N", for renderers and TRL;
and `token_id`, as in vLLM's own class.
"""

import contextlib
import dataclasses
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

import msgspec

from isobit.gateway import logprobs
from isobit.gateway.answers import Usage, digest_of, usage_wanted, version_spans
from isobit.gateway.core import Core, check_alternatives, check_prompt, token_ids
from isobit.gateway.errors import BadRequest, not_offered, openai_body
from isobit.gateway.fields import checked, without_nulls
from isobit.gateway.generation import Completion, Piece, Prompted
from isobit.gateway.http import AnyAnswer, Call, Events, LongAnswer, encode
from isobit.gateway.prompts import StreamOptions
from isobit.gateway.sampling import Sampling, SamplingFields, sampling_of
from isobit.v1 import types_pb2

_ID_PREFIX = "generate-tokens-"
# Fields of vLLM's render step: places in a text, and how to apply a grammar, which is refused.
_OF_RENDER = ("token_offsets", "reasoning_ended", "reasoning_parser_kwargs", "return_weight_versions")
# prime-rl sends these inside sampling_params, where they change nothing.
_IN_SAMPLING = ("return_token_ids", "skip_clone")


class GenerateRequest(msgspec.Struct, kw_only=True):
    token_ids: Any = None
    sampling_params: Any = msgspec.field(default_factory=dict)
    request_id: str | None = None
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    output_mode: str = "tokens"


class GenerateSampling(SamplingFields, kw_only=True):
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclasses.dataclass(frozen=True)
class _Job:
    core: Core
    request: GenerateRequest
    wanted: Prompted
    logprobs: bool
    prompt_logprobs: int | None
    head: dict[str, Any]


async def generate(core: Core, call: Call) -> AnyAnswer:
    job = await _checked(core, call)
    if job.request.stream:
        return Events(_events(job), openai_body)
    (samples, scored) = await _computed(job)
    return LongAnswer(_pieces(job, samples, scored))


async def _checked(core: Core, call: Call) -> _Job:
    request = checked(call.object(), GenerateRequest, harmless=_OF_RENDER)
    model, facts = core.check_model(request.model), await core.facts()
    at = "sampling_params."
    fields = checked(
        without_nulls(request.sampling_params, "sampling_params"), GenerateSampling, at, _IN_SAMPLING
    )
    for name in ("logprobs", "prompt_logprobs"):
        if (count := getattr(fields, name)) is not None:
            check_alternatives(count, facts, at + name)
    if fields.prompt_logprobs is not None:
        if core.engine.scorer is None:
            raise not_offered(f"{at}prompt_logprobs", "the gateway runs without --scorer")
        if request.stream:
            raise BadRequest(f"{at}prompt_logprobs: not with stream", f"{at}prompt_logprobs")
    if call.headers.get("x-data-parallel-rank", "0") != "0":
        raise not_offered("X-data-parallel-rank", "there is rank 0 alone")
    if request.output_mode != "tokens":
        raise not_offered("output_mode", "expected tokens")
    sampling = sampling_of(fields, alternatives=fields.logprobs or 0, at=at)
    prompt = token_ids(request.token_ids, "token_ids")
    check_prompt(prompt, facts, "token_ids")
    sampling = within_context(sampling, facts.context_length - len(prompt))
    # vLLM's header takes precedence over the field.
    given = request.request_id if "x-request-id" not in call.headers else None
    request_id = core.request_id(call, given)
    wanted = await core.prompted(prompt, sampling, request_id=request_id, wants_text=bool(sampling.stop))
    head = {"request_id": _ID_PREFIX + request_id, "model": model, "created": int(time.time())}
    return _Job(
        core,
        request,
        wanted,
        fields.logprobs is not None,
        fields.prompt_logprobs,
        head,
    )


async def _computed(job: _Job) -> tuple[list[Completion], types_pb2.TokenLogprobs | None]:
    samples = await job.core.whole(job.wanted)
    if job.prompt_logprobs is None:
        return samples, None
    digest = await digest_of(job.core, samples[0].ending)
    (scored,) = await job.core.scored(
        [job.wanted.prompt], job.prompt_logprobs, "sampling_params.prompt_logprobs", digest
    )
    return samples, scored


def _pieces(job: _Job, samples: list[Completion], scored: types_pb2.TokenLogprobs | None) -> Iterator[bytes]:
    """Yields the JSON of the answer, one choice at a time."""
    usage = Usage()
    usage.prompt(len(job.wanted.prompt), samples[0].ending)
    yield encode(job.head | {"output_mode": "tokens"})[:-1] + b',"choices":['
    for sample in samples:
        usage.completion_tokens += len(sample.token_ids)
        choice = {
            "index": sample.index,
            "token_ids": sample.token_ids.tolist(),
            "logprobs": _logprobs(job, sample),
            "finish_reason": sample.ending.finish_reason,
            "stop_reason": sample.ending.stop_reason,
            "weight_versions": version_spans(job.core, sample.weight_versions),
        }
        yield (b"," if sample.index else b"") + encode(choice)
    rows = None
    if scored is not None:
        rows = logprobs.prompt_rows(job.wanted.prompt, scored, job.core.texts)
    tail = {"prompt_logprobs": rows, "usage": usage.json()}
    if job.request.return_token_ids:
        tail["prompt_token_ids"] = list(job.wanted.prompt)
    yield b"]," + encode(tail)[1:]


def _logprobs(job: _Job, piece: Completion | Piece) -> dict[str, Any] | None:
    return {"content": content(piece)} if job.logprobs else None


class Named(msgspec.Struct, gc=False):
    """A token with its logprob. Structs are written five times faster than dicts."""

    token: str
    token_id: int
    logprob: float
    rank: int | None  # None: unknown


class Entry(Named, gc=False):
    top_logprobs: list[Named]


def content(piece: Completion | Piece) -> list[Entry]:
    """Yields one entry for each token: the token's own logprob, and in `top_logprobs` the token and the
    alternatives, by rank."""
    return [_entry([_named(*other) for other in row]) for row in logprobs.rows(piece)]


def _named(token: int, logprob: float, rank: int | None) -> Named:
    return Named(logprobs.token_name(token), token, logprob, rank)


def _entry(row: list[Named]) -> Entry:
    own = row[0]
    return Entry(own.token, own.token_id, own.logprob, own.rank, row)


async def _events(job: _Job) -> AsyncGenerator[dict[str, Any], None]:
    usage, with_usage = Usage(), usage_wanted(job.request.stream_options)
    begun: dict[int, int] = {}  # the number of tokens of each choice so far
    prompt_ids = {"prompt_token_ids": list(job.wanted.prompt)} if job.request.return_token_ids else {}
    async with contextlib.aclosing(job.core.streamed(job.wanted)) as events:
        async for event in events:
            choice: dict[str, Any] = {"index": event.index, "token_ids": [], "logprobs": None}
            if isinstance(event, Piece):
                usage.completion_tokens += len(event.token_ids)
                at = begun.get(event.index, 0)
                begun[event.index] = at + len(event.token_ids)
                choice |= {
                    "token_ids": list(event.token_ids),
                    "logprobs": _logprobs(job, event),
                    "finish_reason": None,
                    "weight_versions": version_spans(job.core, event.weight_versions, at),
                }
            else:
                if event.index == 0:
                    usage.prompt(len(job.wanted.prompt), event)
                choice |= {"finish_reason": event.finish_reason, "stop_reason": event.stop_reason}
            yield {**job.head, "choices": [choice], **prompt_ids}
            prompt_ids = {}  # only the first event has them
    if with_usage:
        yield {**job.head, "choices": [], "usage": usage.json()}


def within_context(sampling: Sampling, room: int) -> Sampling:
    """Returns `sampling` with max_tokens of at most `room`, so that a sample ends where the context does, as
    in vLLM."""
    if sampling.params.HasField("max_tokens") and sampling.params.max_tokens <= room:
        return sampling
    params = types_pb2.SamplingParams()
    params.CopyFrom(sampling.params)
    params.max_tokens = room
    return dataclasses.replace(sampling, params=params)
