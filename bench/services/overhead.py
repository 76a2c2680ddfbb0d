"""What the contract costs: latency and throughput in `tree` beside `vanilla` and `batch_invariant`.

    python3 bench/services/overhead.py [--shape qwen3-8b] [--tp_size 4] [--rounds 3] [--json FILE]

Each of three loads runs in several rounds, in each round on one rollout of every mode in turn. A ratio is the
median of the rounds' ratios to `vanilla`.
  latency     one batch of requests of equal length (figures 9 and 12 of the paper on tree-based invariant
              kernels): until every request has its first token, and the time of each later token
  throughput  many requests of 90 to 110 tokens (the table of "Defeating Nondeterminism in LLM Inference")
  streams     one sequence in each stream, compared with as many sequences in few calls that get whole
              samples, one message each: the cost of streaming, in the client too. Each mode is compared with
              itself.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import numpy as np
from command_line import add_targets
from experiment import Experiment, run
from load_generator import LoadGenerator, Request, Timing
from prompts import random_prompt

QUICK = {
    "modes": ["vanilla", "tree"],
    "tp_size": 2,
    "rounds": 1,
    "batch_size": 8,
    "lengths": ["16:8"],
    "requests": 24,
    "concurrency": 16,
    "throughput_input": 16,
    "streams": 32,
    "stream_tokens": 16,
}
BASE_MODE = "vanilla"
STREAM_PROMPT_TOKENS = 16


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_targets(parser, "rollout")
    add = parser.add_argument
    add("--tp_size", type=int, default=4, metavar="N", help="of the rollouts started")
    add("--rounds", type=int, default=3, metavar="N", help="of which the median counts, after one to warm up")
    add("--batch_size", type=int, default=64, metavar="N", help="latency: requests in the batch")
    add(
        "--lengths",
        nargs="+",
        default=["128:128", "1024:128", "128:1024", "1024:1024"],
        metavar="IN:OUT",
        help="latency: tokens of prompt and completion",
    )
    add("--requests", type=int, default=1000, metavar="N", help="throughput: in all")
    add("--concurrency", type=int, default=256, metavar="N", help="throughput: in flight")
    add("--throughput_input", type=int, default=128, metavar="N", help="throughput: tokens of a prompt")
    add("--streams", type=int, default=512, metavar="N", help="streams: at one time")
    add("--stream_tokens", type=int, default=128, metavar="N", help="streams: tokens of each")
    add("--processes", type=int, default=0, metavar="N", help="of the client; 0 suits the machine")


class Loads:
    """The requests of each load; they are the same for every mode and round."""

    def __init__(self, arguments: argparse.Namespace, vocab_size: int, max_n: int):
        self._generator = np.random.default_rng(arguments.seed)
        self._vocab_size = vocab_size
        self.latency = {pair: self._batch(arguments.batch_size, pair) for pair in arguments.lengths}
        self.throughput = [
            self._request(arguments.throughput_input, int(tokens))
            for tokens in self._generator.integers(90, 111, arguments.requests)
        ]
        one = self._request(STREAM_PROMPT_TOKENS, arguments.stream_tokens)
        self.streams = [{**one, "seed": seed} for seed in range(arguments.streams)]
        samples = min(max_n, arguments.streams)
        if arguments.streams % samples:
            raise ValueError(f"--streams is {arguments.streams}, expected a multiple of {samples}")
        self.calls = [
            {**one, "seed": seed, "n": samples, "stream": False}
            for seed in range(arguments.streams // samples)
        ]

    def _batch(self, size: int, pair: str) -> list[Request]:
        prompt_tokens, tokens = (int(number) for number in pair.split(":"))
        return [self._request(prompt_tokens, tokens) for _ in range(size)]

    def _request(self, prompt_tokens: int, tokens: int) -> Request:
        return {
            "prompt_token_ids": random_prompt(self._generator, self._vocab_size, prompt_tokens),
            "max_tokens": tokens,
            "ignore_eos": True,
            "temperature": 1.0,
            "seed": 1,
        }


class Measurement:
    """The timings of every load, by mode, one for each round."""

    def __init__(self, experiment: Experiment, generator: LoadGenerator, targets: Mapping[str, str]):
        self.timings: dict[str, dict[str, list[Timing]]] = {}
        self.incomplete: list[str] = []
        self._experiment = experiment
        self._generator = generator
        self._targets = targets

    def add(self, name: str, requests: Sequence[Request], concurrency: int) -> None:
        """Runs one load on every mode in turn, round after round; the first round does not count."""
        rounds = self._experiment.arguments.rounds
        wanted = sum(request["max_tokens"] * request.get("n", 1) for request in requests)
        timings = self.timings[name] = defaultdict(list)
        with self._experiment.screen.progress(name, (rounds + 1) * len(self._targets)) as progress:
            for round_ in range(rounds + 1):
                for mode, target in self._targets.items():
                    progress.note = mode
                    timing = self._generator.run(target, requests, concurrency)
                    if timing.tokens != wanted:
                        self.incomplete.append(f"{name}, {mode}: {timing.tokens} of {wanted} tokens came")
                    if round_ > 0:
                        timings[mode].append(timing)
                    progress.done += 1

    def median(self, name: str, mode: str, field: str) -> float:
        return statistics.median(getattr(timing, field) for timing in self.timings[name][mode])

    def ratio(self, name: str, mode: str, base_name: str, base_mode: str) -> float:
        """Median over rounds of this load's time divided by that of another load or mode."""
        pairs = zip(self.timings[name][mode], self.timings[base_name][base_mode], strict=True)
        return statistics.median(timing.total_s / base.total_s for timing, base in pairs)


