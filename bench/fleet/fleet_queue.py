"""A timed simulation of a fleet of rollouts: requests are routed, wait, find what they share computed, and go
to another replica if theirs is lost. What a replica takes for them is given (fleet.py has measured figures).

A replica's sequences all get a token in each step, whose time grows with their number. New prompts are
computed before the next step, which delays all. Time is continuous: nothing is simulated step by step.
"""

import bisect
import hashlib
import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

POINTS = 64  # of a replica on the ring of hashes
CLOSE = 1e-9  # seconds that count as none: times are sums of many


@dataclass(frozen=True)
class Speed:
    """What a replica takes: (sequences, seconds of a step) ascending, between which a line runs, and prefill
    in tokens a second. The last number of sequences is the most that run at one time."""

    steps: Sequence[tuple[int, float]]
    prefill: float

    def table(self) -> list[float]:
        """Seconds of a step, by number of sequences."""
        times = [0.0]
        for running in range(1, self.steps[-1][0] + 1):
            at = max(1, bisect.bisect_left(self.steps, (running, 0.0)))
            (n0, t0), (n1, t1) = self.steps[at - 1 : at + 1] if len(self.steps) > 1 else self.steps * 2
            times.append(t0 if n0 == n1 else t0 + (t1 - t0) * (running - n0) / (n1 - n0))
        return times


@dataclass(eq=False)
class Request:
    key: int  # a hash of what it belongs to: a conversation
    prefixes: Sequence[tuple[str, int]]  # names of what it may share, with their tokens; the longest first
    prompt: int  # tokens
    lengths: Sequence[int]  # of its samples' completions
    keeps: Sequence[tuple[str, int]] = ()  # prefixes that a replica has after it
    on_end: Callable[[float], None] | None = None
    arrival: float = 0.0
    first: float = 0.0  # when the first token is there
    started: float = 0.0  # the replica's count of steps then
    missed: int = 0  # tokens of the prompt that are computed
    left: int = 0  # samples that have not ended
    lost: bool = False  # with its replica, after it had started


class Replica:
    """Prefixes by name, with their tokens, the most recently used last; requests that run and wait."""

    def __init__(self, number: int, steps: Sequence[float], prefill: float, capacity: int):
        self.number, self.capacity = number, capacity
        self.alive = True
        self.samples = 0  # of requests here
        self.busy = 0.0  # seconds
        self.version = 0  # of the next end
        self.kept: OrderedDict[str, int] = OrderedDict()
        self.used = 0
        self.running: list[tuple[float, int, Request]] = []  # a heap, by the count of steps at the end
        self.waiting: deque[Request] = deque()
        self._steps, self._prefill = steps, prefill
        self._count = 0.0  # of steps
        self._stall = 0.0  # seconds of prefill before the next step
        self._now = 0.0
        self._order = itertools.count()

    def find(self, prefixes: Sequence[tuple[str, int]]) -> int:
        for name, tokens in prefixes:
            if name in self.kept:
                self.kept.move_to_end(name)
                return min(self.kept[name], tokens)
        return 0

    def keep(self, name: str, tokens: int) -> None:
        self.used += tokens - self.kept.pop(name, 0)
        self.kept[name] = tokens
        while self.used > self.capacity:
            _, dropped = self.kept.popitem(last=False)
            self.used -= dropped

    def advance(self, now: float) -> None:
        passed, self._now = now - self._now, now
        if not self.running:
            return
        self.busy += passed
        stalled = min(passed, self._stall)
        self._stall -= stalled
        self._count += (passed - stalled) / self._steps[len(self.running)]

    def next_end(self) -> float:
        left = max(0.0, self.running[0][0] - self._count)
        return self._now + self._stall + left * self._steps[len(self.running)]

    def start_waiting(self) -> list[Request]:
        begun = []
        while self.waiting and len(self.running) + len(self.waiting[0].lengths) < len(self._steps):
            request = self.waiting.popleft()
            request.missed = request.prompt - self.find(request.prefixes)
            self._stall += request.missed / self._prefill
            request.started, request.left = self._count, len(request.lengths)
            for length in request.lengths:
                heapq.heappush(self.running, (self._count + length, next(self._order), request))
            request.first = self._now + self._stall + self._steps[len(self.running)]
            for name, tokens in request.keeps:
                self.keep(name, tokens)
            begun.append(request)
        return begun

    def end_due(self) -> list[Request]:
        """Takes the samples that have ended. Returns the requests that have."""
        ended = []
        while self.running and self.next_end() <= self._now + CLOSE:
            request = heapq.heappop(self.running)[2]
            request.left -= 1
            if request.left == 0:
                self.samples -= len(request.lengths)
                ended.append(request)
        return ended

    def lose(self) -> tuple[list[Request], float]:
        """The process dies. Returns its requests, and the tokens that it had sampled for them."""
        requests = {id(entry[2]): entry[2] for entry in self.running}
        sampled = 0.0
        for request in requests.values():
            for length in request.lengths:
                sampled += min(self._count - request.started, length)
            request.lost = True
        orphans = [*requests.values(), *self.waiting]
        self.running, self.waiting, self.samples, self._stall = [], deque(), 0, 0.0
        self.kept.clear()
        self.used = 0
        self.alive = False
        return orphans, sampled


