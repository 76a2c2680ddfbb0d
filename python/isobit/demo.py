"""Starts the three services and shows which numerics modes keep rollout and scorer equal in every bit.

    python -m isobit.demo            (from the root of a built checkout; `make demo` builds it first)

For each mode, the same prompts go to a comparator between a rollout and a scorer. In `tree` every logprob
must be equal in every bit; in the other modes some must differ. At the end, one mantissa bit of one weight
is flipped in the scorer's copy: the comparator must refuse to compare, and show the gap if told to go on.
Exits with 0 only if all of this held.
"""

import argparse
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from isobit.client import RolloutClient
from isobit.command_line import Parser
from isobit.comparator_client import ComparatorClient
from isobit.convert.smollm2 import DEFAULT_OUTPUT as DEFAULT_MODEL
from isobit.errors import FailedPreconditionError, IsobitError
from isobit.launch import (
    Service,
    ServiceError,
    Services,
    Setting,
    run_model_tool,
    start_comparator,
    start_rollout,
    start_scorer,
    stop_signals_as_exit,
    wait_all_serving,
)
from isobit.prompts import Text, default_prompts, read_prompts
from isobit.results import CompareSummary, Sample, SequenceReport, TokenGaps
from isobit.screen import Screen

MODES = ("tree", "batch_invariant", "vanilla")
GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.6, "top_p": 0.9, "seed": 20}
# The weight whose lowest bit is flipped; every token's logits depend on it.
FLIPPED_TENSOR = "model.norm.weight"

_INDENT = "    "


@dataclass
class Gap:
    """The result of all comparisons of one mode."""

    tokens: int = 0
    unequal: int = 0
    max_abs_dp: float = 0.0
    max_abs_dlogp: float = 0.0
    kl_k3_sum: float = 0.0

    def add(self, summary: CompareSummary) -> None:
        statistics = summary.statistics
        self.tokens += statistics.num_tokens
        self.unequal += statistics.num_unequal
        self.max_abs_dp = max(self.max_abs_dp, statistics.max_abs_dp)
        self.max_abs_dlogp = max(self.max_abs_dlogp, statistics.max_abs_dlogp)
        self.kl_k3_sum += statistics.kl_k3 * statistics.num_tokens

    @property
    def kl_k3(self) -> float:
        return self.kl_k3_sum / max(self.tokens, 1)


@dataclass
class Row:
    """One mode of the table."""

    mode: str
    gap: Gap = field(default_factory=Gap)
    start_s: float = 0.0
    alone_s: float = 0.0
    compare_s: float = 0.0
    stop_s: float = 0.0


