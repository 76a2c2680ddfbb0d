"""Distinct outputs of each prompt, and how far their probabilities diverge, over batch and TP sizes.

    python3 bench/services/unique_outputs.py [--shape qwen3-8b] [--max_tokens 512] [--json FILE]

Tables 2 and 3 of the paper on tree-based invariant kernels: every prompt is sampled with the same seed once
for each batch size (requests in flight) and tensor-parallel size. In `tree`, every prompt must have one
output, and all settings' top-5 lists must be equal in every bit; else the exit status is 1.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from command_line import add_targets
from divergence import Divergence, distinct, measure
from experiment import CONTRACT_MODE, Experiment, Source, run
from prompts import make_prompts

from isobit.client import RolloutClient
from isobit.results import TokenLogprobs

QUICK = {
    "modes": ["vanilla", "tree"],
    "tp_sizes": [1, 4],
    "batch_sizes": [2, 8],
    "num_prompts": 16,
    "max_tokens": 24,
}
TOP = 5


@dataclass(frozen=True)
class Run:
    """The outputs of all prompts in one setting."""

    tp_size: int
    batch_size: int
    outputs: Sequence[TokenLogprobs]  # by prompt


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_targets(parser, "rollout")
    add = parser.add_argument
    add("--tp_sizes", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="of the rollouts started")
    add("--batch_sizes", type=int, nargs="+", default=[8, 16, 32], metavar="N", help="requests in flight")
    add("--num_prompts", type=int, default=32, metavar="N", help="no batch is larger")
    add("--max_tokens", type=int, default=512, metavar="N", help="of each output")
    add("--temperature", type=float, default=0.6, help=" ")
    add("--top_p", type=float, default=0.95, help=" ")
    add("--top_k", type=int, default=20, help=" ")


def generate(experiment: Experiment, client: RolloutClient, source: Source, batch_size: int) -> Run:
    """All prompts, `batch_size` at a time; the next starts when one ends."""
    arguments = experiment.arguments
    vocab_size = client.get_server_info().server.model.vocab_size
    prompts = make_prompts(experiment.text_model, vocab_size, arguments.num_prompts, arguments.seed)

    def one(prompt: Sequence[int]) -> TokenLogprobs:
        (sample,) = client.generate(
            prompt,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            top_k=arguments.top_k,
            seed=arguments.seed,
            max_tokens=arguments.max_tokens,
            # An end of sequence means something only where text does.
            ignore_eos=experiment.text_model is None,
            logprobs=TOP,
            # The model's own probabilities, which no filter sets to zero.
            logprob_mode="raw",
        )
        progress.done += 1
        return sample.tokens

    label = f"{source}, batch {batch_size}"
    with experiment.screen.progress(label, len(prompts)) as progress, ThreadPoolExecutor(batch_size) as pool:
        return Run(source.tp_size, batch_size, list(pool.map(one, prompts)))


def by_prompt(runs: Sequence[Run]) -> list[tuple[TokenLogprobs, ...]]:
    """The outputs of each prompt in all runs."""
    return list(zip(*(one.outputs for one in runs), strict=True))


def mean_distinct(runs: Sequence[Run], key: str) -> float:
    """Distinct outputs of a prompt among runs that agree in `key`, averaged over prompts and groups."""
    groups = defaultdict(list)
    for one in runs:
        groups[getattr(one, key)].append(one)
    return statistics.fmean(distinct(outputs) for group in groups.values() for outputs in by_prompt(group))


def summarise(mode: str, runs: Sequence[Run]) -> dict:
    counts = [distinct(outputs) for outputs in by_prompt(runs)]
    divergences = [measure(outputs) for outputs in by_prompt(runs)]
    return {
        "mode": mode,
        "settings": len(runs),
        "distinct": counts,
        "mean_distinct": statistics.fmean(counts),
        "max_distinct": max(counts),
        "mean_distinct_over_batch": mean_distinct(runs, "tp_size"),
        "mean_distinct_over_tp": mean_distinct(runs, "batch_size"),
        "divergences": divergences,
        "divergence": Divergence.merge(divergences),
    }


def body(experiment: Experiment) -> None:
    arguments = experiment.arguments
    runs: dict[str, list[Run]] = defaultdict(list)
    seconds = {}
    for source in experiment.sources(arguments.tp_sizes):
        with experiment.rollout(source, f"--max_running={max(arguments.batch_sizes)}") as client:
            for batch_size in arguments.batch_sizes:
                start = time.monotonic()
                runs[source.numerics].append(generate(experiment, client, source, batch_size))
                seconds[f"{source}, batch {batch_size}"] = time.monotonic() - start
    rows = [summarise(mode, mode_runs) for mode, mode_runs in runs.items()]
    experiment.result = {"seconds": seconds, "modes": rows}
    report(experiment, rows)
    for row in rows:
        if row["mode"] == CONTRACT_MODE:
            check_contract(experiment, row)


def report(experiment: Experiment, rows: Sequence[dict]) -> None:
    line, table = experiment.screen.line, experiment.screen.table
    line(f"\nDistinct outputs of a prompt ({experiment.arguments.num_prompts} prompts)\n")
    header = ("mode", "settings", "mean", "max", "over batch sizes", "over TP sizes")
    columns = ("mean_distinct", "mean_distinct_over_batch", "mean_distinct_over_tp")
    cells = []
    for row in rows:
        mean, over_batch, over_tp = (f"{row[column]:.2f}" for column in columns)
        cells.append((row["mode"], str(row["settings"]), mean, str(row["max_distinct"]), over_batch, over_tp))
    table(header, cells)
    line("\n  over batch sizes: at one TP size; over TP sizes: at one batch size\n")
    line(f"Maximum divergence of the top-{TOP} probabilities, up to where the outputs differ (in 1e-3)\n")
    header = ("mode", "mean over positions", "max", "positions", "with unequal bits", "prompts that differ")
    cells = []
    for row in rows:
        all_ = row["divergence"]
        differing = sum(one.first_difference is not None for one in row["divergences"])
        cells.append(
            (
                row["mode"],
                _thousandths(all_.mean),
                _thousandths(all_.maximum),
                str(all_.positions),
                str(all_.unequal_positions),
                str(differing),
            )
        )
    table(header, cells)


def check_contract(experiment: Experiment, row: dict) -> None:
    counts, all_ = row["distinct"], row["divergence"]
    one_each = sum(count == 1 for count in counts)
    experiment.check(
        one_each == len(counts) and row["settings"] > 1,
        f"tree: {one_each} of {len(counts)} prompts have one output over {row['settings']} settings",
    )
    experiment.check(
        all_.unequal_positions == 0 and all_.maximum == 0 and all_.positions > 0,
        f"tree: {all_.unequal_positions} of {all_.positions} positions with unequal bits",
    )


def _thousandths(value: float) -> str:
    """0 only for an exact zero."""
    return "0" if value == 0 else f"{value * 1e3:.3g}"


if __name__ == "__main__":
    sys.exit(run(__doc__, add_flags, body, QUICK))
