"""Clients, one thread each, that repeat a random action until they are stopped."""

import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Self

from isobit.client import RolloutClient

# What a client repeats; returns the name to count it under.
Action = Callable[[Any, random.Random], str]


class BackgroundLoad:
    """`num_clients` clients of one service. On leaving the `with` statement each finishes its current action.

    An exception that `action` raises ends its thread and is raised on leaving.
    """

    def __init__(self, client_type: type, target: str, num_clients: int, action: Action, seed: str):
        self.counts: Counter[str] = Counter()
        self._client_type = client_type
        self._target = target
        self._action = action
        self._lock = threading.Lock()  # guards counts
        self._stopped = threading.Event()
        self._errors: list[Exception] = []
        self._threads = [
            threading.Thread(target=self._work, args=(random.Random(f"{seed}/{index}"),), daemon=True)
            for index in range(num_clients)
        ]

    def _work(self, generator: random.Random) -> None:
        try:
            with self._client_type(self._target) as client:
                while not self._stopped.is_set():
                    name = self._action(client, generator)
                    with self._lock:
                        self.counts[name] += 1
        except Exception as error:
            self._errors.append(error)

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, error_type, *_) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        if self._errors and error_type is None:
            raise self._errors[0]


def random_request(generator: random.Random, vocab_size: int, max_tokens: int) -> dict[str, Any]:
    """Keyword arguments of RolloutClient.generate; prompt and completion have at most `max_tokens` each."""
    length = generator.randint(1, max_tokens)
    return {
        "prompt_token_ids": [generator.randrange(vocab_size) for _ in range(length)],
        "max_tokens": generator.randint(1, max_tokens),
        "n": generator.choice((1, 1, 1, 2, 4)),
        "temperature": generator.choice((0.0, 0.6, 1.0)),
        "top_p": generator.choice((None, 0.9)),
        "top_k": generator.choice((None, 20)),
        "repetition_penalty": generator.choice((None, None, 1.1)),
        "logprobs": generator.choice((None, None, 3)),
        "seed": generator.getrandbits(32),
    }


def generate_something(vocab_size: int, max_tokens: int) -> Action:
    """An action that takes all of one random request."""

    def action(client: RolloutClient, generator: random.Random) -> str:
        client.generate(**random_request(generator, vocab_size, max_tokens))
        return "requests"

    return action
