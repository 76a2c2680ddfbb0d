"""gRPC's health protocol as far as a client needs it: Check, and the status that it answers.

The package grpcio-health-checking would do, but each of its releases wants a protobuf of its own, so that
installing it beside a framework replaces the framework's protobuf.
"""

import enum
from typing import NamedTuple

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

_CHECK = "/grpc.health.v1.Health/Check"
_STATUS_FIELD = 1  # of HealthCheckResponse, which has no other


class ServingStatus(enum.IntEnum):
    """What a service says of itself. Numbers that a later protocol adds are UNKNOWN."""

    UNKNOWN = 0
    SERVING = 1
    NOT_SERVING = 2
    SERVICE_UNKNOWN = 3

    @classmethod
    def _missing_(cls, value: object) -> "ServingStatus":
        return cls.UNKNOWN


class HealthCheckRequest(NamedTuple):
    """Asks about the whole server."""

    def to_wire(self) -> bytes:
        return b""


class HealthCheckResponse(NamedTuple):
    """The answer to Check."""

    status: ServingStatus

    @classmethod
    def from_wire(cls, data: bytes) -> "HealthCheckResponse":
        """Raises google.protobuf.message.DecodeError if `data` is no message."""
        found = [f.data for f in UnknownFieldSet(Empty.FromString(data)) if f.field_number == _STATUS_FIELD]
        return cls(ServingStatus(found[-1] if found else 0))


class HealthStub:
    """The calls of a channel, synchronous or of asyncio."""

    def __init__(self, channel: grpc.Channel | grpc.aio.Channel):
        self.Check = channel.unary_unary(
            _CHECK,
            request_serializer=HealthCheckRequest.to_wire,
            response_deserializer=HealthCheckResponse.from_wire,
        )
