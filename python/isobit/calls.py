"""Makes requests from the arguments of calls, and results from responses: shared by synchronous and asyncio
clients."""

import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np

from isobit.arguments import (
    UINT32,
    UINT64,
    DraftTokenIds,
    TokenIds,
    draft_texts,
    integer,
    optional_integer,
    pairs,
    token_list,
    token_rows,
)
from isobit.errors import IncompleteStreamError
from isobit.results import (
    Chunk,
    CompareSummary,
    Comparison,
    Sample,
    Score,
    SequenceReport,
    TokenGaps,
    TokenLogprobs,
    WatchUpdate,
)
from isobit.sampling import LogprobMode, SamplingOptions, mode_to_proto, to_proto
from isobit.v1 import comparator_pb2, rollout_pb2, scorer_pb2, types_pb2
from isobit.weights import (
    PIECE_BYTES,
    DigestOfSent,
    DistributedWeights,
    HeldWeights,
    Weights,
    specs_of,
    values_of,
)

InFlightMode = Literal["abort", "wait", "recompute_kv"]
PauseMode = Literal["abort", "wait", "keep"]
Determinism = Literal["required", "none"]
SleepLevel = Literal["kv_cache", "kv_cache_and_weights"]
GapDetail = Literal["all", "unequal", "none"]
CompareEvent = TokenGaps | SequenceReport | CompareSummary

# The timeout of calls that are answered at once. Calls that compute have only the caller's timeout: the
# longest sample may take hours, and keepalive detects a service that is gone.
CONTROL_TIMEOUT_S = 30.0

# With this key in the initial metadata, a service accepts the begin of a stream of weights.
WEIGHTS_ACCEPTED = "weights-accepted"

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class LocaliseSide:
    """How one side was asked for the logprobs of a sequence, and what it answered."""

    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    logprob_mode: LogprobMode = "processed"
    logprobs: np.ndarray | Sequence[float] | None = None  # one for each completion token; None: unknown


def probe_request(
    token_ids: TokenIds, site: tuple[int, int] | None, row: int | None
) -> types_pb2.ProbeRequest:
    place = None
    if site is not None:
        layer, op = (optional_integer(f"site[{i}]", part, UINT32) for i, part in enumerate(site))
        place = types_pb2.ProbeSite(layer=layer, op=op)
    return types_pb2.ProbeRequest(
        token_ids=token_list(token_ids, "token_ids"), site=place, row=optional_integer("row", row, UINT32)
    )


def update_weights_request(
    model_path: str | os.PathLike,
    weight_version: int | None,
    expected_digest: str,
    in_flight: InFlightMode | None,
) -> types_pb2.UpdateWeightsRequest:
    return types_pb2.UpdateWeightsRequest(
        model_path=os.fspath(model_path),
        weight_version=optional_integer("weight_version", weight_version, UINT64),
        expected_digest=expected_digest,
        in_flight_mode=in_flight_value(in_flight),
    )


def weight_chunks(
    tensors: Weights, weight_version: int | None, expected_digest: str | None, in_flight: InFlightMode | None
) -> Iterator[types_pb2.WeightChunk]:
    """Yields the messages of a stream of weights. A tensor is taken only after those before it were sent, and
    the first one only after the service has accepted the begin."""
    specs, items = specs_of(tensors)
    yield types_pb2.WeightChunk(
        begin=types_pb2.WeightStreamBegin(
            tensors=[types_pb2.StreamedTensor(name=s.name, dtype=s.dtype, shape=s.shape) for s in specs],
            weight_version=optional_integer("weight_version", weight_version, UINT64),
            in_flight_mode=in_flight_value(in_flight),
        )
    )
    digest = DigestOfSent()
    for number, (spec, (name, tensor)) in enumerate(zip(specs, items, strict=True)):
        if name != spec.name:
            raise ValueError(f"expected tensor {spec.name}, as in the specs, got {name}")
        values = values_of(spec, tensor)
        data = memoryview(values.reshape(-1).view(np.uint8))
        for at in range(0, len(data), PIECE_BYTES):
            chunk = types_pb2.WeightChunk()
            chunk.piece.tensor, chunk.piece.offset = number, at
            chunk.piece.data = bytes(data[at : at + PIECE_BYTES])
            yield chunk
        if expected_digest is None:
            digest.add(spec, values)  # while the pieces are on their way
    if expected_digest is None:
        expected_digest = digest.hex()
    yield types_pb2.WeightChunk(end=types_pb2.WeightStreamEnd(expected_digest=expected_digest))


