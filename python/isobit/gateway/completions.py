"""/v1/completions: OpenAI's path, with vLLM's extensions."""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from starlette.routing import Route

from isobit.gateway import logprobs
from isobit.gateway.answers import Usage, digest_of, usage_wanted, version_spans
from isobit.gateway.batches import each, merged
from isobit.gateway.core import Core, check_alternatives, check_prompt
from isobit.gateway.errors import BadRequest, not_offered, openai_body
from isobit.gateway.fields import checked
from isobit.gateway.generation import Completion, Ending, Piece
from isobit.gateway.http import AnyAnswer, Call, Events, LongAnswer, encode
from isobit.gateway.prompts import StreamOptions, prompts_of
from isobit.gateway.sampling import Sampling, SamplingFields, sampling_of
from isobit.v1 import types_pb2

_DEFAULT_MAX_TOKENS = 16


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: Any = None
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    echo: bool = False
    prompt_logprobs: int | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_weight_versions: bool = False
    add_special_tokens: bool = True
    request_id: str | None = None


@dataclasses.dataclass(frozen=True)
class _Job:
    """A checked request."""

    core: Core
    request: CompletionRequest
    sampling: Sampling
    prompts: list[list[int]]
    head: dict[str, Any]  # the first fields of the answer, or of each event
    request_id: str

    @property
    def texts(self):
        """The texts of tokens; None: tokens are named "token_id:N"."""
        return None if self.request.return_tokens_as_token_ids else self.core.texts

    @property
    def scores(self) -> int | None:
        """How many alternatives to report with each logprob of the prompt; None: no logprobs of the
        prompt."""
        if self.request.prompt_logprobs is not None:
            return self.request.prompt_logprobs
        return self.request.logprobs if self.request.echo else None

    async def prompted(self, index: int):
        many = len(self.prompts) > 1
        name = f"{self.request_id}-{index}" if many else self.request_id
        return await self.core.prompted(self.prompts[index], self.sampling, request_id=name, waits=many)


@dataclasses.dataclass
class _Prompt:
    """What comes before the samples of one prompt."""

    ids: list[int]
    text: str = ""  # empty unless it is echoed
    scored: types_pb2.TokenLogprobs | None = None


def routes(core: Core) -> list[Route]:
    async def completions(call: Call) -> AnyAnswer:
        job = await _checked(core, call)
        if job.request.stream:
            return Events(_events(job), openai_body)
        return await _whole(job)

    return [core.route("/v1/completions", completions, ("POST",), roles=("generate",))]


async def _checked(core: Core, call: Call) -> _Job:
    request = checked(call.object(), CompletionRequest)
    model, facts = core.check_model(request.model), await core.facts()
    for name in ("logprobs", "prompt_logprobs"):
        if (count := getattr(request, name)) is not None:
            check_alternatives(count, facts, name)
    if request.stream and request.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs: not with stream", "prompt_logprobs")
    if request.max_tokens == 0 and not request.echo:
        raise BadRequest("max_tokens is 0, expected at least 1, or echo", "max_tokens")
    if request.max_tokens == 0 and request.stream:
        raise BadRequest("max_tokens is 0: not with stream", "max_tokens")
    sampling = sampling_of(
        request, alternatives=request.logprobs or 0, default_max_tokens=_DEFAULT_MAX_TOKENS
    )
    prompts = await prompts_of(core, request.prompt, request.add_special_tokens)
    for index, prompt in enumerate(prompts):
        check_prompt(prompt, facts, "prompt" if len(prompts) == 1 else f"prompt[{index}]")
    if core.engine.scorer is None:  # before anything is computed
        if request.prompt_logprobs is not None:
            raise not_offered("prompt_logprobs", "the gateway runs without --scorer")
        if request.echo and request.logprobs is not None:
            raise not_offered("echo with logprobs", "the gateway runs without --scorer")
    request_id = core.request_id(call, request.request_id)
    head = {
        "id": f"cmpl-{request_id}", "object": "text_completion", "created": int(time.time()), "model": model
    }  # fmt: skip
    return _Job(core, request, sampling, prompts, head, request_id)


