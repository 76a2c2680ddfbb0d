"""Sends a model's weights to a service: over gRPC, by CUDA IPC, or by NCCL."""

from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor, nn

from isobit.torch_weights.digest import model_digest
from isobit.torch_weights.held import held_weights
from isobit.torch_weights.parameters import NamedWeights, named_weights
from isobit.torch_weights.ranks import rank, told_by_first
from isobit.torch_weights.senders import WeightsUpdateGroup


def update_weights(
    model: nn.Module,
    client: Any = None,
    *,
    transport: Literal["stream", "cuda_ipc", "nccl"] = "stream",
    group: WeightsUpdateGroup | None = None,
    expected_digest: str | None = None,
    **arguments: Any,
) -> None:
    """Sends the model's weights to a service. Every rank of the default group must call it; the first one
    makes the service's call. After an error the old weights stay in use.

    Args:
        client: RolloutClient or ScorerClient; only the first rank needs one.
        transport: "stream" sends the weights over gRPC, to any host. "cuda_ipc" lets a service on GPUs of
            this host read them where they are (see held_weights). "nccl" sends from GPU to GPU; each rank
            sends what it holds, and each rank of the service gets what it needs.
        group: for "nccl", the result of init_weights_update_group for this client.
        expected_digest: the digest that the service must have received; None: that of these weights; empty
            skips the check.
        **arguments: further arguments of the client's method, such as weight_version and in_flight.

    Raises:
        On every rank: the exception that the client's method (see update_weights_from_stream and the others)
            raised on the first rank, or that held_weights raised.
    """
    if transport == "nccl":
        if group is None:
            raise ValueError("transport nccl: expected a group, which init_weights_update_group makes")
        with group.sending(model, client, expected_digest, arguments) as failure:
            return _raise_on_all(failure)
    if transport == "cuda_ipc":
        failure = _share(model, client, expected_digest, arguments)
    elif transport == "stream":
        failure = _stream(model, client, expected_digest, arguments)
    else:
        raise ValueError(f"transport: expected stream, cuda_ipc or nccl, got {transport!r}")
    return _raise_on_all(failure)


def _raise_on_all(failure: Exception | None) -> None:
    """Raises the first rank's exception on every rank."""
    told = told_by_first(failure)
    if failure or told:
        raise failure or told


def _stream(model: nn.Module, client: Any, expected_digest: str | None, arguments: dict) -> Exception | None:
    weights = named_weights(model)
    if rank() != 0:
        if told_by_first(None):
            for _ in weights:
                pass
        return None
    accepted = _Accepted(weights)
    failure = None
    try:
        client.update_weights_from_stream(accepted, expected_digest=expected_digest, **arguments)
    except Exception as error:
        failure = error
    accepted.end()
    return failure


def _share(model: nn.Module, client: Any, expected_digest: str | None, arguments: dict) -> Exception | None:
    held = held_weights(model)
    needs_digest = expected_digest is None
    if rank() != 0:
        if needs_digest and told_by_first(None):
            model_digest(model)
        return None
    is_told = False

    def digest() -> str:  # called once the service has accepted the weights
        nonlocal is_told
        is_told = True
        told_by_first(True)
        return model_digest(model)

    failure = None
    try:
        client.update_weights_from_tensor(
            held, expected_digest=digest if needs_digest else expected_digest, **arguments
        )
    except Exception as error:
        failure = error
    if needs_digest and not is_told:
        told_by_first(False)
    return failure


class _Accepted:
    """The weights on the first rank. When the service requests the first tensor, it has accepted the weights;
    this class then tells the other ranks. Then all ranks gather every tensor, even after a failure."""

    def __init__(self, weights: NamedWeights):
        self.specs = weights.specs
        self._weights = weights
        self._gathered: Iterator[tuple[str, Tensor]] | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        told_by_first(True)
        self._gathered = iter(self._weights)
        return self._gathered

    def end(self) -> None:
        """Does the remaining work once the call is over."""
        if self._gathered is None:
            told_by_first(False)
        else:
            for _ in self._gathered:  # the other ranks wait for this one
                pass