def nothing_to_send() -> bool:
    """For held_weight_chunks: this process sends no weights, so the end may follow at once."""
    return True


def held_weight_chunks(
    weights: HeldWeights | DistributedWeights,
    weight_version: int | None,
    expected_digest: str | Callable[[], str],
    in_flight: InFlightMode | None,
    has_sent: Callable[[], bool] = nothing_to_send,
) -> Iterator[types_pb2.WeightChunk | None]:
    """Yields the messages for weights that the service gets in another way (CUDA IPC or NCCL). None means
    that there is nothing to send yet; it is repeated until `has_sent` returns true. If `expected_digest` is a
    function, it is called once the service has what it needs to begin."""
    begin = types_pb2.WeightStreamBegin(
        tensors=[types_pb2.StreamedTensor(name=s.name, dtype=s.dtype, shape=s.shape) for s in weights.specs],
        weight_version=optional_integer("weight_version", weight_version, UINT64),
        in_flight_mode=in_flight_value(in_flight),
    )
    if isinstance(weights, HeldWeights):
        way = begin.cuda_ipc
        way.handles.extend(weights.handles)
    else:
        way = begin.nccl
        way.group_ids.extend(weights.group_ids)
        way.num_senders = weights.num_senders
        way.has_joined = weights.has_joined
        way.nccl_version = weights.nccl_version
    way.blocks.extend(
        types_pb2.WeightBlock(
            tensor=b.tensor, first_row=b.rows[0], num_rows=b.rows[1], first_column=b.columns[0],
            num_columns=b.columns[1], memory=b.memory, offset=b.offset, row_stride=b.row_stride,
        )
        for b in weights.blocks
    )  # fmt: skip
    yield types_pb2.WeightChunk(begin=begin)
    while not has_sent():
        yield None
        time.sleep(0.001)
    digest = expected_digest if isinstance(expected_digest, str) else expected_digest()
    yield types_pb2.WeightChunk(end=types_pb2.WeightStreamEnd(expected_digest=digest))


def pause_request(mode: PauseMode) -> rollout_pb2.PauseGenerationRequest:
    return rollout_pb2.PauseGenerationRequest(mode=_enum_value(rollout_pb2.PauseMode, "PAUSE_MODE_", mode))


def sleep_request(level: SleepLevel, mode: PauseMode) -> rollout_pb2.SleepRequest:
    return rollout_pb2.SleepRequest(
        level=_enum_value(rollout_pb2.SleepLevel, "SLEEP_LEVEL_", level),
        mode=_enum_value(rollout_pb2.PauseMode, "PAUSE_MODE_", mode),
    )


def abort_request(request_ids: str | Sequence[str]) -> rollout_pb2.AbortRequest:
    names = [request_ids] if isinstance(request_ids, str) else request_ids
    return rollout_pb2.AbortRequest(request_ids=names)


def generate_request(
    prompt_token_ids: TokenIds,
    stream: bool,
    request_id: str,
    logprob_mode: str,
    timeout_ms: int | None,
    draft_token_ids: DraftTokenIds,
    speculation: bool | None,
    determinism: str,
    chunk_interval_ms: int,
    sampling: Mapping,
) -> rollout_pb2.GenerateRequest:
    drafts = draft_texts(draft_token_ids)
    return rollout_pb2.GenerateRequest(
        request_id=request_id,
        prompt_token_ids=token_list(prompt_token_ids, "prompt_token_ids"),
        sampling=to_proto(sampling),
        logprob_mode=mode_to_proto(logprob_mode),
        timeout_ms=optional_integer("timeout_ms", timeout_ms, UINT64),
        final_only=not stream,
        draft_token_ids=itertools.chain.from_iterable(drafts),
        draft_lengths=[len(text) for text in drafts] if len(drafts) > 1 else (),
        speculation=speculation,
        determinism=_enum_value(rollout_pb2.Determinism, "DETERMINISM_", determinism),
        chunk_interval_ms=integer("chunk_interval_ms", chunk_interval_ms, UINT32),
    )