async def _whole(job: _Job) -> LongAnswer:
    async def one(index: int, ids: list[int]) -> tuple[_Prompt, list[Completion]]:
        if job.request.max_tokens == 0:
            samples = [
                Completion(i, ending=Ending(i, "length", None, None, "")) for i in range(job.sampling.n)
            ]
        else:
            samples = await job.core.whole(await job.prompted(index))
        return await _prompt(job, ids, samples[0].ending), samples

    return LongAnswer(_pieces(job, await each(job.prompts, one)))


async def _prompt(job: _Job, ids: list[int], ending: Ending | None) -> _Prompt:
    """Returns the prompt's text and logprobs, as far as the request asks for them."""
    prompt = _Prompt(ids)
    if job.request.echo:
        prompt.text = job.core.tokenizer.decode(ids, skip_special_tokens=job.sampling.skip_special_tokens)
    if job.scores is not None:
        digest = await digest_of(job.core, ending)
        (prompt.scored,) = await job.core.scored([ids], job.scores, "prompt_logprobs", digest)
    return prompt


def _pieces(job: _Job, found: list[tuple[_Prompt, list[Completion]]]) -> Iterator[bytes]:
    """Yields the JSON of the whole answer, one choice at a time."""
    usage = Usage()
    yield encode(job.head)[:-1] + b',"choices":['
    separator = b""
    for number, (prompt, samples) in enumerate(found):
        usage.prompt(len(prompt.ids), samples[0].ending)
        for sample in samples:
            usage.completion_tokens += len(sample.token_ids)
            yield separator + encode(_choice(job, number * len(samples) + sample.index, prompt, sample))
            separator = b","
    yield b'],"usage":' + encode(usage.json()) + b"}"


def _choice(job: _Job, index: int, prompt: _Prompt, sample: Completion) -> dict[str, Any]:
    request = job.request
    choice = {
        "index": index,
        "text": prompt.text + sample.text,
        "logprobs": None,
        "finish_reason": sample.ending.finish_reason,
        "stop_reason": sample.ending.stop_reason,
    }
    if request.logprobs is not None:
        table = _LogprobTable(job)
        if request.echo:
            table.add_prompt(prompt)
        table.add(sample)
        choice["logprobs"] = table.json()
    if request.return_token_ids:
        choice["prompt_token_ids"] = prompt.ids
        choice["token_ids"] = sample.token_ids.tolist()
    if request.prompt_logprobs is not None:
        choice["prompt_logprobs"] = logprobs.prompt_rows(prompt.ids, prompt.scored, job.core.texts)
    if request.return_weight_versions:
        choice["weight_versions"] = version_spans(job.core, sample.weight_versions)
    return choice


