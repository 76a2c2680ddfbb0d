"""Simulates how requests find their prompts' pages in a fleet of rollouts, by the way they are routed.

    python3 tests/bench/fleet.py [--replicas 1000] [--requests 200000] [--seed 1]

Conversations begin at random, have several turns, and share the system prompts of a few applications. Each
replica keeps as many tokens of prefixes as its cache holds, whole conversations at a time; the least recently
used go first. Nothing is timed: the figures are the share of prompt tokens that a replica has computed
before, and the load of the busiest replica beside the mean. docs/scale.md has the results.
"""

import argparse
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

TURNS = 6  # of a conversation, in the mean
TURN_TOKENS = 400  # a question and its answer
SYSTEM_TOKENS = 1000  # an application's system prompt
APPLICATIONS = 50
BOUND = 1.25  # of the mean load, for the last way to route


@dataclass
class Replica:
    """Prefixes by name, with their tokens; the most recently used last."""

    capacity: int
    kept: OrderedDict[str, int] = field(default_factory=OrderedDict)
    used: int = 0
    load: int = 0  # tokens computed

    def find(self, name: str) -> int:
        """The tokens of a prefix that are kept."""
        if name in self.kept:
            self.kept.move_to_end(name)
        return self.kept.get(name, 0)

    def keep(self, name: str, tokens: int) -> None:
        self.used += tokens - self.kept.pop(name, 0)
        self.kept[name] = tokens
        while self.used > self.capacity:
            _, dropped = self.kept.popitem(last=False)
            self.used -= dropped


@dataclass
class Conversation:
    name: str
    application: str
    tokens: int = 0  # of all turns so far


Route = Callable[[list[Replica], Conversation, int], Replica]


def by_turns(replicas: list[Replica], _: Conversation, number: int) -> Replica:
    return replicas[number % len(replicas)]


def at_random(replicas: list[Replica], conversation: Conversation, number: int) -> Replica:
    return replicas[random.Random(f"{conversation.name} {number}").randrange(len(replicas))]


def by_conversation(replicas: list[Replica], conversation: Conversation, _: int) -> Replica:
    """The replica that a hash of the conversation names: where its pages are."""
    return replicas[random.Random(conversation.name).randrange(len(replicas))]


def by_conversation_bounded(replicas: list[Replica], conversation: Conversation, number: int) -> Replica:
    """The same, unless that replica has much more to do than others: then the next that a hash names."""
    draw = random.Random(conversation.name)
    mean = sum(replica.load for replica in replicas[:: max(1, len(replicas) // 50)]) / min(50, len(replicas))
    for _ in range(8):
        replica = replicas[draw.randrange(len(replicas))]
        if replica.load <= BOUND * mean + TURN_TOKENS + SYSTEM_TOKENS:
            return replica
    return by_turns(replicas, conversation, number)


WAYS: dict[str, Route] = {
    "round robin": by_turns,
    "random": at_random,
    "by conversation": by_conversation,
    "by conversation, bounded": by_conversation_bounded,
}


@dataclass(frozen=True)
class Result:
    found: float  # share of prompt tokens that were computed before
    possible: float  # the same if every replica had every page
    busiest: float  # tokens computed by the busiest replica, of the mean


def simulate(route: Route, replicas: int, requests: int, capacity: int, seed: int) -> Result:
    """capacity: tokens of prefixes that a replica keeps."""
    draw = random.Random(seed)
    fleet = [Replica(capacity) for _ in range(replicas)]
    open_ones: list[Conversation] = []
    prompt = found = possible = begun = 0
    seen: set[str] = set()
    for number in range(requests):
        if not open_ones or draw.random() < 1 / TURNS:
            open_ones.append(Conversation(f"c{begun}", f"a{draw.randrange(APPLICATIONS)}"))
            begun += 1
        at = draw.randrange(len(open_ones))
        conversation = open_ones[at]
        length = SYSTEM_TOKENS + conversation.tokens + TURN_TOKENS // 2
        replica = route(fleet, conversation, number)
        hit = max(replica.find(conversation.name), replica.find(conversation.application))
        prompt += length
        found += min(hit, length)
        possible += SYSTEM_TOKENS * (conversation.application in seen) if conversation.tokens == 0 else (
            SYSTEM_TOKENS + conversation.tokens
        )  # fmt: skip
        seen.add(conversation.application)
        replica.load += length - min(hit, length) + TURN_TOKENS // 2
        conversation.tokens += TURN_TOKENS
        replica.keep(conversation.application, SYSTEM_TOKENS)
        replica.keep(conversation.name, SYSTEM_TOKENS + conversation.tokens)
        if draw.random() < 1 / TURNS:
            open_ones[at] = open_ones[-1]
            open_ones.pop()
    loads = [replica.load for replica in fleet]
    return Result(found / prompt, possible / prompt, max(loads) / (sum(loads) / len(loads)))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--capacity", type=int, default=200_000, help="tokens that a replica keeps")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args(argv)
    for name in ("replicas", "requests", "capacity"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(arguments, name)}")
    print(f"{'':26}found  possible  busiest replica / mean")
    for name, route in WAYS.items():
        result = simulate(route, arguments.replicas, arguments.requests, arguments.capacity, arguments.seed)
        print(f"{name:26}{result.found:5.3f}  {result.possible:8.3f}  {result.busiest:5.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
