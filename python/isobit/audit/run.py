"""`isobit audit`: computes every logprob of a recording again on this machine, and compares the bits.

isobit.recording writes recordings. For each model, a scorer is started on this machine's CPU; the digest of
its weights shows which samples it can check. Wherever the rollout ran, on GPUs and at any tensor-parallel
size, its logprobs must come out here bit by bit, and each token must be one that can be drawn.
"""

import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from isobit.audit import state as audit_state
from isobit.audit.draws import dictated, why_undrawable
from isobit.audit.records import Record, batches, read
from isobit.audit.report import SHOWN, Difference, Report, html_of, printable, text_of
from isobit.client import ScorerClient
from isobit.errors import IsobitError
from isobit.launch import ServiceError, Services, stop_signals_as_exit
from isobit.private_files import write_private
from isobit.recording import Recorder, lines_of, parse_line, write_parquet
from isobit.results import TokenLogprobs

SEQUENCES = 64  # at most, in one call
STATUS = {"PASSED": 0, "FAILED": 1, "INCOMPLETE": 3}


@dataclass(frozen=True)
class Options:
    """The flags of `isobit audit`; their help describes them."""

    file: Path
    model: Sequence[Path] = ()
    scorer: Sequence[str] = ()
    bin_dir: Path | None = None
    threads: int = 1
    json: Path | None = None
    html: Path | None = None
    parquet: Path | None = None
    resume: bool = False
    seal: bool = False


def compare(record: Record, computed: np.ndarray, report: Report) -> None:
    """Compares the tokens of a sample and adds them to the report."""
    recorded = record.logprobs.view(np.uint32)
    found = computed.astype(np.float32).view(np.uint32)
    differ = np.flatnonzero(recorded != found)
    report.tokens += len(recorded)
    (report.unequal if len(differ) else report.equal)[record.sum] = len(differ) or len(recorded)
    for at in differ[: max(0, SHOWN - len(report.differences))].tolist():
        difference = Difference(
            record.line, record.request_id, record.index, at, record.tokens[at],
            f"{recorded[at]:08x}", f"{found[at]:08x}",
        )  # fmt: skip
        report.differences.append(asdict(difference))


def judge_draws(record: Record, processed: TokenLogprobs, report: Report) -> None:
    """Reports a sample that cannot have been drawn, and parameters that left no choice."""
    if (why := why_undrawable(record, processed)) is not None:
        report.undrawable[record.sum] = printable(why)
    certain, parameters = dictated(record, processed)
    if parameters:
        report.note_dictated(record.sum, certain, parameters)


def score(scorer: ScorerClient, batch: Sequence[Record]) -> list[tuple[TokenLogprobs, TokenLogprobs]]:
    """Returns two results for each sample: its logprobs in the recorded mode; and those of the distribution
    that it was drawn from, with the most likely token at each position."""
    mode, sampling = batch[0].mode, {**batch[0].sampling, "logprobs": 1}
    pairs = [(record.prompt, record.tokens) for record in batch]
    scores = scorer.score(pairs, logprob_mode=mode, **sampling)
    # Without parameters, tokens were drawn from the raw distribution.
    drawn = scores
    if mode == "raw" and batch[0].sampling:
        drawn = scorer.score(pairs, logprob_mode="processed", **sampling)
    return [(a.tokens, b.tokens) for a, b in zip(scores, drawn, strict=True)]


def audit(
    scorer: ScorerClient,
    records: Sequence[Record],
    report: Report,
    refused: dict[str, str],
    progress: Callable[[], None],
) -> None:
    """Checks the samples that were drawn with the scorer's weights and are not checked yet. `refused`: gets,
    for each other sample, the reason why it was not computed, by the sum of its line."""
    info = scorer.get_server_info().server
    digest, fingerprint = info.weight_version.digest, info.fingerprint.hex
    own = [record for record in records if record.weights == digest and not report.is_done(record.sum)]
    for record in own:
        if record.fingerprint != fingerprint:
            refused[record.sum] = (
                f"other arithmetic or another model: recorded fingerprint {record.fingerprint}, the scorer's"
                f" {fingerprint}"
            )
        elif record.settings != info.fingerprint.settings:
            refused[record.sum] = (
                f"another model directory: recorded settings {record.settings}, the scorer's"
                f" {info.fingerprint.settings}"
            )
    for batch in batches([record for record in own if record.sum not in refused], SEQUENCES):
        try:
            scored = score(scorer, batch)
        except (IsobitError, TypeError, ValueError) as error:
            refused.update({r.sum: f"the scorer refuses line {r.line}: {error}" for r in batch})
            continue
        for record, (computed, processed) in zip(batch, scored, strict=True):
            compare(record, computed.logprobs, report)
            judge_draws(record, processed, report)
        progress()


