"""Typed asyncio client of the comparator: prompts, or the logprobs of both sides, in; gaps and summaries
out.

    async with aio.ComparatorClient("localhost:7003") as comparator:
        comparison = await comparator.compare([prompt_ids], max_tokens=64)
        assert comparison.summary.verdict == "equal"

Errors and timeouts are as in isobit.aio.client.
"""

from collections.abc import AsyncGenerator, AsyncIterable, Coroutine, Iterable, Sequence
from typing import Any, Literal, Unpack, overload

from isobit import calls
from isobit.aio.channel import ServiceClient, amap
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
    """The client of a comparator, which compares the rollout's logprobs with the scorer's."""

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
          stream: True returns an asynchronous iterator that yields gaps and reports as they become known, and
            the summary last.
          logprob_mode: "processed" or "raw", for both sides.
          gap_detail: for which tokens the gaps are returned: "all", "unequal" or "none".
          allow_weight_mismatch: compares even if the weights of the two sides differ.
          max_concurrency: the largest number of prompts in flight; None: the service's default.
          timeout: in seconds; None: no limit.
          **sampling: passed to both services; see SamplingOptions.

        Returns:
          The comparison, to be awaited; or the iterator.

        Raises:
          FailedPreconditionError: the two sides cannot be compared, since their arithmetic or weights differ.
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

        Asyncio: if `pairs` raises an exception, the call ends and raises it.
        """
        requests = amap(lambda pair: calls.record_request(pair, allow_weight_mismatch), pairs)
        return CompareSummary.from_proto(await self._upload("Record", requests, timeout))

    def watch(
        self,
        *,
        interval_ms: int | None = None,
        window_sequences: int | None = None,
        timeout: float | None = None,
    ) -> AsyncGenerator[WatchUpdate, None]:
        """Yields rolling summaries of everything that the comparator has compared, until the iterator is
        closed."""
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
        """Returns where and why the bits of the two services first differ for a sequence. Needs the role
        admin.

        Args:
          prompt, completion: the token ids; `completion` must reach at least to the token that differs.
          rollout, scorer: how each side was asked, and what it answered. Without `scorer`, the scorer is
            taken to have been asked as the rollout was.
          timeout: in seconds; None: no limit.

        Raises:
          ResourceExhaustedError: the comparator is busy localising for another caller.
        """
        request = calls.localise_request(prompt, completion, rollout, scorer)
        return await self._unary("Localise", request, timeout)

    async def get_server_info(
        self, timeout: float | None = CONTROL_TIMEOUT_S
    ) -> comparator_pb2.ComparatorServerInfo:
        """Describes the comparator and the two services behind it."""
        return await self._unary("GetServerInfo", types_pb2.GetServerInfoRequest(), timeout)
