"""The one way by which a framework's seam sends weights to rollouts and scorers."""

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
    """A --model_root that trainer and services see, through which weights go.

    Attributes:
      model_root: where this process sees it.
      model: the model there with the config that the services serve.
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
      tensors: each tensor of the model with its name, of torch: named_parameters() or the items of a state
        dict. What compiling, checkpointing, DDP or FSDP puts into a name is left out. They are read once, to
        the end, and all held in host memory. Of those that are one, as tied weights, the first is sent.
      directory: None sends the tensors over gRPC; else they are written there, once for all services, and
        removed afterwards.
      weight_version: the id to give them, or a function of a service's present id; None: of each service
        the present id plus 1. A service that has these weights under this id already keeps them, so that
        a call that has failed may be repeated.
      in_flight: what happens to a rollout's requests in flight; scorers always let theirs finish.

    Returns:
      What each service answered.

    Raises:
      ValueError: no tensors came, or two of one name.
      isobit.errors.IsobitError: a service refused. It goes on with its old weights, as do those after it.
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