class _LogprobTable:
    """OpenAI's `logprobs` of completions: columns with one entry for each token."""

    def __init__(self, job: _Job, offset: int = 0):
        self._texts = job.texts
        self._core_texts = job.core.texts
        self.offset = offset  # where the next token's text begins
        self._offsets: list[int] = []
        self._values: list[float | None] = []
        self._names: list[str] = []
        self._top: list[dict[str, float] | None] = []

    def add_prompt(self, prompt: _Prompt) -> None:
        """Adds the prompt's tokens. The first one has no logprob."""
        self._put_name(prompt.ids[0])
        self._values.append(None)
        self._top.append(None)
        scored = prompt.scored
        top = scored.top or [None] * len(scored.token_ids)
        for token, value, alternatives in zip(
            scored.token_ids, logprobs.checked(scored.logprobs), top, strict=True
        ):
            self._put(logprobs.ranked(token, value, alternatives))

    def add(self, piece: Piece | Completion) -> None:
        if piece.top:
            for row in logprobs.rows(piece):
                self._put(row)
            return
        values = logprobs.checked(piece.logprobs)
        for token, value in zip(piece.token_ids, values, strict=True):
            self._top.append({self._put_name(token): value})
        self._values.extend(values)

    def json(self) -> dict[str, Any]:
        return {
            "text_offset": self._offsets,
            "token_logprobs": self._values,
            "tokens": self._names,
            "top_logprobs": self._top,
        }

    def _put(self, row: list[tuple[int, float, int]]) -> None:
        name = self._put_name(row[0][0])
        self._values.append(row[0][1])
        top = {name: row[0][1]}
        for token, value, _ in row[1:]:
            top.setdefault(
                self._name(token), value
            )  # of equal texts, the drawn or the most likely token stays
        self._top.append(top)

    def _put_name(self, token: int) -> str:
        name = self._name(token)
        self._names.append(name)
        self._offsets.append(self.offset)
        self.offset += len(name if self._texts is not None else self._core_texts.text_of(token))
        return name

    def _name(self, token: int) -> str:
        return logprobs.token_name(token) if self._texts is None else self._texts.text_of(token)


async def _events(job: _Job) -> AsyncGenerator[dict[str, Any], None]:
    wanted = [await job.prompted(index) for index in range(len(job.prompts))]
    usage, with_usage = Usage(), usage_wanted(job.request.stream_options)
    echoed: dict[int, _Prompt] = {}
    if job.request.echo:
        for index, ids in enumerate(job.prompts):
            echoed[index] = await _prompt(job, ids, None)
    begun: dict[int, int] = {}  # where the next text of each choice begins, by the choice's index
    counts: Counter[int] = Counter()  # the number of tokens of each choice so far
    sources = [lambda one=one: job.core.streamed(one) for one in wanted]
    async with contextlib.aclosing(merged(sources)) as events:
        async for number, event in events:
            index = number * job.sampling.n + event.index
            if isinstance(event, Piece):
                usage.completion_tokens += len(event.token_ids)
            elif event.index == 0:
                usage.prompt(len(job.prompts[number]), event)
            is_first = index not in begun
            prompt = echoed.get(number, _Prompt(job.prompts[number])) if is_first else None
            choice, begun[index] = _delta(job, index, event, prompt, begun.get(index, 0), counts[index])
            if isinstance(event, Piece):
                counts[index] += len(event.token_ids)
            chunk = {**job.head, "choices": [choice]}
            if with_usage:
                chunk["usage"] = None
            yield chunk
    if with_usage:
        yield {**job.head, "choices": [], "usage": usage.json()}


def _delta(
    job: _Job, index: int, event: Piece | Ending, prompt: _Prompt | None, offset: int, first: int
) -> tuple[dict[str, Any], int]:
    """Returns a choice of an event, and where the choice's next text begins.

    Args:
      prompt: only for the first event of a choice.
      offset, first: where the text and the tokens of this event begin in the choice.
    """
    request, is_piece = job.request, isinstance(event, Piece)
    choice = {
        "index": index,
        "text": (prompt.text if prompt else "") + event.text,
        "logprobs": None,
        "finish_reason": None if is_piece else event.finish_reason,
        "stop_reason": None if is_piece else event.stop_reason,
    }
    if request.logprobs is not None and (is_piece or (prompt is not None and request.echo)):
        table = _LogprobTable(job, offset)
        if prompt is not None and request.echo:
            table.add_prompt(prompt)
        if is_piece:
            table.add(event)
        choice["logprobs"], offset = table.json(), table.offset
    if request.return_token_ids:
        if prompt is not None:
            choice["prompt_token_ids"] = prompt.ids
        choice["token_ids"] = list(event.token_ids) if is_piece else []
    if request.return_weight_versions and is_piece:
        choice["weight_versions"] = version_spans(job.core, event.weight_versions, first)
    return choice, offset
