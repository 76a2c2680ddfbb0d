"""The gap between rollout's and scorer's probability of every sampled token, through the comparator.

    python3 bench/services/probability_gap.py [--shape qwen3-8b] [--tp_size 4] [--shards 4] [--json FILE]

Figure 10 of the paper on tree-based invariant kernels: tokens sampled at one tensor-parallel size, scored by
a trainer's whole forward pass on shards. In `tree` both sides must agree in every bit; else the exit status
is 1.
"""

import argparse
import sys
from collections.abc import Sequence

import numpy as np
from command_line import add_targets
from experiment import CONTRACT_MODE, Experiment, Source, numerics_name, run
from prompts import make_prompts

from isobit import ComparatorClient
from isobit.results import CompareSummary, SequenceReport, TokenGaps

QUICK = {"tp_size": 4, "shards": 2, "num_prompts": 16, "max_tokens": 24, "concurrency": 8}
# Upper ends of the histogram's bins; the first holds exact zeros alone.
BINS = (0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
QUANTILES = (0.5, 0.9, 0.99, 0.999)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_targets(parser, "comparator")
    add = parser.add_argument
    add("--tp_size", type=int, default=4, metavar="N", help="of the rollouts started")
    add("--shards", type=int, default=4, metavar="N", help="of the scorers started")
    add("--num_prompts", type=int, default=64, metavar="N", help="one completion each")
    add("--max_tokens", type=int, default=512, metavar="N", help="of each completion")
    add("--concurrency", type=int, default=64, metavar="N", help="prompts in flight")
    add("--temperature", type=float, default=1.0, help="of the sampling, and of the probabilities compared")
    add(
        "--top_p",
        type=float,
        default=1.0,
        help="likewise; what one side bars has probability 0 there",
    )
    add("--top_k", type=int, default=0, help="likewise; 0 keeps all")


def compare(experiment: Experiment, client: ComparatorClient, name: str) -> dict:
    """One mode: every prompt sampled, scored and compared."""
    arguments = experiment.arguments
    info = client.get_server_info()
    experiment.note_info(f"comparator, {name}", info)
    vocab_size = info.rollout.server.model.vocab_size
    prompts = make_prompts(experiment.text_model, vocab_size, arguments.num_prompts, arguments.seed)
    gaps: list[TokenGaps] = []
    reports: list[SequenceReport] = []
    summaries: list[CompareSummary] = []
    with experiment.screen.progress(name, len(prompts)) as progress:
        for event in client.compare(
            prompts,
            stream=True,
            max_concurrency=min(arguments.concurrency, 256),
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            top_k=arguments.top_k,
            seed=arguments.seed,
            max_tokens=arguments.max_tokens,
            # An end of sequence means something only where text does.
            ignore_eos=experiment.text_model is None,
        ):
            for kind, found in ((TokenGaps, gaps), (SequenceReport, reports), (CompareSummary, summaries)):
                if isinstance(event, kind):
                    found.append(event)
            progress.done = len(reports)
    return summarise(numerics_name(info.rollout.server), gaps, reports, summaries[0])


def summarise(
    mode: str, gaps: Sequence[TokenGaps], reports: Sequence[SequenceReport], summary: CompareSummary
) -> dict:
    abs_dp = np.concatenate([gap.abs_dp for gap in gaps])
    # Compared here, too, and by bit patterns: the comparator is not asked to vouch for itself.
    equal = np.concatenate(
        [gap.rollout_logprobs.view(np.uint32) == gap.scorer_logprobs.view(np.uint32) for gap in gaps]
    )
    # Unequal bits count as a gap even where the probabilities round to the same number.
    sizes = np.where(equal, abs_dp, np.maximum(abs_dp, np.finfo(np.float64).tiny))
    return {
        "mode": mode,
        "verdict": summary.verdict,
        "sequences": len(reports),
        "tokens": len(abs_dp),
        "unequal": int((~equal).sum()),
        "statistics": summary.statistics,
        "mean": float(abs_dp.mean()),
        "quantiles": {str(q): float(np.quantile(abs_dp, q)) for q in QUANTILES},
        "maximum": float(abs_dp.max()),
        "histogram": np.diff([0, *((sizes <= end).sum() for end in BINS)]).tolist(),
        "sequence_maxima": sorted(report.statistics.max_abs_dp for report in reports),
    }


def body(experiment: Experiment) -> None:
    arguments = experiment.arguments
    rows = []
    for target in arguments.comparator:
        with ComparatorClient(target) as client:
            rows.append(compare(experiment, client, target))
    if not arguments.comparator:
        for mode in arguments.modes:
            with experiment.services() as services:
                flags = [f"--max_running={arguments.concurrency}"]
                source = Source(mode, arguments.tp_size)
                _, _, comparator = experiment.start_trio(services, source, arguments.shards, *flags)
                with ComparatorClient(comparator.target) as client:
                    rows.append(compare(experiment, client, str(source)))
    experiment.result = {"bins": BINS, "modes": rows}
    report(experiment, rows)
    for row in rows:
        if row["mode"] == CONTRACT_MODE:
            experiment.check(
                row["verdict"] == "equal" and row["unequal"] == 0 and row["maximum"] == 0,
                f"tree: {row['tokens']} tokens compared, {row['unequal']} unequal, verdict {row['verdict']}",
            )
            wanted = arguments.num_prompts
            experiment.check(
                row["sequences"] == wanted, f"tree: {row['sequences']} of {wanted} sequences compared"
            )


def report(experiment: Experiment, rows: Sequence[dict]) -> None:
    line, table = experiment.screen.line, experiment.screen.table
    line("\n|p_rollout - p_scorer| of the sampled tokens\n")
    header = ("mode", "tokens", "unequal bits", "mean", *(f"{q:.1%}" for q in QUANTILES), "max")
    cells = []
    for row in rows:
        values = (row["mean"], *row["quantiles"].values(), row["maximum"])
        counts = (str(row["tokens"]), str(row["unequal"]))
        cells.append((row["mode"], *counts, *(_number(value) for value in values)))
    table(header, cells)
    line("\nTokens by size of the gap\n")
    header = ("gap", *(row["mode"] for row in rows))
    names = ["exactly 0", *(f"up to {end:g}" for end in BINS[1:])]
    histograms = [row["histogram"] for row in rows]
    table(header, [(name, *map(str, counts)) for name, *counts in zip(names, *histograms, strict=True)])


def _number(value: float) -> str:
    """0 only for an exact zero."""
    return "0" if value == 0 else f"{value:.2e}"


if __name__ == "__main__":
    sys.exit(run(__doc__, add_flags, body, QUICK))