class Demo:
    """One run. `failures` counts the checks that did not hold."""

    def __init__(self, arguments: argparse.Namespace, screen: Screen, log_dir: Path, model: Path):
        self._arguments = arguments
        self._screen = screen
        self._log_dir = log_dir
        self._model = model
        self._text = Text(model)
        texts = read_prompts(arguments.prompts) if arguments.prompts else default_prompts(model)
        self._prompts = [self._text.prompt(text) for text in texts]
        self._rows: list[Row] = []
        self._checks: list[tuple[bool, str]] = []

    @property
    def failures(self) -> int:
        return sum(not passed for passed, _ in self._checks)

    def run(self) -> None:
        for mode in self._arguments.modes:
            self._run_mode(mode)
        self._report()

    def keep_running(self) -> None:
        """Starts the services in the first mode and leaves them up until Ctrl-C or SIGTERM."""
        with Services(self._arguments.bin_dir, self._log_dir) as services:
            trio = self._start(services, self._arguments.modes[0], "kept")
            for service in trio:
                self._screen.line(f"  {service.name}: {service.target}")
            self._screen.line("Ctrl-C stops them.")
            while True:
                for service in trio:
                    service.check_alive()
                time.sleep(1.0)

    def _run_mode(self, mode: str) -> None:
        row = Row(mode)
        self._rows.append(row)
        self._screen.line(f"\n{mode}")
        with Services(self._arguments.bin_dir, self._log_dir) as services:
            start = time.monotonic()
            rollout, _, comparator = self._start(services, mode, mode)
            row.start_s = time.monotonic() - start
            self._screen.line(f"  the services started in {row.start_s:.1f} s")
            with ComparatorClient(comparator.target) as client:
                if mode == "tree":
                    alone = self._generate_alone(rollout, row)
                    self._compare_aloud(client, row, alone)
                    self._compare_with_flipped_bit(services, rollout)
                else:
                    self._compare(client, row)
            start = time.monotonic()
            services.stop()
            row.stop_s = time.monotonic() - start
        self._check(not services.bad_ends, "; ".join(services.bad_ends) or f"{mode}: every service exited 0")
        self._check_gap(row)

    def _start(self, services: Services, mode: str, name: str) -> tuple[Service, Service, Service]:
        setting = Setting(mode, self._arguments.tp_size, self._arguments.shards)
        with self._screen.progress("  starting the services"):
            rollout = start_rollout(services, setting, self._model, f"{name}-rollout")
            scorer = start_scorer(services, setting, self._model, f"{name}-scorer")
            comparator = start_comparator(services, rollout, scorer, f"{name}-comparator")
            wait_all_serving(services, (rollout, scorer, comparator))
        return rollout, scorer, comparator

    def _generate_alone(self, rollout: Service, row: Row) -> Sample:
        """Samples the first prompt with no other request on the rollout; prints it token by token."""
        self._screen.line(f"\n  One prompt alone, from the rollout at TP {self._arguments.tp_size}:")
        prompt = self._prompts[0]
        samples: list[Sample] = []

        def runs(events) -> Iterator[Sequence[int]]:
            for event in events:
                if isinstance(event, Sample):
                    samples.append(event)
                else:
                    yield event.tokens.token_ids

        start = time.monotonic()
        with RolloutClient(rollout.target) as client:
            events = client.generate(prompt.token_ids, stream=True, **SAMPLED, **self._limits())
            self._screen.paragraph(f"> {prompt.title}", _INDENT)
            self._screen.piece(_INDENT, "")
            for piece in self._text.pieces(runs(events)):
                self._screen.piece(piece, _INDENT)
        self._screen.line()
        row.alone_s = time.monotonic() - start
        return samples[0]

    def _compare_aloud(self, client: ComparatorClient, row: Row, alone: Sample) -> None:
        """Compares all prompts and prints each completion as it comes."""
        start = time.monotonic()
        for name, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
            self._screen.line(f"\n  {len(self._prompts)} prompts at once, {name}, through the comparator:")
            with self._screen.progress("  generating and scoring", len(self._prompts)) as progress:
                compared = 0
                tokens: dict[str, list[TokenGaps]] = {}
                for event in client.compare(self._token_ids(), stream=True, **sampling, **self._limits()):
                    if isinstance(event, TokenGaps):
                        tokens.setdefault(event.sequence_id, []).append(event)
                    elif isinstance(event, SequenceReport):
                        progress.done += 1
                        compared += event.statistics.num_tokens
                        gaps = tokens.pop(event.sequence_id, [])
                        self._print_completion(event, gaps)
                        if sampling is SAMPLED and event.prompt_index == 0:
                            self._check_alone(alone, gaps)
                    else:
                        row.gap.add(event)
                    progress.note = f"{compared} tokens"
        row.compare_s = time.monotonic() - start

    def _print_completion(self, report: SequenceReport, gaps: list[TokenGaps]) -> None:
        self._screen.paragraph(f"> {self._prompts[report.prompt_index].title}", _INDENT)
        token_ids = [int(token) for part in gaps for token in part.token_ids]
        self._screen.paragraph(self._text.decode(token_ids), _INDENT)
        tokens, unequal = report.statistics.num_tokens, report.statistics.num_unequal
        self._screen.line(f"{_INDENT}[{tokens} tokens, {unequal} unequal, {report.finish_reason}]")

    def _compare(self, client: ComparatorClient, row: Row) -> None:
        start = time.monotonic()
        total = 2 * len(self._prompts)
        with self._screen.progress(f"  comparing {total} completions", total) as progress:
            for sampling in (GREEDY, SAMPLED):
                events = client.compare(
                    self._token_ids(), stream=True, gap_detail="none", **sampling, **self._limits()
                )
                for event in events:
                    if isinstance(event, CompareSummary):
                        row.gap.add(event)
                    else:
                        progress.done += isinstance(event, SequenceReport)
        row.compare_s = time.monotonic() - start
        self._screen.line(f"  compared {row.gap.tokens} tokens in {row.compare_s:.1f} s")

    def _compare_with_flipped_bit(self, services: Services, rollout: Service) -> None:
        self._screen.line("\n  A scorer whose copy of one weight differs in one mantissa bit:")
        with (
            tempfile.TemporaryDirectory(prefix="flipped-", dir=self._log_dir) as scratch,
            self._screen.progress("  comparing with the flipped bit"),
        ):
            flipped = Path(scratch).resolve() / "model"
            said = run_model_tool(
                self._arguments.bin_dir, "flip-bit", str(self._model), FLIPPED_TENSOR, "0", "0", str(flipped)
            )
            self._screen.paragraph(said, _INDENT)
            setting = Setting("tree", self._arguments.tp_size, self._arguments.shards)
            scorer = start_scorer(services, setting, flipped, "flipped-scorer")
            comparator = start_comparator(services, rollout, scorer, "flipped-comparator")
            wait_all_serving(services, (scorer, comparator))
            with ComparatorClient(comparator.target) as client:
                self._check_flipped_bit(client)

    def _check_flipped_bit(self, client: ComparatorClient) -> None:
        # A few tokens of each prompt suffice to show it.
        call = {"gap_detail": "none", **GREEDY, "max_tokens": min(self._arguments.max_tokens, 16)}
        try:
            client.compare(self._token_ids(), **call)
            self._check(False, "flipped bit: the comparison went on although the weights differ")
        except FailedPreconditionError as error:
            self._screen.paragraph(f"refused: {error}", _INDENT)
            self._check(True, "flipped bit: refused with FAILED_PRECONDITION while digests are checked")
        summary = client.compare(self._token_ids(), allow_weight_mismatch=True, **call).summary
        statistics = summary.statistics
        self._check(
            statistics.num_unequal > 0,
            f"flipped bit: {statistics.num_unequal} of {statistics.num_tokens} tokens unequal with the check"
            f" off, max |dp| {_number(statistics.max_abs_dp)}",
        )

    def _check_alone(self, alone: Sample, gaps: list[TokenGaps]) -> None:
        ids = np.concatenate([part.token_ids for part in gaps]) if gaps else np.zeros(0, np.int32)
        logprobs = np.concatenate([part.rollout_logprobs for part in gaps]) if gaps else np.zeros(0, "f4")
        same = np.array_equal(ids, alone.tokens.token_ids) and np.array_equal(
            logprobs.view(np.uint32), alone.tokens.logprobs.view(np.uint32)
        )
        outcome = "the same" if same else "other"
        self._check(same, f"tree: alone, the first prompt gave {outcome} tokens and bits as in company")

    def _check_gap(self, row: Row) -> None:
        gap = row.gap
        counts = f"{row.mode}: {gap.tokens} tokens compared, {gap.unequal} unequal"
        if row.mode == "tree":
            self._check(gap.unequal == 0, counts)
            wanted = self._arguments.min_tokens_compared
            self._check(gap.tokens >= wanted, f"tree: {gap.tokens} tokens compared, at least {wanted} wanted")
        else:
            self._check(gap.unequal > 0, f"{counts}, as this mode must show a gap")

    def _check(self, passed: bool, text: str) -> None:
        self._checks.append((passed, text))

    def _report(self) -> None:
        self._screen.line("\nResult\n")
        header = ("mode", "tokens", "unequal", "max |dp|", "max |dlogp|", "k3 KL")
        phases = ("start s", "alone s", "compare s", "stop s")
        self._screen.table(
            (*header, *phases),
            [
                (
                    row.mode,
                    str(row.gap.tokens),
                    str(row.gap.unequal),
                    *(_number(value) for value in (row.gap.max_abs_dp, row.gap.max_abs_dlogp, row.gap.kl_k3)),
                    *(f"{value:.1f}" for value in (row.start_s, row.alone_s, row.compare_s, row.stop_s)),
                )
                for row in self._rows
            ],
        )
        if any(math.isinf(row.gap.max_abs_dlogp) for row in self._rows):
            self._screen.line("\n  inf, nan: the scorer's top_p bars a token that the rollout's let through")
        self._screen.line(
            f"\n  alone: one prompt, generated; compare: {2 * len(self._prompts)} completions, generated,"
            " scored and compared\n"
        )
        for passed, text in self._checks:
            self._screen.line(f"  {'ok  ' if passed else 'FAIL'}  {text}")

    def _token_ids(self) -> list[Sequence[int]]:
        return [prompt.token_ids for prompt in self._prompts]

    def _limits(self) -> dict:
        return {"max_tokens": self._arguments.max_tokens}


