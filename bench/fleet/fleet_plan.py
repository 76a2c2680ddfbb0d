"""What a fleet takes beside requests: weights to all replicas, a share of the traffic compared, its evidence.
Each formula stands beside a simulation of the same thing, which fleet_test.py compares."""

import heapq
import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Of every node, source and replicas alike; each sends and receives at this rate at the same time."""

    bytes_per_s: float
    latency_s: float = 0.0  # of a chunk, from its last byte sent to its being sent on


def one_source(replicas: int, size: float, link: Link) -> float:
    """Seconds until the last replica has the weights, if the source sends them to one after the other."""
    return replicas * (size / link.bytes_per_s) + link.latency_s


def doubling(replicas: int, size: float, link: Link) -> float:
    """Whoever has all of them sends them to one more at a time."""
    return math.ceil(math.log2(replicas + 1)) * (size / link.bytes_per_s + link.latency_s)


def chain(replicas: int, size: float, link: Link, chunks: int) -> float:
    """Each sends every chunk on to the next as it comes."""
    chunk = size / chunks / link.bytes_per_s
    return (chunks + replicas - 1) * chunk + replicas * link.latency_s


def tree(replicas: int, size: float, link: Link, chunks: int) -> float:
    """Each sends every chunk on to two others, one after the other, as it comes. Exact where the last level
    is whole; otherwise no less than it takes."""
    chunk = size / chunks / link.bytes_per_s
    # The last chunk leaves the source behind all others, and is second at each level.
    levels = math.ceil(math.log2(replicas + 2) - 1e-12) - 1
    return 2 * (chunks - 1) * chunk + levels * (2 * chunk + link.latency_s)


def simulate_relay(replicas: int, size: float, link: Link, chunks: int, children: int) -> float:
    """The same as `chain` (children 1) and `tree` (children 2), chunk by chunk: node n sends to nodes
    n * children + 1 to n * children + children; node 0 is the source. Seconds until all have all."""
    seconds = size / chunks / link.bytes_per_s
    free = [0.0] * (replicas + 1)  # when a node's sending side is
    # A node has a chunk: (when, chunk, node).
    events = [(0.0, chunk, 0) for chunk in range(chunks)]
    heapq.heapify(events)
    last = 0.0
    while events:
        now, chunk, node = heapq.heappop(events)
        last = max(last, now)
        for child in range(node * children + 1, min(node * children + children, replicas) + 1):
            free[node] = max(free[node], now) + seconds
            heapq.heappush(events, (free[node] + link.latency_s, chunk, child))
    return last


def seen_after(share: float, samples_per_s: float, wrong: float, probability: float) -> float:
    """Seconds until a fault is seen with that probability.

    share: of the samples, those that are compared, each drawn by itself. samples_per_s: of the replica with
    the fault. wrong: the share of its samples in which the fault changes a bit.
    """
    return math.log1p(-probability) / math.log1p(-share * wrong) / samples_per_s


def share_for(seconds: float, samples_per_s: float, wrong: float, probability: float) -> float:
    """The share to compare, so that a fault is seen within that time with that probability. May be above 1:
    then no share is enough."""
    samples = seconds * samples_per_s
    return -math.expm1(math.log1p(-probability) / samples) / wrong


def simulate_detection(
    share: float, samples_per_s: float, wrong: float, runs: int, draw: random.Random
) -> list[float]:
    """Seconds until the first sample that is wrong and compared, of as many runs, ascending. Samples end one
    after the other at that rate; each is drawn by itself."""
    times = []
    for _ in range(runs):
        number = 1
        while draw.random() >= wrong or draw.random() >= share:
            number += 1
        times.append(number / samples_per_s)
    return sorted(times)


@dataclass(frozen=True)
class Evidence:
    """Of a day, at a share of the fleet's samples."""

    bytes_per_day: float
    gpus: float  # that score
    share_of_fleet: float  # these GPUs, of the fleet's
    cost_per_day: float


def evidence(
    share: float,
    *,
    samples_per_s: float,
    completion: int,
    gpus: int,
    bytes_per_sample: float,
    scored_per_s: float,
    gpu_hour: float,
) -> Evidence:
    """samples_per_s, gpus: of the fleet. scored_per_s: tokens of completions that a scorer's GPU scores.
    gpu_hour: its price."""
    scorers = share * samples_per_s * completion / scored_per_s
    return Evidence(
        bytes_per_day=share * samples_per_s * bytes_per_sample * 86400,
        gpus=scorers,
        share_of_fleet=scorers / gpus,
        cost_per_day=scorers * gpu_hour * 24,
    )
