"""Simulates a fleet of rollouts: routing, lost replicas, weights, and what it takes to compare a share.

    python3 bench/fleet/fleet.py [--replicas 1000] [--rates 10 30] [--json FILE]

Step times and the rate of prefill are those of docs/benchmarks/data/rollout.json: Qwen3-8B's shape, tree,
four H200 a replica. All else is assumed, here and by the flags. docs/scale.md has the results.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fleet_plan as plan
from fleet_queue import WAYS, Measured, Request, Simulation, Speed, hash_of

DATA = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "data" / "rollout.json"

TURNS = 6  # of a conversation, in the mean
QUESTION, ANSWER = 200, 200  # tokens of a turn, the answer's in the mean
SYSTEM = 1000  # tokens of an application's system prompt
APPLICATIONS = 50
THINKS = 2.0  # seconds between an answer and the next question, in the mean
NOTICED, BACK = (
    1.0,
    60.0,
)  # seconds until a lost replica's requests are sent again, and until it is back
CAPACITY = 3_000_000  # tokens of prefixes: 147 KB each, in what 4 x 141 GB leave beside 16.4 GB of weights

LONGEST = 8192  # tokens of an RL step's samples; the logarithm of their lengths is normal
MEDIAN, SPREAD = 700, 1.0

WEIGHTS = 16.4e9  # bytes
LINK = plan.Link(bytes_per_s=50e9, latency_s=20e-6)  # 400 Gb/s
CHUNKS = 1024
PUT_IN_PLACE = 0.17  # seconds: read, packed, switched, to the first token (docs/benchmarks/on_policy.md)

SAMPLE_TOKENS, PROMPT_TOKENS = 256, 1024
REPLICA_TOKENS = 32_102  # a second; docs/benchmarks/README.md
SCORED = 7480  # tokens of completions that an H200 scores a second, with such prompts (docs/scale.md)
SAMPLE_BYTES = 11_000  # of a recorded sample, likewise
GPU_HOUR = 2.5  # dollars


def measured_speed() -> Speed:
    """A replica's, of the data of the benchmarks; the host's time where it is longer than the GPU's."""
    tables = {table["id"]: table for table in json.loads(DATA.read_text("utf-8"))["tables"]}
    decode = tables["decode-tp4"]
    batches = [int(column["name"].removeprefix("batch ")) for column in decode["columns"][1:]]
    (times,) = (row[1:] for row in decode["rows"] if row[0] == "`tree`")
    host = dict(
        zip(
            tables["engine"]["rows"][0][1:],
            tables["engine"]["rows"][1][1:],
            strict=True,
        )
    )
    steps = [
        (batch, max(1e-3 * ms, 1e-6 * host.get(str(batch), 0.0)))
        for batch, ms in zip(batches, times, strict=True)
    ]
    (prefill,) = (row[1] for row in tables["prefill-tp4"]["rows"] if row[0] == "`tree`")
    return Speed(steps, float(prefill))


class Conversations:
    """Begin at random at a constant rate, in the state that they have in the long run."""

    def __init__(self, simulation: Simulation, requests_per_s: float):
        self._simulation, self._draw = simulation, simulation.draw
        self._rate = requests_per_s / TURNS
        self._number = 0
        cycle = THINKS + 1.0
        for _ in range(round(requests_per_s * cycle)):
            turn = 0
            while self._draw.random() >= 1 / TURNS:
                turn += 1
            name = self._begin(self._draw.uniform(0, cycle), turn * (QUESTION + ANSWER))
            before = SYSTEM + turn * (QUESTION + ANSWER)
            if turn > 0:
                simulation.preload(Request(hash_of(name), (), 0, (1,), keeps=((name, before),)))
        for replica in simulation.fleet:
            for application in range(APPLICATIONS):
                replica.keep(f"a{application}", SYSTEM)
        self._next()

    def _next(self) -> None:
        at = self._simulation.now + self._draw.expovariate(self._rate)

        def begin() -> None:
            self._begin(self._simulation.now, 0)
            self._next()

        self._simulation.at(at, begin)

    def _begin(self, at: float, tokens: int) -> str:
        self._number += 1
        name, application = f"c{self._number}", f"a{self._draw.randrange(APPLICATIONS)}"
        key = hash_of(name)
        self._simulation.at(at, lambda: self._ask(name, application, key, tokens))
        return name

    def _ask(self, name: str, application: str, key: int, tokens: int) -> None:
        answer = max(1, round(self._draw.expovariate(1 / ANSWER)))
        known = SYSTEM + tokens
        after = tokens + QUESTION + answer

        def on_end(now: float) -> None:
            if self._draw.random() >= 1 / TURNS:
                later = now + self._draw.expovariate(1 / THINKS)
                self._simulation.at(later, lambda: self._ask(name, application, key, after))

        self._simulation.submit(
            Request(
                key=key,
                prefixes=((name, known), (application, SYSTEM)),
                prompt=known + QUESTION,
                lengths=(answer,),
                keeps=((application, SYSTEM), (name, SYSTEM + after)),
                on_end=on_end,
            )
        )


