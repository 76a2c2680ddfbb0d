"""The calls by which a rollout receives weights that a trainer broadcasts, with coroutines.

What isobit.weight_transfer says of arguments, results and errors holds here.
"""

from collections.abc import Sequence
from typing import Unpack

from isobit.calls import InFlightMode
from isobit.v1 import rollout_pb2, types_pb2
from isobit.weight_transfer import TransferGroup, init_request, receive_request, start_request
from isobit.weights import WeightSpec


class WeightTransferCalls:
    """Of RolloutClient."""

    async def init_weight_transfer(
        self, *, timeout: float | None = None, **group: Unpack[TransferGroup]
    ) -> rollout_pb2.InitWeightTransferResponse:
        """As the synchronous client's."""
        return await self._unary("InitWeightTransfer", init_request(**group), timeout)

    async def start_weight_transfer(
        self,
        *,
        weight_version: int | None = None,
        in_flight: InFlightMode | None = None,
        timeout: float | None = None,
    ) -> rollout_pb2.StartWeightTransferResponse:
        """As the synchronous client's."""
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
        """As the synchronous client's."""
        request = receive_request(specs, packed, packed_buffer_size_bytes)
        return (await self._unary("ReceiveWeights", request, timeout)).num_bytes

    async def finish_weight_transfer(
        self, *, expected_digest: str = "", timeout: float | None = None
    ) -> types_pb2.UpdateWeightsResponse:
        """As the synchronous client's."""
        request = rollout_pb2.FinishWeightTransferRequest(expected_digest=expected_digest)
        return await self._unary("FinishWeightTransfer", request, timeout)

    async def shutdown_weight_transfer(
        self, timeout: float | None = None
    ) -> rollout_pb2.ShutdownWeightTransferResponse:
        """As the synchronous client's."""
        request = rollout_pb2.ShutdownWeightTransferRequest()
        return await self._unary("ShutdownWeightTransfer", request, timeout)
