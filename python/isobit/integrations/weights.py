"""Sends weights to rollouts and scorers, for the integrations of all frameworks."""

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isobit.calls import InFlightMode
from isobit.client import RolloutClient, ScorerClient
from isobit.v1 import types_pb2
from isobit.weights import checkpoint_name, digest_of, specs_of


@dataclass(frozen=True)
class SharedDirectory:
    """A --model_root that trainer and services share, for sending weights as files.

    Attributes:
      model_root: its path in this process.
      model: the model in it whose config the services use.
    """

    model_root: Path | str
    model: str


def send_weights(
    clients: Sequence[RolloutClient | ScorerClient],
    tensors: Iterable[tuple[str, Any]],
    *,
    directory: SharedDirectory | None = None,
    weight_version: int | Callable[[int], int] | None = None,
    in_flight: InFlightMode | None = None,
) -> list[types_pb2.UpdateWeightsResponse]:
    """Switches services to new weights, one service after the other.

    Args:
      tensors: torch tensors of the model, each with its name: named_parameters(), or the items of a state
        dict. Prefixes that compiling, checkpointing, DDP or FSDP add to names are removed. The tensors are
        read once and all held in host memory. Of tied weights, only the first is sent.
      directory: None: the tensors are sent over gRPC. Otherwise they are written to this directory, once for
        all services, and removed afterwards.
      weight_version: the version id of the new weights, or a function that returns it for a service's present
        id; None: for each service its present id plus 1. A service that has these weights with this id
        already keeps them, so that a failed call can be repeated.
      in_flight: what happens to a rollout's requests in flight; scorers always let theirs finish.

    Returns:
      The response of each service.

    Raises:
      ValueError: there are no tensors, or two have the same name.
      isobit.errors.IsobitError: a service refused. It keeps its old weights, and so do the services after it.
    """
    named = {}
    for given, tensor in tensors:
        name = checkpoint_name(given)
        if name in named:
            raise ValueError(f"{given}: expected one tensor of the name {name}, got two")
        named[name] = tensor.detach().cpu()
    if not named:
        raise ValueError("expected the tensors of a model, got none")

    digest = functools.cache(lambda: digest_of(named))

    def switched(client, update: Callable) -> types_pb2.UpdateWeightsResponse:
        version = weight_version
        if version is not None:
            present = client.get_server_info().server.weight_version
            if callable(version):
                version = version(present.id)
            elif version == present.id and digest() == present.digest:
                return types_pb2.UpdateWeightsResponse(previous=present, current=present)
        mode = in_flight if isinstance(client, RolloutClient) else None
        return update(weight_version=version, in_flight=mode)

    if directory is None:
        return [switched(c, functools.partial(c.update_weights_from_stream, named)) for c in clients]
    root = Path(directory.model_root)
    path = Path(tempfile.mkdtemp(prefix="weights-", dir=root))
    try:
        _write(named, path, root / directory.model)
        return [switched(c, functools.partial(c.update_weights, path.name)) for c in clients]
    finally:
        shutil.rmtree(path)


def _write(tensors: dict, path: Path, like: Path) -> None:
    from safetensors.torch import save_file

    path.chmod(0o755)  # services may run as other users
    stored, storages = {}, set()
    for name, tensor in specs_of(tensors)[1]:
        tensor = tensor.contiguous()
        storage = tensor.untyped_storage().data_ptr()
        # safetensors refuses tensors that share memory, such as parts of a fused matrix.
        stored[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        if (like / name).exists():
            shutil.copy(like / name, path)
