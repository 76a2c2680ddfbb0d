"""Clipping by the norm of all gradients (C15). The bits do not depend on how the parameters are sharded."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from isobit.torch import functional as F
from isobit.torch.environment import keep_subnormals
from isobit.torch.gradients import local, named_once, refuse

# C15 adds 1e-6 to the norm.
NORM_EPS = float.fromhex("0x1.0c6f7a0b5ed8dp-20")


def _rows(gradient: Tensor) -> Tensor:
    """Returns a gradient as a matrix of dimension 0 and all other dimensions. Each element of a vector is a
    row."""
    t = local(gradient).contiguous()
    return t.flatten(1) if t.dim() > 1 else t.reshape(-1, 1)


def _gathered(sums: list[Tensor], gradients: list[Tensor]) -> list[Tensor]:
    """Returns the row sums of whole parameters from the sums of this rank's shards, with one all-gather for
    each group."""
    groups: dict[dist.ProcessGroup, list[int]] = {}
    for index, gradient in enumerate(gradients):
        if isinstance(gradient, DTensor) and not all(p.is_replicate() for p in gradient.placements):
            if gradient.device_mesh.ndim != 1 or not gradient.placements[0].is_shard(0):
                raise ValueError(
                    f"clip_grad_norm_: expected gradients sharded over rows in one dimension, got"
                    f" {gradient.placements} on {gradient.device_mesh}"
                )
            groups.setdefault(gradient.device_mesh.get_group(), []).append(index)
    whole = list(sums)
    for group, indices in groups.items():
        world = dist.get_world_size(group)
        # Cut as by torch.chunk: every rank has ceil(rows / world) rows, the last ones fewer or none.
        chunks = [-(-gradients[i].shape[0] // world) for i in indices]
        mine = sums[indices[0]].new_zeros(sum(chunks))
        begins = [0]
        for chunk in chunks:
            begins.append(begins[-1] + chunk)
        for i, begin in zip(indices, begins[:-1], strict=True):
            mine[begin : begin + len(sums[i])] = sums[i]
        everyone = mine.new_empty(world * len(mine))
        dist.all_gather_into_tensor(everyone, mine, group=group)
        everyone = everyone.view(world, -1)
        for i, begin, end in zip(indices, begins[:-1], begins[1:], strict=True):
            whole[i] = everyone[:, begin:end].reshape(-1)[: gradients[i].shape[0]].contiguous()
    return whole


@torch.no_grad()
@keep_subnormals()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor] | Iterable[tuple[str, Tensor]],
    max_norm: float,
    check_finite: bool = True,
) -> Tensor:
    """Multiplies the gradients by min(1, max_norm / norm), where norm is the norm of all gradients together
    (C15).

    Unlike with torch.nn.utils.clip_grad_norm_, the bits do not depend on how many ranks share the parameters.
    Waits for the GPU once.

    Args:
        parameters: the parameters in the model's order; or (name, parameter) pairs as from
            named_parameters(), whose names appear in errors; or a single parameter. Gradients are fp32:
            tensors, or DTensors sharded over rows (FSDP2). Parameters without a gradient are skipped.
        max_norm: above 0; math.inf only computes the norm.
        check_finite: False: a gradient with a NaN or an infinity is no error; the result is then NaN or
            infinity, and if it is NaN, every gradient becomes NaN.

    Returns:
        The norm before clipping: float64, a scalar on the CPU.

    Raises:
        FloatingPointError: a gradient has a NaN or an infinity; the message names the parameter. No gradient
            is changed.
        ValueError: max_norm is not above 0, or a parameter comes twice.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm: expected above 0, got {max_norm}")
    named = [(name, p) for name, p in named_once(parameters) if p.grad is not None]
    gradients = [parameter.grad for _, parameter in named]
    sums = [F.square_sums(_rows(gradient)) for gradient in gradients]
    totals = [F.tree_sum64(rows) for rows in _gathered(sums, gradients)]
    squares = torch.stack(totals).tolist() if totals else []
    if check_finite:
        refuse([name for (name, _), square in zip(named, squares, strict=True) if not math.isfinite(square)])
    total = squares[0] if squares else 0.0
    for square in squares[1:]:
        total += square
    norm = math.sqrt(total)
    ratio = max_norm / (norm + NORM_EPS)
    factor = 1.0 if ratio >= 1.0 else ratio  # NaN if the norm is NaN
    if factor != 1.0:
        for gradient in gradients:
            local(gradient).mul_(factor)
    return torch.tensor(norm, dtype=torch.float64, device="cpu")
