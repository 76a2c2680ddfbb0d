"""Typed asyncio client of the comparator: isobit.comparator_client with coroutines and async iterators."""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Coroutine, Iterable, Sequence
from typing import Any, Literal, Unpack, overload

from isobit import calls
from isobit.aio.channel import ServiceClient
from isobit.calls import (
    CONTROL_TIMEOUT_S,
    CompareEvent,
    GapDetail,
    LocaliseSide,
    TokenIds,
)
from isobit.results import CompareSummary, Comparison, Sample, Score, WatchUpdate
from isobit.sampling import LogprobMode, SamplingOptions
from isobit.v1 import comparator_pb2, comparator_pb2_grpc, types_pb2

_Pair = tuple[Sample, Score]


class ComparatorClient(ServiceClient):
    """Compares the rollout's logprobs with the scorer's."""

    _stub_type = comparator_pb2_grpc.ComparatorServiceStub

    @overload
    def compare(
        self, prompts: Sequence[TokenIds], *, stream: Literal[False] = False,
        logprob_mode: LogprobMode = "processed", gap_detail: GapDetail = "all",
        allow_weight_mismatch: bool = False, max_concurrency: int | None = None,
        timeout: float | None = None, **sampling: Unpack[SamplingOptions],
    ) -> Coroutine[Any, Any, Comparison]: ...  # fmt: skip

    @overload
    def compare(
        self, prompts: Sequence[TokenIds], *, stream: Literal[True],
        logprob_mode: LogprobMode = "processed", gap_detail: GapDetail = "all",
        allow_weight_mismatch: bool = False, max_concurrency: int | None = None,
        timeout: float | None = None, **sampling: Unpack[SamplingOptions],
    ) -> AsyncGenerator[CompareEvent, None]: ...  # fmt: skip

    def compare(
        self,
        prompts,
        *,
        stream=False,
        logprob_mode="processed",
        gap_detail="all",
        allow_weight_mismatch=False,
        max_concurrency=None,
        timeout=None,
        **sampling,
    ):
        """Generates from prompts, scores every completion, and compares the two.

        Args:
          prompts: rows of token ids.
          stream: gives an asynchronous iterator of gaps and reports as they become known, and last of the
            summary.
          gap_detail: of which tokens the gaps are returned.
          allow_weight_mismatch: compares even if the two sides' weights differ.
          max_concurrency: prompts in flight at one time; None is the service's default.
          **sampling: passed to both services; see SamplingOptions.

        Returns:
          The comparison, to be awaited; or the iterator.
        """
        request = calls.compare_request(
            prompts, logprob_mode, gap_detail, allow_weight_mismatch, max_concurrency, sampling
        )
        events = self._stream("Compare", request, timeout, calls.compare_events)
        return events if stream else self._whole(events, calls.whole_comparison)

    async def record(
        self,
        pairs: Iterable[_Pair] | AsyncIterable[_Pair],
        *,
        allow_weight_mismatch: bool = False,
        timeout: float | None = None,
    ) -> CompareSummary:
        """Compares logprobs that the caller already has from both sides.

        An exception that `pairs` raises ends the call, and is raised here.
        """

        async def requests() -> AsyncIterator[comparator_pb2.RecordRequest]:
            async for pair in _each(pairs):
                yield calls.record_request(pair, allow_weight_mismatch)

        return CompareSummary.from_proto(await self._upload("Record", requests(), timeout))

    def watch(
        self,
        *,
        interval_ms: int | None = None,
        window_sequences: int | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[WatchUpdate, None]:
        """Rolling summaries of all that the comparator has compared, until the iterator is closed."""
        request = calls.watch_request(interval_ms, window_sequences)
        return self._stream("Watch", request, timeout, calls.watch_events, waits=False)

    async def localise(
        self,
        prompt: TokenIds,
        completion: TokenIds = (),
        *,
        rollout: LocaliseSide | None = None,
        scorer: LocaliseSide | None = None,
        timeout: float | None = None,
    ) -> comparator_pb2.LocaliseResponse:
        """Where and why the two services' bits first differ for a sequence. Needs the role admin.

        Args:
          prompt, completion: the tokens; `completion` up to the one that differs, at least.
          rollout, scorer: how each was asked, and what it said. A scorer that is left out was asked as the
            rollout was.

        Raises:
          ResourceExhaustedError: the comparator localises for another caller.
        """
        request = calls.localise_request(prompt, completion, rollout, scorer)
        return await self._unary("Localise", request, timeout)

    async def get_server_info(
        self, timeout: float | None = CONTROL_TIMEOUT_S
    ) -> comparator_pb2.ComparatorServerInfo:
        """The comparator and the two services behind it."""
        return await self._unary("GetServerInfo", types_pb2.GetServerInfoRequest(), timeout)


async def _each(pairs: Iterable[_Pair] | AsyncIterable[_Pair]) -> AsyncIterator[_Pair]:
    if isinstance(pairs, AsyncIterable):
        async for pair in pairs:
            yield pair
    else:
        for pair in pairs:
            yield pair
