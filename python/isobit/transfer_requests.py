"""The requests by which a rollout receives weights that a trainer broadcasts."""

from collections.abc import Sequence
from typing import TypedDict

from isobit.arguments import UINT32, UINT64, optional_integer
from isobit.calls import InFlightMode, in_flight_value
from isobit.v1 import rollout_pb2, types_pb2
from isobit.weights import WeightSpec


class TransferGroup(TypedDict, total=False):
    """The group of a trainer, in which the trainer is rank 0."""

    master_address: str  # the address of the trainer's store (torch's TCPStore), which has the group's id
    master_port: int
    nccl_unique_id: bytes  # the id itself, 128 bytes, instead of the store's address
    rank_offset: int  # the rank of the rollout, which takes one rank; default 1
    world_size: int  # the number of all ranks; default 2
    packed: bool  # a broadcast holds several tensors; default False
    packed_buffer_size_bytes: int | None  # a broadcast ends with the tensor that makes it longer; None: 1 GiB


def init_request(
    master_address: str = "",
    master_port: int = 0,
    nccl_unique_id: bytes = b"",
    rank_offset: int = 1,
    world_size: int = 2,
    packed: bool = False,
    packed_buffer_size_bytes: int | None = None,
) -> rollout_pb2.InitWeightTransferRequest:
    return rollout_pb2.InitWeightTransferRequest(
        master_address=master_address,
        master_port=optional_integer("master_port", master_port, UINT32),
        nccl_unique_id=nccl_unique_id,
        rank_offset=optional_integer("rank_offset", rank_offset, UINT32),
        world_size=optional_integer("world_size", world_size, UINT32),
        packed=packed,
        packed_buffer_size_bytes=_buffer_size(packed_buffer_size_bytes),
    )


def start_request(
    weight_version: int | None, in_flight: InFlightMode | None
) -> rollout_pb2.StartWeightTransferRequest:
    return rollout_pb2.StartWeightTransferRequest(
        weight_version=optional_integer("weight_version", weight_version, UINT64),
        in_flight_mode=in_flight_value(in_flight),
    )


def receive_request(
    specs: Sequence[WeightSpec], packed: bool | None, packed_buffer_size_bytes: int | None
) -> rollout_pb2.ReceiveWeightsRequest:
    return rollout_pb2.ReceiveWeightsRequest(
        tensors=[types_pb2.StreamedTensor(name=s.name, dtype=s.dtype, shape=s.shape) for s in specs],
        packed=packed,
        packed_buffer_size_bytes=_buffer_size(packed_buffer_size_bytes),
    )


def _buffer_size(given: int | None) -> int | None:
    return optional_integer("packed_buffer_size_bytes", given, UINT64)