class SampleAssembly:
    """Turns the responses of one Generate call into its Chunks and, at the end of each sample, the Sample."""

    def __init__(self):
        self._chunks: dict[int, list[TokenLogprobs]] = {}

    def events(self, response: rollout_pb2.GenerateResponse) -> Iterator[Chunk | Sample]:
        if response.HasField("chunk"):
            tokens = TokenLogprobs.from_proto(response.chunk.tokens)
            self._chunks.setdefault(response.chunk.index, []).append(tokens)
            yield Chunk(response.request_id, response.chunk.index, tokens)
        elif response.HasField("complete"):
            yield _whole_sample(response, self._chunks.pop(response.complete.index, []))


def _whole_sample(response: rollout_pb2.GenerateResponse, parts: list[TokenLogprobs]) -> Sample:
    tokens = TokenLogprobs.concatenate(parts)
    if len(tokens.token_ids) != response.complete.num_completion_tokens:
        raise IncompleteStreamError(
            f"sample {response.complete.index}: got {len(tokens.token_ids)} tokens, expected"
            f" {response.complete.num_completion_tokens}"
        )
    return Sample.from_proto(response.request_id, response.complete, tokens)


def samples_in_order(request: rollout_pb2.GenerateRequest, events: Iterable[Chunk | Sample]) -> list[Sample]:
    samples = {event.index: event for event in events if isinstance(event, Sample)}
    wanted = request.sampling.n if request.sampling.HasField("n") else 1
    return _in_order(samples, wanted, "samples")


def score_request(
    sequences: Sequence[tuple[TokenIds, TokenIds]],
    logprob_mode: str,
    prompt_logprobs: bool,
    entropy: bool,
    weight_version: int | None,
    sampling: Mapping,
) -> scorer_pb2.ScoreRequest:
    return scorer_pb2.ScoreRequest(
        sequences=[
            scorer_pb2.ScoreSequence(prompt_token_ids=prompt, completion_token_ids=completion)
            for prompt, completion in pairs(sequences, "sequences")
        ],
        sampling=to_proto(sampling),
        logprob_mode=mode_to_proto(logprob_mode),
        prompt_logprobs=prompt_logprobs,
        entropy=entropy,
        weight_version=optional_integer("weight_version", weight_version, UINT64),
    )


def score_events(request: scorer_pb2.ScoreRequest, response: scorer_pb2.ScoreResponse) -> tuple[Score]:
    return (Score.from_proto(response, request.entropy),)


def scores_in_order(request: scorer_pb2.ScoreRequest, scores: Iterable[Score]) -> list[Score]:
    return _in_order({score.index: score for score in scores}, len(request.sequences), "sequences")


def compare_request(
    prompts: Sequence[TokenIds],
    logprob_mode: str,
    gap_detail: GapDetail,
    allow_weight_mismatch: bool,
    max_concurrency: int | None,
    sampling: Mapping,
) -> comparator_pb2.CompareRequest:
    return comparator_pb2.CompareRequest(
        prompts=[
            comparator_pb2.ComparePrompt(token_ids=prompt)
            for prompt in token_rows(prompts, "prompts", "a single prompt is given as [prompt]")
        ],
        sampling=to_proto(sampling),
        logprob_mode=mode_to_proto(logprob_mode),
        gap_detail=_enum_value(comparator_pb2.GapDetail, "GAP_DETAIL_", gap_detail),
        allow_weight_mismatch=allow_weight_mismatch,
        max_concurrency=optional_integer("max_concurrency", max_concurrency, UINT32),
    )


