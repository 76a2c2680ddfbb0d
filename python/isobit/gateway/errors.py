"""Errors as HTTP: the status of a failed call, and the body in which a dialect reports it.

4xx: the client's fault. It gets the same answer each time, so only 429 is worth another try. 503: nothing has
begun.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from isobit.errors import (
    AbortedError,
    AlreadyExistsError,
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    IncompleteStreamError,
    InvalidArgumentError,
    IsobitError,
    NotFoundError,
    OutOfRangeError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)

_LOG = logging.getLogger("isobit.gateway")
_MAX_RETRY_AFTER_S = 110  # OpenAI's clients ignore values above 120
NO_RETRY = {"x-should-retry": "false"}
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    503: "ServiceUnavailableError",
}
# The beginning of services' messages that name a field of SamplingParams.
_SAMPLING_FIELD = re.compile(r"[\w +]*\bsampling\.(\w+)")
_STATUS = {
    InvalidArgumentError: 400,
    OutOfRangeError: 400,
    UnimplementedError: 400,
    NotFoundError: 404,
    UnauthenticatedError: 401,
    PermissionDeniedError: 403,
    AlreadyExistsError: 409,
    AbortedError: 409,
    FailedPreconditionError: 409,
    DeadlineExceededError: 504,
    UnavailableError: 503,
    CancelledError: 503,
}


class HttpError(Exception):
    """An error for the client. `param`: the field of its request that is wrong, or None."""

    def __init__(
        self, status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        """OpenAI's name for this class of errors."""
        return _TYPES.get(self.status, "InternalServerError" if self.status >= 500 else "BadRequestError")


class BadRequest(HttpError):
    """A field of the request is wrong in itself."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(400, message, param)


def not_offered(name: str, instead: str = "") -> BadRequest:
    """Returns the error for a request for something that isobit does not have. `instead`: the reason, or what
    to use."""
    return BadRequest(f"{name} is not offered by isobit" + (f": {instead}" if instead else ""), name)


ErrorBody = Callable[[HttpError], dict[str, Any]]


def openai_body(error: HttpError) -> dict[str, Any]:
    """The form of OpenAI and vLLM. Clients that read SGLang's errors can read it, too."""
    return {
        "error": {
            "message": error.message,
            "type": error.type,
            "param": error.param,
            "code": error.status,
        }
    }


def as_http(error: Exception) -> HttpError:
    """Returns the error that the client gets, for any exception that ended its request."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, ResourceExhaustedError):
        return _exhausted(error)
    if isinstance(error, IsobitError):
        status = next((code for kind, code in _STATUS.items() if isinstance(error, kind)), 500)
        headers = {}
        if status == 503:
            headers = retry_after(1000)
        elif status in (409, 500, 504):
            headers = NO_RETRY
        found = _SAMPLING_FIELD.match(error.details) if status == 400 else None
        return HttpError(status, error.details, found[1] if found else None, headers)
    if isinstance(error, IncompleteStreamError):
        return HttpError(502, str(error), headers=NO_RETRY)
    if isinstance(error, TimeoutError):
        return HttpError(504, str(error) or "the service did not answer in time", headers=NO_RETRY)
    _LOG.error("a request failed", exc_info=error)
    return HttpError(500, "the gateway failed; its log has the reason", headers=NO_RETRY)


def retry_after(milliseconds: int) -> dict[str, str]:
    """Returns the headers that say when to try again: within two minutes, since clients ignore longer
    times."""
    bounded = min(max(milliseconds, 1), _MAX_RETRY_AFTER_S * 1000)
    return {"retry-after": str(math.ceil(bounded / 1000)), "retry-after-ms": str(bounded)}


def _exhausted(error: ResourceExhaustedError) -> HttpError:
    if error.retry_after_ms is None:  # too large by itself: with a 429 the client would try again for ever
        return HttpError(413, error.details)
    return HttpError(429, error.details, headers=retry_after(error.retry_after_ms))


def field_of(error: msgspec.ValidationError, at: str = "") -> BadRequest:
    """Returns msgspec's error, such as "Expected `int`, got `str` - at `$.max_tokens`", as a BadRequest that
    names the field. at: the place of the checked object in the request."""
    text, _, path = str(error).partition(" - at `$")
    path = path.rstrip("`").removeprefix(".")
    if text.startswith("Object contains unknown field"):
        path = f"{path}.{text.split('`')[1]}".lstrip(".")
        name = f"{at}{path}"
        return BadRequest(f"{name}: unknown field", name)
    name = f"{at}{path}"
    return BadRequest(f"{name}: {text[:1].lower()}{text[1:]}" if name else text, name or None)
