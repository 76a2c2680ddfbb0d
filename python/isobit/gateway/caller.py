"""The caller of a request: its bearer token, and the roles that the access file gives to the token.

The access file is the same as the services' (docs/API.md). The gateway checks the role for a path before it
reads the body. It passes the token on, so that the service checks each call, too, and counts it for that
client.
"""

import contextlib
import contextvars
import hashlib
import hmac
import json
import logging
from collections.abc import Iterator
from pathlib import Path

from isobit.gateway.errors import HttpError
from isobit.token import ROLES

_LOG = logging.getLogger("isobit.gateway")

# The caller's token, which calls to services carry. None: they carry the gateway's own, if it has one.
_TOKEN: contextvars.ContextVar[str | None] = contextvars.ContextVar("isobit_caller_token", default=None)


def token_to_forward() -> str | None:
    return _TOKEN.get()


@contextlib.contextmanager
def as_caller(token: str | None) -> Iterator[None]:
    """Within the block, calls to services carry `token`; None: the gateway's own."""
    before = _TOKEN.set(token)
    try:
        yield
    finally:
        _TOKEN.reset(before)


def bearer(header: str | None) -> str | None:
    """The bearer token in an authorization header; None if there is none."""
    kind, _, token = (header or "").strip().partition(" ")
    return token.strip() if kind.lower() == "bearer" and token.strip() else None


class AccessFile:
    """Clients, identified by the SHA-256 of their tokens. The file is read again when it changes; if it is
    malformed then, the clients stay as they were."""

    def __init__(self, path: Path):
        """Reads the file.

        Raises:
          ValueError: it is malformed; the message names file and place.
          OSError: it cannot be read.
        """
        self._path = path
        self._stamp = self._stamp_now()
        self._roles = _parse(path)

    def check(self, token: str | None, roles: tuple[str, ...]) -> None:
        """Checks that the caller has one of `roles`.

        Raises:
          HttpError: 401: no token, or an unknown one. 403: the caller has none of the roles.
        """
        if token is None:
            raise HttpError(401, "expected an authorization header with a bearer token", None, _CHALLENGE)
        digest = hashlib.sha256(token.encode()).hexdigest()
        found = None
        for (
            known,
            owned,
        ) in (
            self._current().items()
        ):  # compare with all of them, so that the time does not reveal which one it is
            if hmac.compare_digest(known, digest):
                found = owned
        if found is None:
            raise HttpError(401, "unknown bearer token", None, _CHALLENGE)
        if not found.intersection(roles):
            raise HttpError(403, f"expected a caller with the role {' or '.join(roles)}")

    def _current(self) -> dict[str, frozenset[str]]:
        try:
            if (stamp := self._stamp_now()) != self._stamp:
                self._stamp = stamp
                self._roles = _parse(self._path)
        except (OSError, ValueError) as error:
            _LOG.error("the access file stays as it was: %s", error)
        return self._roles

    def _stamp_now(self) -> tuple[int, int, int]:
        info = self._path.stat()
        return info.st_ino, info.st_size, info.st_mtime_ns


_CHALLENGE = {"www-authenticate": "Bearer"}


def _parse(path: Path) -> dict[str, frozenset[str]]:
    """The roles of each token's SHA-256."""
    try:
        clients = json.loads(path.read_text("utf-8"))["clients"]
        found: dict[str, frozenset[str]] = {}
        for index, client in enumerate(clients):
            place, roles = f"clients[{index}]", frozenset(client["roles"])
            if not roles or roles - set(ROLES):
                raise ValueError(f"{place}.roles: expected some of {', '.join(ROLES)}, got {sorted(roles)}")
            for digest in client.get("token_sha256", ()):
                digest = digest.lower()
                if len(bytes.fromhex(digest)) != 32 or digest in found:
                    raise ValueError(f"{place}.token_sha256: expected 64 hex digits, and no token twice")
                found[digest] = roles
        return found
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path}: not an access file: {type(error).__name__}: {error}") from error