def localise_request(
    prompt: TokenIds,
    completion: TokenIds,
    rollout: LocaliseSide | None,
    scorer: LocaliseSide | None,
) -> comparator_pb2.LocaliseRequest:
    return comparator_pb2.LocaliseRequest(
        prompt_token_ids=token_list(prompt, "prompt"),
        completion_token_ids=token_list(completion, "completion"),
        rollout=_localise_side(rollout),
        scorer=_localise_side(scorer),
    )


def _localise_side(side: LocaliseSide | None) -> comparator_pb2.LocaliseSide | None:
    if side is None:
        return None
    return comparator_pb2.LocaliseSide(
        sampling=to_proto(side.sampling),
        logprob_mode=mode_to_proto(side.logprob_mode),
        logprobs=() if side.logprobs is None else side.logprobs,
    )


def compare_events(response: comparator_pb2.CompareEvent) -> Iterator[CompareEvent]:
    if response.HasField("gaps"):
        yield TokenGaps.from_proto(response.gaps)
    elif response.HasField("sequence"):
        yield SequenceReport.from_proto(response.sequence)
    elif response.HasField("summary"):
        yield CompareSummary.from_proto(response.summary)


def whole_comparison(events: Iterable[CompareEvent]) -> Comparison:
    found: dict[type, list] = {TokenGaps: [], SequenceReport: [], CompareSummary: []}
    for event in events:
        found[type(event)].append(event)
    if len(found[CompareSummary]) != 1:
        raise IncompleteStreamError(f"the stream had {len(found[CompareSummary])} summaries, expected 1")
    reports = sorted(found[SequenceReport], key=lambda report: (report.prompt_index, report.sample_index))
    return Comparison(found[CompareSummary][0], tuple(reports), tuple(found[TokenGaps]))


def watch_request(interval_ms: int | None, window_sequences: int | None) -> comparator_pb2.WatchRequest:
    return comparator_pb2.WatchRequest(
        interval_ms=optional_integer("interval_ms", interval_ms, UINT32),
        window_sequences=optional_integer("window_sequences", window_sequences, UINT32),
    )


def watch_events(response: comparator_pb2.WatchResponse) -> tuple[WatchUpdate]:
    return (WatchUpdate.from_proto(response),)


def record_request(pair: tuple[Sample, Score], allow_weight_mismatch: bool) -> comparator_pb2.RecordRequest:
    sample, score = pair
    return comparator_pb2.RecordRequest(
        rollout=_record_side(sample), scorer=_record_side(score), allow_weight_mismatch=allow_weight_mismatch
    )


def _record_side(result: Sample | Score) -> comparator_pb2.RecordSide:
    return comparator_pb2.RecordSide(
        tokens=result.tokens.to_proto(),
        fingerprint=types_pb2.Fingerprint(hex=result.fingerprint, settings=result.settings),
        weight_version=types_pb2.WeightVersion(
            id=result.weight_version.id, digest=result.weight_version.digest
        ),
    )


def in_flight_value(name: InFlightMode | None) -> int:
    return _enum_value(types_pb2.InFlightMode, "IN_FLIGHT_MODE_", name)


def _enum_value(enum, prefix: str, name: str | None) -> int:
    """Returns the value of the enum called `prefix` + NAME; for None 0, the unset value."""
    if name is None:
        return 0
    choices = {full.removeprefix(prefix).lower(): value for full, value in enum.items() if value != 0}
    if name not in choices:
        raise ValueError(f"{enum.DESCRIPTOR.name} is {name!r}, expected one of {', '.join(choices)}")
    return choices[name]


def _in_order(results: dict[int, _Result], wanted: int, what: str) -> list[_Result]:
    if missing := [index for index in range(wanted) if index not in results]:
        raise IncompleteStreamError(f"the stream ended without {what} {missing} of {wanted}")
    return [results[index] for index in range(wanted)]
