"""/v1/chat/completions: OpenAI's path, with vLLM's extensions and SGLang's input_ids and return_meta_info."""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from starlette.routing import Route

from isobit.gateway import logprobs
from isobit.gateway.answers import Usage, digest_of, usage_wanted, version_spans
from isobit.gateway.control import control_of
from isobit.gateway.core import Core, check_alternatives, check_prompt, token_ids
from isobit.gateway.errors import BadRequest, not_offered, openai_body
from isobit.gateway.fields import checked
from isobit.gateway.generation import Completion, Ending, Piece
from isobit.gateway.http import AnyAnswer, Call, Events, LongAnswer, encode
from isobit.gateway.prompts import StreamOptions, chat_prompt
from isobit.gateway.sampling import Sampling, SamplingFields, sampling_of
from isobit.gateway.tools import ToolCallReader, check_parser, wants_calls


class ChatRequest(SamplingFields, kw_only=True):
    messages: list[dict[str, Any]] | None = None
    model: str | None = None
    input_ids: list[int] | None = None  # used in place of the rendered messages
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    echo: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_weight_versions: bool = False
    return_meta_info: bool = False
    no_stop_trim: bool = False
    request_id: str | None = None


@dataclasses.dataclass(frozen=True)
class _Job:
    """A checked request."""

    core: Core
    request: ChatRequest
    sampling: Sampling
    prompt: list[int]
    reads_calls: bool
    head: dict[str, Any]  # the first fields of the answer; events have another `object`
    request_id: str

    def content(self, piece: Piece | Completion) -> dict[str, Any]:
        texts = None if self.request.return_tokens_as_token_ids else self.core.texts
        return {"content": logprobs.content(piece, texts, self.request.top_logprobs or 0)}


def routes(core: Core) -> list[Route]:
    async def chat(call: Call) -> AnyAnswer:
        job = await _checked(core, call)
        if job.request.stream:
            return Events(_events(job), openai_body)
        return await _whole(job)

    return [core.route("/v1/chat/completions", chat, ("POST",), roles=("generate",))]


async def _checked(core: Core, call: Call) -> _Job:
    request = checked(call.object(), ChatRequest)
    model, facts = core.check_model(request.model), await core.facts()
    for name in ("top_logprobs", "prompt_logprobs"):
        if (count := getattr(request, name)) is not None:
            check_alternatives(count, facts, name)
    if request.top_logprobs and not request.logprobs:
        raise BadRequest("top_logprobs: expected logprobs: true, too", "top_logprobs")
    if request.echo:
        raise not_offered("echo", "in chats")
    if request.stream and request.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs: not with stream", "prompt_logprobs")
    if request.stream and request.return_meta_info:
        raise BadRequest("return_meta_info: not with stream", "return_meta_info")
    if request.prompt_logprobs is not None and core.engine.scorer is None:
        raise not_offered("prompt_logprobs", "the gateway runs without --scorer")
    reads_calls = wants_calls(request.tools, request.tool_choice)
    if reads_calls:
        check_parser(core.settings.tool_call_parser, _template(core, request))
    sampling = _sampling(request)
    prompt = await _prompt(core, request)
    check_prompt(prompt, facts, "messages" if request.input_ids is None else "input_ids")
    request_id = core.request_id(call, request.request_id)
    head = {
        "id": f"chatcmpl-{request_id}", "object": "chat.completion", "created": int(time.time()),
        "model": model,
    }  # fmt: skip
    return _Job(core, request, sampling, prompt, reads_calls, head, request_id)


def _template(core: Core, request: ChatRequest) -> str:
    return request.chat_template or core.settings.chat_template or core.tokenizer.chat_template(request.tools)


def _sampling(request: ChatRequest) -> Sampling:
    if request.max_completion_tokens is not None:
        if request.max_tokens not in (None, request.max_completion_tokens):
            raise BadRequest("max_tokens and max_completion_tokens: expected one of them", "max_tokens")
        if not 1 <= request.max_completion_tokens < 2**32:
            raise BadRequest(
                f"max_completion_tokens is {request.max_completion_tokens}, expected 1 at least",
                "max_completion_tokens",
            )
        request.max_tokens = request.max_completion_tokens
    sampling = sampling_of(request, alternatives=request.top_logprobs or 0)
    return dataclasses.replace(sampling, include_stop=sampling.include_stop or request.no_stop_trim)


async def _prompt(core: Core, request: ChatRequest) -> list[int]:
    if request.input_ids is not None:
        return token_ids(request.input_ids, "input_ids")
    if not request.messages:
        raise BadRequest("messages: expected one message at least", "messages")
    return await chat_prompt(core, request)


async def _whole(job: _Job) -> LongAnswer:
    wanted = await job.core.prompted(job.prompt, job.sampling, request_id=job.request_id)
    samples = await job.core.whole(wanted)
    rows = None
    if job.request.prompt_logprobs is not None:
        digest = await digest_of(job.core, samples[0].ending)
        (scored,) = await job.core.scored(
            [job.prompt], job.request.prompt_logprobs, "prompt_logprobs", digest
        )
        rows = logprobs.prompt_rows(job.prompt, scored, job.core.texts)
    return LongAnswer(_pieces(job, samples, rows))