def body(experiment: Experiment) -> None:
    arguments = experiment.arguments
    sources = experiment.sources([arguments.tp_size])
    max_running = max(arguments.batch_size, arguments.concurrency, arguments.streams)
    with ExitStack() as stack:
        clients = {}
        for index, source in enumerate(sources):
            # Of what those before have left, so that all have the same share.
            share = 0.9 / (len(sources) - index)
            flags = (f"--max_running={max_running}", f"--gpu_memory_fraction={share:.3f}")
            clients[source.numerics] = stack.enter_context(experiment.rollout(source, *flags))
        targets = {mode: client.target for mode, client in clients.items()}
        info = next(iter(clients.values())).get_server_info()
        loads = Loads(arguments, info.server.model.vocab_size, info.max_n)
        generator = stack.enter_context(LoadGenerator(arguments.processes))
        generator.warm_up(next(iter(targets.values())), loads.streams[0])
        measurement = Measurement(experiment, generator, targets)
        for pair, requests in loads.latency.items():
            measurement.add(f"latency {pair}", requests, arguments.batch_size)
        measurement.add("throughput", loads.throughput, arguments.concurrency)
        measurement.add("calls", loads.calls, len(loads.calls))
        measurement.add("streams", loads.streams, arguments.streams)
        for mode, client in clients.items():
            experiment.note_info(f"rollout, {mode}, after the loads", client.get_server_info())
    experiment.result = measurement.timings
    complete = "every request brought the tokens that it asked for"
    experiment.check(not measurement.incomplete, "; ".join(measurement.incomplete) or complete)
    report(experiment, measurement, list(targets))


def report(experiment: Experiment, measurement: Measurement, modes: Sequence[str]) -> None:
    arguments, line, table = experiment.arguments, experiment.screen.line, experiment.screen.table
    median = measurement.median

    def times_base(name: str, mode: str) -> str:
        return f"{measurement.ratio(name, mode, name, BASE_MODE):.3f}" if BASE_MODE in modes else "-"

    line(f"\nLatency of {arguments.batch_size} requests at once\n")
    cells = []
    for pair in arguments.lengths:
        name, (_, tokens) = f"latency {pair}", pair.split(":")
        for mode in modes:
            first, total = (median(name, mode, field) for field in ("first_tokens_s", "total_s"))
            step_ms = 1e3 * (total - first) / max(int(tokens) - 1, 1)
            cells.append(
                (pair, mode, *(f"{value:.3f}" for value in (total, first, step_ms)), times_base(name, mode))
            )
    table(("in:out", "mode", "s", "first tokens s", "ms a later token", f"/ {BASE_MODE}"), cells)

    line(f"\nThroughput of {arguments.requests} requests, {arguments.concurrency} in flight\n")
    cells = [
        (
            mode,
            f"{median('throughput', mode, 'total_s'):.2f}",
            f"{median('throughput', mode, 'tokens_per_s'):.0f}",
            times_base("throughput", mode),
        )
        for mode in modes
    ]
    table(("mode", "s", "tokens/s", f"s / {BASE_MODE}"), cells)

    line(f"\n{arguments.streams} streams, beside {arguments.streams} sequences in few calls\n")
    cells = [
        (
            mode,
            *(f"{median(name, mode, 'tokens_per_s'):.0f}" for name in ("streams", "calls")),
            *(str(int(median(name, mode, "messages"))) for name in ("streams", "calls")),
            f"{measurement.ratio('streams', mode, 'calls', mode):.3f}",
        )
        for mode in modes
    ]
    table(("mode", "streams: tokens/s", "calls: tokens/s", "messages", "messages", "s / s of calls"), cells)


if __name__ == "__main__":
    sys.exit(run(__doc__, add_flags, body, QUICK))
