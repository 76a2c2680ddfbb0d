"""The base of every dialect of the gateway.

A dialect is a module of this package with `routes(core: Core) -> list[starlette.routing.Route]`; its name is
in isobit.gateway.app.DIALECTS. It makes its routes with `core.route`:

    def routes(core):
        async def pause(call: Call) -> Answer:
            mode = call.query.get("mode", "abort")
            await core.engine.rollout.pause_generation(mode)
            return Answer({"status": "paused"})

        return [core.route("/pause", pause, ("POST",), roles=("admin",))]

core.route(path, handler, methods, roles=, errors=)
    The handler gets a `Call` (http.py: body, headers, query, path_params, object()) and returns an `Answer`
    (JSON or bytes, with Content-Length), a `LongAnswer` (JSON in pieces) or `Events` (server-sent events).
    Before it runs, the body is read, within bounds, whatever the method. `roles`: the caller needs one of
    these roles of the access file; empty: open to all. `errors`: turns an HttpError into the dialect's JSON.
    Every exception of the handler becomes an HTTP error (errors.py: as_http): HttpError, BadRequest,
    not_offered(name), and every class of isobit.errors with the HTTP status for its gRPC status. If the
    client disconnects, the handler is cancelled, and with it all calls that it awaits.

core.engine (engine.py)
    `rollout` and `scorer` (None without one) are clients of isobit.aio. All their calls carry the caller's
    token, so that the service checks it.

core.facts() -> Facts
    Context length, vocabulary, end-of-sequence tokens, bounds.

fields.checked(mapping, Struct, at=, harmless=) and fields.object_of(body) (fields.py)
    JSON to a msgspec.Struct. Unknown fields, and those that isobit does not offer, are errors that name them;
    harmless ones pass. `at` is the place of the object in the request, such as "sampling_params.".

sampling.SamplingFields, sampling.sampling_of(fields, alternatives=, default_max_tokens=, at=, names=)
    Makes a Sampling. SamplingFields has vLLM's names; a dialect's Struct inherits it, or uses it for its
    `sampling_params`. A dialect with other names renames them first.

core.prompted(prompt, sampling, request_id=, wants_text=) -> Prompted checks the prompt's ids and length
core.whole(prompted) -> list[Completion] all samples, by index; generation.py has the classes
core.streamed(prompted) -> iterator of Piece | Ending closing it (contextlib.aclosing) ends the call
core.scored(prompts, alternatives, field, digest) -> list[TokenLogprobs] prompts, by the scorer
    `digest`: of the weights in use in the rollout (answers.digest_of). If the scorer has others, the error is
    409. So a client that updates the weights must update both.
core.server_info() -> RolloutServerInfo asked again each time, with the gateway's own token

logprobs.content(piece_or_completion, texts, limit), logprobs.rows(...), logprobs.prompt_rows(...)
    Logprobs in JSON's form. `core.texts` gives the text and the bytes of a token; with `texts=None` tokens
    are named "token_id:N". Encode with http.encode, whose floats keep every bit.

core.check_model(name) 404 for a name that is not the model's core.request_id(call, field) the request's own
field, or the header X-Request-Id, or a new id core.counters numbers of requests, by path and status, and of
tokens
"""

import contextlib
import dataclasses
import re
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from isobit.errors import IncompleteStreamError, PermissionDeniedError, UnauthenticatedError
from isobit.gateway import generation
from isobit.gateway.caller import AccessFile, as_caller, bearer
from isobit.gateway.counters import Counters
from isobit.gateway.engine import Engine
from isobit.gateway.errors import BadRequest, ErrorBody, HttpError, as_http, not_offered, openai_body
from isobit.gateway.generation import Completion, Ending, Piece, Prompted
from isobit.gateway.hosts import check_browser
from isobit.gateway.http import (
    BodyBudget,
    Call,
    ClientGone,
    Events,
    Handler,
    Sender,
    ends_with_client,
    error_answer,
    read_body,
)
from isobit.gateway.sampling import Sampling
from isobit.gateway.settings import Settings
from isobit.gateway.text import TokenTexts
from isobit.tokenizer import Tokenizer
from isobit.v1 import rollout_pb2, scorer_pb2, types_pb2

_IDS = list[int]
_MS_PER_SAMPLE = 0.2  # twice what one event of a stream costs this process
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


@dataclasses.dataclass(frozen=True)
class Facts:
    """What the rollout reports about model and limits."""

    context_length: int  # prompt and completion together
    vocab_size: int
    max_logprobs: int
    max_n: int
    eos_token_ids: frozenset[int]


