"""FILE.audit: the findings of an audit that was stopped, for --resume.

The file has an authentication code, made with a key that only the user who audits has:
$XDG_STATE_HOME/isobit/audit.key (default: ~/.local/state). So files of other users are not trusted. Samples
are identified by the sums of their lines; the file is valid for a recording that has all of them.
"""

import hashlib
import hmac
import json
import os
import secrets
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from isobit.audit.report import Report, printable
from isobit.private_files import open_private, write_private
from isobit.recording import parse_line

_KEY_BYTES = 32


class StateError(Exception):
    """The saved state cannot be used; the message says why."""


def path_of(recording: Path) -> Path:
    return recording.with_name(recording.name + ".audit")


def save(path: Path, report: Report) -> None:
    """Writes the state.

    Raises:
      StateError: the key or the state cannot be written.
    """
    found = asdict(report)
    try:
        write_private(path, json.dumps({**found, "code": _code_of(found, _key())}))
    except (OSError, RuntimeError) as error:
        raise StateError(f"{path} cannot be written: {error}") from None


def load(path: Path, sums: Iterable[str]) -> Report:
    """Returns the report that was saved for a recording whose lines have these sums.

    Raises:
      StateError: there is none, or it is another user's or another recording's.
    """
    try:
        file = open_private(path, os.O_RDONLY)
        with os.fdopen(file, "rb") as stream:
            found = parse_line(stream.read())
        key = _key()
    except (OSError, RuntimeError, ValueError) as error:
        raise StateError(f"{path} cannot be read: {printable(error)}") from None
    code = found.pop("code", None) if isinstance(found, dict) else None
    if not isinstance(code, str) or not hmac.compare_digest(code.encode(), _code_of(found, key).encode()):
        raise StateError(f"{path} was not written by this user's audit")
    try:
        report = Report(**found)
    except TypeError:
        raise StateError(f"{path} was written by another version of the audit") from None
    if not report.belongs_to(set(sums)):
        raise StateError(f"{path} belongs to another recording, or to lines that are gone")
    return report


def _code_of(found: dict[str, Any], key: bytes) -> str:
    return hmac.new(key, json.dumps(found, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _key() -> bytes:
    """Returns this user's key, which is made when it is first needed.

    Raises:
      OSError, RuntimeError: the key cannot be read or made.
    """
    folder = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "isobit"
    path = folder / "audit.key"
    if not path.exists():
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file, part = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(file, "wb") as stream:
                stream.write(secrets.token_bytes(_KEY_BYTES))
            os.link(part, path)  # if two audits run at the same time, the first one's key stays
        except FileExistsError:
            pass
        finally:
            os.unlink(part)
    with os.fdopen(open_private(path, os.O_RDONLY), "rb") as stream:
        key = stream.read()
    if len(key) != _KEY_BYTES:
        raise OSError(f"{path}: expected {_KEY_BYTES} bytes, got {len(key)}")
    return key
