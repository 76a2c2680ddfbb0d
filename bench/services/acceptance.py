"""Measures which guesses hold when the drafts are samples of earlier weights, by the distance of the weights.

    python3 bench/services/acceptance.py --versions runs/first/models/step-* [--json FILE] [--figure FILE.png]

--versions are the weights of one on-policy run, in order (train.py --models_every=1). Version v - d samples
prompts at temperature 1, and each sample comes along as draft_token_ids when version v samples the same
prompt with the same seed. The control has drafts of another seed. Every pair has a rollout of its own, so
`history` knows nothing but that draft of a prompt. Bits must be those without guesses, else the exit status
is 1.

    guesses right   accepted guesses, by guesses that were computed; the end of a sequence counts as refused,
                    since no token follows
    length          accepted guesses, by drafts: steps that computed at least one
    tokens a step   what a sequence gets in a step, those without guesses included: a bound on the speed-up
    same tokens     tokens before the first that differs from the draft, in the mean; needs no guess
    a difference    same tokens of all samples, by samples that differ: how far a draft would hold in the mean
                    if no sample ended

One request runs at a time: how much is guessed depends on it. --figure needs matplotlib.
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from statistics import mean

import numpy as np
from command_line import ROOT
from divergence import first_difference
from experiment import CONTRACT_MODE, Experiment, Source, run
from prompts import make_prompts
from rl_loads import unequal_tokens
from speculation import accepted_by_position, count_of, free_port, grown, read_counters

from isobit.client import RolloutClient
from isobit.results import Sample, TokenLogprobs
from isobit_tools.bf16_files import bf16_tensors

sys.path.append(str(ROOT / "python" / "examples" / "on_policy"))
from tasks import load_task

QUICK = {"distances": [0, 1, 2], "prompts": 4, "samples": 1, "max_tokens": 24}
QUICK_SEEDS = (2, 1, 1)  # of the weights of --shape: the last step changes nothing
SAME, OTHER = "same seeds", "other seeds"
# Seeds of drafts of another seed are so much higher.
OTHER_SEEDS = 1_000_000
QUESTIONS, RANDOM = "questions", "random"  # loads that are no task
DRAFTER = "history"
AT_ONCE = 8  # samples without guesses

# By load and sample: one of each prompt.
Drawn = dict[tuple[str, int], list[TokenLogprobs]]


@dataclass
class Outcome:
    """What a load did with the drafts of one distance."""

    load: str
    distance: int
    seeds: str
    tokens: int = 0
    unequal: int = 0  # tokens or logprobs that are not those without guesses
    drafts: int = 0
    guesses: int = 0
    accepted: int = 0
    stopped: int = 0  # samples that ended by themselves
    by_position: list[int] = field(default_factory=list)  # accepted guesses
    same: list[int] = field(default_factory=list)  # of each sample: tokens before the first that differs
    differ: list[bool] = field(default_factory=list)  # of each sample: one differs

    def add(self, plain: TokenLogprobs, draft: TokenLogprobs, guessed: Sample) -> None:
        self.tokens += len(plain.token_ids)
        self.unequal += unequal_tokens(plain, guessed.tokens)
        self.guesses += guessed.num_draft_tokens
        self.accepted += guessed.num_accepted_tokens
        self.stopped += guessed.finish_reason == "stop"
        difference = first_difference([plain, draft])
        self.same.append(len(plain.token_ids) if difference is None else difference)
        self.differ.append(difference is not None)

    def count(self, before: Mapping[str, float], after: Mapping[str, float]) -> None:
        """Adds what the rollout has counted of this load."""
        counted = grown(before, after)
        self.drafts += count_of(counted, "num_drafts_total", DRAFTER)
        pairs = zip_longest(self.by_position, accepted_by_position(counted, DRAFTER), fillvalue=0)
        self.by_position = [old + new for old, new in pairs]

    @property
    def share(self) -> float | None:
        return self.accepted / self.guesses if self.guesses else None

    @property
    def length(self) -> float | None:
        return self.accepted / self.drafts if self.drafts else None

    @property
    def tokens_a_step(self) -> float:
        return self.tokens / (self.tokens - self.accepted)

    @property
    def tokens_a_difference(self) -> float | None:
        return sum(self.same) / sum(self.differ) if any(self.differ) else None

    def still_same(self, tokens: int) -> float:
        """The share of samples that do not differ within so many tokens."""
        return 1 - mean(d and same < tokens for same, d in zip(self.same, self.differ, strict=True))

    def as_json(self) -> dict:
        return {
            **dataclasses.asdict(self),
            "share": self.share,
            "length": self.length,
            "tokens_a_step": self.tokens_a_step,
            "mean_same": mean(self.same),
            "tokens_a_difference": self.tokens_a_difference,
        }


class Acceptance:
    """Draws each version's samples once, and gives them to later versions."""

    def __init__(self, experiment: Experiment, versions: Sequence[Path]):
        self._experiment = experiment
        self._arguments = experiment.arguments
        self._versions = versions
        self._source = Source(CONTRACT_MODE, self._arguments.tp_size)
        self._prompts = self._make_prompts()
        self._drawn: dict[tuple[int, str], Drawn] = {}  # by version and seeds
        self.outcomes: dict[tuple[str, int, str], Outcome] = {}

    def _make_prompts(self) -> dict[str, list[list[int]]]:
        """By load; no prompt comes twice."""
        arguments, model = self._arguments, self._versions[-1]
        if not (model / "tokenizer.json").is_file():
            vocab_size = json.loads((model / "config.json").read_text("utf-8"))["vocab_size"]
            return {RANDOM: make_prompts(None, vocab_size, arguments.prompts, arguments.seed)}
        found = {}
        for load in arguments.loads:
            if load == QUESTIONS:
                found[load] = make_prompts(model, 0, arguments.prompts, arguments.seed)
                continue
            task = load_task(load, model)
            rows: dict[tuple[int, ...], None] = {}
            for number in range(100 * arguments.prompts):
                if len(rows) < arguments.prompts:
                    rows[tuple(int(token) for token in task.prompt(number))] = None
            found[load] = [list(row) for row in rows]
        return found

    def _call(self, load: str, prompt: int, sample: int, seeds: str) -> dict:
        number = prompt * self._arguments.samples + sample
        return {
            "prompt_token_ids": self._prompts[load][prompt],
            "seed": self._arguments.seed + number + (OTHER_SEEDS if seeds == OTHER else 0),
            "max_tokens": self._arguments.max_tokens,
            "temperature": self._arguments.temperature,
            "ignore_eos": load == RANDOM,
        }

    def _draw(self, version: int, seeds: str) -> None:
        """All samples of a version without guesses."""
        if (version, seeds) in self._drawn:
            return
        drawn = self._drawn[version, seeds] = {}
        model = self._versions[version]
        places = [
            (load, prompt, sample, seeds)
            for load, prompts in self._prompts.items()
            for sample in range(self._arguments.samples)
            for prompt in range(len(prompts))
        ]
        with self._experiment.rollout(self._source, variant=f"version {version}", model=model) as client:

            def one(place: tuple) -> TokenLogprobs:
                return client.generate(**self._call(*place))[0].tokens

            with ThreadPoolExecutor(AT_ONCE) as pool:
                for (load, _, sample, _), tokens in zip(places, pool.map(one, places), strict=True):
                    drawn.setdefault((load, sample), []).append(tokens)

    def measure(self, target: int, distance: int, seeds: str) -> None:
        """Gives the samples of version `target - distance`, drawn with these seeds, to version `target`."""
        self._draw(target, SAME)
        self._draw(target - distance, seeds)
        for sample in range(self._arguments.samples):
            port = free_port()
            flags = (f"--speculation={DRAFTER}", f"--metrics_port={port}")
            model = self._versions[target]
            name = f"version {target} after {distance} {seeds} {sample}"
            with self._experiment.rollout(self._source, *flags, variant=name, model=model) as client:
                for load in self._prompts:
                    outcome = Outcome(load, distance, seeds)
                    outcome = self.outcomes.setdefault((load, distance, seeds), outcome)
                    before = read_counters(port)
                    self._guess(client, outcome, target, sample)
                    outcome.count(before, read_counters(port))

    def _guess(self, client: RolloutClient, outcome: Outcome, target: int, sample: int) -> None:
        place = outcome.load, sample
        plains = self._drawn[target, SAME][place]
        drafts = self._drawn[target - outcome.distance, outcome.seeds][place]
        for prompt, (plain, draft) in enumerate(zip(plains, drafts, strict=True)):
            call = self._call(outcome.load, prompt, sample, SAME)
            (guessed,) = client.generate(**call, draft_token_ids=draft.token_ids.tolist())
            outcome.add(plain, draft, guessed)


