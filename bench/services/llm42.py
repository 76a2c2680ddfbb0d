"""LLM-42's scheme (--speculation=fast_path) beside `tree` and `vanilla` for everybody, on one load.

    python3 bench/services/llm42.py [--shape qwen3-8b --dummy_weights --backend cuda] [--json FILE]

After figures 10 and 13 of "LLM-42: Enabling Determinism in LLM Inference with Verified Speculation":

    shares   tokens/s by the share of requests that must be deterministic, for each --lengths
    windows  tokens/s and recomputed tokens by rows of a window and windows of a group, all deterministic

Every request that must be deterministic has to have the bits that `tree` gives it; else the exit status is 1.
Prompts are not shared, so that no run finds what another has computed. --lengths: `sharegpt` draws lengths of
prompts and completions from log-normal distributions with the means and medians of the paper's table 3; PxC
is P prompt tokens and C drawn ones.
"""

import argparse
import math
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from statistics import median

import numpy as np
from experiment import Experiment, Source, run
from prompts import random_prompt
from speculation import bits, free_port, read_counters

from isobit.client import RolloutClient
from isobit.results import Sample

QUICK = {
    "tp_size": 2,
    "requests": 8,
    "concurrency": 8,
    "rounds": 1,
    "scale": 0.1,
    "shares": [50, 100],
    "lengths": ["sharegpt", "64x160"],
    "windows": [4, 16],
    "groups": [1, 4],
}
# Mean and median of tokens (the paper's table 3, ShareGPT).
PROMPT, COMPLETION = (304, 136), (192, 118)
COUNTERS = "isobit_fast_path_"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tp_size", type=int, default=1, metavar="N", help="of the rollouts")
    add("--requests", type=int, default=256, metavar="N", help="of a round")
    add("--concurrency", type=int, default=128, metavar="N", help="requests in flight")
    add("--rounds", type=int, default=3, metavar="N", help="of these; the median counts")
    add("--lengths", nargs="+", default=["sharegpt", "1024x256", "1024x1024"], metavar="L", help="loads")
    add("--scale", type=float, default=1.0, metavar="F", help="factor of all lengths, for slow machines")
    add("--shares", type=int, nargs="*", default=[2, 5, 10, 20, 50, 100], metavar="PERCENT")
    add("--window", type=int, default=16, metavar="N", help="rows of a window in `shares`")
    add("--group", type=int, default=0, metavar="N", help="windows verified together there; 0: as fit")
    add("--windows", type=int, nargs="*", default=[16, 32, 64, 128, 256, 512], metavar="N")
    add("--groups", type=int, nargs="*", default=[1, 4, 8, 16, 32], metavar="N")
    add(
        "--max_running", type=int, default=0, metavar="N", help="as the rollout's flag; bounds window x group"
    )
    add("--temperature", type=float, default=1.0, metavar="T")


def lognormal(generator: np.random.Generator, mean: float, middle: float, count: int) -> np.ndarray:
    return generator.lognormal(math.log(middle), math.sqrt(2 * math.log(mean / middle)), count)


class Load:
    """The requests of one --lengths, which are the same for every system."""

    def __init__(self, name: str, arguments: argparse.Namespace, info):
        self.name = name
        generator = np.random.default_rng(arguments.seed)
        count = arguments.requests
        if name == "sharegpt":
            lengths = [lognormal(generator, *of, count) for of in (PROMPT, COMPLETION)]
        else:
            lengths = [np.full(count, int(part)) for part in name.split("x")]
        most = info.server.model.context_length // 2
        prompts, completions = (
            np.clip(np.rint(of * arguments.scale), 1, most).astype(int).tolist() for of in lengths
        )
        vocab_size = info.server.model.vocab_size
        self.calls = [
            {
                "prompt_token_ids": random_prompt(generator, vocab_size, prompt),
                "max_tokens": completion,
                "seed": arguments.seed + i,
                "temperature": arguments.temperature,
                "ignore_eos": True,
            }
            for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]
        # In an order of its own, so that shares are of all lengths.
        self._order = generator.permutation(count)

    def deterministic(self, share: int) -> np.ndarray:
        """Which requests must be: a larger share has those of a smaller one."""
        count = len(self.calls)
        return self._order < max(round(count * share / 100), 1 if share else 0)


