"""The calls by which a rollout receives weights that a trainer broadcasts."""

from collections.abc import Sequence
from typing import Unpack

from isobit.calls import InFlightMode
from isobit.transfer_requests import TransferGroup, init_request, receive_request, start_request
from isobit.v1 import rollout_pb2, types_pb2
from isobit.weights import WeightSpec


class WeightTransferCalls:
    """A part of isobit.aio.RolloutClient. While a call here waits, the trainer must join the group, or
    broadcast."""

    async def init_weight_transfer(
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
        return await self._unary("InitWeightTransfer", init_request(**group), timeout)

    async def start_weight_transfer(
        self,
        *,
        weight_version: int | None = None,
        in_flight: InFlightMode | None = None,
        timeout: float | None = None,
    ) -> rollout_pb2.StartWeightTransferResponse:
        """Opens an update. weight_version, in_flight: as for update_weights."""
        request = start_request(weight_version, in_flight)
        return await self._unary("StartWeightTransfer", request, timeout)

    async def receive_weights(
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
        response = await self._unary("ReceiveWeights", request, timeout)
        return response.num_bytes

    async def finish_weight_transfer(
        self, *, expected_digest: str = "", timeout: float | None = None
    ) -> types_pb2.UpdateWeightsResponse:
        """Switches to the weights that were received. After an error the old weights stay in use, and the
        group stays joined."""
        request = rollout_pb2.FinishWeightTransferRequest(expected_digest=expected_digest)
        return await self._unary("FinishWeightTransfer", request, timeout)

    async def shutdown_weight_transfer(
        self, timeout: float | None = None
    ) -> rollout_pb2.ShutdownWeightTransferResponse:
        """Drops an open update and leaves the group."""
        request = rollout_pb2.ShutdownWeightTransferRequest()
        return await self._unary("ShutdownWeightTransfer", request, timeout)
