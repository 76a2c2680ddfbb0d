"""The calls by which a rollout receives weights that a trainer broadcasts: the methods of the synchronous
client, and the requests that both clients send."""

from collections.abc import Sequence
from typing import TypedDict, Unpack

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


class WeightTransferCalls:
    """A part of RolloutClient. While a call here waits, the trainer must join the group, or broadcast."""

    def init_weight_transfer(
        self, *, timeout: float | None = None, **group: Unpack[TransferGroup]
    ) -> rollout_pb2.InitWeightTransferResponse:
        """Joins a trainer's group, in which the trainer is rank 0. Returns once all ranks have joined.

        Args:
          timeout: in seconds; None: no limit. The service itself waits at most 300 s.
          **group: see TransferGroup.

        Raises:
          InvalidArgumentError: an argument is wrong, or the store does not hold an id.
          UnavailableError: the store cannot be reached, or a rank has gone.
          DeadlineExceededError: not all ranks joined in time.
          AbortedError: another call of this method replaced this one.
        """
        return self._unary(self._stub.InitWeightTransfer, init_request(**group), timeout)

    def start_weight_transfer(
        self,
        *,
        weight_version: int | None = None,
        in_flight: InFlightMode | None = None,
        timeout: float | None = None,
    ) -> rollout_pb2.StartWeightTransferResponse:
        """Opens an update. weight_version, in_flight: as for update_weights."""
        request = start_request(weight_version, in_flight)
        return self._unary(self._stub.StartWeightTransfer, request, timeout)

    def receive_weights(
        self,
        specs: Sequence[WeightSpec] = (),
        *,
        packed: bool | None = None,
        packed_buffer_size_bytes: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Receives tensors that the trainer broadcasts in this order during the call. Returns the number of
        bytes.

        Args:
          specs: all tensors of the model, or some of them, with dtypes BF16, F16 or F32. Empty: the tensors
            of the last call that named some.
          packed, packed_buffer_size_bytes: as for init_weight_transfer; None: the values given there.

        Raises:
          InvalidArgumentError: the model has no such tensor; the message names it.
          AbortedError: another update is in progress.
          DeadlineExceededError: the trainer was silent.
          UnavailableError: the trainer has gone.
          After any of these, the old weights stay in use, and the next call must be init_weight_transfer.
        """
        request = receive_request(specs, packed, packed_buffer_size_bytes)
        return self._unary(self._stub.ReceiveWeights, request, timeout).num_bytes

    def finish_weight_transfer(
        self, *, expected_digest: str = "", timeout: float | None = None
    ) -> types_pb2.UpdateWeightsResponse:
        """Switches to the weights that were received. After an error the old weights stay in use, and the
        group stays joined."""
        request = rollout_pb2.FinishWeightTransferRequest(expected_digest=expected_digest)
        return self._unary(self._stub.FinishWeightTransfer, request, timeout)

    def shutdown_weight_transfer(
        self, timeout: float | None = None
    ) -> rollout_pb2.ShutdownWeightTransferResponse:
        """Drops an open update and leaves the group."""
        request = rollout_pb2.ShutdownWeightTransferRequest()
        return self._unary(self._stub.ShutdownWeightTransfer, request, timeout)


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
