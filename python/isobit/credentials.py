"""How a client connects to a protected service: TLS, a client certificate, a bearer token."""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import grpc

from isobit.targets import checked_target, is_loopback

Options = tuple[tuple[str, int | str], ...]


class Security(TypedDict, total=False):
    """Keyword arguments of every client. Without any of them: plain text and no bearer token."""

    tls_ca: str | Path  # PEM of the CA to trust; if given, the connection uses TLS
    tls_cert: str | Path  # PEM of the client's certificate, with its chain; needs tls_key
    tls_key: str | Path  # PEM of the certificate's key
    tls_server_name: str  # the name that the service's certificate must have; default: the target's host
    token: str  # bearer token that is sent with each call
    token_file: str | Path  # file with that token; it is read again when it changes


@dataclass(frozen=True)
class Endpoint:
    """The checked address of a service, and how to connect to it."""

    target: str  # host:port
    options: Options
    credentials: grpc.ChannelCredentials | None  # None: plain text
    token: "BearerToken | None"  # sent with each call


def endpoint(
    target: str, options: Options, credentials: grpc.ChannelCredentials | None, security: Security
) -> Endpoint:
    """Returns the endpoint for `target` (host:port), with the arguments `security`, or with gRPC's own
    `credentials`.

    Raises:
      TypeError: an unknown argument.
      ValueError: `target` is not host:port, arguments exclude each other, or a bearer token would go to
        another host in plain text.
      OSError: a file cannot be read.
    """
    checked_target(target)
    if unknown := security.keys() - Security.__annotations__.keys():
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    if is_loopback(target):  # ignore http_proxy: no proxy could reach this machine's own services
        options = (*options, ("grpc.enable_http_proxy", 0))
    tls_names = [name for name in security if name.startswith("tls_")]
    if credentials is not None and tls_names:
        raise ValueError(f"credentials and {tls_names[0]} are both given, expected one of them")
    if tls_names:
        credentials = _tls_credentials(security)
        if name := security.get("tls_server_name"):
            options = (*options, ("grpc.ssl_target_name_override", name))
    if "token" not in security and "token_file" not in security:
        return Endpoint(target, options, credentials, None)
    if credentials is None and not is_loopback(target):
        raise ValueError(
            f"{target} is another host: a token needs tls_ca, since others could read it in plain text"
        )
    return Endpoint(target, options, credentials, BearerToken(security))


def connect(to: Endpoint) -> grpc.Channel:
    """Returns a synchronous channel to the endpoint."""
    if to.credentials is None:
        channel = grpc.insecure_channel(to.target, options=to.options)
    else:
        channel = grpc.secure_channel(to.target, to.credentials, options=to.options)
    return channel if to.token is None else grpc.intercept_channel(channel, _TokenInterceptor(to.token))


def read_token(path: str | Path) -> str:
    """Returns the bearer token in a file.

    Raises:
      ValueError: the file is not one word of printable ASCII.
      OSError: it cannot be read.
    """
    return _checked(Path(path).read_text("ascii").strip(), str(path))


def _checked(token: str, name: str) -> str:
    if not token or not all("!" <= character <= "~" for character in token):
        raise ValueError(f"{name}: expected one token of printable ASCII characters")
    return token


def _tls_credentials(security: Security) -> grpc.ChannelCredentials:
    if "tls_ca" not in security:
        raise ValueError("tls_ca is missing: the other TLS arguments need it")
    if ("tls_cert" in security) != ("tls_key" in security):
        raise ValueError("tls_cert and tls_key: expected both or neither")

    def read(name: str) -> bytes | None:
        return Path(security[name]).read_bytes() if name in security else None

    return grpc.ssl_channel_credentials(read("tls_ca"), read("tls_key"), read("tls_cert"))


class _CallDetails(grpc.ClientCallDetails):
    """The details of a call, with other metadata."""

    def __init__(self, details: grpc.ClientCallDetails, metadata: list):
        self.method = details.method
        self.timeout = details.timeout
        self.metadata = metadata
        self.credentials = details.credentials
        self.wait_for_ready = details.wait_for_ready
        self.compression = details.compression


class BearerToken:
    """The bearer token from the argument `token` or `token_file`."""

    def __init__(self, security: Security):
        if "token" in security and "token_file" in security:
            raise ValueError("token and token_file are both given, expected one of them")
        self._path = Path(security["token_file"]) if "token_file" in security else None
        self._lock = threading.Lock()
        self._stamp: tuple[int, int, int] | None = None
        self._token = _checked(security["token"], "token") if self._path is None else self._current()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata for a call that starts now."""
        return (("authorization", f"Bearer {self._current()}"),)

    def _current(self) -> str:
        """Returns the bearer token. While the file cannot be read, it is the last one that was read."""
        if self._path is None:
            return self._token
        with self._lock:
            try:
                info = self._path.stat()
                stamp = (info.st_ino, info.st_size, info.st_mtime_ns)
                if stamp != self._stamp:
                    self._token, self._stamp = read_token(self._path), stamp
            except (OSError, ValueError):
                if self._stamp is None:
                    raise
            return self._token


class _TokenInterceptor(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds the bearer token to each call. gRPC's own call credentials would refuse plain text."""

    def __init__(self, token: BearerToken):
        self._token = token

    def _intercept(self, continuation, details, request):
        metadata = [*(details.metadata or ()), *self._token.metadata()]
        return continuation(_CallDetails(details, metadata), request)

    intercept_unary_unary = _intercept
    intercept_unary_stream = _intercept
    intercept_stream_unary = _intercept
    intercept_stream_stream = _intercept