class Core:
    """One gateway: its settings, the services, the tokenizer, counters."""

    def __init__(self, settings: Settings, engine: Engine | None = None):
        """`engine`: the engine of another core, which closes it; None: a new engine."""
        self.settings = settings
        self.engine = engine or Engine(settings)
        self.tokenizer = Tokenizer(settings.model)
        self.texts = TokenTexts(self.tokenizer)
        self.counters = Counters()
        self.access = AccessFile(settings.access_file) if settings.access_file else None
        self.bodies = BodyBudget(settings.max_bodies_bytes)
        self._samples = 0  # the number of samples that are streamed now
        self.connections: Callable[[], int] = lambda: 0  # the number of open ones; the server sets it
        self.names = settings.names  # names of the model, at least one
        self._facts: Facts | None = None

    def route(
        self,
        path: str,
        handler: Handler,
        methods: Sequence[str],
        *,
        roles: tuple[str, ...] = (),
        errors: ErrorBody = openai_body,
    ) -> Route:
        """Returns a route that answers `path`; the module's docstring describes the arguments."""
        return Route(path, _Endpoint(self, path, handler, roles, errors), methods=list(methods))

    async def facts(self) -> Facts:
        """Returns what the rollout reports about model and limits.

        Raises:
          HttpError: 503 and others: the rollout does not answer.
        """
        if self._facts is None:
            info = await self.server_info()
            found = re.search(r"eos_token_ids=([\d,]+)", info.server.fingerprint.settings)
            self._facts = Facts(
                context_length=info.server.model.context_length,
                vocab_size=info.server.model.vocab_size,
                max_logprobs=info.server.max_logprobs,
                max_n=info.max_n,
                eos_token_ids=frozenset(map(int, found[1].split(","))) if found else frozenset(),
            )
        return self._facts

    async def server_info(self) -> rollout_pb2.RolloutServerInfo:
        """Returns the rollout's description of itself now.

        Raises:
          HttpError: 503: the rollout does not let the gateway ask.
        """
        try:
            return await self.engine.info()
        except (UnauthenticatedError, PermissionDeniedError) as error:
            raise HttpError(
                503,
                "the rollout does not tell the gateway about itself: expected --upstream_token_file with a"
                f" token that has the role watch: {error.details}",
            ) from error

    async def prompted(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str = "",
        wants_text: bool = True,
        waits: bool = False,
    ) -> Prompted:
        """Returns the arguments of Generate. Without max_tokens, samples may reach the end of the context.

        Args:
          waits: True: wait while the rollout's queue is full; False: then the error is 429. True is for one
            prompt of many, since a client that tries again would begin all of them again.

        Raises:
          BadRequest: the prompt is empty, has an id outside the vocabulary, or fills the context.
        """
        facts = await self.facts()
        check_prompt(prompt, facts)
        params = sampling.params
        if not 1 <= sampling.n <= facts.max_n:
            raise BadRequest(f"n is {sampling.n}, expected 1 to {facts.max_n}", "n")
        if not params.HasField("max_tokens"):
            filled = types_pb2.SamplingParams()
            filled.CopyFrom(params)
            filled.max_tokens = facts.context_length - len(prompt)
            sampling = dataclasses.replace(sampling, params=filled)
        ends = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            ends |= facts.eos_token_ids
        return Prompted(prompt, sampling, request_id, ends=ends, wants_text=wants_text, waits=waits)

    async def whole(self, wanted: Prompted) -> list[Completion]:
        """Returns all samples of a prompt, by index."""
        with self._paced(wanted) as interval_ms:
            found = await generation.whole(
                self.engine.rollout, self.tokenizer, self.texts, wanted, interval_ms
            )
        self.counters.tokens(len(wanted.prompt), sum(len(sample.token_ids) for sample in found))
        return found

    async def streamed(self, wanted: Prompted) -> AsyncGenerator[Piece | Ending, None]:
        """Yields pieces as they come, and the ending of each sample. The pieces of different samples are
        interleaved."""
        count = 0
        with self._paced(wanted) as interval_ms:
            try:
                async with contextlib.aclosing(
                    generation.streamed(self.engine.rollout, self.texts, wanted, interval_ms)
                ) as events:
                    async for event in events:
                        if isinstance(event, Piece):
                            count += len(event.token_ids)
                        yield event
            finally:
                self.counters.tokens(len(wanted.prompt), count)

    @contextlib.contextmanager
    def _paced(self, wanted: Prompted) -> Iterator[int]:
        """Yields the milliseconds between two pieces of a sample that let this process write all samples: 0
        for a few samples, 102 for 512. A piece has the tokens that arrived in that time."""
        self._samples += wanted.sampling.n
        try:
            yield int(self._samples * _MS_PER_SAMPLE)
        finally:
            self._samples -= wanted.sampling.n

    async def scored(
        self, prompts: Sequence[Sequence[int]], alternatives: int, field: str, digest: str = ""
    ) -> list[types_pb2.TokenLogprobs]:
        """Returns the model's own logprobs of all tokens of each prompt except the first, from the scorer.

        Args:
          alternatives: how many of the most likely tokens to report at each position.
          field: the field of the request that asks for them, for errors.
          digest: the digest of the rollout's weights; empty: any.

        Raises:
          HttpError: 409: the scorer has weights of another digest.
        """
        if self.engine.scorer is None:
            raise not_offered(field, "the gateway runs without --scorer")
        request = scorer_pb2.ScoreRequest(
            sequences=[scorer_pb2.ScoreSequence(prompt_token_ids=prompt) for prompt in prompts],
            prompt_logprobs=True,
        )
        if alternatives:
            request.sampling.logprobs = alternatives
        found: dict[int, types_pb2.TokenLogprobs] = {}
        async with contextlib.aclosing(self.engine.scorer.results(request)) as results:
            async for result in results:
                scored = result.weight_version.digest
                if digest and scored and scored != digest:
                    raise HttpError(
                        409,
                        f"{field}: the scorer has weights with the digest {scored}, the rollout {digest}",
                        headers={"x-should-retry": "false"},
                    )
                found[result.index] = result.prompt
        if len(found) != len(prompts):
            raise IncompleteStreamError(f"the scorer scored {len(found)} of {len(prompts)} prompts")
        return [found[index] for index in range(len(prompts))]

    def check_model(self, name: str | None) -> str:
        """Returns the model's name for an answer: `name`, or the first name.

        Raises:
          HttpError: 404: `name` is another model.
        """
        if name is None or name == "":
            return self.names[0]
        if name not in self.names:
            there = ", ".join(self.names)
            raise HttpError(404, f"model {name[:256]!r} is not served here, expected {there}", "model")
        return name

    def request_id(self, call: Call, field: str | None = None) -> str:
        """Returns `field`, the request's own; or the header X-Request-Id, if it can be an id; or a new id."""
        if field:
            if not _REQUEST_ID.fullmatch(field):
                raise BadRequest("request_id: expected 1 to 128 printable ASCII characters", "request_id")
            return field
        given = call.headers.get("x-request-id", "")
        return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)

    async def close(self) -> None:
        await self.engine.close()


