"""The part of gRPC's health protocol that a client needs: the call Check, and the status in its answer.

The package grpcio-health-checking has this, too. But each of its releases needs a certain protobuf version,
so installing it beside a framework replaces the framework's protobuf.
"""

import enum
from typing import NamedTuple

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet

_CHECK = "/grpc.health.v1.Health/Check"
_STATUS_FIELD = 1  # the only field of HealthCheckResponse


class ServingStatus(enum.IntEnum):
    """The status that a service reports. Numbers that a later protocol adds are UNKNOWN."""

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
        """Parses the message.

        Raises:
          google.protobuf.message.DecodeError: `data` is not a message.
        """
        found = [f.data for f in UnknownFieldSet(Empty.FromString(data)) if f.field_number == _STATUS_FIELD]
        return cls(ServingStatus(found[-1] if found else 0))


class HealthStub:
    """The calls of the health service on a channel, synchronous or asyncio."""

    def __init__(self, channel: grpc.Channel | grpc.aio.Channel):
        self.Check = channel.unary_unary(
            _CHECK,
            request_serializer=HealthCheckRequest.to_wire,
            response_deserializer=HealthCheckResponse.from_wire,
        )
