"""Protects a gateway on a user's machine from web pages of other sites in the user's browser.

Such a page can send a POST to any address, or make its own host name resolve to 127.0.0.1. So the gateway
answers a request with an Origin only if that is the gateway's own. At a loopback address it answers only if
the Host is a loopback name or an address.
"""

import ipaddress
from collections.abc import Mapping

from starlette.types import Scope

from isobit.gateway.errors import HttpError


def check_browser(scope: Scope, headers: Mapping[bytes, bytes]) -> None:
    """Checks that a request does not come from a page of another site.

    Raises:
      HttpError: 403: it does.
    """
    host = headers.get(b"host", b"").decode("latin-1").lower()
    origin = headers.get(b"origin")
    if origin is not None:
        origin_host = origin.decode("latin-1").lower().partition("://")[2]
        if not origin_host or origin_host != host:
            raise HttpError(403, "origin: pages of other sites may not call the gateway")
    server = scope.get("server")
    if host and server and server[0] and _is_loopback(server[0]) and not _is_local_name(_without_port(host)):
        raise HttpError(403, f"host: expected localhost or an address, got {host[:256]!r}")


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _is_local_name(name: str) -> bool:
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
