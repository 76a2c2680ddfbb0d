"""Writes down what a rollout sampled, so that anybody can compute every logprob again, anywhere, later.

    with Recorder("run.jsonl") as recorder:
        samples = rollout.generate(prompt, seed=1, temperature=0.8, max_tokens=64)
        recorder.add(prompt, samples, temperature=0.8)

`isobit audit` reads the file. One line is one sample, a JSON object with FIELDS. Logprobs are the 8 hex
digits of their fp32 bits. `sum` is the SHA-256 of the line before's `sum` (of the first line: nothing) and of
this line without its `sum`, as `sum_of` says: it finds lines that were changed, lost or moved. It is no
signature: whoever wants to can write another file.
"""

import hashlib
import itertools
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self, Unpack

import numpy as np

from isobit.calls import TokenIds
from isobit.results import Sample
from isobit.sampling import SamplingOptions, to_proto

FORMAT = 1
FIELDS = (
    "format", "time", "request_id", "index", "prompt", "tokens", "logprobs", "logprob_mode", "sampling",
    "weights", "weight_version", "fingerprint", "settings", "finish_reason", "sum",
)  # fmt: skip
# What scoring does not depend on.
_NOT_SCORED = ("n", "seed", "max_tokens", "max_new_tokens")


class Recorder:
    """Appends samples to a file. Threads may share it. Each line is with the operating system when add()
    returns, so that a killed process loses none."""

    def __init__(self, path: str | os.PathLike):
        """Goes on behind the last line of a file that exists.

        Raises:
            ValueError: the file does not end with a whole line of a recording.
            OSError: the file cannot be opened.
        """
        self._lock = threading.Lock()
        self._file = Path(path).open("a+b", buffering=0)  # noqa: SIM115  it outlives this call
        try:
            self._sum = _last_sum(self._file)
        except BaseException:
            self._file.close()
            raise

    def add(
        self, prompt_token_ids: TokenIds, samples: Iterable[Sample], **sampling: Unpack[SamplingOptions]
    ) -> None:
        """Records the samples of one prompt.

        Args:
            samples: RolloutClient.generate's, or those of isobit.aio.
            **sampling: what they were drawn with. n, seed and max_tokens may be left out.

        Raises:
            ValueError: a sample without tokens, or whose tokens several versions of the weights drew, which
                no later scorer has together.
            InvalidArgumentError, TypeError: not a sampling parameter.
        """
        to_proto(sampling)
        options = {name: _plain(value) for name, value in sampling.items() if name not in _NOT_SCORED}
        options = {name: value for name, value in options.items() if value is not None}
        lines = [self._line(prompt_token_ids, sample, options) for sample in samples]
        with self._lock:
            for line in lines:
                line["sum"] = self._sum = sum_of(self._sum, line)
                self._file.write((json.dumps(line, separators=(",", ":")) + "\n").encode())

    @staticmethod
    def _line(prompt: TokenIds, sample: Sample, options: dict[str, Any]) -> dict[str, Any]:
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
            "prompt": [int(token) for token in prompt],
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

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def lines_of(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """The lines of a recording that write_parquet wrote.

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
                    line["sampling"] = json.loads(line["sampling"])
                    yield line
    except (pyarrow.ArrowException, KeyError, TypeError) as error:
        raise ValueError(f"{path}: expected a recording in Parquet: {error}") from None


def write_parquet(lines: Iterable[Mapping[str, Any]], path: str | os.PathLike) -> None:
    """Writes lines of a recording, as json.loads gives them, in Parquet: a column a field, `sampling` as its
    JSON text. Nothing is lost, so their sums still fit.

    Raises:
        ImportError: pyarrow is not there (pip install 'isobit[parquet]').
        ValueError: a line lacks a field, or one has another type.
    """
    import pyarrow
    from pyarrow import parquet

    types = {"prompt": pyarrow.list_(pyarrow.uint32()), "tokens": pyarrow.list_(pyarrow.uint32())}
    types |= dict.fromkeys(("format", "index", "weight_version"), pyarrow.int64()) | {
        "time": pyarrow.float64()
    }
    schema = pyarrow.schema([(name, types.get(name, pyarrow.string())) for name in FIELDS])
    part = Path(f"{os.fspath(path)}.part")
    try:
        with parquet.ParquetWriter(part, schema, compression="zstd") as writer:
            for rows in _groups(lines, 1024):
                table = [{**row, "sampling": json.dumps(row["sampling"])} for row in rows]
                writer.write_table(pyarrow.Table.from_pylist(table, schema=schema))
        part.replace(path)
    except (pyarrow.ArrowException, KeyError, TypeError) as error:
        raise ValueError(f"a line is not one of a recording: {error!r}") from None
    finally:
        part.unlink(missing_ok=True)


def _groups(lines: Iterable[Mapping[str, Any]], size: int) -> Iterator[list[Mapping[str, Any]]]:
    lines = iter(lines)
    while group := list(itertools.islice(lines, size)):
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


def _plain(value: Any) -> Any:
    """What JSON can hold: NumPy's numbers as Python's, token ids of a bias as text."""
    if isinstance(value, Mapping):
        return {str(int(key)): _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | list | tuple):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _last_sum(file: Any) -> str:
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return ""
    block = 1 << 16
    while True:
        file.seek(max(0, size - block))
        lines = file.read(size).split(b"\n")
        if len(lines) > 2 or block >= size:
            break
        block *= 16
    if lines[-1] != b"":
        raise ValueError(f"{file.name}: the last line is not whole; cut it off, or record into a new file")
    try:
        return str(json.loads(lines[-2])["sum"])
    except (ValueError, KeyError, TypeError, IndexError):
        raise ValueError(f"{file.name}: the last line is not one of a recording") from None