def conversations(
    speed: Speed,
    way: str,
    replicas: int,
    rate: float,
    warm: float,
    seconds: float,
    drain: float,
    losses_per_s: float = 0.0,
    seed: int = 1,
) -> Measured:
    """rate: requests a second and replica. Losses: of the fleet. Measured are those that arrive in `seconds`
    after `warm` and end before `drain` more seconds have passed."""
    simulation = Simulation(speed, replicas, way, capacity=CAPACITY, seed=seed)
    Conversations(simulation, rate * replicas)
    draw = random.Random(seed + 2)

    def lose() -> None:
        simulation.lose(simulation.fleet[draw.randrange(replicas)], NOTICED, BACK)
        simulation.at(simulation.now + draw.expovariate(losses_per_s), lose)

    if losses_per_s > 0:
        simulation.at(warm + draw.expovariate(losses_per_s), lose)
    return simulation.run(until=warm + seconds + drain, warm=warm, last=warm + seconds)


def rl_step(speed: Speed, way: str, replicas: int, prompts: int, samples: int, seed: int = 1) -> Measured:
    """All prompts of an RL step at one time. prompts: of a replica, in the mean; samples: of a prompt."""
    simulation = Simulation(speed, replicas, way, seed=seed)
    draw = simulation.draw

    def submit(number: int) -> None:
        lengths = [
            min(LONGEST, max(1, round(MEDIAN * draw.lognormvariate(0, SPREAD)))) for _ in range(samples)
        ]
        simulation.submit(Request(hash_of(f"p{number}"), (), PROMPT_TOKENS, lengths))

    for number in range(prompts * replicas):
        simulation.at(0.0, lambda number=number: submit(number))
    return simulation.run()


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def of_requests(measured: Measured) -> dict[str, float]:
    return {
        "requests": len(measured.wholes),
        "found": 1 - measured.missed / measured.prompt,
        "first_p50_ms": 1e3 * percentile(measured.firsts, 0.5),
        "first_p99_ms": 1e3 * percentile(measured.firsts, 0.99),
        "whole_p50_s": percentile(measured.wholes, 0.5),
        "whole_p99_s": percentile(measured.wholes, 0.99),
        "idle": measured.idle,
        "busiest": measured.busiest,
    }


def of_losses(measured: Measured, with_none: Measured) -> dict[str, float]:
    losses = max(measured.losses, 1)
    return {
        "losses": measured.losses,
        "resent": measured.resent / losses,
        "sampled_twice": measured.sampled_twice / losses,
        "computed_twice": measured.computed_twice / losses,
        "whole_p99_s": percentile(measured.wholes, 0.99),
        "whole_p99_s_with_none": percentile(with_none.wholes, 0.99),
    }


def weights(replicas: int) -> dict[str, dict[str, float]]:
    """Seconds until all serve, and the share of tokens that are a version old, if one comes each minute."""
    all_have = {
        "one source": plan.one_source(replicas, WEIGHTS, LINK),
        "doubling": plan.doubling(replicas, WEIGHTS, LINK),
        "pipelined tree": plan.tree(replicas, WEIGHTS, LINK, CHUNKS),
        "pipelined chain": plan.chain(replicas, WEIGHTS, LINK, CHUNKS),
    }
    # From one source replicas switch one after the other; else nearly all at the end.
    mean = {way: seconds / 2 if way == "one source" else seconds for way, seconds in all_have.items()}
    return {
        way: {
            "all_serve_s": seconds + PUT_IN_PLACE,
            "old": (mean[way] + PUT_IN_PLACE) / 60,
        }
        for way, seconds in all_have.items()
    }


