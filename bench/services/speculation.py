"""Measures what guesses of next tokens bring and cost (--speculation), and that they change no bit.

    python3 bench/services/speculation.py [--shape qwen3-8b --dummy_weights --backend cuda] [--json FILE]

One rollout computes each load with and without guesses (`speculation` of the request), in turn, and both must
have the same bits; else the exit status is 1.

    replay   an earlier trajectory of the same weights comes along as draft_token_ids
    wrong    draft_token_ids that mislead at every fourth token
    all_wrong  draft_token_ids of which none is right
    edit     the answer repeats text of the prompt with a change, for `lookup`; needs a model of text
    tail     groups of samples whose prompts were sampled before with other noise, for `history`
    step     an RL step: samples of groups, whose lengths have a long tail: the model's, or drawn at random
             without a model of text. What the weights of --earlier drew with the same seeds comes along as
             draft_token_ids
    step_other  the same, drawn with other seeds

Plain and guessed rounds alternate. "last s" is the time from the first finished request to the last, "CPU"
the rollout's CPU time: on a shared machine it says more than the clock, at --tp_size 1 (more ranks wait for
each other, which takes CPU time, too). "engine ratio" compares the times that the engine had work, from the
first request to the last token: this client, whose threads share a core, takes what follows.
"""

import argparse
import socket
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Self

import numpy as np
from command_line import add_targets
from experiment import Experiment, run
from machine import cpu_seconds
from prompts import make_prompts

from isobit.client import RolloutClient
from isobit.prompts import Text
from isobit.results import Sample

QUICK = {
    "modes": ["tree"],
    "tp_size": 2,
    "batch": 1,
    "max_tokens": 48,
    "rounds": 1,
    "groups": 4,
    "samples": 2,
}
LOADS = ("wrong", "all_wrong", "replay", "edit", "tail", "step", "step_other")
EDIT = (
    "Task {number}: repeat the following text word for word, but write 'harbour' instead of 'port'. Answer"
    " with the text alone.\n\n"
    "The port of the old town lies behind a long wall of grey stone. Every morning the fishermen leave the"
    " port before the sun is up, and every evening they come back to the port with what the sea has given"
    " them. In winter the port is quiet, and only the wind walks along the wall of grey stone. In summer"
    " the port is loud, and children run along the wall before the sun is up."
)
COUNTERS = "isobit_spec_decode_"
STEPS = "isobit_step"
OTHER_SEEDS = 1_000_000  # are so much higher

# What all clients ask at once: each call's arguments.
Calls = list[dict]


@dataclass(frozen=True)
class End:
    """How long after the first call began one ended."""

    seconds: float
    cpu_s: float  # of the rollout; 0 of one that ran already


@dataclass(frozen=True)
class Times:
    """Of a round."""

    rate: float  # tokens/s
    cpu_rate: float  # tokens by the rollout's CPU seconds; 0 if these are not known
    last_s: float  # from the first end to the last
    last_cpu_s: float
    steps: int  # of the engine; this and the next ones are 0 of a rollout that ran already
    device_s: float  # that the first rank's device worked
    engine_s: float  # that the engine had work

    @classmethod
    def of(cls, samples: Sequence[Sample], ends: Sequence[End], counted: Mapping[str, float]) -> Self:
        tokens = sum(len(one.tokens.token_ids) for one in samples)
        seconds, cpu = [end.seconds for end in ends], [end.cpu_s for end in ends]
        cpu_rate = tokens / max(cpu) if max(cpu) else 0.0
        device_s, engine_s = (
            sum(
                value
                for name, value in counted.items()
                if name.startswith(f"isobit_step{kind}_seconds_total")
            )
            for kind in ("_device", "")
        )
        steps = int(counted.get("isobit_steps_total", 0))
        last = max(seconds) - min(seconds), max(cpu) - min(cpu)
        return cls(tokens / max(seconds), cpu_rate, *last, steps, device_s, engine_s)


