"""The address of a service: host:port as users write it, and whether it is on this machine."""

import ipaddress
import re

# gRPC's own forms of targets are passed on unchanged: dns:///host:port, unix:path, ipv4:a:1,b:2.
_GRPC_SCHEMES = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock|xds|google-c2p):")
_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")


def checked_target(target: str) -> str:
    """Returns `target`, which must be host:port.

    Raises:
      TypeError: it is not a string.
      ValueError: it has no port, or it has a scheme such as http://. The message says what to write.
    """
    if not isinstance(target, str):
        raise TypeError(f"target is {target!r} of type {type(target).__name__}, expected host:port as text")
    if _GRPC_SCHEMES.match(target):
        return target
    if found := _SCHEME.match(target):
        rest = target[found.end() :].rstrip("/")
        raise ValueError(f"target is {target!r}, expected host:port without {found[0]}, such as {rest!r}")
    host, colon, port = target.rpartition(":")
    if host.count(":") and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"target is {target!r}, expected host:port, of IPv6 [address]:port")
    if not colon or not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
        raise ValueError(f"target is {target!r}, expected host:port, such as 127.0.0.1:7001")
    if re.search(r"[\s/@]", host):
        raise ValueError(f"target is {target!r}, expected host:port: no spaces, path or user")
    return target


def is_loopback(target: str) -> bool:
    """Whether `target` is a loopback name or address of this machine."""
    if re.match(r"unix(-abstract)?:", target):
        return True
    host = re.sub(r"^(dns|ipv4|ipv6):(//[^/]*/)?", "", target).rpartition(":")[0].strip("[]").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
