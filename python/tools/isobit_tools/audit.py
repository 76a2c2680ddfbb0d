"""Computes every logprob of a recording again, on this machine, and compares bits.

    python -m isobit_tools.audit run.jsonl --model models/my-model [--model models/my-model-after-100-steps]
    python -m isobit_tools.audit run.jsonl --scorer 127.0.0.1:7002

isobit.recording writes recordings. A scorer of this machine's CPU is started for each --model; its weights'
digest says which samples it can answer for. Wherever a rollout ran, on GPUs and at any tensor-parallel size,
its logprobs must come out here bit by bit. The exit status is 0 only if every sample was computed again and
every bit was equal; 1 if not; 2 for wrong arguments.
"""

import argparse
import html
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from isobit.client import ScorerClient
from isobit.errors import IsobitError
from isobit.recording import FIELDS, FORMAT, lines_of, logprobs_of, sum_of, write_parquet
from isobit_tools.services import ServiceError, Services, stop_signals_as_exit

ROOT = Path(__file__).resolve().parents[3]
SEQUENCES = 64  # of a call, at most
SHOWN = 20  # differences and faults that a report lists


@dataclass(frozen=True)
class Difference:
    """A token whose logprob came out otherwise."""

    line: int
    request_id: str
    index: int  # of the sample
    position: int  # of the token in the completion
    token: int
    recorded: str  # bits, 8 hex digits
    computed: str


@dataclass
class Report:
    """What is known of a recording. Saved after every call, for --resume."""

    file: str = ""
    lines: int = 0
    equal: dict[str, int] = field(default_factory=dict)  # tokens, by the line's sum
    unequal: dict[str, int] = field(default_factory=dict)  # tokens that differ, by the line's sum
    tokens: int = 0  # compared
    differences: list[dict] = field(default_factory=list)  # the first SHOWN
    faults: list[str] = field(default_factory=list)  # of lines that cannot be read or were changed
    missing: dict[str, int] = field(default_factory=dict)  # samples not computed, by reason

    @property
    def passed(self) -> bool:
        return bool(self.equal) and not (self.unequal or self.faults or self.missing)

    def done(self, record: "Record") -> bool:
        return record.sum in self.equal or record.sum in self.unequal


@dataclass(frozen=True)
class Record:
    """A line of the recording."""

    line: int
    prompt: list[int]
    tokens: list[int]
    logprobs: np.ndarray
    mode: str
    sampling: dict[str, Any]
    weights: str
    fingerprint: str
    settings: str
    request_id: str
    index: int
    sum: str

    @property
    def call(self) -> str:
        """Samples of one call have this in common."""
        return json.dumps([self.mode, self.sampling], sort_keys=True)


def parse(line: int, text: bytes | dict, before: str) -> Record:
    """ValueError says what is wrong with the line. before: the sum of the line before it."""
    try:
        found = json.loads(text) if isinstance(text, bytes) else text
    except ValueError:
        raise ValueError("it is no JSON") from None
    if not isinstance(found, dict) or set(found) != set(FIELDS):
        raise ValueError(f"expected an object with {', '.join(FIELDS)}")
    if found["format"] != FORMAT:
        raise ValueError(f"expected format {FORMAT}, got {found['format']}")
    if found["sum"] != sum_of(before, found):
        raise ValueError("its sum does not fit: it, or the line before it, was changed, lost or moved")
    try:
        sampling = dict(found["sampling"])
        if "logit_bias" in sampling:
            sampling["logit_bias"] = {int(key): value for key, value in sampling["logit_bias"].items()}
        record = Record(
            line, list(found["prompt"]), list(found["tokens"]), logprobs_of(found["logprobs"]),
            found["logprob_mode"], sampling, found["weights"], found["fingerprint"], found["settings"],
            found["request_id"], found["index"], found["sum"],
        )  # fmt: skip
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"a field is not as it must be: {error}") from None
    if len(record.logprobs) != len(record.tokens):
        raise ValueError(f"{len(record.tokens)} tokens, but {len(record.logprobs)} logprobs")
    return record