def detection(seed: int) -> list[dict[str, float]]:
    """Times until one replica's fault is seen, in 99 of 100 cases, by formula and simulated."""
    rate = REPLICA_TOKENS / SAMPLE_TOKENS
    rows = []
    for share in (0.01, 0.001, 0.0001):
        for wrong in (1.0, 0.01, 0.0001):
            row = {
                "share": share,
                "wrong": wrong,
                "seconds": plan.seen_after(share, rate, wrong, 0.99),
            }
            if share * wrong >= 1e-4:
                times = plan.simulate_detection(share, rate, wrong, 2000, random.Random(seed))
                row["simulated"] = percentile(times, 0.99)
            rows.append(row)
    return rows


def evidence(replicas: int) -> dict[str, dict[str, float]]:
    return {
        f"{share:.4f}": asdict(
            plan.evidence(
                share,
                samples_per_s=replicas * REPLICA_TOKENS / SAMPLE_TOKENS,
                completion=SAMPLE_TOKENS,
                gpus=4 * replicas,
                bytes_per_sample=SAMPLE_BYTES,
                scored_per_s=SCORED,
                gpu_hour=GPU_HOUR,
            )
        )
        for share in (0.01, 0.001, 0.0001)
    }


def table(title: str, rows: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}")
    names = list(next(iter(rows.values())))
    print(" " * 24 + "".join(f"{name:>16}" for name in names))
    for label, row in rows.items():
        print(f"{label:24}" + "".join(f"{row[name]:16.4g}" for name in names), flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--replicas", type=int, default=1000)
    add(
        "--rates",
        type=float,
        nargs="+",
        default=[10.0, 30.0],
        help="requests a second and replica",
    )
    add(
        "--warm",
        type=float,
        default=6.0,
        help="seconds of conversations before what is measured",
    )
    add("--seconds", type=float, default=1.0, help="in which those requests arrive that are measured")
    add("--drain", type=float, default=5.0, help="seconds in which the last of them may end")
    add(
        "--losses",
        type=float,
        default=0.5,
        help="replicas lost a second: far more than any fleet's, to see some",
    )
    add("--prompts", type=int, default=32, help="of an RL step, for each replica")
    add("--samples", type=int, default=8, help="of a prompt of an RL step")
    add("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    add("--seed", type=int, default=1)
    add("--json", type=Path, help="gets all figures")
    arguments = parser.parse_args(argv)
    for name in ("replicas", "prompts", "samples"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: expected at least 1, got {getattr(arguments, name)}")
    if min(arguments.seconds, arguments.warm) <= 0 or min(arguments.rates) <= 0 or arguments.losses <= 0:
        parser.error("--seconds, --warm, --rates and --losses: expected above 0")
    result: dict[str, Any] = {"arguments": {k: str(v) for k, v in vars(arguments).items()}}
    speed, replicas, seed = measured_speed(), arguments.replicas, arguments.seed

    def chats(way: str, rate: float, losses: float = 0.0) -> Measured:
        return conversations(
            speed, way, replicas, rate, arguments.warm, arguments.seconds, arguments.drain, losses, seed
        )

    for rate in arguments.rates:
        runs = {way: chats(way, rate) for way in arguments.ways}
        rows = {way: of_requests(measured) for way, measured in runs.items()}
        result[f"conversations, {rate:g} requests/s and replica"] = rows
        table(f"Conversations, {rate:g} requests/s and replica, {replicas} replicas", rows)
    way = arguments.ways[-1]
    lost = chats(way, rate, arguments.losses)
    result["losses"] = {way: of_losses(lost, runs[way])}
    table(
        f"Lost replicas, for each: requests, tokens; {rate:g} requests/s and replica",
        result["losses"],
    )

    steps = {
        way: rl_step(speed, way, replicas, arguments.prompts, arguments.samples, seed)
        for way in arguments.ways
    }
    result["rl_step"] = {
        way: {
            "seconds": measured.end,
            "idle": measured.idle,
            "tokens_per_s": measured.sampled / measured.end,
            "mean_whole_s": statistics.fmean(measured.wholes),
        }
        for way, measured in steps.items()
    }
    title = f"An RL step of {arguments.prompts} prompts x {arguments.samples} samples for each replica"
    table(title, result["rl_step"])

    result["weights"] = weights(replicas)
    table(f"Weights of {WEIGHTS / 1e9} GB to {replicas} replicas", result["weights"])
    result["detection"] = detection(seed)
    rows = {
        f"{row['share']:g} x {row['wrong']:g}": {"simulated": float("nan"), **row}
        for row in result["detection"]
    }
    table("A replica's fault is seen, share compared x share of samples wrong, 99 %", rows)
    result["evidence"] = evidence(replicas)
    table("Evidence of a day, by share compared", result["evidence"])
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