def moved(versions: Sequence[Path], target: int, distance: int) -> float:
    """The norm of the difference of two versions' weights, by that of the weights."""
    difference = norm = 0.0
    earlier = bf16_tensors(versions[target - distance])
    for name, bits in bf16_tensors(versions[target]).items():
        now, then = ((b.astype(np.uint32) << 16).view(np.float32) for b in (bits, earlier[name]))
        difference += float(np.square(now - then, dtype=np.float64).sum())
        norm += float(np.square(now, dtype=np.float64).sum())
    return math.sqrt(difference / norm)


def check(experiment: Experiment, outcomes: Sequence[Outcome]) -> None:
    for one in outcomes:
        text = f"{one.load}, {one.seeds}, {one.distance} steps: {one.unequal} of {one.tokens} tokens unequal"
        experiment.check(one.unequal == 0 < one.tokens, f"{text} to those without guesses")
        if one.distance == 0 and one.seeds == SAME:
            right = one.guesses - one.stopped <= one.accepted and one.guesses > 0
            text = f"{one.accepted} of {one.guesses} guesses right, {one.stopped} ends"
            experiment.check(right and not any(one.differ), f"{one.load}, the version's own samples: {text}")


def report(experiment: Experiment, outcomes: Sequence[Outcome], distances: Mapping[int, float]) -> None:
    header = (
        "load", "drafts", "steps", "weights moved", "samples", "tokens", "guesses", "right", "length",
        "tokens a step", "same tokens", "a difference", "whole",
    )  # fmt: skip
    experiment.screen.table(
        header,
        [
            (
                one.load, one.seeds, str(one.distance), f"{distances[one.distance]:.1e}", str(len(one.same)),
                f"{one.tokens:,}", f"{one.guesses:,}", _cell(one.share), _cell(one.length),
                _cell(one.tokens_a_step), f"{mean(one.same):.1f}", _cell(one.tokens_a_difference),
                _cell(1 - mean(one.differ)),
            )
            for one in outcomes
        ],
    )  # fmt: skip
    experiment.screen.line("\n  accepted by position, of all drafts:")
    for one in outcomes:
        if one.drafts:
            shares = ", ".join(f"{count / one.drafts:.2f}" for count in one.by_position)
            experiment.screen.line(f"  {one.load}, {one.seeds}, {one.distance} steps: {shares}")


