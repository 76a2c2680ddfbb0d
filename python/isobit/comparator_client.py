"""Typed synchronous client of the comparator: prompts, or logprobs of both sides, in; gaps and summaries out.

    with ComparatorClient("localhost:50053") as comparator:
        assert comparator.compare([prompt_ids], max_tokens=64).summary.verdict == "equal"

Errors and timeouts are those of isobit.client.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, Unpack, overload

import grpc

from isobit.calls import TokenIds, enum_value, token_list
from isobit.channel import ServiceClient
from isobit.credentials import Security
from isobit.errors import IncompleteStreamError
from isobit.results import (
    CompareSummary,
    Comparison,
    Sample,
    Score,
    SequenceReport,
    TokenGaps,
    WatchUpdate,
)
from isobit.sampling import LogprobMode, SamplingOptions, mode_to_proto, to_proto
from isobit.v1 import comparator_pb2, comparator_pb2_grpc, types_pb2

GapDetail = Literal["all", "unequal", "none"]

_CONTROL_TIMEOUT_S = 30.0
_COMPARE_TIMEOUT_S = 3600.0


class ComparatorClient(ServiceClient):
    """Compares the rollout's logprobs with the scorer's."""

    def __init__(
        self, target: str, credentials: grpc.ChannelCredentials | None = None, **security: Unpack[Security]
    ):
        super().__init__(target, credentials, **security)
        self._stub = comparator_pb2_grpc.ComparatorServiceStub(self._channel)

    @overload
    def compare(
        self, prompts: Sequence[TokenIds], *, stream: Literal[False] = False,
        logprob_mode: LogprobMode = "processed", gap_detail: GapDetail = "all",
        allow_weight_mismatch: bool = False, max_concurrency: int | None = None,
        timeout: float = _COMPARE_TIMEOUT_S, **sampling: Unpack[SamplingOptions],
    ) -> Comparison: ...  # fmt: skip

    @overload
    def compare(
        self, prompts: Sequence[TokenIds], *, stream: Literal[True],
        logprob_mode: LogprobMode = "processed", gap_detail: GapDetail = "all",
        allow_weight_mismatch: bool = False, max_concurrency: int | None = None,
        timeout: float = _COMPARE_TIMEOUT_S, **sampling: Unpack[SamplingOptions],
    ) -> Iterator[TokenGaps | SequenceReport | CompareSummary]: ...  # fmt: skip

    def compare(
        self,
        prompts,
        *,
        stream=False,
        logprob_mode="processed",
        gap_detail="all",
        allow_weight_mismatch=False,
        max_concurrency=None,
        timeout=_COMPARE_TIMEOUT_S,
        **sampling,
    ):
        """Generates from prompts, scores every completion, and compares the two.

        Args:
          prompts: rows of token ids.
          stream: gives an iterator of gaps and reports as they become known, and last of the summary.
          gap_detail: of which tokens the gaps are returned.
          allow_weight_mismatch: compares even if the two sides' weights differ.
          max_concurrency: prompts in flight at one time; None is the service's default.
          **sampling: passed to both services; see SamplingOptions.
        """
        request = comparator_pb2.CompareRequest(
            prompts=[
                comparator_pb2.ComparePrompt(token_ids=token_list(prompt, f"prompts[{index}]"))
                for index, prompt in enumerate(prompts)
            ],
            sampling=to_proto(sampling),
            logprob_mode=mode_to_proto(logprob_mode),
            gap_detail=enum_value(comparator_pb2.GapDetail, "GAP_DETAIL_", gap_detail),
            allow_weight_mismatch=allow_weight_mismatch,
            max_concurrency=max_concurrency,
        )
        stream_events = self._compare_events(request, timeout)
        return stream_events if stream else _whole_comparison(stream_events)

    def record(
        self,
        pairs: Iterable[tuple[Sample, Score]],
        *,
        allow_weight_mismatch: bool = False,
        timeout: float = _COMPARE_TIMEOUT_S,
    ) -> CompareSummary:
        """Compares logprobs that the caller already has from both sides."""
        requests = (
            comparator_pb2.RecordRequest(
                rollout=_record_side(sample),
                scorer=_record_side(score),
                allow_weight_mismatch=allow_weight_mismatch,
            )
            for sample, score in pairs
        )
        return CompareSummary.from_proto(self._unary(self._stub.Record, requests, timeout))

    def watch(
        self,
        *,
        interval_ms: int | None = None,
        window_sequences: int | None = None,
        timeout: float | None = None,
    ) -> Iterator[WatchUpdate]:
        """Rolling summaries of all that the comparator has compared, until the iterator is closed."""
        request = comparator_pb2.WatchRequest(interval_ms=interval_ms, window_sequences=window_sequences)
        for response in self._stream(self._stub.Watch, request, timeout):
            yield WatchUpdate.from_proto(response)

    def get_server_info(self, timeout: float = _CONTROL_TIMEOUT_S) -> comparator_pb2.ComparatorServerInfo:
        """The comparator and the two services behind it."""
        return self._unary(self._stub.GetServerInfo, types_pb2.GetServerInfoRequest(), timeout)

    def _compare_events(
        self, request: comparator_pb2.CompareRequest, timeout: float
    ) -> Iterator[TokenGaps | SequenceReport | CompareSummary]:
        for response in self._stream(self._stub.Compare, request, timeout):
            if response.HasField("gaps"):
                yield TokenGaps.from_proto(response.gaps)
            elif response.HasField("sequence"):
                yield SequenceReport.from_proto(response.sequence)
            elif response.HasField("summary"):
                yield CompareSummary.from_proto(response.summary)


def _whole_comparison(events: Iterator[TokenGaps | SequenceReport | CompareSummary]) -> Comparison:
    found: dict[type, list] = {TokenGaps: [], SequenceReport: [], CompareSummary: []}
    for event in events:
        found[type(event)].append(event)
    if len(found[CompareSummary]) != 1:
        raise IncompleteStreamError(f"the stream brought {len(found[CompareSummary])} summaries, expected 1")
    reports = sorted(found[SequenceReport], key=lambda report: (report.prompt_index, report.sample_index))
    return Comparison(found[CompareSummary][0], tuple(reports), tuple(found[TokenGaps]))


def _record_side(result: Sample | Score) -> comparator_pb2.RecordSide:
    return comparator_pb2.RecordSide(
        tokens=result.tokens.to_proto(),
        fingerprint=types_pb2.Fingerprint(hex=result.fingerprint),
        weight_version=types_pb2.WeightVersion(
            id=result.weight_version.id, digest=result.weight_version.digest
        ),
    )
