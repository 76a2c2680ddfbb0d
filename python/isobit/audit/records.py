"""Reads a recording for an audit: which lines are complete, whether a line was changed, lost or moved, and
whether the seal at the end confirms that nothing is missing. It computes no logprobs."""

import fcntl
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from isobit.audit.report import Report, printable
from isobit.recording import FIELDS, FORMAT, SEAL_FIELDS, lines_of, logprobs_of, parse_line, sum_of
from isobit.sampling import mode_to_proto, to_proto

_MAX_ID = 2**32 - 1


@dataclass(frozen=True)
class Record:
    """One line of a recording."""

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
        """A key that is equal for samples that one Score call can compute."""
        return json.dumps([self.mode, self.sampling], sort_keys=True)


def read(path: Path, report: Report) -> list[Record]:
    """Returns the lines that are complete. Adds the faults of the others, and what the seal says, to
    `report`.

    Raises:
      ImportError: the file is Parquet, and pyarrow is not installed.
      OSError, ValueError: the file cannot be read.
    """
    records, before = [], ""
    report.faults.clear()
    seal_line = line = 0
    with path.open("rb") as file:
        report.is_open = _is_recorded_to(file)
        is_parquet = file.read(4) == b"PAR1"
        file.seek(0)
        for line, text in enumerate(lines_of(path) if is_parquet else file, start=1):
            found: Any = None
            try:
                found = _value_of(text)
                if seal_line:
                    raise ValueError(f"it comes after the seal in line {seal_line}")
                if isinstance(found, dict) and set(found) == set(SEAL_FIELDS):
                    seal_line = line
                    check_seal(found, line - 1, before)
                else:
                    records.append(parse(line, found, before))
            except (ValueError, RecursionError) as error:
                report.faults.append(f"line {line}: {printable(error)}")
            before = _sum_in(found)  # also for a faulty line, so that one fault is reported once
    report.sealed = seal_line > 0
    report.lines = line - report.sealed
    return records


def check_seal(found: dict[str, Any], samples: int, before: str) -> None:
    """Checks the seal of a recording with `samples` lines. `before`: the sum of the last of these lines.

    Raises:
      ValueError: the seal is wrong; the message says why.
    """
    if found["sum"] != sum_of(before, found):
        raise ValueError("the seal's sum does not fit: it, or the line before it, was changed, lost or moved")
    if found["samples"] != samples:
        raise ValueError(f"the seal says {found['samples']} samples, there are {samples}")


def parse(line: int, found: Any, before: str) -> Record:
    """Returns the record in a line. `before`: the sum of the line before it.

    Raises:
      ValueError: the line is wrong; the message says why.
    """
    if not isinstance(found, dict) or set(found) != set(FIELDS):
        raise ValueError(f"expected an object with {', '.join(FIELDS)}")
    if found["format"] != FORMAT:
        raise ValueError(f"expected format {FORMAT}, got {found['format']}")
    if found["sum"] != sum_of(before, found):
        raise ValueError("its sum does not fit: it, or the line before it, was changed, lost or moved")
    try:
        record = Record(
            line, _ids(found, "prompt"), _ids(found, "tokens"), logprobs_of(_text(found, "logprobs")),
            _text(found, "logprob_mode"), _sampling(found["sampling"]), _text(found, "weights"),
            _text(found, "fingerprint"), _text(found, "settings"), _text(found, "request_id"),
            _number(found["index"], "index"), _text(found, "sum"),
        )  # fmt: skip
        mode_to_proto(record.mode)
    except (ValueError, TypeError) as error:
        raise ValueError(f"a field is wrong: {error}") from None
    if len(record.logprobs) != len(record.tokens):
        raise ValueError(
            f"expected as many logprobs as tokens, got {len(record.logprobs)} and {len(record.tokens)}"
        )
    return record


def _value_of(text: bytes | dict) -> Any:
    if not isinstance(text, bytes):
        return text
    if not text.endswith(b"\n"):
        raise ValueError("it is cut off")
    try:
        return parse_line(text)
    except json.JSONDecodeError:
        raise ValueError("it is not JSON") from None


def _number(value: Any, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_ID:
        raise ValueError(f"{name}: expected 0 to {_MAX_ID}, got {value!r}")
    return value


def _ids(found: dict[str, Any], name: str) -> list[int]:
    value = found[name]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name}: expected a list of token ids, at least one")
    return [_number(token, f"{name}[{at}]") for at, token in enumerate(value)]


def _text(found: dict[str, Any], name: str) -> str:
    if not isinstance(found[name], str):
        raise ValueError(f"{name}: expected a string, got {found[name]!r}")
    return found[name]


def _sampling(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"sampling: expected an object, got {value!r}")
    sampling = dict(value)
    if isinstance(sampling.get("logit_bias"), dict):
        sampling["logit_bias"] = {int(key): bias for key, bias in sampling["logit_bias"].items()}
    to_proto(sampling)
    return sampling


def _sum_in(found: Any) -> str:
    return str(found["sum"]) if isinstance(found, dict) and "sum" in found else ""


def _is_recorded_to(file: BinaryIO) -> bool:
    """Whether a recorder has the file open now."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def batches(records: Sequence[Record], size: int) -> Iterator[list[Record]]:
    """Yields groups of samples that one call can score, at most `size` in each."""
    by_call: dict[str, list[Record]] = {}
    for record in records:
        by_call.setdefault(record.call, []).append(record)
    for same in by_call.values():
        for at in range(0, len(same), size):
            yield same[at : at + size]