def read(path: Path, report: Report) -> list[Record]:
    """The lines that are whole; `report` gets the faults of the others."""
    records, before = [], ""
    report.faults.clear()
    report.lines = 0
    with path.open("rb") as file:
        is_parquet = file.read(4) == b"PAR1"
        file.seek(0)
        for line, text in enumerate(lines_of(path) if is_parquet else file, start=1):
            report.lines = line
            try:
                if isinstance(text, bytes) and not text.endswith(b"\n"):
                    raise ValueError("it is cut off")
                records.append(parse(line, text, before))
                before = records[-1].sum
            except ValueError as error:
                report.faults.append(f"line {line}: {error}")
                before = _sum_in(text)  # so that one fault is told once
    return records


def _sum_in(text: bytes | dict) -> str:
    try:
        return str((json.loads(text) if isinstance(text, bytes) else text)["sum"])
    except (ValueError, KeyError, TypeError):
        return ""


def compare(record: Record, computed: np.ndarray, report: Report) -> None:
    """Counts the tokens of a sample."""
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


def batches(records: Sequence[Record]) -> Iterator[list[Record]]:
    """Samples that one call can score."""
    by_call: dict[str, list[Record]] = {}
    for record in records:
        by_call.setdefault(record.call, []).append(record)
    for same in by_call.values():
        for at in range(0, len(same), SEQUENCES):
            yield same[at : at + SEQUENCES]


def audit(
    scorer: ScorerClient, records: Sequence[Record], report: Report, refused: dict[str, str], progress
) -> None:
    """Computes the samples of the scorer's weights that are not done yet. refused: gets why others are not,
    by the line's sum."""
    info = scorer.get_server_info().server
    digest, fingerprint = info.weight_version.digest, info.fingerprint.hex
    own = [record for record in records if record.weights == digest and not report.done(record)]
    for record in own:
        if record.fingerprint != fingerprint:
            refused[record.sum] = (
                f"other arithmetic, or another model: fingerprint {record.fingerprint}, the scorer's"
                f" {fingerprint}"
            )
        elif record.settings != info.fingerprint.settings:
            refused[record.sum] = (
                f"another model directory: recorded {record.settings}, the scorer's"
                f" {info.fingerprint.settings}"
            )
    for batch in batches([record for record in own if record.sum not in refused]):
        try:
            scores = scorer.score(
                [(r.prompt, r.tokens) for r in batch], logprob_mode=batch[0].mode, **batch[0].sampling
            )
        except (IsobitError, TypeError, ValueError) as error:
            refused.update({r.sum: f"the scorer refuses line {r.line}: {error}" for r in batch})
            continue
        for record, score in zip(batch, scores, strict=True):
            compare(record, score.tokens.logprobs, report)
        progress()


def text_of(report: Report) -> str:
    """The report for a screen."""
    unequal = sum(report.unequal.values())
    lines = [
        f"{report.file}: {'PASSED' if report.passed else 'FAILED'}",
        f"  {unequal} of {report.tokens} tokens unequal, in {len(report.equal) + len(report.unequal)} of"
        f" {report.lines} samples",
    ]
    lines += [
        f"  line {d['line']}, request {d['request_id']}, sample {d['index']}, token {d['position']} (id"
        f" {d['token']}): recorded {d['recorded']}, computed {d['computed']}"
        for d in report.differences
    ]
    lines += [f"  {fault}" for fault in report.faults[:SHOWN]]
    if len(report.faults) > SHOWN:
        lines.append(f"  and {len(report.faults) - SHOWN} more faults")
    lines += [f"  {count} samples not computed: {reason}" for reason, count in report.missing.items()]
    return "\n".join(lines)