class System:
    """A rollout under load."""

    def __init__(self, experiment: Experiment, client: RolloutClient, port: int):
        self._arguments = experiment.arguments
        self._client = client
        self._port = port
        self.info = client.get_server_info()

    def run(self, load: Load, share: int = 100) -> tuple[list[Sample], float]:
        """The samples of all calls, and tokens/s."""

        def one(call: dict, required: bool) -> Sample:
            return self._client.generate(**call, determinism="required" if required else "none")[0]

        begin = time.monotonic()
        with ThreadPoolExecutor(self._arguments.concurrency) as pool:
            samples = list(pool.map(one, load.calls, load.deterministic(share).tolist()))
        return samples, sum(len(one.tokens.token_ids) for one in samples) / (time.monotonic() - begin)

    def measure(self, load: Load, share: int = 100) -> tuple[list[list[Sample]], dict]:
        before = read_counters(self._port, COUNTERS)
        rounds = [self.run(load, share) for _ in range(self._arguments.rounds)]
        after = read_counters(self._port, COUNTERS)
        counts = {name.removeprefix(COUNTERS): value - before[name] for name, value in after.items()}
        row = {"rate": median(rate for _, rate in rounds), "rates": [rate for _, rate in rounds]}
        if counts:
            drawn = {
                outcome: counts[f'tokens_total{{outcome="{outcome}"}}']
                for outcome in ("verified", "recomputed")
            }
            row |= drawn | {
                "windows": counts["windows_total"],
                "rollbacks": counts["rollbacks_total"],
                "recomputed_share": drawn["recomputed"] / max(sum(drawn.values()), 1),
            }
        return [samples for samples, _ in rounds], row


@contextmanager
def system(experiment: Experiment, numerics: str, *flags: str, variant: str = ""):
    arguments = experiment.arguments
    port = free_port()
    given = ("--prefix_sharing=false", f"--metrics_port={port}", f"--max_running={arguments.max_running}")
    source = Source(numerics, arguments.tp_size)
    with experiment.rollout(source, *given, *flags, variant=variant) as client:
        yield System(experiment, client, port)


def fast_path_flags(window: int, group: int) -> tuple[str, ...]:
    return ("--speculation=fast_path", f"--verify_window={window}", f"--verify_group={group}")


def check_bits(
    experiment: Experiment,
    what: str,
    load: Load,
    share: int,
    expected: list[Sample],
    rounds: list[list[Sample]],
) -> None:
    required = np.flatnonzero(load.deterministic(share)).tolist()
    same = all(
        bits([samples[i] for i in required]) == bits([expected[i] for i in required]) for samples in rounds
    )
    experiment.check(same, f"{what}: {len(required)} deterministic requests have the bits of tree")


def body(experiment: Experiment) -> None:
    arguments, screen = experiment.arguments, experiment.screen
    rows: list[dict] = []
    expected: dict[str, list[Sample]] = {}
    loads: list[Load] = []
    for numerics in ("tree", "vanilla") if arguments.shares else ("tree",):
        with system(experiment, numerics) as measured:
            loads = loads or [Load(name, arguments, measured.info) for name in arguments.lengths]
            for load in loads:
                with screen.progress(f"{numerics}, {load.name}"):
                    measured.run(load)  # touches memory and graphs
                    rounds, row = measured.measure(load)
                rows.append({"lengths": load.name, "system": numerics, "share": None, **row})
                show(experiment, f"{numerics}, {load.name}", row)
                if numerics == "tree":
                    expected[load.name] = rounds[0]
                    experiment.check(
                        all(bits(samples) == bits(rounds[0]) for samples in rounds),
                        f"tree, {load.name}: the same bits in each of {len(rounds)} rounds",
                    )
    if arguments.shares:
        measure_shares(experiment, loads, expected, rows)
    grid = measure_windows(experiment, loads[0], expected[loads[0].name])
    experiment.result = {"shares": rows, "windows": grid}
    report(experiment, loads, rows, grid)


