"""The calls by which a rollout receives weights that a trainer broadcasts, as coroutines.

isobit.weight_transfer describes arguments, results and errors.
"""

from collections.abc import Sequence
from typing import Unpack

from isobit.calls import InFlightMode
from isobit.v1 import rollout_pb2, types_pb2
from isobit.weight_transfer import TransferGroup, init_request, receive_request, start_request
from isobit.weights import WeightSpec


class WeightTransferCalls:
    """A part of isobit.aio.RolloutClient."""

    async def init_weight_transfer(
        self, *, timeout: float | None = None, **group: Unpack[TransferGroup]
    ) -> rollout_pb2.InitWeightTransferResponse:
        """Like isobit.RolloutClient.init_weight_transfer, as a coroutine."""
        return await self._unary("InitWeightTransfer", init_request(**group), timeout)

    async def start_weight_transfer(
        self,
        *,
        weight_version: int | None = None,
        in_flight: InFlightMode | None = None,
        timeout: float | None = None,
    ) -> rollout_pb2.StartWeightTransferResponse:
        """Like isobit.RolloutClient.start_weight_transfer, as a coroutine."""
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
        """Like isobit.RolloutClient.receive_weights, as a coroutine."""
        request = receive_request(specs, packed, packed_buffer_size_bytes)
        return (await self._unary("ReceiveWeights", request, timeout)).num_bytes

    async def finish_weight_transfer(
        self, *, expected_digest: str = "", timeout: float | None = None
    ) -> types_pb2.UpdateWeightsResponse:
        """Like isobit.RolloutClient.finish_weight_transfer, as a coroutine."""
        request = rollout_pb2.FinishWeightTransferRequest(expected_digest=expected_digest)
        return await self._unary("FinishWeightTransfer", request, timeout)

    async def shutdown_weight_transfer(
        self, timeout: float | None = None
    ) -> rollout_pb2.ShutdownWeightTransferResponse:
        """Like isobit.RolloutClient.shutdown_weight_transfer, as a coroutine."""
        request = rollout_pb2.ShutdownWeightTransferRequest()
        return await self._unary("ShutdownWeightTransfer", request, timeout)
