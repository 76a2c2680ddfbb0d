"""One exception class for each gRPC status, so that callers do not have to know gRPC."""

import grpc


class IsobitError(Exception):
    """A call failed. `code` is the gRPC status, `details` the server's message."""

    def __init__(self, code: grpc.StatusCode, details: str):
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details

    def __reduce__(self):
        # Worker processes pass exceptions on. By default an exception is rebuilt from its message alone,
        # which fails.
        return type(self), (self.code, self.details), self.__dict__


class InvalidArgumentError(IsobitError, ValueError):
    """An argument is wrong in itself; the message names field, value and bound."""


class NotFoundError(IsobitError, LookupError):
    """A model directory, or a file of it, does not exist."""


class FailedPreconditionError(IsobitError):
    """The service is not in the state that the call needs, such as another weight version."""


class AlreadyExistsError(IsobitError):
    """A request with the same id is in flight."""


class AbortedError(IsobitError):
    """A weight update ended the call, or another update is in progress."""


class UnavailableError(IsobitError, ConnectionError):
    """The service cannot be reached, or it is loading, draining or stopped. It is safe to try again."""


class DeadlineExceededError(IsobitError, TimeoutError):
    """The call took longer than its timeout. The service has freed what the call held."""


class CancelledError(IsobitError):
    """The call was cancelled."""


class UnauthenticatedError(IsobitError, PermissionError):
    """The service does not know the caller: the call had no valid certificate or bearer token."""


class PermissionDeniedError(IsobitError, PermissionError):
    """The caller is known, but does not have the role for this call."""


class InternalError(IsobitError):
    """The service failed, for example because logits were not finite."""


class OutOfRangeError(IsobitError, ValueError):
    """The call went beyond the end of the data."""


class UnimplementedError(IsobitError, NotImplementedError):
    """The service does not have this method: it is another service, or another release."""


class DataLossError(IsobitError):
    """Data was lost or damaged on its way."""


class UnknownError(IsobitError):
    """The call failed with no reason that a status describes."""


class ResourceExhaustedError(IsobitError):
    """A queue or the KV cache is full, a quota is used up, or a message is too large.

    `retry_after_ms`: the service's hint when to try again, in milliseconds; None if trying again is useless.
    """

    def __init__(self, code: grpc.StatusCode, details: str, retry_after_ms: int | None = None):
        super().__init__(code, details)
        self.retry_after_ms = retry_after_ms


class IncompleteStreamError(Exception):
    """A stream ended without an error, but something was missing."""


_CLASSES = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.FAILED_PRECONDITION: FailedPreconditionError,
    grpc.StatusCode.ABORTED: AbortedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.INTERNAL: InternalError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
    grpc.StatusCode.OUT_OF_RANGE: OutOfRangeError,
    grpc.StatusCode.DATA_LOSS: DataLossError,
    grpc.StatusCode.UNKNOWN: UnknownError,
}


def from_rpc_error(error: grpc.RpcError) -> IsobitError:
    """Returns the exception for a failed call."""
    code, details = error.code(), error.details() or ""
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        # As pairs, since dict() cannot copy grpc.aio's Metadata.
        trailing = {key: value for key, value in error.trailing_metadata() or ()}
        hint = trailing.get("retry-after-ms", "")
        return ResourceExhaustedError(code, details, int(hint) if hint.isdecimal() else None)
    return _CLASSES.get(code, IsobitError)(code, details)
