"""What it saves an RL step that prompts are shared: several samples of each prompt, step after step.

    python3 bench/services/rl_step.py [--shape qwen3-8b] [--tp_size 4] [--prompts 64] [--samples 8] \
        [--json FILE]

The same steps run on one rollout that shares nothing and on one that shares prompts, one after the other. A
step samples all prompts at once, in one or several turns. In a later turn a prompt goes on with its first
completion and new tokens of a user. Every completion has its full length. Measured are
  step          all turns of a step, and each turn alone
  prompts       as many other prompts with one token each: of all samples, and of one sample a prompt
  decode step   the first turn less its prompts, for each further token
  first token   of the second turn of a conversation that is alone, and of a new prompt of the same length
A ratio is the median of the rounds' ratios. In `tree`, every rollout must give the same tokens and logprob
bits, and so must one sample of each prompt without its siblings; else the exit status is 1.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from command_line import add_targets
from experiment import CONTRACT_MODE, Experiment, Source, run
from load_generator import LoadGenerator
from rl_loads import Outcome, Prompt, Prompts, Sampler, unequal_tokens

from isobit.client import RolloutClient
from isobit.results import TokenLogprobs

QUICK = {
    "variants": ["not shared", "shared"],
    "tp_size": 2,
    "prompts": 4,
    "samples": 3,
    "input": 40,
    "output": 12,
    "user_tokens": 8,
    "turns": 2,
    "repeated": 0.5,
    "rounds": 1,
    "max_running": 16,
    "processes": 2,
}
# The rollouts to start, with their flags. Ratios are to the first.
VARIANTS: Mapping[str, Sequence[str]] = {
    "not shared": ("--prefix_sharing=false",),
    "attention not shared": (
        "--prefix_sharing=true",
        "--shared_prefix_attention=false",
    ),
    "shared": ("--prefix_sharing=true",),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(modes=[CONTRACT_MODE])
    add_targets(parser, "rollout")
    add = parser.add_argument
    names = ", ".join(f"'{name}'" for name in VARIANTS)
    add(
        "--variants",
        nargs="+",
        choices=VARIANTS,
        default=[*VARIANTS],
        metavar="V",
        help=f"some of {names}",
    )
    add("--tp_size", type=int, default=4, metavar="N", help="of the rollouts started")
    add(
        "--max_running",
        type=int,
        default=512,
        metavar="N",
        help="of the rollouts started",
    )
    add("--prompts", type=int, default=64, metavar="N", help="in a step")
    add("--samples", type=int, default=8, metavar="N", help="of each prompt")
    add(
        "--input",
        type=int,
        default=1024,
        metavar="N",
        help="tokens of a prompt in the first turn",
    )
    add(
        "--output",
        type=int,
        default=256,
        metavar="N",
        help="tokens of a completion, at least 2",
    )
    add("--turns", type=int, default=1, metavar="N", help="of a step")
    add(
        "--user_tokens",
        type=int,
        default=128,
        metavar="N",
        help="new tokens of a later turn's prompt",
    )
    add(
        "--repeated",
        type=float,
        default=0.0,
        metavar="F",
        help="share of prompts that are in every step",
    )
    add(
        "--groups",
        choices=("one_request", "n_requests"),
        default="one_request",
        help="the samples of a prompt: in one request, or each in a request of its own",
    )
    add(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="steps that count, after one to warm up",
    )
    add(
        "--processes",
        type=int,
        default=0,
        metavar="N",
        help="of the client; 0 suits the machine",
    )


@dataclass
class Steps:
    """The steps that one rollout did. The first is to warm up: its times do not count, its bits do."""

    source: Source
    variant: str
    shares: bool  # whether the rollout is to share prompts
    outcomes: list[dict[str, Outcome]] = field(default_factory=list)  # by load
    times: list[dict[str, float]] = field(default_factory=list)  # by name, which has the unit
    completions: dict[str, list[TokenLogprobs]] = field(default_factory=lambda: defaultdict(list))  # by load
    unequal_alone: int = 0  # tokens of the first samples in the first step

    def __str__(self) -> str:
        return f"{self.source}, {self.variant}"

    def median(self, name: str) -> float:
        return statistics.median(times[name] for times in self.times[1:])

    def ratio(self, name: str, base: "Steps") -> float:
        pairs = zip(self.times[1:], base.times[1:], strict=True)
        return statistics.median(own[name] / other[name] for own, other in pairs)

    def unequal(self, base: "Steps") -> int:
        """Tokens of any load that differ from those of `base`, in themselves or in a bit of their logprob."""
        return sum(
            unequal_tokens(own, other)
            for load, completions in self.completions.items()
            for own, other in zip(completions, base.completions[load], strict=True)
        )

    @property
    def num_tokens(self) -> int:
        return sum(len(one.token_ids) for load in self.completions.values() for one in load)

    def total(self, counter: str, only_turns: bool = False) -> int:
        """The sum of a field of Outcome over all steps, of all loads or of the steps' own turns."""
        return sum(
            getattr(outcome, counter)
            for outcomes in self.outcomes
            for load, outcome in outcomes.items()
            if not only_turns or load.startswith(TURN)
        )


