"""Samples for every dialect: tokens with logprobs and text, ended by stop tokens, lengths and stop
strings."""

import dataclasses
from array import array
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Literal

from isobit.errors import IncompleteStreamError
from isobit.gateway.engine import RolloutClient
from isobit.gateway.sampling import Sampling
from isobit.gateway.text import SampleText, TokenTexts
from isobit.tokenizer import Tokenizer
from isobit.v1 import rollout_pb2, types_pb2

FinishReason = Literal["stop", "length", "abort"]
_REASONS: dict[int, FinishReason] = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
    types_pb2.FINISH_REASON_ABORT: "abort",
}


@dataclasses.dataclass(slots=True)
class Piece:
    """The next tokens of a sample. All sequences have one entry for each token, but `top` may be empty."""

    index: int  # of the sample, in [0, n)
    token_ids: Sequence[int]
    logprobs: Sequence[float]  # float32 values as Python floats
    weight_versions: Sequence[int]
    top: Sequence[types_pb2.TopLogprobs]  # alternatives, most likely first
    text: str  # may lag behind the tokens


@dataclasses.dataclass(slots=True)
class Ending:
    """The end of a sample. If a stop string ended it, later tokens are dropped, and there is no
    `complete`."""

    index: int
    finish_reason: FinishReason
    stop_reason: int | str | None  # a token of the request's stop_token_ids, or a stop string
    stop_token_id: int | None  # the token that ended it, the model's own end-of-sequence tokens included
    text: str  # the text that was held back
    abort_reason: str = ""
    complete: rollout_pb2.GenerateComplete | None = None

    @property
    def cached_tokens(self) -> int:
        return self.complete.num_cached_tokens if self.complete is not None else 0


@dataclasses.dataclass(slots=True)
class Completion:
    """A whole sample. Token ids and logprobs are arrays, which take a tenth of the memory of lists."""

    index: int
    token_ids: array = dataclasses.field(default_factory=lambda: array("I"))
    logprobs: array = dataclasses.field(default_factory=lambda: array("f"))
    weight_versions: array = dataclasses.field(default_factory=lambda: array("Q"))
    top: list[types_pb2.TopLogprobs] = dataclasses.field(default_factory=list)
    text: str = ""
    ending: Ending | None = None

    def add(self, piece: Piece) -> None:
        self.token_ids.extend(piece.token_ids)
        self.logprobs.extend(piece.logprobs)
        self.weight_versions.extend(piece.weight_versions)
        self.top.extend(piece.top)
        self.text += piece.text


@dataclasses.dataclass(frozen=True)
class Prompted:
    """One prompt with all arguments of Generate, except the way in which the answer is sent."""

    prompt: Sequence[int]
    sampling: Sampling
    request_id: str = ""
    logprob_mode: int = types_pb2.LOGPROB_MODE_PROCESSED
    ends: frozenset[int] = frozenset()  # tokens that end a sample
    wants_text: bool = True
    waits: bool = False  # wait while the rollout's queue is full, instead of raising an error

    def message(self, final_only: bool, interval_ms: int = 0) -> rollout_pb2.GenerateRequest:
        return rollout_pb2.GenerateRequest(
            request_id=self.request_id,
            prompt_token_ids=self.prompt,
            sampling=self.sampling.params,
            logprob_mode=self.logprob_mode,
            final_only=final_only,
            chunk_interval_ms=interval_ms,
        )

    def text(self, texts: TokenTexts) -> SampleText:
        sampling = self.sampling
        return SampleText(
            texts,
            ends=self.ends,
            stop=sampling.stop,
            include_stop=sampling.include_stop,
            skip_special_tokens=sampling.skip_special_tokens,
            min_tokens=sampling.params.min_tokens,
        )