@dataclass
class Load:
    name: str
    rounds: list[Calls]
    goal: float | None  # the least ratio of rates that is aimed at
    earlier: Calls | None = None  # computed with guesses before the first round


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_targets(parser, "rollout")
    add = parser.add_argument
    add("--tp_size", type=int, default=1, metavar="N", help="of the rollout started")
    add(
        "--batch",
        type=int,
        default=8,
        metavar="N",
        help="requests at once in replay, wrong, all_wrong and edit",
    )
    add("--max_tokens", type=int, default=256, metavar="N", help="of each completion")
    add("--rounds", type=int, default=3, metavar="N", help="of these; the median counts")
    add(
        "--loads", nargs="+", choices=LOADS, default=LOADS, metavar="LOAD", help=f"some of {', '.join(LOADS)}"
    )
    add(
        "--earlier",
        type=Path,
        metavar="DIR",
        help="beside --model: its weights draw a step's drafts; default: --model",
    )
    add("--groups", type=int, default=64, metavar="N", help="prompts of tail and step")
    add("--samples", type=int, default=8, metavar="N", help="of each of them")
    add("--temperature", type=float, default=1.0, metavar="T", help="of all loads but edit")


def bits(samples: Sequence[Sample]) -> list[tuple[bytes, bytes]]:
    return [(one.tokens.token_ids.tobytes(), one.tokens.logprobs.tobytes()) for one in samples]


def mislead(tokens: Sequence[int], vocab_size: int) -> list[int]:
    """For every fourth token: the three before it, and another token in its place."""
    text: list[int] = []
    for i in range(3, len(tokens), 4):
        text += [*tokens[i - 3 : i], (tokens[i] + 1) % vocab_size]
    return text


def other_tokens(tokens: Sequence[int], vocab_size: int) -> list[int]:
    return [(token + 1) % vocab_size for token in tokens]


# The drafts of loads that gain nothing, from what the samples will be.
Change = Callable[[Sequence[int], int], list[int]]
USELESS: dict[str, Change] = {"wrong": mislead, "all_wrong": other_tokens}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def read_counters(port: int | None, prefix: str = COUNTERS) -> dict[str, float]:
    """The metrics of a rollout with that --metrics_port whose names begin with `prefix`."""
    if port is None:
        return {}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        lines = [line for line in answer.read().decode().splitlines() if line.startswith(prefix)]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in after.items()}


def count_of(counters: Mapping[str, float], name: str, drafter: str) -> int:
    return int(counters.get(f'{COUNTERS}{name}{{drafter="{drafter}"}}', 0))


def accepted_by_position(counters: Mapping[str, float], drafter: str) -> list[int]:
    """How many guesses at each place of a drafter's drafts were accepted."""
    name = f'{COUNTERS}num_accepted_tokens_per_pos_total{{drafter="{drafter}",position="'
    places = {int(key[len(name) : -2]): value for key, value in counters.items() if key.startswith(name)}
    return [int(value) for _, value in sorted(places.items())]


