"""What the soak's clients do: requests that end in every way, and comparisons that updates may end.

Raises an outcome that neither the client nor a weight update explains.
"""

import contextlib
import random
import threading
import time
from collections.abc import Iterator

from background import Action, random_request

from isobit import ComparatorClient, RolloutClient
from isobit.errors import (
    AbortedError,
    DeadlineExceededError,
    FailedPreconditionError,
    ResourceExhaustedError,
)

_MEAN_PAUSE_S = 0.05
_COMPARED_PROMPTS = 8
_FATES = ("taken whole", "taken whole", "cancelled", "aborted", "timed out", "overdue")


def disturb(vocab_size: int, max_tokens: int) -> Action:
    """An action that sends a random request after a random pause, and often does not wait for its end."""

    def action(client: RolloutClient, generator: random.Random) -> str:
        time.sleep(generator.expovariate(1 / _MEAN_PAUSE_S))
        request = random_request(generator, vocab_size, max_tokens)
        fate = generator.choice(_FATES)
        try:
            _send(client, generator, request, fate)
        except ResourceExhaustedError as error:
            if error.retry_after_ms is None:
                raise
            time.sleep(error.retry_after_ms / 1000)
            return "requests refused, queue full"
        return f"requests {fate}"

    return action


def _send(client: RolloutClient, generator: random.Random, request: dict, fate: str) -> None:
    if fate == "taken whole":
        client.generate(**request)
    elif fate == "timed out":
        client.generate(**request, timeout_ms=generator.randint(1, 100))
    elif fate == "overdue":
        with contextlib.suppress(DeadlineExceededError):
            client.generate(**request, timeout=generator.uniform(0.001, 0.1))
    else:
        name = f"{generator.getrandbits(64):016x}"
        stream = client.generate(**request, stream=True, request_id=name)
        for _ in range(generator.randint(1, 8)):
            next(stream, None)
        if fate == "aborted":
            client.abort(name)
            for _ in stream:
                pass
        stream.close()


class Comparing:
    """An action that compares completions of random prompts, all of them or until it cancels the call."""

    def __init__(self, vocab_size: int, max_tokens: int):
        self._vocab_size = vocab_size
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._switching = False
        self._switches = 0

    @contextlib.contextmanager
    def while_weights_differ(self) -> Iterator[None]:
        """Comparisons that overlap the `with` statement may fail."""
        with self._lock:
            self._switching = True
            self._switches += 1
        yield
        with self._lock:
            self._switching = False

    def __call__(self, client: ComparatorClient, generator: random.Random) -> str:
        request = random_request(generator, self._vocab_size, self._max_tokens)
        first = request.pop("prompt_token_ids")
        prompts = [first[: generator.randint(1, len(first))] for _ in range(_COMPARED_PROMPTS)]
        with self._lock:
            may_fail, switches = self._switching, self._switches
        cancelled = generator.random() < 0.2
        try:
            with contextlib.closing(client.compare(prompts, stream=True, **request)) as events:
                for _ in events:
                    if cancelled:
                        return "comparisons cancelled"
        except (AbortedError, FailedPreconditionError):
            with self._lock:
                if not may_fail and switches == self._switches:
                    raise
            return "comparisons ended by an update"
        return "comparisons"
