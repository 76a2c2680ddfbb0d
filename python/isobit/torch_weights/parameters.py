"""The parameters of a PyTorch model as the services know them: names, dtypes, and whole tensors."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from isobit.weights import WeightSpec, checkpoint_name


class NamedWeights:
    """The parameters of a model as (name, tensor), vectors first, each once. Of tied parameters only the
    first is included, as in a Hugging Face checkpoint. `specs` lists them.

    With FSDP2 every rank must iterate over it, in step: each tensor is gathered when it is reached, and no
    rank holds more than one.
    """

    def __init__(self, model: nn.Module):
        # The same order as in isobit.weights.specs_of.
        self._parameters = sorted(of_model(model), key=lambda item: item[1].dim() > 1)
        self.specs = [
            WeightSpec(name, sent_dtype(name, p.dtype), tuple(p.shape)) for name, p in self._parameters
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._parameters:
            yield name, _whole(parameter)


def named_weights(model: nn.Module) -> NamedWeights:
    """Returns the model's weights for update_weights_from_stream; see NamedWeights.

    Args:
        model: plain, or under FSDP2 or tensor parallelism (its parameters are DTensors); float32, bfloat16 or
            float16. float32 is rounded to bfloat16, as the services would do, before it is gathered.

    Raises:
        TypeError: a parameter has another dtype.
        ValueError: a weight is a rank's flat part, as in FSDP1.
    """
    return NamedWeights(model)


def _refuse_flat_shards(model: nn.Module) -> None:
    """Raises ValueError if a weight does not have the shape of its layer: FSDP1 and ZeRO 3 leave each rank a
    flat part."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            expected = (module.out_features, module.in_features)
        elif isinstance(module, nn.Embedding):
            expected = (module.num_embeddings, module.embedding_dim)
        else:
            continue
        weight = module._parameters.get("weight")
        if weight is None or tuple(weight.shape) != expected:
            got = "none" if weight is None else str(list(weight.shape))
            raise ValueError(
                f"{name}.weight: expected {list(expected)}, got {got}: a part of it, as of FSDP1 or"
                " DeepSpeed's ZeRO 3? Gather the weights first (FSDP.summon_full_params, GatheredParameters),"
                " or shard by FSDP2 (isobit.torch.fully_shard), which needs no gathering"
            )


def of_model(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns names, as in a checkpoint, and parameters, of which each rank has what it holds.

    Raises:
        TypeError: a parameter has a dtype that cannot be sent.
        ValueError: a weight is a rank's flat part, as in FSDP1.
    """
    _refuse_flat_shards(model)
    found = []
    for given, parameter in model.named_parameters():
        name = checkpoint_name(given)
        sent_dtype(name, parameter.dtype)
        found.append((name, parameter.detach()))
    return found


def sent_dtype(name: str, dtype: torch.dtype) -> str:
    """Returns the dtype with which a parameter is sent: BF16 or F16."""
    if dtype in (torch.float32, torch.bfloat16):
        return "BF16"
    if dtype is torch.float16:
        return "F16"
    raise TypeError(f"{name}: expected float32, bfloat16 or float16, got {dtype}")


def _whole(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return rounded(parameter)
    local = rounded(parameter.to_local())
    shard = DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False,
                               shape=parameter.shape, stride=parameter.stride())  # fmt: skip
    return shard.full_tensor()


def rounded(values: Tensor) -> Tensor:
    """Returns float32 as bfloat16, to nearest. A NaN keeps its sign and upper bits, which a cast does not
    guarantee."""
    if values.dtype is not torch.float32:
        return values
    nearest = values.to(torch.bfloat16)
    is_nan = values.isnan()
    if is_nan.any():
        quiet = ((values.view(torch.int32) >> 16) | 0x40).to(torch.int16).view(torch.bfloat16)
        nearest = torch.where(is_nan, quiet, nearest)
    return nearest
