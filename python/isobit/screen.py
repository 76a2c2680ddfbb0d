"""A program's output: lines, tables and, on a terminal, a progress bar that is erased at the end.

If the output is not a terminal, there are no control sequences: tables are plain text, and work in progress
is shown as one line. The same holds if rich is not installed, as in the environments of trainers.
"""

import contextlib
import importlib.util
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

_BAR_WIDTH = 24
_REDRAWS_PER_S = 5
# Work that takes less time than this shows no bar.
_BAR_AFTER_S = 2.0
_GB = 1e9


class Progress:
    """The state of some work. The thread that does the work may change `label`, `done` and `note`."""

    def __init__(self, label: str, total: int | None, in_bytes: bool = False):
        self.label = label
        self.total = total
        self.done = 0
        self.note = ""
        self.started = time.monotonic()
        self._in_bytes = in_bytes

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    def text(self) -> str:
        """The text after the bar."""
        parts = [self.note] if self.note else []
        if self.total and self._in_bytes:
            rate = self.done / _GB / max(self.seconds, 1e-3)
            parts.insert(0, f"{self.done / _GB:.2f}/{self.total / _GB:.2f} GB  {rate:.2f} GB/s")
        elif self.total:
            parts.insert(0, f"{self.done}/{self.total}")
        return "  ".join([*parts, f"{self.seconds:.0f} s"])

    def row(self) -> Any:
        """The whole row, for rich."""
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        row = Table.grid(padding=(0, 2))
        bar = [ProgressBar(self.total, min(self.done, self.total), _BAR_WIDTH)] if self.total else []
        row.add_row(self.label, *bar, self.text())
        return row


class Screen:
    """Writes to one stream, so that lines and the progress bar do not disturb each other."""

    def __init__(self, stream: TextIO | None = None):
        self._stream = stream or sys.stdout
        self.is_terminal = self._stream.isatty() and importlib.util.find_spec("rich") is not None
        self._console: Any = None
        if self.is_terminal:
            from rich.console import Console

            self._console = Console(file=self._stream, markup=False, highlight=False, emoji=False)
        self._lock = threading.Lock()

    def line(self, text: str = "") -> None:
        self._write(text, "\n")

    def paragraph(self, text: str, indent: str) -> None:
        """Writes `text` wrapped and indented, keeping its own line breaks."""
        width = min(shutil.get_terminal_size().columns, 100)
        for row in text.strip().splitlines() or [""]:
            self.line(textwrap.fill(row, width, initial_indent=indent, subsequent_indent=indent))

    def piece(self, text: str, indent: str) -> None:
        """Appends to the current line. After each line break in `text`, writes `indent`."""
        self._write(text.replace("\n", "\n" + indent), "")

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Writes a table: the first column left-aligned, the others right-aligned."""
        if self.is_terminal:
            from rich import box
            from rich.table import Table

            table = Table(*header, box=box.SIMPLE_HEAD)
            for column in table.columns[1:]:
                column.justify = "right"
            for row in rows:
                table.add_row(*row)
            self._console.print(table)
            return
        widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
        for row in (header, ["-" * width for width in widths], *rows):
            cells = [row[0].ljust(widths[0])]
            cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            self.line("  " + "  ".join(cells))

    @contextlib.contextmanager
    def progress(self, label: str, total: int | None = None, in_bytes: bool = False) -> Iterator[Progress]:
        """Shows a bar if the body runs longer than two seconds; without a terminal, one line."""
        progress = Progress(label, total, in_bytes)
        if not self.is_terminal:
            self.line(f"{label} ...")
            yield progress
            return
        from rich.live import Live

        live = Live(
            console=self._console,
            get_renderable=progress.row,
            refresh_per_second=_REDRAWS_PER_S,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        timer = threading.Timer(_BAR_AFTER_S, live.start)
        timer.daemon = True
        timer.start()
        try:
            yield progress
        finally:
            timer.cancel()
            timer.join()
            live.stop()

    def _write(self, text: str, end: str) -> None:
        with self._lock:
            if self.is_terminal:
                self._console.print(text, end=end, soft_wrap=True)
            else:
                print(text, end=end, file=self._stream, flush=True)
