"""The digest of a model's weights, from what each rank holds of them (docs/API.md, "The weight digest")."""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from isobit.torch_weights import parameters
from isobit.torch_weights.slices import first_index
from isobit.weight_digest import (
    bf16_bits,
    block_sums,
    check_columns,
    rows_and_columns,
    sums_hex,
    weight_digest,
)


def model_digest(model: nn.Module) -> str:
    """Returns the digest that a service reports for the model's weights, 64 hex digits (docs/API.md, "The
    weight digest"). Nothing is gathered. Without the operators of isobit-torch, NumPy computes it, after
    copying one tensor at a time from a GPU to the host.

    Every rank of the default group must call it, and gets the same result. `model`: as for named_weights.
    """
    named = parameters.of_model(model)
    sums = [_own_sums(name, p) for name, p in named]
    together = torch.stack([of_one.to(sums[0].device) for of_one in sums]) if sums else torch.zeros(0, 2)
    shards = [i for i, (_, p) in enumerate(named) if isinstance(p, DTensor)]
    if shards:
        of_shards = together[shards]
        dist.all_reduce(of_shards)  # modulo 2^64
        together[shards] = of_shards
    return weight_digest(
        {
            name: (tuple(p.shape), sums_hex([value % 2**64 for value in pair]))
            for (name, p), pair in zip(named, together.tolist(), strict=True)
        }
    )


def _own_sums(name: str, parameter: Tensor) -> Tensor:
    """Returns the sums of what this rank holds of a tensor, int64 [2]; zeros if another rank counts it."""
    rows, columns = rows_and_columns(parameter.shape)
    first_row = first_column = 0
    local = parameter
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        first = first_index(name, parameter)
        if first is None or local.numel() == 0:
            return torch.zeros(2, dtype=torch.int64, device=local.device)
        if local.dim() > 0:
            first_row = first[0] * (rows // parameter.shape[0])
        if local.dim() > 1:
            first_column = first[-1]
    width = local.shape[-1] if local.dim() > 1 else 1
    try:
        check_columns(first_column, width, columns)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    block = local.contiguous().reshape(-1, width)
    if _has_operator():
        block = block.float() if block.dtype is torch.float16 else block
        # The third says where a value is not finite; the service checks that itself.
        return torch.ops.isobit.weight_sums(block, columns, first_row, first_column)[:2]
    sums = block_sums(_bits(block), columns, first_row, first_column)
    return torch.from_numpy(sums.view(np.int64)).to(local.device)


def _has_operator() -> bool:
    return hasattr(torch.ops.isobit, "weight_sums")


def _bits(block: Tensor) -> np.ndarray:
    """Returns the bits of the values rounded to bfloat16."""
    # Always a copy, since a storage that NumPy has seen can no longer be resized, which FSDP1 does.
    host = block.to("cpu", copy=True)
    return bf16_bits(host.view(torch.uint16).numpy() if host.dtype is torch.bfloat16 else host.numpy())
