"""Records what a rollout sampled, so that every logprob can be computed again later, by anyone, on any
machine.

    with Recorder("run.jsonl") as recorder:
        samples = rollout.generate(prompt, seed=1, temperature=0.8, max_tokens=64)
        recorder.add(prompt, samples, temperature=0.8)

`isobit audit` reads the file. Each line is a JSON object with FIELDS and holds one sample. A logprob is
stored as the 8 hex digits of its fp32 bits. `sum` is the SHA-256 of the previous line's `sum` (empty for the
first line) and of this line without its `sum`; see `sum_of`. It reveals lines that were changed, lost or
moved. The last line is the seal, an object with SEAL_FIELDS: the number of samples, and the sum that ends the
chain. A recording without a seal is still being written, was cut off, or its writer died. Sums and seal are
not a signature: anyone can write another file.
"""

import fcntl
import hashlib
import itertools
import json
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np

from isobit.calls import TokenIds, token_list
from isobit.private_files import open_private, replacing
from isobit.results import Sample
from isobit.sampling import SamplingOptions, to_proto

FORMAT = 1
FIELDS = (
    "format", "time", "request_id", "index", "prompt", "tokens", "logprobs", "logprob_mode", "sampling",
    "weights", "weight_version", "fingerprint", "settings", "finish_reason", "sum",
)  # fmt: skip
SEAL_FIELDS = ("format", "samples", "sum")
# Parameters that do not change a score.
_NOT_SCORED = ("n", "seed", "max_tokens", "max_new_tokens", "logprobs")

_SAMPLES = "samples"  # the field that only a seal has

_recorders: "weakref.WeakSet[Recorder]" = weakref.WeakSet()