def _number(value: float) -> str:
    """0 only for an exact zero."""
    return "0" if value == 0 else f"{value:.2e}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m isobit.demo", description="Shows which numerics modes are equal in every bit."
    )
    add = parser.add_argument
    add("--model", type=Path, default=DEFAULT_MODEL, help="a Hugging Face directory (default: %(default)s)")
    add("--offline", action="store_true", help="take a small random model and token ids for prompts")
    add(
        "--modes", nargs="+", choices=MODES, default=MODES, metavar="MODE", help=f"some of {', '.join(MODES)}"
    )
    add("--prompts", type=Path, metavar="FILE", help="one prompt a line (token ids if there is no tokenizer)")
    add("--max_tokens", type=int, default=48, help="tokens of a completion (default: %(default)s)")
    add(
        "--min_tokens_compared",
        type=int,
        default=500,
        metavar="N",
        help="fewer in `tree` fail (default: 500)",
    )
    add("--tp_size", type=int, default=4, help="tensor-parallel size of the rollout (default: %(default)s)")
    add("--shards", type=int, default=2, help="shards of the scorer (default: %(default)s)")
    add("--bin_dir", type=Path, default=Path("build/release/bin"), help="the services (default: %(default)s)")
    add("--log_dir", type=Path, help="new, for the services' logs (default: logs/demo-TIME)")
    add("--keep_running", action="store_true", help="afterwards, leave services up in the first mode")
    return parser.parse_args(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    screen = Screen()
    log_dir = arguments.log_dir or Path(time.strftime("logs/demo-%Y%m%d-%H%M%S"))
    start = time.monotonic()
    try:
        with stop_signals_as_exit():
            log_dir.mkdir(parents=True)
            model = arguments.model.resolve()
            if arguments.offline:
                model = log_dir.resolve() / "random-model"
                run_model_tool(arguments.bin_dir, "make", "tiny-llama", str(model), "--seed", "1")
            screen.line(
                f"{model.name}: rollout at TP {arguments.tp_size}, scorer at TP 1 on {arguments.shards}"
                f" shards; logs in {log_dir}"
            )
            demo = Demo(arguments, screen, log_dir, model)
            demo.run()
            screen.line(f"\n{time.monotonic() - start:.0f} s in all; {demo.failures} checks failed")
            if arguments.keep_running:
                demo.keep_running()
            return 1 if demo.failures else 0
    except (ServiceError, IsobitError, OSError, ValueError) as error:
        screen.line(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        screen.line("\ninterrupted; the services are stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main())