class Speculation:
    def __init__(self, experiment: Experiment, client: RolloutClient, port: int | None):
        self._experiment = experiment
        self._arguments = experiment.arguments
        self._client = client
        self._port = port
        self._vocab_size = client.get_server_info().server.model.vocab_size
        self._text = experiment.text_model
        self._common = {
            "max_tokens": self._arguments.max_tokens,
            "temperature": self._arguments.temperature,
            "ignore_eos": self._text is None,  # an end of sequence means something only where text does
        }

    def run(self, calls: Calls, speculation: bool) -> tuple[list[Sample], list[End]]:
        """The samples of all calls, and when each call ended."""
        pid = self._experiment.rollout_pid
        begin, cpu_begin = time.monotonic(), cpu_seconds(pid) if pid else 0.0

        def one(call: dict) -> tuple[list[Sample], End]:
            samples = self._client.generate(**call, speculation=speculation)
            return samples, End(time.monotonic() - begin, cpu_seconds(pid) - cpu_begin if pid else 0.0)

        with ThreadPoolExecutor(len(calls)) as pool:
            answers = list(pool.map(one, calls))
        return [sample for samples, _ in answers for sample in samples], [end for _, end in answers]

    def measure(self, load: Load) -> dict:
        times: dict[bool, list[Times]] = {False: [], True: []}
        drafted = accepted = 0
        with self._experiment.screen.progress(load.name, len(load.rounds)) as progress:
            if load.earlier:
                self.run(load.earlier, True)
            self.run(load.rounds[0], False)  # the first touches memory and graphs
            for calls in load.rounds:  # whoever comes first would have to compute the prompts
                only_prompts = {"max_tokens": 1, "draft_token_ids": ()}
                self.run([{**call, **only_prompts} for call in calls], False)
            before = read_counters(self._port)
            for number, calls in enumerate(load.rounds):
                both = {}
                for guesses in (True, False) if number % 2 else (False, True):
                    counters = read_counters(self._port, STEPS)
                    both[guesses], ends = self.run(calls, guesses)
                    counted = grown(counters, read_counters(self._port, STEPS))
                    times[guesses].append(Times.of(both[guesses], ends, counted))
                guessed = both[True]
                drafted += sum(sample.num_draft_tokens for sample in guessed)
                accepted += sum(sample.num_accepted_tokens for sample in guessed)
                same = bits(both[False]) == bits(guessed)
                self._experiment.check(same, f"{load.name}: {len(guessed)} samples have the same bits")
                progress.done += 1
            after = read_counters(self._port)

        def middle(name: str, guesses: bool) -> float:
            return median(getattr(one, name) for one in times[guesses])

        def ratio(name: str) -> float:
            pairs = zip(times[True], times[False], strict=True)
            return median(getattr(own, name) / (getattr(plain, name) or 1) for own, plain in pairs)

        return {
            "load": load.name,
            "samples": len(guessed),
            "plain_rate": middle("rate", False),
            "guessed_rate": middle("rate", True),
            "ratio": ratio("rate"),
            "goal": load.goal,
            "cpu_ratio": ratio("cpu_rate") or None,
            "engine_ratio": 1 / engine if (engine := ratio("engine_s")) else None,
            "plain_last_s": middle("last_s", False),
            "guessed_last_s": middle("last_s", True),
            "plain_last_cpu_s": middle("last_cpu_s", False),
            "guessed_last_cpu_s": middle("last_cpu_s", True),
            "draft_tokens": drafted,
            "accepted_tokens": accepted,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "counters": grown(before, after),
            "rounds": {
                "plain": [asdict(one) for one in times[False]],
                "guessed": [asdict(one) for one in times[True]],
            },
        }

    def loads(self) -> list[Load]:
        rounds = range(self._arguments.rounds)
        found = []
        for name in self._arguments.loads:
            if name == "replay":
                calls = self.calls(0)
                self._add_drafts(calls, self.run(calls, False)[0])
                found.append(Load(name, [calls for _ in rounds], 4.0))
            elif name in USELESS:
                # Prompts of their own, so that `history` knows no more than what comes along.
                first = 1 + list(USELESS).index(name) * len(rounds)
                useless = [self.calls(first + number) for number in rounds]
                for calls in useless:
                    self._add_drafts(calls, self.run(calls, False)[0], USELESS[name])
                found.append(Load(name, useless, 0.98))
            elif name == "edit" and self._text:
                found.append(Load(name, [self.edits(number) for number in rounds], 1.3))
            elif name == "tail":
                earlier = [call for number in rounds for call in self.groups(number, 2000)]
                found.append(Load(name, [self.groups(number, 1000) for number in rounds], 1.5, earlier))
            elif name.startswith("step"):
                found.append(Load(name, self.steps(name), None))
        return found

    def _add_drafts(self, calls: Calls, samples: Sequence[Sample], change: Change | None = None) -> None:
        """`samples`: of each call all, one call after the other."""
        texts = [sample.tokens.token_ids.tolist() for sample in samples]
        if change is not None:
            texts = [change(text, self._vocab_size) for text in texts]
        for call in calls:
            count = call.get("n", 1)
            call["draft_token_ids"], texts = texts[:count], texts[count:]

    def calls(self, number: int) -> Calls:
        """Requests whose prompts no other number has."""
        seed, batch = self._arguments.seed, self._arguments.batch
        prompts = make_prompts(self._text, self._vocab_size, batch, seed)
        return [
            {**self._common, "prompt_token_ids": [*prompt, number % self._vocab_size], "seed": seed + i}
            for i, prompt in enumerate(prompts)
        ]

    def edits(self, number: int) -> Calls:
        text = Text(self._text)
        found = []
        for i in range(self._arguments.batch):
            prompt = text.prompt(EDIT.format(number=100 * number + i)).token_ids
            call = {**self._common, "temperature": 0.3, "seed": i}
            found.append({**call, "prompt_token_ids": [int(token) for token in prompt]})
        return found

    def groups(self, number: int, seed: int) -> Calls:
        """A request for each of the prompts that round `number` has for itself."""
        call = {**self._common, "n": self._arguments.samples}
        prompts = self._prompts_of(number)
        return [{**call, "prompt_token_ids": prompt, "seed": seed + i} for i, prompt in enumerate(prompts)]

    def steps(self, name: str) -> list[Calls]:
        """Steps with what other weights drew."""
        arguments = self._arguments
        generator = np.random.default_rng(arguments.seed)
        first = arguments.rounds * (LOADS.index(name) + 1)  # prompts that no other load has
        steps = [
            self._step(self.groups(first + number, arguments.seed), generator)
            for number in range(arguments.rounds)
        ]
        offset = 0 if name == "step" else OTHER_SEEDS
        drafts = [[{**call, "seed": call["seed"] + offset} for call in calls] for calls in steps]
        with self._earlier_weights():
            drawn = [self.run(calls, False)[0] for calls in drafts]
        for calls, samples in zip(steps, drawn, strict=True):
            self._add_drafts(calls, samples)
        return steps

    def _step(self, groups: Calls, generator: np.random.Generator) -> Calls:
        """The requests of a step: groups that end where the model ends them, up to --max_tokens; without text
        each sample for itself, with a limit whose logarithm is normal with deviation 1 (one in fifty has
        --max_tokens)."""
        if self._text:
            return groups
        most, samples = self._arguments.max_tokens, self._arguments.samples
        limits = np.clip(most / 8 * np.exp(generator.standard_normal((len(groups), samples))), 1, most)
        return [
            {**group, "n": 1, "seed": group["seed"] * samples + i, "max_tokens": int(limit)}
            for group, of_group in zip(groups, limits, strict=True)
            for i, limit in enumerate(of_group)
        ]

    @contextmanager
    def _earlier_weights(self) -> Iterator[None]:
        if (earlier := self._arguments.earlier) is None:
            yield
            return
        self._client.update_weights(earlier.resolve().name)
        yield
        self._client.update_weights(self._experiment.model.name)

    def _prompts_of(self, number: int) -> list[list[int]]:
        count, seed = self._arguments.groups, self._arguments.seed + 1
        prompts = make_prompts(self._text, self._vocab_size, count * (number + 1), seed)
        return prompts[-count:]


