"""What a gateway must remember beside the services: labels of weight versions, which directory serves, and
what sleeps. All workers of a gateway share it.
"""

import contextlib
import fcntl
import os
from collections.abc import Iterator

import msgspec

# Names the descriptor of a file that workers.share_notes makes; without it a process remembers for itself.
NOTES = "ISOBIT_GATEWAY_NOTES_FD"
MAX_LABELS = 4096  # older ones are forgotten


class Served(msgspec.Struct, frozen=True):
    """A directory whose weights an update has put to serve."""

    path: str  # below --model_root
    stamp: str  # of its files
    id: int
    digest: str


class Note(msgspec.Struct):
    labels: dict[int, str] = {}  # by version id, in the order in which they were given
    served: Served | None = None
    asleep: set[str] = set()  # of "weights" and "kv_cache"

    def label(self, version: int) -> str:
        """What clients call the weights of that id: as they said, else SGLang's "default" for the first
        weights, and the id for others."""
        return self.labels.get(version) or ("default" if version <= 1 else str(version))

    def put_label(self, version: int, label: str) -> None:
        self.labels.pop(version, None)
        self.labels[version] = label
        while len(self.labels) > MAX_LABELS:
            del self.labels[next(iter(self.labels))]


class Notes:
    """A Note that this process, or with a descriptor all workers, read and change."""

    def __init__(self, descriptor: int | None):
        """descriptor: of a file that can be read and written, such as a memfd."""
        self._descriptor = descriptor
        self._bytes = b""
        self._note = Note()

    @classmethod
    def of_environment(cls) -> "Notes":
        value = os.environ.get(NOTES)
        return cls(int(value) if value else None)

    def read(self) -> Note:
        """The note as it is now, not to be changed."""
        if self._descriptor is not None:
            fcntl.lockf(self._descriptor, fcntl.LOCK_SH)
            try:
                self._load()
            finally:
                fcntl.lockf(self._descriptor, fcntl.LOCK_UN)
        return self._note

    @contextlib.contextmanager
    def changing(self) -> Iterator[Note]:
        """The note, whose changes are kept when the block ends. The block must not wait for anything."""
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