def measure_shares(
    experiment: Experiment, loads: Sequence[Load], expected: Mapping[str, list[Sample]], rows: list[dict]
) -> None:
    arguments = experiment.arguments
    flags = fast_path_flags(arguments.window, arguments.group)
    with system(experiment, "tree", *flags, variant="llm42") as measured:
        for load in loads:
            measured.run(load)
            for share in arguments.shares:
                what = f"LLM-42, {load.name}, {share} %"
                with experiment.screen.progress(what):
                    rounds, row = measured.measure(load, share)
                rows.append({"lengths": load.name, "system": "llm42", "share": share, **row})
                check_bits(experiment, what, load, share, expected[load.name], rounds)
                show(experiment, what, row)


def show(experiment: Experiment, what: str, row: dict) -> None:
    """At once, so that a run which is stopped has told what it found."""
    again = f", {row['recomputed_share']:.2%} recomputed" if "recomputed_share" in row else ""
    experiment.screen.line(f"  {what}: {row['rate']:.0f} tokens/s{again}")


def measure_windows(experiment: Experiment, load: Load, expected: list[Sample]) -> list[dict]:
    arguments = experiment.arguments
    grid = []
    for window in arguments.windows:
        for group in arguments.groups:
            variant = f"llm42 {group}x{window}"
            rows = window * group
            if arguments.max_running and rows > arguments.max_running:
                continue
            flags = fast_path_flags(window, group)
            if not arguments.max_running:
                flags += (f"--max_running={max(rows, arguments.concurrency)}",)
            with (
                system(experiment, "tree", *flags, variant=variant) as measured,
                experiment.screen.progress(f"{group} windows of {window} rows"),
            ):
                measured.run(load)
                rounds, row = measured.measure(load)
            check_bits(experiment, variant, load, 100, expected, rounds)
            grid.append({"window": window, "group": group, **row})
            show(experiment, variant, row)
    return grid


def report(experiment: Experiment, loads: Sequence[Load], rows: list[dict], grid: list[dict]) -> None:
    table = []
    for load in loads:
        of_load = [row for row in rows if row["lengths"] == load.name]
        rate = {row["system"]: row["rate"] for row in of_load if row["share"] is None}
        for row in of_load:
            row["to_vanilla"] = row["rate"] / rate["vanilla"] if "vanilla" in rate else None
            row["to_tree"] = row["rate"] / rate["tree"]
            name = row["system"] if row["share"] is None else f"LLM-42 @{row['share']} %"
            table.append([load.name, name, *cells(row, "rate", "to_vanilla", "to_tree", *COUNTS)])
    header = ["lengths", "system", "tokens/s", "to vanilla", "to tree", "rollbacks", "windows", "recomputed"]
    experiment.screen.table(header, table)
    if not grid:
        return
    best = max(row["rate"] for row in grid)
    for row in grid:
        row["to_best"] = row["rate"] / best
    experiment.screen.line(f"\n  all requests deterministic, {loads[0].name}:")
    columns = ("window", "group", "rate", "to_best", *COUNTS)
    header = ["window", "group", "tokens/s", "to best", "rollbacks", "windows", "recomputed"]
    experiment.screen.table(header, [cells(row, *columns) for row in grid])


COUNTS = ("rollbacks", "windows", "recomputed_share")


def cells(row: dict, *columns: str) -> list[str]:
    def cell(column: str) -> str:
        value = row.get(column)
        if value is None:
            return "-"
        if column == "recomputed_share":
            return f"{value:.2%}"
        return f"{value:.2f}" if column.startswith("to_") else f"{value:.0f}"

    return [cell(column) for column in columns]


if __name__ == "__main__":
    sys.exit(run(__doc__, add_flags, body, QUICK))
