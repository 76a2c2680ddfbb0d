"""`isobit demo`: starts the three services and shows which numerics modes are equal in every bit.

In each mode, the same prompts go through a comparator to a rollout and a scorer. In `tree` every logprob must
be equal in every bit; in the other modes some must differ. At the end, one mantissa bit of one weight is
flipped in the scorer's copy: the comparator must refuse to compare, and must show the gap if told to compare
anyway. The demo succeeds only if all of this is so.
"""

import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from isobit.client import RolloutClient
from isobit.comparator_client import ComparatorClient
from isobit.convert.smollm2 import DEFAULT_OUTPUT as DEFAULT_MODEL
from isobit.errors import FailedPreconditionError
from isobit.launch import (
    Service,
    Services,
    Setting,
    run_model_tool,
    start_comparator,
    start_rollout,
    start_scorer,
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


@dataclass(frozen=True)
class Options:
    """The flags of `isobit demo`; their help describes them."""

    model: Path = DEFAULT_MODEL
    offline: bool = False
    modes: Sequence[str] = MODES
    prompts: Path | None = None
    max_tokens: int = 48
    min_tokens_compared: int = 500
    tp_size: int = 4
    shards: int = 2
    bin_dir: Path | None = None
    log_dir: Path | None = None
    keep_running: bool = False
    as_json: bool = False


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
        """The mean over all tokens."""
        return self.kl_k3_sum / max(self.tokens, 1)


@dataclass
class Row:
    """One mode's row of the table."""

    mode: str
    gap: Gap = field(default_factory=Gap)
    start_s: float = 0.0
    alone_s: float = 0.0
    compare_s: float = 0.0
    stop_s: float = 0.0


class Demo:
    """One run of the demo. `failures` counts the checks that failed."""

    def __init__(self, options: Options, screen: Screen, log_dir: Path, model: Path):
        self._options = options
        self._screen = screen
        self._log_dir = log_dir
        self._model = model
        self._text = Text(model)
        texts = read_prompts(options.prompts) if options.prompts else default_prompts(model)
        self._prompts = [self._text.prompt(text) for text in texts]
        self._rows: list[Row] = []
        self._checks: list[tuple[bool, str]] = []

    @property
    def failures(self) -> int:
        return sum(not passed for passed, _ in self._checks)

    def run(self) -> None:
        for mode in self._options.modes:
            self._run_mode(mode)
        self._report()

    def json(self) -> str:
        """The result for scripts: of each mode the numbers of the table, and each check. Numbers that are not
        finite are null."""
        modes = {
            row.mode: {
                "tokens": row.gap.tokens,
                "unequal": row.gap.unequal,
                "max_abs_dp": _finite(row.gap.max_abs_dp),
                "max_abs_dlogp": _finite(row.gap.max_abs_dlogp),
                "kl_k3": _finite(row.gap.kl_k3),
                "start_s": row.start_s,
                "alone_s": row.alone_s,
                "compare_s": row.compare_s,
                "stop_s": row.stop_s,
            }
            for row in self._rows
        }
        checks = [{"passed": passed, "text": text} for passed, text in self._checks]
        return json.dumps({"passed": not self.failures, "modes": modes, "checks": checks})

    def keep_running(self) -> None:
        """Starts the services in the first mode, and keeps them running until Ctrl-C or SIGTERM."""
        with Services(self._options.bin_dir, self._log_dir) as services:
            trio = self._start(services, self._options.modes[0], "kept")
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
        with Services(self._options.bin_dir, self._log_dir) as services:
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
        self._check(
            not services.bad_ends,
            "; ".join(services.bad_ends) or f"{mode}: every service ended with status 0",
        )
        self._check_gap(row)

    def _start(self, services: Services, mode: str, name: str) -> tuple[Service, Service, Service]:
        setting = Setting(mode, self._options.tp_size, self._options.shards)
        with self._screen.progress("  starting the services"):
            rollout = start_rollout(services, setting, self._model, f"{name}-rollout")
            scorer = start_scorer(services, setting, self._model, f"{name}-scorer")
            comparator = start_comparator(services, rollout, scorer, f"{name}-comparator")
            wait_all_serving(services, (rollout, scorer, comparator))
        return rollout, scorer, comparator

    def _generate_alone(self, rollout: Service, row: Row) -> Sample:
        """Samples the first prompt while the rollout has no other request; prints it token by token."""
        self._screen.line(f"\n  One prompt alone, from the rollout at TP {self._options.tp_size}:")
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
        """Compares all prompts and prints each completion as soon as it is there."""
        start = time.monotonic()
        for name, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
            self._screen.line(
                f"\n  {len(self._prompts)} prompts at the same time, {name}, through the comparator:"
            )
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
                self._options.bin_dir, "flip-bit", str(self._model), FLIPPED_TENSOR, "0", "0", str(flipped)
            )
            self._screen.paragraph(said, _INDENT)
            setting = Setting("tree", self._options.tp_size, self._options.shards)
            scorer = start_scorer(services, setting, flipped, "flipped-scorer")
            comparator = start_comparator(services, rollout, scorer, "flipped-comparator")
            wait_all_serving(services, (scorer, comparator))
            with ComparatorClient(comparator.target) as client:
                self._check_flipped_bit(client)

    def _check_flipped_bit(self, client: ComparatorClient) -> None:
        # A few tokens of each prompt are enough to show the gap.
        call = {"gap_detail": "none", **GREEDY, "max_tokens": min(self._options.max_tokens, 16)}
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
        self._check(
            same, f"tree: alone, the first prompt gave {outcome} tokens and bits as with the other prompts"
        )

    def _check_gap(self, row: Row) -> None:
        gap = row.gap
        counts = f"{row.mode}: {gap.tokens} tokens compared, {gap.unequal} unequal"
        if row.mode == "tree":
            self._check(gap.unequal == 0, counts)
            wanted = self._options.min_tokens_compared
            self._check(
                gap.tokens >= wanted, f"tree: {gap.tokens} tokens compared, expected at least {wanted}"
            )
        else:
            self._check(gap.unequal > 0, f"{counts}; this mode must show a gap")

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
            self._screen.line(
                "\n  inf, nan: the scorer's top_p excludes a token that the rollout's top_p allowed"
            )
        self._screen.line(
            f"\n  alone: one prompt, generated; compare: {2 * len(self._prompts)} completions, generated,"
            " scored and compared\n"
        )
        for passed, text in self._checks:
            self._screen.line(f"  {'ok  ' if passed else 'FAIL'}  {text}")

    def _token_ids(self) -> list[Sequence[int]]:
        return [prompt.token_ids for prompt in self._prompts]

    def _limits(self) -> dict:
        return {"max_tokens": self._options.max_tokens}


