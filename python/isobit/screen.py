"""A program's output: lines, tables and, on a terminal, a progress bar that is erased at the end."""

import contextlib
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TextIO

_BAR_WIDTH = 24
_REDRAW_S = 0.2
# Shorter work shows no bar.
_BAR_AFTER_S = 2.0
_ERASE_LINE = "\r\x1b[K"


class Progress:
    """Work in progress. The thread that does the work may change `done` and `note`."""

    def __init__(self, label: str, total: int | None):
        self.label = label
        self.total = total
        self.done = 0
        self.note = ""
        self.started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def text(self) -> str:
        parts = [self.label]
        if self.total:
            filled = _BAR_WIDTH * self.done // self.total
            parts.append(f"[{'#' * filled}{'.' * (_BAR_WIDTH - filled)}] {self.done}/{self.total}")
        if self.note:
            parts.append(self.note)
        parts.append(f"{self.seconds:.0f} s")
        return "  ".join(parts)


class Screen:
    """Writes to one stream; lines and the progress bar do not garble each other."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stdout
        self._is_terminal = self._stream.isatty()
        self._lock = threading.Lock()
        self._bar_shown = False

    def line(self, text: str = "") -> None:
        with self._lock:
            self._erase_bar()
            print(text, file=self._stream, flush=True)

    def paragraph(self, text: str, indent: str) -> None:
        """`text` with its own line breaks, wrapped and indented."""
        width = min(shutil.get_terminal_size().columns, 100)
        for row in text.strip().splitlines() or [""]:
            self.line(textwrap.fill(row, width, initial_indent=indent, subsequent_indent=indent))

    def piece(self, text: str, indent: str) -> None:
        """Appends to the current line; after each line break in `text` comes `indent`."""
        with self._lock:
            self._erase_bar()
            print(text.replace("\n", "\n" + indent), end="", file=self._stream, flush=True)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """First column to the left, the others to the right."""
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
        for row in (header, ["-" * width for width in widths], *rows):
            cells = [row[0].ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            self.line("  " + "  ".join(cells))

    @contextlib.contextmanager
    def progress(self, label: str, total: int | None = None) -> Iterator[Progress]:
        """Shows a bar while the body runs longer than two seconds; without a terminal, one line."""
        progress = Progress(label, total)
        if not self._is_terminal:
            self.line(f"{label} ...")
            yield progress
            return
        finished = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(progress, finished), daemon=True)
        ticker.start()
        try:
            yield progress
        finally:
            finished.set()
            ticker.join()
            with self._lock:
                self._erase_bar()

    def _tick(self, progress: Progress, finished: threading.Event) -> None:
        while not finished.wait(_REDRAW_S):
            if progress.seconds < _BAR_AFTER_S:
                continue
            with self._lock:
                width = shutil.get_terminal_size().columns - 1
                print(_ERASE_LINE + progress.text()[:width], end="", file=self._stream, flush=True)
                self._bar_shown = True

    def _erase_bar(self) -> None:
        if self._bar_shown:
            print(_ERASE_LINE, end="", file=self._stream, flush=True)
            self._bar_shown = False
