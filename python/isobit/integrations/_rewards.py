"""TRL's reward functions, in every form that TRL accepts, and the advantages of a group of completions."""

import asyncio
import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np

# Columns of a row that are not arguments of a reward function.
_NO_COLUMNS = ("prompt", "completion", "completion_ids")
_POLL_S = 0.2

logger = logging.getLogger(__name__)


class Rewards:
    """Calls reward functions for groups of completions, from any thread.

    Args:
      functions: functions, partials and callable objects; asynchronous ones run in one event loop.
      stopping: when it is set, running calls of asynchronous functions end.
    """

    def __init__(self, functions: Sequence[Callable], stopping: threading.Event):
        self._functions = list(functions)
        self._stopping = stopping
        self._loop: asyncio.AbstractEventLoop | None = None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Runs the event loop while the block runs. Calls that are still running at the end are cancelled."""
        started, ended = threading.Event(), asyncio.Event()

        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            started.set()
            await ended.wait()

        thread = threading.Thread(
            target=asyncio.run, args=(serve(),), name="isobit-reward-functions", daemon=True
        )
        thread.start()
        started.wait()
        try:
            yield
        finally:
            self._loop.call_soon_threadsafe(ended.set)
            thread.join()

    def score(
        self, row: dict[str, Any], completions: list, completion_ids: list[list[int]]
    ) -> tuple[np.ndarray, list[dict[str, float]]] | None:
        """Returns advantages and metrics of a group, computed as TRL's own worker computes them; None after a
        stop.

        A completion whose rewards are all None is not scored: its advantage is 0, and the others are compared
        without it. The same happens to a completion with a reward that is infinite in float32, since it would
        make all advantages of the group NaN; a warning names the function.

        Raises:
          TypeError: a function does not return one reward for each completion.
        """
        count = len(completions)
        table = self._table(row, completions, completion_ids)
        if table is None:
            return None
        by_function = np.array(table, dtype=float)
        with np.errstate(over="ignore"):
            infinite = np.isinf(by_function.astype(np.float32))
        self._warn_of(infinite)
        scored = ~np.isnan(by_function).all(axis=0) & ~infinite.any(axis=0)
        total, advantages, spread = np.full(count, np.nan), np.zeros(count), float("nan")
        if scored.any():
            total[scored] = np.nansum(by_function[:, scored], axis=0)
            spread = float(total[scored].std())
            advantages[scored] = (total[scored] - total[scored].mean()) / (spread + 1e-8)
        names = [f"rewards/{_name(function)}" for function in self._functions]
        metrics = [
            {"reward": float(total[i]), "reward_std": spread}
            | dict(zip(names, map(float, by_function[:, i]), strict=True))
            for i in range(count)
        ]
        return advantages, metrics

    def _table(self, row, completions, completion_ids) -> list[list[float]] | None:
        """Returns one row for each function: a reward for each completion, NaN for None."""
        count = len(completions)
        columns = {name: [value] * count for name, value in row.items() if name not in _NO_COLUMNS}
        given = []
        for function in self._functions:
            rewards = function(
                prompts=[row["prompt"]] * count,
                completions=completions,
                completion_ids=completion_ids,
                **columns,
            )
            if inspect.isawaitable(rewards):  # it runs while the next functions do
                rewards = asyncio.run_coroutine_threadsafe(_result_of(rewards), self._loop)
            given.append(rewards)
        table = []
        for function, rewards in zip(self._functions, given, strict=True):
            if isinstance(rewards, Future):
                if not self._waited(rewards):
                    return None
                rewards = rewards.result()
            if isinstance(rewards, str) or not hasattr(rewards, "__len__") or len(rewards) != count:
                raise TypeError(f"{_name(function)}: expected {count} rewards, got {rewards!r}")
            table.append([np.nan if reward is None else float(reward) for reward in rewards])
        return table

    def _waited(self, future: Future) -> bool:
        """Waits for the future. Returns whether it ended before a stop."""
        while not wait([future], timeout=_POLL_S).done:
            if self._stopping.is_set():
                return False
        return True

    def _warn_of(self, infinite: np.ndarray) -> None:
        for function, of_one in zip(self._functions, infinite, strict=True):
            if number := int(of_one.sum()):
                logger.warning(
                    "reward function %s: %d of the %d rewards of a group are infinite in float32; these"
                    " completions count as not scored",
                    _name(function),
                    number,
                    len(of_one),
                )


async def _result_of(awaitable):
    return await awaitable


def _name(function: Callable) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)