def draw(outcomes: Sequence[Outcome], title: str, path: Path) -> None:
    """Guesses right and tokens a step over the distance, and how long samples stay the same, by load."""
    from matplotlib.figure import Figure

    loads = list(dict.fromkeys(one.load for one in outcomes))
    figure = Figure(figsize=(3.4 * (2 + len(loads)), 3.4), layout="constrained")
    shares, steps, *lengths = figure.subplots(1, 2 + len(loads))
    distances = sorted({one.distance for one in outcomes})
    for number, load in enumerate(loads):
        for seeds, style in ((SAME, "o-"), (OTHER, "s:")):
            those = [one for one in outcomes if (one.load, one.seeds) == (load, seeds)]
            places = [distances.index(one.distance) for one in those]
            label = f"{load}, {seeds}"
            values = [math.nan if one.share is None else one.share for one in those]
            shares.plot(places, values, style, color=f"C{number}", label=label)
            steps.plot(places, [one.tokens_a_step for one in those], style, color=f"C{number}", label=label)
    shares.set_ylim(0, 1.05)
    for axes, name in ((shares, "guesses that are right"), (steps, "tokens a step")):
        axes.set_xticks(range(len(distances)), [str(distance) for distance in distances])
        axes.set_xlabel("steps between the weights")
        axes.set_title(name, fontsize="medium")
    for axes, load in zip(lengths, loads, strict=True):
        for one in outcomes:
            if (one.load, one.seeds) == (load, SAME):
                places = range(max(one.same) + 1)
                axes.plot(places, [one.still_same(k) for k in places], label=f"{one.distance} steps")
        axes.set_ylim(0, 1.05)
        axes.set_xlabel("tokens")
        axes.set_title(f"samples still the same, {load}", fontsize="medium")
    for axes in (shares, steps, *lengths):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path)


