"""What a gateway must remember itself, since the services do not: labels of weight versions, the directory of
the weights in use, and what is asleep. All workers of a gateway share it."""

import contextlib
import fcntl
import os
from collections.abc import Iterator

import msgspec

# This environment variable names the descriptor of a file made by workers.share_notes. Without it, a process
# keeps its own notes.
NOTES = "ISOBIT_GATEWAY_NOTES_FD"
MAX_LABELS = 4096  # the oldest ones beyond this number are dropped


class Served(msgspec.Struct, frozen=True):
    """The directory of the weights in use."""

    path: str  # below --model_root
    stamp: str  # changes with the files of the directory
    id: int
    digest: str


class Note(msgspec.Struct):
    labels: dict[int, str] = {}  # by version id, in the order in which clients set them
    served: Served | None = None
    asleep: set[str] = set()  # a subset of {"weights", "kv_cache"}

    def label(self, version: int) -> str:
        """The clients' name for the weights of this id. If they gave none: SGLang's "default" for the first
        weights, otherwise the id."""
        return self.labels.get(version) or ("default" if version <= 1 else str(version))

    def put_label(self, version: int, label: str) -> None:
        self.labels.pop(version, None)
        self.labels[version] = label
        while len(self.labels) > MAX_LABELS:
            del self.labels[next(iter(self.labels))]


class Notes:
    """A Note that this process reads and changes; with a descriptor, all workers share it."""

    def __init__(self, descriptor: int | None):
        """descriptor: a file open for reading and writing, such as a memfd; None: only this process has the
        note."""
        self._descriptor = descriptor
        self._bytes = b""
        self._note = Note()

    @classmethod
    def of_environment(cls) -> "Notes":
        value = os.environ.get(NOTES)
        return cls(int(value) if value else None)

    def read(self) -> Note:
        """Returns the current note. Do not change it."""
        if self._descriptor is not None:
            fcntl.lockf(self._descriptor, fcntl.LOCK_SH)
            try:
                self._load()
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        return self._note

    @contextlib.contextmanager
    def changing(self) -> Iterator[Note]:
        """Yields the note; changes are stored when the block ends. The block must not wait for anything."""
        if self._descriptor is None:
            yield self._note
            return
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX)
        try:
            self._load()
            yield self._note
            self._bytes = msgspec.json.encode(self._note)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, self._bytes, 0)
        finally:
            fcntl.lockf(self._descriptor, fcntl.LOCK_UN)

    def _load(self) -> None:
        content = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        if content != self._bytes:
            self._note = msgspec.json.decode(content, type=Note)
            self._bytes = content