async def streamed(
    rollout: RolloutClient, texts: TokenTexts, wanted: Prompted, interval_ms: int = 0
) -> AsyncGenerator[Piece | Ending, None]:
    """Yields pieces as they come, and the ending of each sample; samples are interleaved. Closing the
    iterator ends the call at the rollout. interval_ms: the shortest time between two pieces of a sample."""
    samples = wanted.sampling.n
    decoders = [wanted.text(texts) if wanted.wants_text else None for _ in range(samples)]
    ended: set[int] = set()
    async with aclosing(rollout.events(wanted.message(False, interval_ms), wanted.waits)) as events:
        async for response in events:
            if response.HasField("chunk"):
                chunk = response.chunk
                if chunk.index in ended:
                    continue
                piece, stop = _piece(chunk, decoders[chunk.index])
                yield piece
                if stop is not None:
                    ended.add(chunk.index)
                    yield Ending(chunk.index, "stop", stop, None, "")
                    if len(ended) == samples:
                        return
            elif response.HasField("complete") and response.complete.index not in ended:
                ended.add(response.complete.index)
                yield _ending(response.complete, decoders[response.complete.index], wanted)
    if len(ended) != samples:
        raise IncompleteStreamError(f"the stream ended after {len(ended)} of {samples} samples")


async def whole(
    rollout: RolloutClient, tokenizer: Tokenizer, texts: TokenTexts, wanted: Prompted, interval_ms: int = 0
) -> list[Completion]:
    """Returns all samples of a prompt, by index. interval_ms: the time between two searches for a stop
    string."""
    found = [Completion(index) for index in range(wanted.sampling.n)]
    if wanted.sampling.stop and wanted.wants_text:
        async with aclosing(streamed(rollout, texts, wanted, interval_ms)) as events:
            async for event in events:
                sample = found[event.index]
                if isinstance(event, Piece):
                    sample.add(event)
                else:
                    sample.ending = event
                    sample.text += event.text
        return found
    async with aclosing(rollout.events(wanted.message(True), wanted.waits)) as events:
        async for response in events:
            if response.HasField("chunk"):
                found[response.chunk.index].add(_piece(response.chunk, None)[0])
            elif response.HasField("complete"):
                sample = found[response.complete.index]
                sample.ending = _ending(response.complete, None, wanted)
                if wanted.wants_text:
                    sample.text = _whole_text(tokenizer, sample, wanted)
    for sample in found:
        if sample.ending is None or len(sample.token_ids) != sample.ending.complete.num_completion_tokens:
            raise IncompleteStreamError(f"sample {sample.index} of {len(found)} is incomplete")
    return found


def _piece(chunk: rollout_pb2.GenerateChunk, text: SampleText | None) -> tuple[Piece, str | None]:
    tokens = chunk.tokens
    if text is None:
        return (
            Piece(chunk.index, tokens.token_ids, tokens.logprobs, tokens.weight_versions, tokens.top, ""),
            None,
        )
    given, taken, stop = text.add(tokens.token_ids)
    columns = tokens.token_ids, tokens.logprobs, tokens.weight_versions, tokens.top
    if taken < len(tokens.token_ids):
        columns = tuple(column[:taken] for column in columns)
    piece = Piece(chunk.index, *columns, given)
    return piece, stop


def _ending(complete: rollout_pb2.GenerateComplete, text: SampleText | None, wanted: Prompted) -> Ending:
    reason = _REASONS.get(complete.finish_reason, "abort")
    token = complete.stop_token_id if complete.HasField("stop_token_id") else None
    stop_reason = token if token in wanted.sampling.params.stop_token_ids else None
    rest, stop = text.finish() if text is not None else ("", None)
    if stop is not None:
        reason, stop_reason = "stop", stop
    return Ending(complete.index, reason, stop_reason, token, rest, complete.abort_reason, complete)


def _whole_text(tokenizer: Tokenizer, sample: Completion, wanted: Prompted) -> str:
    ids = sample.token_ids.tolist()
    if not wanted.sampling.include_stop and sample.ending.stop_token_id is not None:
        ids.pop()
    return tokenizer.decode(ids, skip_special_tokens=wanted.sampling.skip_special_tokens)