def by_position(counters: Mapping[str, float], drafter: str) -> str:
    """The share of a drafter's drafts whose guess at each place was accepted."""
    drafts = count_of(counters, "num_drafts_total", drafter)
    accepted = accepted_by_position(counters, drafter)
    return ", ".join(f"{value / drafts:.2f}" for value in accepted) if drafts else ""


def body(experiment: Experiment) -> None:
    rows = []
    for source in experiment.sources([experiment.arguments.tp_size]):
        port = None if source.target else free_port()
        flags = ("--speculation=history,lookup", f"--metrics_port={port}")
        with experiment.rollout(source, *flags) as client:
            bench = Speculation(experiment, client, port)
            rows += [{"mode": source.numerics, **bench.measure(load)} for load in bench.loads()]
    experiment.result = {"loads": rows}
    columns = (
        "load",
        "samples",
        "plain_rate",
        "guessed_rate",
        "ratio",
        "goal",
        "cpu_ratio",
        "engine_ratio",
        "plain_last_s",
        "guessed_last_s",
        "plain_last_cpu_s",
        "guessed_last_cpu_s",
        "draft_tokens",
        "accepted_tokens",
    )
    header = [column.replace("_", " ") for column in columns]
    experiment.screen.table(header, [[_cell(row[column]) for column in columns] for row in rows])
    experiment.screen.line("\n  rates in tokens/s; accepted by position, of each drafter's drafts:")
    for row in rows:
        for drafter in ("history", "lookup"):
            if shares := by_position(row["counters"], drafter):
                experiment.screen.line(f"  {row['load']}, {drafter}: {shares}")
        if row["load"] == "replay":
            rate = row["draft_acceptance_rate"]
            experiment.check(rate > 0.8, f"replay: {rate:.0%} of the guesses are right")


def _cell(value: float | str | None) -> str:
    return f"{value:.2f}" if isinstance(value, float) else "-" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(run(__doc__, add_flags, body, QUICK))