@contextmanager
def local_scorer(bin_dir: Path | None, model: Path, threads: int) -> Iterator[ScorerClient]:
    """Starts a scorer on this machine's CPU with a model directory."""
    with tempfile.TemporaryDirectory() as logs, Services(bin_dir, Path(logs)) as services:
        flags = [f"--model_root={model.parent}", f"--model={model.name}", "--shards=1"]
        scorer = services.start("isobit-scorer", "scorer", [*flags, f"--threads_per_rank={threads}"])
        services.wait_serving(scorer)
        with ScorerClient(scorer.target) as client:
            yield client


class Progress:
    """Shows the progress of an audit, and saves it in FILE.audit."""

    def __init__(self, state: Path, report: Report, samples: int):
        self._state, self._report, self._samples = state, report, samples
        self._told = 0.0
        self._saves = True

    def save(self) -> None:
        if not self._saves:
            return
        try:
            audit_state.save(self._state, self._report)
        except audit_state.StateError as error:
            self._saves = False
            print(f"note: {error}; --resume will compute everything again", file=sys.stderr)

    def __call__(self) -> None:
        self.save()
        if time.monotonic() - self._told > 1:
            self._told = time.monotonic()
            done = len(self._report.equal) + len(self._report.unequal)
            text = f"{done} of {self._samples} samples, {self._report.tokens} tokens"
            print(text, file=sys.stderr, flush=True)


def prepare(options: Options) -> tuple[list[Record], Report]:
    """Returns the samples of the recording, and the findings so far.

    Raises:
      ImportError, OSError, ValueError: the file cannot be used.
    """
    report = Report()
    records = read(options.file, report)
    state = audit_state.path_of(options.file)
    if options.resume and os.path.lexists(state):
        try:
            report = audit_state.load(state, [record.sum for record in records])
            read(options.file, report)
        except audit_state.StateError as error:
            print(f"note: {error}; everything is computed again", file=sys.stderr)
    report.file = options.file.name
    report.missing = {}
    if options.parquet:
        with options.file.open("rb") as file:
            is_parquet = file.read(4) == b"PAR1"
            file.seek(0)
            lines = lines_of(options.file) if is_parquet else map(parse_line, file)
            write_parquet(lines, options.parquet)
    return records, report


def compute(options: Options, records: Sequence[Record], report: Report) -> None:
    """Checks all samples that the given scorers and models can compute.

    Raises:
      IsobitError, ServiceError: a scorer failed.
    """
    refused: dict[str, str] = {}
    progress = Progress(audit_state.path_of(options.file), report, len(records))
    with stop_signals_as_exit(), ExitStack() as stack:
        for target in options.scorer:
            audit(stack.enter_context(ScorerClient(target)), records, report, refused, progress)
        for model in options.model:
            if all(report.is_done(record.sum) for record in records):
                break
            with local_scorer(options.bin_dir, model.resolve(), options.threads) as scorer:
                audit(scorer, records, report, refused, progress)
    left = [record for record in records if not report.is_done(record.sum)]
    reasons = (refused.get(r.sum, f"no scorer or model has the weights {r.weights}") for r in left)
    report.missing = dict(Counter(map(printable, reasons)))
    progress.save()


def run(options: Options) -> int:
    """Runs an audit and returns the exit status.

    Raises:
      BinaryNotFoundError: no scorer can be started.
    """
    try:
        if options.seal:
            Recorder(options.file, cut_torn_line=True).close()
            if not (options.model or options.scorer):
                return 0
        records, report = prepare(options)
    except (ImportError, OSError, ValueError) as error:
        print(f"error: {printable(error)}", file=sys.stderr)
        return 2
    try:
        compute(options, records, report)
    except (IsobitError, ServiceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    try:
        if options.json:
            found = {"verdict": report.verdict, "passed": report.passed, **asdict(report)}
            write_private(options.json, json.dumps(found, indent=2) + "\n")
        if options.html:
            write_private(options.html, html_of(report))
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text_of(report))
    return STATUS[report.verdict]