def _pieces(job: _Job, samples: list[Completion], rows: list | None) -> Iterator[bytes]:
    """Yields the JSON of the whole answer, one choice at a time."""
    usage = Usage()
    usage.prompt(len(job.prompt), samples[0].ending)
    head = dict(job.head)
    if job.request.return_token_ids:
        head["prompt_token_ids"] = job.prompt
    if rows is not None:
        head["prompt_logprobs"] = rows
    yield encode(head)[:-1] + b',"choices":['
    for sample in samples:
        usage.completion_tokens += len(sample.token_ids)
        yield (b"," if sample.index else b"") + encode(_choice(job, sample))
    yield b'],"usage":' + encode(usage.json()) + b"}"


def _choice(job: _Job, sample: Completion) -> dict[str, Any]:
    request, ending = job.request, sample.ending
    message, reason = {"role": "assistant", "content": sample.text}, ending.finish_reason
    if job.reads_calls:
        reader = ToolCallReader()
        (text, calls), (rest, more) = reader.add(sample.text), reader.finish()
        if reader.count:
            message["content"] = text + rest or None
            message["tool_calls"] = [found.message() for found in calls + more]
            reason = "tool_calls" if reason == "stop" else reason
    choice = {
        "index": sample.index,
        "message": message,
        "logprobs": job.content(sample) if request.logprobs else None,
        "finish_reason": reason,
        "stop_reason": ending.stop_reason,
    }
    if request.return_token_ids:
        choice["token_ids"] = sample.token_ids.tolist()
    if request.return_weight_versions:
        choice["weight_versions"] = version_spans(job.core, sample.weight_versions)
    if request.return_meta_info:
        label = control_of(job.core).notes.read().label
        pairs = zip(sample.token_ids, logprobs.checked(sample.logprobs), strict=True)
        choice["meta_info"] = {
            "output_token_logprobs": [[value, token, None] for token, value in pairs],
            "completion_tokens": len(sample.token_ids),
            "prompt_tokens": len(job.prompt),
            "cached_tokens": ending.cached_tokens,
            "weight_version": label(sample.weight_versions[-1]) if sample.weight_versions else None,
        }
    return choice


async def _events(job: _Job) -> AsyncGenerator[dict[str, Any], None]:
    wanted = await job.core.prompted(job.prompt, job.sampling, request_id=job.request_id)
    usage, with_usage = Usage(), usage_wanted(job.request.stream_options)
    readers = [ToolCallReader() if job.reads_calls else None for _ in range(job.sampling.n)]
    head = job.head | {"object": "chat.completion.chunk"}
    counts: Counter[int] = Counter()  # the tokens of each choice so far
    async with contextlib.aclosing(job.core.streamed(wanted)) as events:
        async for event in events:
            if event.index not in counts:
                yield _chunk(
                    job, head, event.index, {"role": "assistant", "content": ""}, with_usage, first=True
                )
            if isinstance(event, Piece):
                usage.completion_tokens += len(event.token_ids)
            elif event.index == 0:
                usage.prompt(len(job.prompt), event)
            yield _delta(job, head, event, readers[event.index], with_usage, counts[event.index])
            counts[event.index] += len(event.token_ids) if isinstance(event, Piece) else 0
    if with_usage:
        yield {**head, "choices": [], "usage": usage.json()}


def _chunk(
    job: _Job, head: dict, index: int, delta: dict[str, Any], with_usage: bool, first: bool = False
) -> dict[str, Any]:
    """An event with a choice that has not ended."""
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
    chunk = {**head, "choices": [choice]}
    if first and job.request.return_token_ids:
        chunk["prompt_token_ids"] = job.prompt
    if with_usage:
        chunk["usage"] = None
    return chunk


def _delta(
    job: _Job, head: dict, event: Piece | Ending, reader: ToolCallReader | None, with_usage: bool, first: int
) -> dict[str, Any]:
    """The event of a piece or an ending. `first`: the choice's tokens before."""
    is_piece, delta, text = isinstance(event, Piece), {}, event.text
    if reader is not None:
        before = reader.count
        text, calls = reader.add(text)
        if not is_piece:
            rest, more = reader.finish()
            text, calls = text + rest, calls + more
        if calls:
            delta["tool_calls"] = [{"index": before + i, **found.message()} for i, found in enumerate(calls)]
    if text or is_piece:
        delta["content"] = text
    chunk = _chunk(job, head, event.index, delta, with_usage)
    (choice,) = chunk["choices"]
    if is_piece:
        if job.request.logprobs:
            choice["logprobs"] = job.content(event)
        if job.request.return_token_ids:
            choice["token_ids"] = list(event.token_ids)
        if job.request.return_weight_versions:
            choice["weight_versions"] = version_spans(job.core, event.weight_versions, first)
        return chunk
    reason = event.finish_reason
    choice["finish_reason"] = (
        "tool_calls" if reader is not None and reader.count and reason == "stop" else reason
    )
    choice["stop_reason"] = event.stop_reason
    if job.request.return_token_ids:
        choice["token_ids"] = []
    return chunk