class Recorder:
    """Appends samples to a file, and a seal at `close`. Threads may share it; processes may not.

    When add() returns, the operating system has its lines, so a killed process loses none. A recording whose
    process died has no seal; another Recorder can continue it, and its close() writes the seal.
    """

    def __init__(self, path: str | os.PathLike, *, cut_torn_line: bool = False):
        """Opens the file, or makes it. In an existing recording, continues after the last sample; the old
        seal is removed with the first sample that is added.

        Args:
          cut_torn_line: removes an incomplete last line, which a crash of the machine can leave.

        Raises:
          ValueError: the file does not end with a complete line of a recording.
          BlockingIOError: another recorder, of this or another process, has the file open.
          OSError: the file cannot be opened, is a symlink, or belongs to another user.
        """
        self._path = Path(path)
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._file = open_private(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            _lock_file(self._file, self._path)
            self._state = _state_of(self._file, self._path, cut_torn_line)
        except BaseException:
            os.close(self._file)
            raise
        _recorders.add(self)

    def add(
        self, prompt_token_ids: TokenIds, samples: Iterable[Sample], **sampling: Unpack[SamplingOptions]
    ) -> None:
        """Records the samples of one prompt: all of them or, if it raises an exception, none.

        Args:
          prompt_token_ids: one row of integers.
          samples: the result of RolloutClient.generate, or of isobit.aio.
          **sampling: the parameters that the samples were drawn with. n, seed and max_tokens may be left out.

        Raises:
          ValueError: a sample has no tokens; or its tokens come from several weight versions, which no scorer
            has at the same time; or the recorder is closed, or belongs to the parent of this forked process.
          TypeError: an unknown sampling parameter, or not one row of token ids.
          OSError: the file cannot be written, for example because the disk is full; it then ends with its
            last complete line. Or another process has written to it.
        """
        self._check_process()
        options = _options_of(sampling)
        prompt = token_list(prompt_token_ids, "prompt_token_ids")
        lines = [self._line(prompt, sample, options) for sample in samples]
        with self._lock:
            if lines:
                self._append(lines)

    @staticmethod
    def _line(prompt: list[int], sample: Sample, options: dict[str, Any]) -> dict[str, Any]:
        where = f"request {sample.request_id}, sample {sample.index}"
        tokens = sample.tokens
        if len(tokens.token_ids) == 0:
            raise ValueError(f"{where}: expected at least one token")
        if len(set(tokens.weight_versions.tolist())) > 1:
            raise ValueError(f"{where}: expected tokens of one weight version, got several")
        return {
            "format": FORMAT,
            "time": round(time.time(), 3),
            "request_id": sample.request_id,
            "index": sample.index,
            "prompt": prompt,
            "tokens": tokens.token_ids.tolist(),
            "logprobs": bits_hex(tokens.logprobs),
            "logprob_mode": sample.logprob_mode,
            "sampling": options,
            "weights": sample.weight_version.digest,
            "weight_version": sample.weight_version.id,
            "fingerprint": sample.fingerprint,
            "settings": sample.settings,
            "finish_reason": sample.finish_reason,
        }

    def _check_process(self) -> None:
        if self._process != os.getpid():
            raise ValueError(
                f"{self._path}: expected process {self._process}, which made this recorder, got its child"
                f" {os.getpid()}: make a Recorder in the child, with another file"
            )

    def _append(self, lines: list[dict[str, Any]]) -> None:
        """Writes lines of samples. The caller holds the lock."""
        if self._file < 0:
            raise ValueError(f"{self._path}: expected an open recorder, got a closed one")
        state = self._state
        info = os.fstat(self._file)
        if info.st_nlink == 0 or info.st_size != state.end + state.seal_size:
            raise OSError(f"{self._path}: another process has removed it, or has written to it")
        if state.seal_size:
            os.ftruncate(self._file, state.end)
            state = self._state = _State(state.samples, state.sum, state.end)
        before, texts = state.sum, []
        for line in lines:
            line["sum"] = before = sum_of(before, line)
            texts.append(_text_of(line))
        data = b"".join(texts)
        self._write(data, _State(state.samples + len(lines), before, state.end + len(data)))

    def _seal(self) -> None:
        if self._state.seal_size:
            return
        state = self._state
        seal: dict[str, Any] = {"format": FORMAT, "samples": state.samples}
        seal["sum"] = sum_of(state.sum, seal)
        data = _text_of(seal)
        self._write(data, _State(state.samples, state.sum, state.end, len(data)))

    def _write(self, data: bytes, after: "_State") -> None:
        """Writes all of `data`, or nothing and raises an exception. after: the state that results."""
        before = self._state
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            self._state = after
        except BaseException:
            self._state = before
            os.ftruncate(self._file, before.end + before.seal_size)
            raise

    def close(self) -> None:
        """Seals and closes the file.

        Raises:
          OSError: the seal cannot be written; the file is closed without it.
        """
        with self._lock:
            if self._file < 0:
                return
            try:
                self._seal()
            finally:
                file, self._file = self._file, -1
                os.close(file)

    def _drop(self) -> None:
        """Closes the file in a forked child. It belongs to the parent, and its lock would last as long as a
        child has it open."""
        self._lock = (
            threading.Lock()
        )  # a new one, since another thread of the parent may have held the old one
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _drop_all() -> None:
    for recorder in list(_recorders):
        recorder._drop()


os.register_at_fork(after_in_child=_drop_all)


@dataclass(frozen=True)
class _State:
    """The state of a recording's file."""

    samples: int  # the number of lines with samples
    sum: str  # the sum of the last of these lines; "": there are none
    end: int  # where these lines end, in bytes
    seal_size: int = 0  # bytes of the seal that follows; 0: there is no seal


def _lock_file(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise BlockingIOError(error.errno, "another recorder has it", str(path)) from None


def _state_of(file: int, path: Path, cut_torn_line: bool) -> _State:
    lines, size, last, before, torn = 0, 0, b"", b"", b""
    with open(file, "rb", closefd=False) as stream:
        for line in stream:
            if not line.endswith(b"\n"):
                torn = line
                break
            lines, size, last, before = lines + 1, size + len(line), line, last
    if torn and not cut_torn_line:
        raise ValueError(
            f"{path}: the last line is not whole; remove it with cut_torn_line=True or `isobit audit --seal`,"
            " or record into a new file"
        )
    found = _line_of(last, path) if lines else {}
    if torn:
        if not torn.startswith(b"{"):
            raise ValueError(f"{path}: the last line is not one of a recording")
        os.ftruncate(file, size)
    if lines == 0:
        return _State(0, "", 0)
    if set(found) != set(SEAL_FIELDS):
        return _State(lines, str(found["sum"]), size)
    if found["samples"] != lines - 1:
        raise ValueError(f"{path}: its seal says {found['samples']} samples, there are {lines - 1}")
    sum_before = str(_line_of(before, path)["sum"]) if before else ""
    return _State(lines - 1, sum_before, size - len(last), len(last))


def _line_of(text: bytes, path: Path) -> dict[str, Any]:
    try:
        found = parse_line(text)
    except ValueError:
        found = {}
    if not isinstance(found, dict) or "sum" not in found:
        raise ValueError(f"{path}: the last line is not one of a recording")
    return found


def _text_of(line: Mapping[str, Any]) -> bytes:
    return (json.dumps(line, separators=(",", ":")) + "\n").encode()


def parse_line(text: bytes) -> Any:
    """Returns the JSON value in a line.

    Raises:
      ValueError: it is not JSON, or readers may understand it differently.
    """

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(found)
        if len(value) != len(found):
            raise ValueError("it has a field twice")
        return value

    try:
        return json.loads(text.decode(), object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def lines_of(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """Yields the lines of a recording that write_parquet wrote, including the seal.

    Raises:
      ImportError: pyarrow is not installed (pip install 'isobit[parquet]').
      ValueError: the file is not such a recording.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for line in batch.to_pylist():
                    if line.get(_SAMPLES) is not None:
                        yield {name: line[name] for name in SEAL_FIELDS}
                        continue
                    line.pop(_SAMPLES, None)
                    line["sampling"] = parse_line(line["sampling"].encode())
                    yield line
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: expected a recording in Parquet: {error}") from None


def write_parquet(lines: Iterable[Mapping[str, Any]], path: str | os.PathLike) -> None:
    """Writes lines of a recording (as json.loads returns them) as Parquet: one column for each field, with
    `sampling` as JSON text. Nothing is lost, so the sums are still valid; the seal is a row, too. Only the
    owner may read the file.

    Raises:
      ImportError: pyarrow is not installed (pip install 'isobit[parquet]').
      ValueError: a field is missing in a line, or has a wrong type.
      OSError: the file cannot be written.
    """
    import pyarrow
    from pyarrow import parquet

    types = {"prompt": pyarrow.list_(pyarrow.uint32()), "tokens": pyarrow.list_(pyarrow.uint32())}
    types |= dict.fromkeys(("format", "index", "weight_version", _SAMPLES), pyarrow.int64()) | {
        "time": pyarrow.float64()
    }
    schema = pyarrow.schema([(name, types.get(name, pyarrow.string())) for name in (*FIELDS, _SAMPLES)])
    try:
        with (
            replacing(path) as file,
            parquet.ParquetWriter(file, schema, compression="zstd") as writer,
        ):
            for rows in _groups(map(_row_of, lines), 1024):
                writer.write_table(pyarrow.Table.from_pylist(rows, schema=schema))
    except (pyarrow.ArrowException, KeyError, TypeError) as error:
        raise ValueError(f"a line is not one of a recording: {error!r}") from None


def _row_of(line: Mapping[str, Any]) -> dict[str, Any]:
    if set(line) == set(SEAL_FIELDS):
        return dict(line)
    if set(line) != set(FIELDS):
        raise KeyError(f"expected {', '.join(FIELDS)}, got {', '.join(map(str, line))}")
    return {**line, "sampling": json.dumps(line["sampling"])}


def _groups(rows: Iterable[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    rows = iter(rows)
    while group := list(itertools.islice(rows, size)):
        yield group


def sum_of(before: str, line: Mapping[str, Any]) -> str:
    """Returns the `sum` of a line, given the sum of the line before it ("" for the first line)."""
    rest = {name: value for name, value in line.items() if name != "sum"}
    text = before + json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def bits_hex(logprobs: np.ndarray) -> str:
    """Returns fp32 [tokens] as text, 8 hex digits for each, the sign's digit first."""
    return logprobs.astype(">f4").tobytes().hex()


def logprobs_of(bits: str) -> np.ndarray:
    """Returns the fp32 [tokens] that bits_hex wrote.

    Raises:
      ValueError: `bits` is not 8 hex digits for each token.
    """
    data = bytes.fromhex(bits)
    if len(data) % 4:
        raise ValueError(f"expected 8 hex digits for each token, got {len(bits)}")
    return np.frombuffer(data, ">f4").astype(np.float32)


def _options_of(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters that a score depends on, checked as in generate(), in a form that JSON can
    hold."""
    plain = {name: _plain(value) for name, value in sampling.items()}  # an iterator can be read only once
    to_proto(plain)
    options = {k: v for k, v in plain.items() if v is not None and k not in _NOT_SCORED}
    if "logit_bias" in options:
        options["logit_bias"] = {str(token): bias for token, bias in options["logit_bias"].items()}
    return options


def _plain(value: Any) -> Any:
    """Turns numbers and rows of NumPy and torch, sets and iterators into Python's numbers, lists and
    dicts."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value
