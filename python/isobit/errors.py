"""Exceptions that stand for gRPC statuses, so that callers need not know gRPC."""

import contextlib
from collections.abc import Iterator

import grpc


class IsobitError(Exception):
    """A call failed. `code` is the gRPC status, `details` the server's message."""

    def __init__(self, code: grpc.StatusCode, details: str):
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details


class InvalidArgumentError(IsobitError, ValueError):
    """The request is wrong as it stands; the message names field, value and bound."""


class FailedPreconditionError(IsobitError):
    """The service is not in the state that the call needs, such as another weight version."""


class AlreadyExistsError(IsobitError):
    """A request of the same id is in flight."""


class AbortedError(IsobitError):
    """A weight update ended the call."""


class UnavailableError(IsobitError, ConnectionError):
    """The service cannot be reached, or it is draining. Trying again is safe."""


class DeadlineExceededError(IsobitError, TimeoutError):
    """The call took longer than its timeout; the service has freed what it held."""


class CancelledError(IsobitError):
    """The call was cancelled."""


class ResourceExhaustedError(IsobitError):
    """Queue or page budget is full, or a message is over the limit.

    `retry_after_ms` is the service's hint of when to try again; None if trying again is of no use.
    """

    def __init__(self, code: grpc.StatusCode, details: str, retry_after_ms: int | None = None):
        super().__init__(code, details)
        self.retry_after_ms = retry_after_ms


class IncompleteStreamError(Exception):
    """A stream ended without an error and without all it had to bring."""


_CLASSES = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.ABORTED: AbortedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: CancelledError,
}


def from_rpc_error(error: grpc.RpcError) -> IsobitError:
    """The exception that stands for a failed call."""
    code, details = error.code(), error.details() or ""
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        hints = dict(error.trailing_metadata() or ()).get("retry-after-ms")
        return ResourceExhaustedError(code, details, int(hints) if hints is not None else None)
    return _CLASSES.get(code, IsobitError)(code, details)


@contextlib.contextmanager
def rpc_errors() -> Iterator[None]:
    """Turns a grpc.RpcError raised inside into the exception that stands for it."""
    try:
        yield
    except grpc.RpcError as error:
        raise from_rpc_error(error) from error