def _number(value: float) -> str:
    """Formats a number; only an exact zero gives "0"."""
    return "0" if value == 0 else f"{value:.2e}"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def run(options: Options) -> int:
    """Runs the demo and returns how many checks failed. With `as_json`, stdout gets only the result, and
    stderr everything else.

    Raises:
      ServiceError, BinaryNotFoundError, IsobitError, OSError, ValueError: it cannot run.
    """
    screen = Screen(sys.stderr if options.as_json else None)
    log_dir = options.log_dir or Path(time.strftime("logs/demo-%Y%m%d-%H%M%S"))
    start = time.monotonic()
    log_dir.mkdir(parents=True)
    model = options.model.resolve()
    if options.offline:
        model = log_dir.resolve() / "random-model"
        run_model_tool(options.bin_dir, "make", "tiny-llama", str(model), "--seed", "1")
    screen.line(
        f"{model.name}: rollout at TP {options.tp_size}, scorer at TP 1 on {options.shards} shards;"
        f" logs in {log_dir}"
    )
    demo = Demo(options, screen, log_dir, model)
    demo.run()
    screen.line(f"\n{time.monotonic() - start:.0f} s in total; {demo.failures} checks failed")
    if options.as_json:
        print(demo.json(), flush=True)
    if options.keep_running:
        demo.keep_running()
    return demo.failures
