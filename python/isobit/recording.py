"""Writes down what a rollout sampled, so that anybody can compute every logprob again, anywhere, later.

    with Recorder("run.jsonl") as recorder:
        samples = rollout.generate(prompt, seed=1, temperature=0.8, max_tokens=64)
        recorder.add(prompt, samples, temperature=0.8)

`isobit audit` reads the file. One line is one sample, a JSON object with FIELDS. Logprobs are the 8 hex
digits of their fp32 bits. `sum` is the SHA-256 of the line before's `sum` (of the first line: nothing) and of
this line without its `sum`, as `sum_of` says: it finds lines that were changed, lost or moved. The last line
is the seal, an object with SEAL_FIELDS: how many samples there are, and the sum that ends the chain. A
recording without one is still being written, was cut, or lost its writer. Sums and seal are no signature:
whoever wants to can write another file.
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
# What scoring does not depend on.
_NOT_SCORED = ("n", "seed", "max_tokens", "max_new_tokens", "logprobs")

_SAMPLES = "samples"  # the field that only a seal has

_recorders: "weakref.WeakSet[Recorder]" = weakref.WeakSet()


class Recorder:
    """Appends samples to a file, and its seal at `close`. Threads may share it; processes may not.

    The lines of an add() are with the operating system when it returns, so that a killed process loses none.
    A recording whose process died has no seal: another Recorder on it goes on, and its close() seals.
    """

    def __init__(self, path: str | os.PathLike, *, cut_torn_line: bool = False):
        """Goes on behind the last sample of a file that exists, whose seal goes with the first sample added.

        Args:
            cut_torn_line: cuts off a last line that is not whole, as a machine that crashed leaves it.

        Raises:
            ValueError: the file does not end with a whole line of a recording.
            BlockingIOError: another recorder, of this process or of another, has the file.
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
        """Records the samples of one prompt: all of them or, with an exception, none.

        Args:
            samples: RolloutClient.generate's, or those of isobit.aio.
            **sampling: what they were drawn with. n, seed and max_tokens may be left out.

        Raises:
            ValueError: a sample without tokens, or whose tokens several versions of the weights drew, which
                no later scorer has together; the recorder is closed, or of the process that forked this one.
            TypeError: not a sampling parameter, or not one row of token ids.
            OSError: the file could not be written, such as on a full disk, and ends with the last whole line;
                or somebody else has written to it.
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
            raise ValueError(f"{where}: expected tokens of one version of the weights, got several")
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
                f"{self._path}: expected process {self._process}, whose recorder this is, got its child"
                f" {os.getpid()}: make a Recorder in the child, for a file of its own"
            )

    def _append(self, lines: list[dict[str, Any]]) -> None:
        """Writes lines of samples; the caller holds the lock."""
        if self._file < 0:
            raise ValueError(f"{self._path}: expected an open recorder, got one that is closed")
        state = self._state
        info = os.fstat(self._file)
        if info.st_nlink == 0 or info.st_size != state.end + state.seal_size:
            raise OSError(f"{self._path}: somebody else has removed it, or written to it")
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
        """All of `data`, or none and an exception. after: the state that it makes."""
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
        """Seals and closes the file. OSError: no seal could be written; the file is closed without it."""
        with self._lock:
            if self._file < 0:
                return
            try:
                self._seal()
            finally:
                file, self._file = self._file, -1
                os.close(file)

    def _drop(self) -> None:
        """In a forked child: the file is the parent's, whose lock would last as long as a child has it."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
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
    """Of a recording's file."""

    samples: int  # lines
    sum: str  # of the last of them; "": there is none
    end: int  # of them, in bytes
    seal_size: int = 0  # bytes of the seal, which follows; 0: there is none


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
            f"{path}: the last line is not whole; cut it with cut_torn_line=True or `isobit audit --seal`,"
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
    """The JSON value of a line. ValueError: it is none, or one that readers may understand differently."""

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
    """The lines of a recording that write_parquet wrote, its seal included.

    Raises:
        ImportError: pyarrow is not there (pip install 'isobit[parquet]').
        ValueError: the file is no such recording.
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
    """Writes lines of a recording, as json.loads gives them, in Parquet: a column a field, `sampling` as its
    JSON text. Nothing is lost, so their sums still fit; the seal is a row, too. Only the file's owner may
    read it.

    Raises:
        ImportError: pyarrow is not there (pip install 'isobit[parquet]').
        ValueError: a line lacks a field, or one has another type.
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
    """The `sum` of a line, given that of the line before it ("" for the first)."""
    rest = {name: value for name, value in line.items() if name != "sum"}
    text = before + json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def bits_hex(logprobs: np.ndarray) -> str:
    """fp32 [tokens] as 8 hex digits each, the sign's first."""
    return logprobs.astype(">f4").tobytes().hex()


def logprobs_of(bits: str) -> np.ndarray:
    """The fp32 [tokens] that bits_hex wrote. ValueError: not 8 hex digits each."""
    data = bytes.fromhex(bits)
    if len(data) % 4:
        raise ValueError(f"expected 8 hex digits for each token, got {len(bits)}")
    return np.frombuffer(data, ">f4").astype(np.float32)


def _options_of(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """What scoring depends on, checked as generate() does, as JSON can hold it."""
    plain = {name: _plain(value) for name, value in sampling.items()}  # an iterator can be read once only
    to_proto(plain)
    options = {k: v for k, v in plain.items() if v is not None and k not in _NOT_SCORED}
    if "logit_bias" in options:
        options["logit_bias"] = {str(token): bias for token, bias in options["logit_bias"].items()}
    return options


def _plain(value: Any) -> Any:
    """Numbers and rows of NumPy and torch, sets and iterators as Python's numbers, lists and dicts."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [_plain(item) for item in value]
    return value
