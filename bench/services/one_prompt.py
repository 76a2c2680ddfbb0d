"""Counts distinct completions of one prompt at temperature 0 under a changing load.

    python3 bench/services/one_prompt.py [--shape qwen3-8b] [--completions 1000] [--json FILE]

The experiment of the article "Defeating Nondeterminism in LLM Inference": the same greedy request many times,
at 1, 2, 4 ... requests in flight, while other clients send requests of random length and sampling. In `tree`
all completions must be equal, in tokens and in the bits of their logprobs; else the exit status is 1.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from background import BackgroundLoad, generate_something
from command_line import add_targets
from divergence import first_difference
from experiment import CONTRACT_MODE, Experiment, Source, run
from prompts import one_prompt

from isobit.client import RolloutClient
from isobit.results import TokenLogprobs

QUICK = {
    "modes": ["vanilla", "tree"],
    "tp_size": 2,
    "completions": 60,
    "max_tokens": 32,
    "max_concurrency": 8,
    "others": 2,
}
OTHERS_MAX_TOKENS = 256


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_targets(parser, "rollout")
    add = parser.add_argument
    add("--tp_size", type=int, default=4, metavar="N", help="of the rollouts started")
    add("--completions", type=int, default=1000, metavar="N", help="of the prompt, in each mode")
    add("--max_tokens", type=int, default=1000, metavar="N", help="of each completion")
    add("--max_concurrency", type=int, default=256, metavar="N", help="of the completions")
    add("--others", type=int, default=16, metavar="N", help="clients that send other requests meanwhile")


def phases(completions: int, max_concurrency: int) -> list[tuple[int, int]]:
    """Requests in flight, 1, 2, 4 ... and again, and completions to make: two rounds in each phase."""
    found = []
    concurrency = 1
    while completions > 0:
        found.append((concurrency, min(2 * concurrency, completions)))
        completions -= found[-1][1]
        concurrency = 2 * concurrency if 2 * concurrency <= max_concurrency else 1
    return found


def complete(experiment: Experiment, client: RolloutClient, source: Source) -> list[TokenLogprobs]:
    arguments = experiment.arguments
    vocab_size = client.get_server_info().server.model.vocab_size
    prompt = one_prompt(experiment.text_model, vocab_size, arguments.seed)

    def one(_: int) -> TokenLogprobs:
        (sample,) = client.generate(
            prompt,
            temperature=0.0,
            max_tokens=arguments.max_tokens,
            # An end of sequence means something only where text does.
            ignore_eos=experiment.text_model is None,
        )
        progress.done += 1
        return sample.tokens

    completions = []
    something = generate_something(vocab_size, OTHERS_MAX_TOKENS)
    others = BackgroundLoad(RolloutClient, client.target, arguments.others, something, str(arguments.seed))
    with experiment.screen.progress(str(source), arguments.completions) as progress, others:
        for concurrency, count in phases(arguments.completions, arguments.max_concurrency):
            progress.note = f"{concurrency} in flight"
            with ThreadPoolExecutor(concurrency) as pool:
                completions += pool.map(one, range(count))
    experiment.screen.line(f"  {others.counts['requests']} other requests meanwhile")
    return completions


def summarise(source: Source, completions: Sequence[TokenLogprobs]) -> dict:
    by_tokens = Counter(completion.token_ids.tobytes() for completion in completions)
    with_bits = {completion.token_ids.tobytes() + completion.logprobs.tobytes() for completion in completions}
    return {
        "mode": source.numerics,
        "tp_size": source.tp_size,
        "completions": len(completions),
        "distinct": len(by_tokens),
        "distinct_with_logprobs": len(with_bits),
        "most_common": max(by_tokens.values()),
        "first_difference": first_difference(completions),
        "longest": max(len(completion.token_ids) for completion in completions),
    }


def body(experiment: Experiment) -> None:
    arguments = experiment.arguments
    rows = []
    for source in experiment.sources([arguments.tp_size]):
        with experiment.rollout(source, f"--max_running={arguments.max_concurrency}") as client:
            rows.append(summarise(source, complete(experiment, client, source)))
    experiment.result = {"modes": rows}
    experiment.screen.line(f"\nCompletions of one prompt at temperature 0 ({rows[0]['longest']} tokens)\n")
    columns = ("completions", "distinct", "distinct_with_logprobs", "most_common", "first_difference")
    header = ("mode", *(column.replace("_", " ") for column in columns))
    cells = [(row["mode"], *(_cell(row[column]) for column in columns)) for row in rows]
    experiment.screen.table(header, cells)
    experiment.screen.line("\n  first difference: the first position (from 0) whose tokens differ")
    for row in rows:
        if row["mode"] == CONTRACT_MODE:
            experiment.check(
                row["distinct_with_logprobs"] == 1 and row["completions"] == arguments.completions > 1,
                f"tree: {row['completions']} completions, {row['distinct']} distinct,"
                f" {row['distinct_with_logprobs']} with the bits of their logprobs",
            )


def _cell(value: int | None) -> str:
    return "-" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(run(__doc__, add_flags, body, QUICK))
