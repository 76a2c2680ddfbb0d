"""One exception class for each gRPC status, so that callers need not know gRPC."""

import grpc


class IsobitError(Exception):
    """A call failed. `code` is the gRPC status, `details` the server's message."""

    def __init__(self, code: grpc.StatusCode, details: str):
        super().__init__(f"{code.name}: {details}")
        self.code = code
        self.details = details

    def __reduce__(self):
        # An exception is rebuilt from its message alone by default, which fails; worker processes hand it on.
        return type(self), (self.code, self.details), self.__dict__


class InvalidArgumentError(IsobitError, ValueError):
    """The request is wrong as it stands; the message names field, value and bound."""


class NotFoundError(IsobitError, LookupError):
    """A model directory, or a file of it, is not there."""


class FailedPreconditionError(IsobitError):
    """The service is not in the state that the call needs, such as another weight version."""


class AlreadyExistsError(IsobitError):
    """A request of the same id is in flight."""


class AbortedError(IsobitError):
    """A weight update ended the call."""


class UnavailableError(IsobitError, ConnectionError):
    """The service cannot be reached, or it is loading or draining. Trying again is safe."""


class DeadlineExceededError(IsobitError, TimeoutError):
    """The call took longer than its timeout; the service has freed what it held."""


class CancelledError(IsobitError):
    """The call was cancelled."""


class UnauthenticatedError(IsobitError, PermissionError):
    """The service does not know who calls: no valid certificate or bearer token came with the call."""


class PermissionDeniedError(IsobitError, PermissionError):
    """The caller is known, but may not do this."""


class InternalError(IsobitError):
    """The service failed, such as by logits that are not finite."""


class OutOfRangeError(IsobitError, ValueError):
    """The call went past the end of what there is."""


class UnimplementedError(IsobitError, NotImplementedError):
    """The service has no such method: another service listens there, or another release."""


class DataLossError(IsobitError):
    """Data was lost or damaged on its way."""


class UnknownError(IsobitError):
    """The call failed without a reason that has a status."""


class ResourceExhaustedError(IsobitError):
    """A queue or the KV cache is full, a quota is used up, or a message is over the limit.

    `retry_after_ms` is the service's hint of when to try again; None if trying again is of no use.
    """

    def __init__(self, code: grpc.StatusCode, details: str, retry_after_ms: int | None = None):
        super().__init__(code, details)
        self.retry_after_ms = retry_after_ms


class IncompleteStreamError(Exception):
    """A stream ended without an error and without all it had to bring."""


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
    """The exception that stands for a failed call."""
    code, details = error.code(), error.details() or ""
    if code == grpc.StatusCode.RESOURCE_EXHAUSTED:
        # As pairs: grpc.aio's Metadata is no mapping that dict() could copy.
        trailing = {key: value for key, value in error.trailing_metadata() or ()}
        hint = trailing.get("retry-after-ms", "")
        return ResourceExhaustedError(code, details, int(hint) if hint.isdecimal() else None)
    return _CLASSES.get(code, IsobitError)(code, details)
