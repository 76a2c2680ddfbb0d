"""Files with prompts or tokens: only their owner may read them, no symlink redirects them, and they are never
half written."""

import errno
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

MODE = 0o600


def open_private(path: str | os.PathLike, flags: int) -> int:
    """Returns a descriptor of the regular file `path`, after setting its mode to 0600.

    Args:
      flags: the flags of os.open; with O_CREAT a new file is made.

    Raises:
      OSError: the file cannot be opened, is a symlink or not a regular file, or belongs to another user.
    """
    # Without O_NONBLOCK, opening a FIFO would wait.
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        file = os.open(path, flags, MODE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise OSError(error.errno, "expected a file, got a symlink", os.fspath(path)) from None
        raise
    try:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "expected a regular file", os.fspath(path))
        if info.st_uid != os.geteuid():
            raise OSError(
                errno.EPERM,
                f"expected a file of user {os.geteuid()}, got one of {info.st_uid}",
                os.fspath(path),
            )
        if stat.S_IMODE(info.st_mode) != MODE:
            os.fchmod(file, MODE)
    except BaseException:
        os.close(file)
        raise
    return file


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Yields a new file of mode 0600, which replaces `path` when the block ends without an error. Until then
    the old file stays complete. A symlink is replaced, not followed.

    Raises:
      OSError: the file cannot be written, or `path` is not a regular file but, for example, a device.
    """
    path = Path(path)
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        pass
    else:
        if not (stat.S_ISREG(kind) or stat.S_ISLNK(kind)):
            raise OSError(errno.EINVAL, "expected a regular file", str(path))
    # The name is random, so that no other process can have put something there.
    file, part = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(file, "wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def write_private(path: str | os.PathLike, text: str) -> None:
    """Replaces a whole file with `text`. Raises OSError as `replacing` does."""
    with replacing(path) as file:
        file.write(text.encode("utf-8", "backslashreplace"))