class Router:
    """Chooses a replica that lives, by one of `WAYS`."""

    def __init__(self, fleet: Sequence[Replica], way: str, bound: float, draw: random.Random):
        self._fleet, self._bound, self._draw = fleet, bound, draw
        self._turn = 0
        self._choose = {
            "round robin": self._round_robin,
            "random": self._random,
            "least loaded": self._least,
            "better of two": self._better_of_two,
            "by conversation": self._by_key,
        }[way]
        self._least_first = [(0, replica.number) for replica in fleet]
        points = (
            (hash_of(f"replica {replica.number} {i}"), replica.number)
            for replica in (fleet if way == "by conversation" else ())
            for i in range(POINTS)
        )
        self._ring = sorted(points)
        self.samples = 0  # in the fleet

    def route(self, request: Request) -> Replica:
        return self._choose(request)

    def moved(self, replica: Replica) -> None:
        """The replica's load has changed, or it is back."""
        if self._choose == self._least:
            heapq.heappush(self._least_first, (replica.samples, replica.number))

    def _round_robin(self, _: Request) -> Replica:
        while True:
            replica = self._fleet[self._turn % len(self._fleet)]
            self._turn += 1
            if replica.alive:
                return replica

    def _random(self, _: Request) -> Replica:
        while True:
            replica = self._fleet[self._draw.randrange(len(self._fleet))]
            if replica.alive:
                return replica

    def _least(self, _: Request) -> Replica:
        while True:
            samples, number = self._least_first[0]
            replica = self._fleet[number]
            if replica.alive and replica.samples == samples:
                return replica
            heapq.heappop(self._least_first)  # what was true once

    def _better_of_two(self, request: Request) -> Replica:
        one, other = self._random(request), self._random(request)
        return one if one.samples <= other.samples else other

    def _by_key(self, request: Request) -> Replica:
        """Consistent hashing: the first replica behind the key on the ring that is not over its bound."""
        most = self._bound * (self.samples + len(request.lengths)) / len(self._fleet) + len(request.lengths)
        at = bisect.bisect(self._ring, (request.key, 0))
        for i in range(len(self._ring)):
            replica = self._fleet[self._ring[(at + i) % len(self._ring)][1]]
            if replica.alive and replica.samples + len(request.lengths) <= most:
                return replica
        return self._least_of_all()

    def _least_of_all(self) -> Replica:
        return min((r for r in self._fleet if r.alive), key=lambda replica: replica.samples)


WAYS = ("round robin", "random", "least loaded", "better of two", "by conversation")


@dataclass
class Measured:
    """Of requests that arrived in a window of time."""

    prompt: int = 0  # tokens
    missed: int = 0  # of them, those that were computed
    firsts: list[float] = field(default_factory=list)  # seconds to the first token
    wholes: list[float] = field(default_factory=list)  # seconds to the last
    losses: int = 0
    resent: int = 0  # requests
    sampled_twice: float = 0.0  # tokens
    computed_twice: int = 0  # tokens of prompts, of requests that had started
    sampled: int = 0  # tokens, all
    idle: float = 0.0  # share of the replicas' time
    busiest: float = 0.0  # busy time of the busiest replica, of the mean
    end: float = 0.0  # when the last request ended