TURN = "turn "


class Measurement:
    """Runs steps on one rollout."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        client: RolloutClient,
        generator: LoadGenerator,
    ):
        self._arguments = arguments
        self._client = client
        self._prompts = Prompts(arguments, client.get_server_info().server.model.vocab_size)
        self._sampler = Sampler(arguments, client, generator)

    def add_step(self, steps: Steps) -> None:
        step, arguments = len(steps.outcomes), self._arguments
        steps.outcomes.append({})
        for load, samples in (("prompts", arguments.samples), ("one sample", 1)):
            prompts = self._prompts.first(load, step)
            self._sample(steps, load, prompts, self._seed(step), samples, max_tokens=1)
        prompts = self._prompts.first("step", step)
        for turn in range(arguments.turns):
            load, seed = f"{TURN}{turn + 1}", self._seed(step, turn)
            groups = self._sample(steps, load, prompts, seed, arguments.samples, arguments.output)
            if step == turn == 0:
                ones = self._sample(steps, "alone", prompts, seed, 1, arguments.output)
                pairs = zip(groups, ones, strict=True)
                steps.unequal_alone = sum(unequal_tokens(group[0], one) for group, (one,) in pairs)
            firsts = [group[0] for group in groups]
            prompts = self._prompts.next(prompts, firsts, "step", step, turn + 1)
        steps.times.append(self._times(steps.outcomes[-1]) | self._first_tokens(steps, step))

    def _sample(
        self,
        steps: Steps,
        load: str,
        prompts: list[Prompt],
        seed: int,
        samples: int,
        max_tokens: int,
    ) -> list[list[TokenLogprobs]]:
        outcome, groups = self._sampler.sample(prompts, seed, samples, max_tokens)
        steps.outcomes[-1][load] = outcome
        for group in groups:
            steps.completions[load] += group
        return groups

    def _times(self, outcomes: Mapping[str, Outcome]) -> dict[str, float]:
        turns = {load: outcome.seconds for load, outcome in outcomes.items() if load.startswith(TURN)}
        prompts, one_sample = (outcomes[load].seconds for load in ("prompts", "one sample"))
        found = {"step, s": sum(turns.values())}
        if len(turns) > 1:
            found |= {f"{load}, s": seconds for load, seconds in turns.items()}
        return found | {
            "prompts, s": prompts,
            "prompts, one sample, s": one_sample,
            "prompts / one sample": prompts / one_sample,
            "decode step, ms": 1e3 * (turns[f"{TURN}1"] - prompts) / (self._arguments.output - 1),
        }

    def _first_tokens(self, steps: Steps, step: int) -> dict[str, float]:
        first, length = self._seed(step), self._arguments.output
        prompt = self._prompts.single("conversation", step, self._arguments.input)
        ((answer,),) = self._sample(steps, "conversation", [prompt], first, 1, length)
        (second,) = self._prompts.next([prompt], [answer], "conversation", step, 1)
        new = self._prompts.single("new prompt", step, len(second))
        for load, prompt in (("second turn", second), ("new prompt", new)):
            self._sample(steps, load, [prompt], first, 1, max_tokens=1)
        warm, cold = (1e3 * steps.outcomes[-1][load].seconds for load in ("second turn", "new prompt"))
        return {
            "first token, second turn, ms": warm,
            "first token, new prompt, ms": cold,
            "second turn / new prompt": warm / cold,
        }

    def _seed(self, step: int, turn: int = 0) -> int:
        """The first of a turn's seeds; no two samples of a step's turns have the same."""
        arguments = self._arguments
        place = step * arguments.turns + turn
        return arguments.seed + place * arguments.prompts * arguments.samples


def body(experiment: Experiment) -> None:
    arguments = experiment.arguments
    if arguments.output < 2 or not 0 <= arguments.repeated <= 1:
        given = f"--output={arguments.output} --repeated={arguments.repeated}"
        raise ValueError(f"{given}: expected an output of 2 or more, and a share from 0 to 1")
    found: list[Steps] = []
    with LoadGenerator(arguments.processes) as generator:
        for source in experiment.sources([arguments.tp_size]):
            chosen = {source.target: ()} if source.target else {v: VARIANTS[v] for v in arguments.variants}
            for variant, flags in chosen.items():
                given = (f"--max_running={arguments.max_running}", *flags)
                with experiment.rollout(source, *given, variant=variant) as client:
                    says_so = client.get_server_info().prefix_sharing
                    shares = "--prefix_sharing=true" in flags if flags else says_so
                    found.append(steps := Steps(source, variant, shares))
                    measure(experiment, steps, Measurement(arguments, client, generator))
                    experiment.note_info(f"rollout, {steps}, after the steps", client.get_server_info())
    experiment.result = {"rollouts": []}
    for mode in dict.fromkeys(steps.source.numerics for steps in found):
        base, *others = [steps for steps in found if steps.source.numerics == mode]
        report(experiment, base, others)
        check(experiment, base, others)
        experiment.result["rollouts"] += [as_json(steps, base) for steps in (base, *others)]


def measure(experiment: Experiment, steps: Steps, measurement: Measurement) -> None:
    rounds = experiment.arguments.rounds + 1
    with experiment.screen.progress(f"steps, {steps}", rounds) as progress:
        for _ in range(rounds):
            measurement.add_step(steps)
            progress.done += 1


def as_json(steps: Steps, base: Steps) -> dict[str, Any]:
    return {
        "mode": steps.source.numerics,
        "tp_size": steps.source.tp_size,
        "variant": steps.variant,
        "median": {name: steps.median(name) for name in steps.times[0]},
        "ratio": {name: steps.ratio(name, base) for name in steps.times[0]},
        "tokens": steps.num_tokens,
        "unequal": steps.unequal(base),
        "unequal_alone": steps.unequal_alone,
        "steps": [
            {"times": times, "loads": outcomes}
            for times, outcomes in zip(steps.times, steps.outcomes, strict=True)
        ],
    }


def report(experiment: Experiment, base: Steps, others: Sequence[Steps]) -> None:
    arguments, line, table = (
        experiment.arguments,
        experiment.screen.line,
        experiment.screen.table,
    )
    line(
        f"\n{base.source}: {arguments.prompts} prompts x {arguments.samples} samples,"
        f" {arguments.input} + {arguments.output} tokens, {arguments.turns} turns\n"
    )
    everyone = [base, *others]
    ratios = [f"{steps.variant} / {base.variant}" for steps in others]
    cells = [
        (
            name,
            *(f"{steps.median(name):.3f}" for steps in everyone),
            *(f"{steps.ratio(name, base):.3f}" for steps in others),
        )
        for name in base.times[0]
    ]
    table(("median", *(steps.variant for steps in everyone), *ratios), cells)
    line("\nOf the steps, warming up included\n")
    counters = {
        "prompt tokens": "num_prompt_tokens",
        "of them found computed": "num_cached_tokens",
        "tokens sampled": "num_completion_tokens",
        "preemptions": "num_preemptions",
    }
    cells = [
        (name, *(f"{steps.total(counter, only_turns=True):,}" for steps in everyone))
        for name, counter in counters.items()
    ]
    cached_pages = (steps.outcomes[-1]["new prompt"].after["num_cached_pages"] for steps in everyone)
    cells.append(("cached pages at the end", *(f"{pages:,}" for pages in cached_pages)))
    table(("total", *(steps.variant for steps in everyone)), cells)


def check(experiment: Experiment, base: Steps, others: Sequence[Steps]) -> None:
    for steps in (base, *others):
        check_counts(experiment, steps)
    if base.source.numerics != CONTRACT_MODE:
        return
    for steps in (base, *others):
        alone = f"{steps.unequal_alone} tokens unequal to those of one sample without its siblings"
        experiment.check(steps.unequal_alone == 0, f"{steps}: {alone}")
    for steps in others:
        unequal, tokens = steps.unequal(base), steps.num_tokens
        compared = f"{unequal} of {tokens} tokens unequal to those of {base.variant}"
        experiment.check(unequal == 0 < tokens, f"{steps}: {compared}")


def check_counts(experiment: Experiment, steps: Steps) -> None:
    """That every token came, that prompts were shared if they were to be, and that all counters agree."""
    arguments = experiment.arguments
    wanted = len(steps.outcomes) * arguments.prompts * arguments.turns * arguments.samples * arguments.output
    came = steps.total("num_completion_tokens", only_turns=True)
    experiment.check(came == wanted, f"{steps}: {came} of {wanted} tokens came")
    prompt_tokens, cached = (
        steps.total("num_prompt_tokens"),
        steps.total("num_cached_tokens"),
    )
    shares = "shares" if steps.shares else "does not share"
    experiment.check(
        (cached > 0) == steps.shares,
        f"{steps}: {cached} of {prompt_tokens} prompt tokens found computed; the rollout {shares} prompts",
    )
    if not steps.source.target:  # one that runs already may have other clients
        counted = tuple(steps.total(f"counted_{kind}_tokens") for kind in ("prompt", "cached"))
        experiment.check(
            counted == (prompt_tokens, cached),
            f"{steps}: GetLoad counted {counted[1]} of {counted[0]}",
        )


if __name__ == "__main__":
    sys.exit(run(__doc__, add_flags, body, QUICK))
