"""Runs `isobit serve` and `isobit pair` as a user does, on a tiny model with a tokenizer of single bytes."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from isobit.launch import run_model_tool
from isobit_tools.testing import BIN_DIR, ServiceTest

# Long enough for a loaded machine: nothing waits for it to pass.
TIMEOUT_S = 240.0


def is_alive(pid: int) -> bool:
    """Whether `pid` runs, and is no zombie that only waits to be read."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    return False


def children_of(pid: int) -> dict[int, str]:
    """The command lines of the processes whose parent `pid` is, by id."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            if int(stat.read_text().rpartition(") ")[2].split()[1]) == pid:
                words = stat.with_name("cmdline").read_text().split("\0")
                found[int(stat.parent.name)] = " ".join(words)
    return found


class Command:
    """One `isobit` process. `said` has the lines of its stderr, `out` those of its stdout."""

    def __init__(self, test: unittest.TestCase, words: Sequence[str], environment: dict[str, str]):
        self.test = test
        # Where it is ignored, as in a shell's background, children would ignore it as well.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "isobit", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        self.out: list[str] = []
        self.said: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=pair, daemon=True)
            for pair in ((self.process.stdout, self.out), (self.process.stderr, self.said))
        ]
        for reader in self._readers:
            reader.start()
        test.addCleanup(self._clean_up)

    @property
    def text(self) -> str:
        return "".join(self.said)

    def wait_for(self, condition: Callable[[], object], what: str) -> None:
        """Fails with `what`, and all that was said, if the process ends or nothing comes of it."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            ended = self.process.poll() is not None
            if (ended and not condition()) or time.monotonic() > deadline:
                self.test.fail(f"{what}: status {self.process.poll()}\n{self.text}{''.join(self.out)}")
            time.sleep(0.02)

    def first_line(self) -> str:
        """What it prints first."""
        self.wait_for(lambda: self.out, "nothing was printed")
        return self.out[0]

    def children(self) -> dict[str, int]:
        """The services' ids by kind."""
        kinds = ("isobit-rollout", "isobit-scorer", "isobit-comparator", "isobit.gateway")
        found = children_of(self.process.pid).items()
        return {
            kind.removeprefix("isobit").strip("-."): pid
            for kind in kinds
            for pid, line in found
            if kind in line
        }

    def end(self, number: int | None = None) -> int:
        """Sends a signal, if one is given; the exit status."""
        if number is not None:
            self.process.send_signal(number)
        status = self.process.wait(TIMEOUT_S)
        for reader in self._readers:
            reader.join(TIMEOUT_S)
        return status

    def _read(self, stream, lines: list[str]) -> None:
        for line in stream:
            lines.append(line)

    def _clean_up(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(TIMEOUT_S)
        for stream in (self.process.stdout, self.process.stderr):
            stream.close()


class CliTest(ServiceTest):
    """`self.model` has a tokenizer."""

    @classmethod
    def make_model(cls) -> None:
        run_model_tool(BIN_DIR, "make", "tiny-qwen3", str(cls.model), "--seed", "3")
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {token: index for index, token in enumerate(["<bos>", "<eos>", *alphabet])}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.add_special_tokens(["<bos>", "<eos>"])
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(cls.model / "tokenizer.json"))

    def isobit(self, *words: str, **environment: str) -> Command:
        # Logs of what fails are kept in a temporary folder.
        return Command(self, words, {"TMPDIR": str(self.log_dir), **environment})

    def wait_gone(self, pids: Sequence[int]) -> None:
        self.wait_until(lambda: not any(map(is_alive, pids)), f"{pids} are left", TIMEOUT_S)

    def taken_port(self) -> int:
        """A port at which somebody listens."""
        server = self.enterContext(socket.create_server(("127.0.0.1", 0)))
        return server.getsockname()[1]