def versions_of(experiment: Experiment) -> list[Path]:
    arguments = experiment.arguments
    if arguments.shape:
        return [experiment.random_model(seed) for seed in QUICK_SEEDS]
    versions = [path.resolve() for path in arguments.versions]
    if len(versions) < 2:
        raise ValueError(f"--versions: expected two model directories or more, got {len(versions)}")
    return versions


def body(experiment: Experiment) -> None:
    arguments = experiment.arguments
    versions = versions_of(experiment)
    targets = arguments.targets or [len(versions) - 1]
    if bad := [target for target in targets if not 0 <= target < len(versions)]:
        raise ValueError(f"--targets: expected 0 to {len(versions) - 1}, got {bad[0]}")
    pairs = [
        (target, distance, seeds)
        for target in targets
        for distance in arguments.distances
        if 0 <= distance <= target
        for seeds in ((SAME, OTHER) if distance in arguments.control_distances else (SAME,))
    ]
    far = {
        distance: mean(moved(versions, target, distance) for target in targets if distance <= target)
        for distance in sorted({distance for _, distance, _ in pairs})
    }
    acceptance = Acceptance(experiment, versions)
    with experiment.screen.progress("versions and distances", len(pairs)) as progress:
        for pair in pairs:
            acceptance.measure(*pair)
            progress.done += 1
    outcomes = sorted(
        acceptance.outcomes.values(), key=lambda one: (one.load, one.seeds != SAME, one.distance)
    )
    experiment.result = {
        "versions": [path.name for path in versions],
        "weights_moved": far,
        "outcomes": [one.as_json() for one in outcomes],
    }
    report(experiment, outcomes, far)
    check(experiment, outcomes)
    if arguments.figure:
        draw(outcomes, f"Drafts of earlier weights, temperature {arguments.temperature}", arguments.figure)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--versions", type=Path, nargs="+", default=[], metavar="DIR", help="model directories, in order")
    add(
        "--targets",
        type=int,
        nargs="+",
        metavar="N",
        help="places in --versions, from 0, that get drafts; the last",
    )
    add("--distances", type=int, nargs="+", default=[0, 1, 2, 4, 8, 16], metavar="N", help="in versions")
    add(
        "--control_distances",
        type=int,
        nargs="+",
        default=[0, 1],
        metavar="N",
        help="of drafts of other seeds",
    )
    add("--loads", nargs="+", default=["arithmetic", QUESTIONS], metavar="TASK",
        help=f"a task of train.py, or {QUESTIONS}")  # fmt: skip
    add("--prompts", type=int, default=16, metavar="N", help="of each load")
    add("--samples", type=int, default=2, metavar="N", help="of each prompt")
    add("--max_tokens", type=int, default=64, metavar="N", help="of each sample")
    add("--temperature", type=float, default=1.0, metavar="T", help="of the draw")
    add("--tp_size", type=int, default=1, metavar="N", help="of the rollouts")
    add("--figure", type=Path, metavar="FILE", help="draw it here, as its suffix says: .png or .svg")


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(run(__doc__, add_flags, body, QUICK))
