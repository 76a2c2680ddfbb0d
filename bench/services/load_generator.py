"""Sends many requests at once from several processes, so that Python is not the bottleneck.

A request is read token by token, as a client that shows text does, unless its "stream" is False.
"""

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Self

from isobit.client import RolloutClient
from isobit.results import Chunk, Sample

# Keyword arguments of RolloutClient.generate, which streams unless they say otherwise.
Request = Mapping[str, Any]

# Enough for every process to have its share and a connection before all begin.
_LEAD_S = 0.2


@dataclass(frozen=True)
class Timing:
    """Timings of a load, in seconds since its start."""

    first_tokens_s: float  # until every request had its first token
    total_s: float
    tokens: int
    messages: int  # that carried them: a message has the tokens made while the one before was on its way

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.total_s


class LoadGenerator:
    """Client processes that stay for many loads; use it in a `with` statement."""

    def __init__(self, num_processes: int = 0):
        """`num_processes`: 0 takes half of the processors, but at most 32."""
        self._num_processes = num_processes or max(1, min(32, (os.cpu_count() or 1) // 2))
        # Not by fork, since gRPC's threads do not survive it.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(self._num_processes, mp_context=context)

    def run(self, target: str, requests: Sequence[Request], concurrency: int) -> Timing:
        """Sends all `requests` to the rollout at `target`, `concurrency` at a time."""
        timing, _ = self._run(target, requests, concurrency, keep=False)
        return timing

    def complete(
        self, target: str, requests: Sequence[Request], concurrency: int
    ) -> tuple[Timing, list[list[Sample]]]:
        """As run(), with the samples of each request; a request that does not stream has them by index."""
        return self._run(target, requests, concurrency, keep=True)

    def _run(
        self, target: str, requests: Sequence[Request], concurrency: int, keep: bool
    ) -> tuple[Timing, list[list[Sample]]]:
        processes = min(self._num_processes, concurrency, len(requests))
        threads = [len(range(index, concurrency, processes)) for index in range(processes)]
        start = time.monotonic() + _LEAD_S
        shares = [
            self._pool.submit(_send, target, requests[index::processes], threads[index], start, keep)
            for index in range(processes)
        ]
        timings, samples = [], [[] for _ in requests]
        for index, share in enumerate(shares):
            timing, samples[index::processes] = share.result()
            timings.append(timing)
        return _whole(timings), samples

    def warm_up(self, target: str, request: Request) -> None:
        """Starts every process, which takes a second, and sends one request from each."""
        self.run(target, [request] * self._num_processes, self._num_processes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._pool.shutdown(cancel_futures=True)


def _send(
    target: str, requests: Sequence[Request], concurrency: int, start: float, keep: bool
) -> tuple[Timing, list[list[Sample]]]:
    """One process's share; `start` is a time of the monotonic clock, which all processes share."""
    with RolloutClient(target) as client, ThreadPoolExecutor(concurrency) as pool:
        client.wait_until_serving()  # connects
        time.sleep(max(0.0, start - time.monotonic()))
        parts = list(pool.map(lambda request: _read(client, request), requests))
    whole = _whole([timing for timing, _ in parts])
    timing = replace(whole, first_tokens_s=whole.first_tokens_s - start, total_s=whole.total_s - start)
    # What is not asked for need not be sent to the process that gathers the shares.
    return timing, [samples if keep else [] for _, samples in parts]


def _read(client: RolloutClient, request: Request) -> tuple[Timing, list[Sample]]:
    """One request, with the clock's own times."""
    if not request.get("stream", True):
        samples = client.generate(**request)
        end = time.monotonic()
        tokens = sum(len(sample.tokens.token_ids) for sample in samples)
        return Timing(end, end, tokens, len(samples)), samples
    first, tokens, messages, samples = 0.0, 0, 0, []
    for event in client.generate(stream=True, **request):
        if isinstance(event, Chunk):
            first = first or time.monotonic()
            tokens += len(event.tokens.token_ids)
            messages += 1
        else:
            samples.append(event)
    return Timing(first, time.monotonic(), tokens, messages), samples


def _whole(parts: Sequence[Timing]) -> Timing:
    """The timing of all parts together."""
    return Timing(
        max(part.first_tokens_s for part in parts),
        max(part.total_s for part in parts),
        sum(part.tokens for part in parts),
        sum(part.messages for part in parts),
    )