def check_prompt(prompt: Sequence[int], facts: Facts, field: str = "prompt") -> None:
    """Checks the ids and the length of a prompt.

    Raises:
      BadRequest: they do not fit the model.
    """
    if not prompt:
        raise BadRequest(f"{field}: expected at least one token", field)
    if len(prompt) >= facts.context_length:
        raise BadRequest(
            f"{field} has {len(prompt)} tokens, and the model's context length is {facts.context_length}:"
            " nothing is left to generate",
            field,
        )
    if min(prompt) < 0 or max(prompt) >= facts.vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < facts.vocab_size)
        raise BadRequest(f"{field} has token {wrong}, expected 0 to {facts.vocab_size - 1}", field)


def check_alternatives(count: int, facts: Facts, field: str) -> int:
    """Returns `count`, the number of most likely tokens to report.

    Raises:
      BadRequest: the rollout does not report that many.
    """
    if not 0 <= count <= facts.max_logprobs:
        raise BadRequest(f"{field} is {count}, expected 0 to {facts.max_logprobs}", field)
    return count


def token_ids(value: object, field: str) -> list[int]:
    """Returns `value` as token ids.

    Raises:
      BadRequest: it is not a list of integers.
    """
    try:
        return msgspec.convert(value, _IDS)
    except msgspec.ValidationError as error:
        raise BadRequest(f"{field}: expected token ids: {error}", field) from None


class _Endpoint:
    """The ASGI application of one route."""

    def __init__(self, core: Core, path: str, handler: Handler, roles: tuple[str, ...], errors: ErrorBody):
        self._core = core
        self._path = path
        self._handler = handler
        self._roles = roles
        self._errors = errors

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sender = Sender(send)
        status = 499  # the client has disconnected
        try:
            status = await self._answer(scope, receive, sender)
        except ClientGone:
            pass
        except Exception as error:
            failure = as_http(error)
            status = failure.status
            if sender.begun:
                raise
            await error_answer(failure, self._errors)(scope, receive, sender)
        finally:
            self._core.counters.request(self._path, status)

    async def _answer(self, scope: Scope, receive: Receive, sender: Sender) -> int:
        core, settings = self._core, self._core.settings
        headers = {name: value for name, value in scope["headers"]}
        check_browser(scope, headers)
        token = bearer(headers.get(b"authorization", b"").decode("latin-1"))
        if core.access is not None and self._roles:
            core.access.check(token, self._roles)
        body = await read_body(
            receive, scope["headers"], settings.max_body_bytes, settings.body_timeout_s, core.bodies
        )
        call = Call(scope, body, token)
        del body
        try:
            forwarded = token if core.access is not None or not core.engine.has_token else None
            with as_caller(forwarded):
                async with ends_with_client(receive, lambda: sender.ended):
                    answer = await self._handler(call)
                    core.bodies.give_back(call.drop_body())
                    if isinstance(answer, Events):
                        await answer.begin()
                    await answer(scope, receive, sender)
            return answer.status
        finally:
            core.bodies.give_back(call.drop_body())