class Simulation:
    def __init__(
        self,
        speed: Speed,
        replicas: int,
        way: str,
        *,
        capacity: int = 1 << 60,
        bound: float = 1.25,
        seed: int = 1,
    ):
        """capacity: tokens of prefixes that a replica keeps. bound: of a replica's load, beside the mean."""
        self.draw = random.Random(seed)
        steps = speed.table()
        self.fleet = [Replica(i, steps, speed.prefill, capacity) for i in range(replicas)]
        self.now = 0.0
        self.measured = Measured()
        self._router = Router(self.fleet, way, bound, random.Random(seed + 1))
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._warm, self._last = 0.0, float("inf")

    def at(self, time: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), call))

    def submit(self, request: Request) -> None:
        """A request arrives now."""
        request.arrival = self.now
        self._send(request)

    def preload(self, request: Request) -> None:
        """A replica has what the request leaves, as if it had ended there long ago."""
        for name, tokens in request.keeps:
            self._router.route(request).keep(name, tokens)

    def lose(self, replica: Replica, noticed: float, back: float) -> None:
        """The replica dies now. Its requests are sent again after `noticed` seconds; it is back, with
        nothing, after `back`."""
        if not replica.alive:
            return
        replica.advance(self.now)
        self._router.samples -= replica.samples
        orphans, sampled = replica.lose()
        self.measured.losses += 1
        self.measured.resent += len(orphans)
        self.measured.sampled_twice += sampled
        for request in orphans:
            self.at(self.now + noticed, lambda request=request: self._send(request))

        def revive() -> None:
            replica.advance(self.now)
            replica.alive = True
            self._router.moved(replica)

        self.at(self.now + back, revive)

    def run(self, until: float = float("inf"), warm: float = 0.0, last: float = float("inf")) -> Measured:
        """Runs to that time, or to the last event. Measures requests that arrive from `warm` to `last`."""
        self._warm, self._last = warm, last
        busy = [0.0] * len(self.fleet)

        def begin() -> None:
            for replica in self.fleet:
                replica.advance(self.now)
                busy[replica.number] = replica.busy

        self.at(warm, begin)
        while self._events and self._events[0][0] <= until:
            self.now, _, call = heapq.heappop(self._events)
            call()
        span = min(until, self.now) - warm
        for replica in self.fleet:
            replica.advance(min(until, self.now))
        times = [replica.busy - busy[replica.number] for replica in self.fleet]
        mean = sum(times) / len(times)
        self.measured.idle = 1 - mean / span
        self.measured.busiest = max(times) / mean if mean else 1.0
        return self.measured

    def _send(self, request: Request) -> None:
        replica = self._router.route(request)
        replica.advance(self.now)
        replica.samples += len(request.lengths)
        self._router.samples += len(request.lengths)
        replica.waiting.append(request)
        self._go_on(replica)

    def _go_on(self, replica: Replica) -> None:
        for request in replica.start_waiting():
            if request.lost:
                self.measured.computed_twice += request.missed
                request.lost = False
        self._router.moved(replica)
        replica.version += 1
        if replica.running:
            version = replica.version
            self.at(replica.next_end(), lambda: self._end(replica, version))

    def _end(self, replica: Replica, version: int) -> None:
        if version != replica.version or not replica.alive:
            return
        replica.advance(self.now)
        for request in replica.end_due():
            self._router.samples -= len(request.lengths)
            self._measure(request)
            if request.on_end is not None:
                request.on_end(self.now)
        self._go_on(replica)

    def _measure(self, request: Request) -> None:
        measured = self.measured
        measured.end = self.now
        measured.sampled += sum(request.lengths)
        if not self._warm <= request.arrival <= self._last:
            return
        measured.prompt += request.prompt
        measured.missed += request.missed
        measured.firsts.append(request.first - request.arrival)
        measured.wholes.append(self.now - request.arrival)


def hash_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