def html_of(report: Report) -> str:
    """The report as one page that needs nothing else."""
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(value))}</td>" for value in d.values()) + "</tr>"
        for d in report.differences
    )
    heads = "".join(f"<th>{name}</th>" for name in Difference.__dataclass_fields__)
    summary, *rest = (html.escape(line.strip()) for line in text_of(report).split("\n"))
    items = "".join(f"<li>{line}</li>" for line in rest)
    table = f"<table><tr>{heads}</tr>{rows}</table>" if rows else ""
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>isobit audit</title><style>'
        "body{font:16px system-ui;margin:2em;max-width:70em}td,th{padding:.2em .8em;text-align:left;"
        "font-family:monospace}</style>"
        f"<h1>{summary}</h1><ul>{items}</ul>{table}</html>\n"
    )


def write(path: Path, text: str) -> None:
    """Replaces a file as a whole."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, "utf-8")
    part.replace(path)


@contextmanager
def local_scorer(bin_dir: Path, model: Path, threads: int) -> Iterator[ScorerClient]:
    """A scorer of this machine's CPU on a model directory."""
    with tempfile.TemporaryDirectory() as logs, Services(bin_dir, Path(logs)) as services:
        flags = [f"--model_root={model.parent}", f"--model={model.name}", "--shards=1"]
        scorer = services.start("isobit-scorer", "scorer", [*flags, f"--threads_per_rank={threads}"])
        services.wait_serving(scorer)
        with ScorerClient(scorer.target) as client:
            yield client


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m isobit_tools.audit", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("file", type=Path, help="a recording")
    add("--model", type=Path, action="append", default=[], metavar="DIR", help="weights; may be repeated")
    add("--scorer", action="append", default=[], metavar="HOST:PORT", help="one that runs; may be repeated")
    add("--bin_dir", type=Path, default=ROOT / "build" / "release" / "bin", help="where isobit-scorer is")
    add("--threads", type=int, default=os.cpu_count() or 1, help="of a scorer that is started")
    add("--json", type=Path, metavar="FILE", help="write the report there, too")
    add("--html", type=Path, metavar="FILE", help="write the report there, too")
    add("--parquet", type=Path, metavar="FILE", help="write the recording there as Parquet (needs pyarrow)")
    add("--resume", action="store_true", help="go on with what FILE.audit says is done")
    arguments = parser.parse_args(argv)
    if not (arguments.model or arguments.scorer):
        parser.error("expected --model or --scorer, which say what computes")
    for model in arguments.model:
        if not (model / "config.json").is_file():
            parser.error(f"--model: expected a model directory, got {model}")
    if not arguments.file.is_file():
        parser.error(f"expected a recording, got {arguments.file}, which is no file")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = arguments_of(argv)
    state = arguments.file.with_name(arguments.file.name + ".audit")
    report = Report()
    if arguments.resume and state.is_file():
        report = Report(**json.loads(state.read_text("utf-8")))
    report.file = arguments.file.name
    try:
        records = read(arguments.file, report)
        if arguments.parquet:
            with arguments.file.open("rb") as lines:
                write_parquet(map(json.loads, lines), arguments.parquet)
    except (ImportError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    refused: dict[str, str] = {}
    told = 0.0

    def progress() -> None:
        nonlocal told
        write(state, json.dumps(asdict(report)))
        if time.monotonic() - told > 1:
            told = time.monotonic()
            done = len(report.equal) + len(report.unequal)
            print(f"{done} of {len(records)} samples, {report.tokens} tokens", file=sys.stderr, flush=True)

    try:
        with stop_signals_as_exit(), ExitStack() as stack:
            for target in arguments.scorer:
                audit(stack.enter_context(ScorerClient(target)), records, report, refused, progress)
            for model in arguments.model:
                if all(map(report.done, records)):
                    break
                with local_scorer(arguments.bin_dir, model.resolve(), arguments.threads) as scorer:
                    audit(scorer, records, report, refused, progress)
    except (IsobitError, ServiceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    left = [record for record in records if not report.done(record)]
    reasons = (refused.get(r.sum, f"nobody has the weights {r.weights}") for r in left)
    report.missing = dict(Counter(reasons))
    write(state, json.dumps(asdict(report)))
    if arguments.json:
        write(arguments.json, json.dumps({"passed": report.passed, **asdict(report)}, indent=2) + "\n")
    if arguments.html:
        write(arguments.html, html_of(report))
    print(text_of(report))
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
