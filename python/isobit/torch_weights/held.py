"""Where a model's weights are on GPUs of a service's host (CUDA IPC)."""

import dataclasses

import torch
from torch import Tensor, nn

from isobit import cuda_ipc
from isobit.torch_weights import parameters
from isobit.torch_weights.ranks import rank, told_by_all
from isobit.torch_weights.slices import local_slices
from isobit.weights import HeldBlock, HeldWeights, WeightSpec

_STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def held_weights(model: nn.Module) -> HeldWeights:
    """Returns where the model's weights are on GPUs, for update_weights_from_tensor; nothing is gathered or
    copied.

    Every rank of the default group must call it. The first rank's result has the blocks of all ranks; the
    results of the others are empty. When it returns, the GPU work so far has ended.

    Args:
        model: as for named_weights, on GPUs of the service's host, or on GPUs that those can reach. The
            service rounds float32.

    Raises:
        TypeError: a parameter has another dtype. This and the following are raised on every rank.
        ValueError: a parameter is not on a GPU, or its rows are not contiguous.
        OSError: CUDA cannot export the memory, such as that of PyTorch's expandable segments.
    """
    named = parameters.of_model(model)
    specs = [WeightSpec(name, _STORED[p.dtype], tuple(p.shape)) for name, p in named]
    try:
        own = _own_blocks(named)
        torch.cuda.synchronize()
    except Exception as error:
        own = error
    together = told_by_all(own)
    for failed in together:
        if isinstance(failed, Exception):
            raise failed
    if rank() != 0:
        return HeldWeights(specs, [], [])
    handles = sorted({handle for of_rank in together for handle, _ in of_rank})
    number_of = {handle: number for number, handle in enumerate(handles)}
    blocks = [
        dataclasses.replace(block, memory=number_of[handle])
        for of_rank in together
        for handle, block in of_rank
    ]
    return HeldWeights(specs, handles, blocks)


def _own_blocks(named: list[tuple[str, Tensor]]) -> list[tuple[bytes, HeldBlock]]:
    """Returns this rank's slices of the parameters, each with the handle of its memory."""
    memories: dict[int, tuple[bytes, int]] = {}  # handle and first address, by the storage's address
    found = []
    for local in local_slices(named):
        storage = local.values.untyped_storage().data_ptr()
        if storage not in memories:
            memories[storage] = cuda_ipc.export_memory(storage)
        handle, begin = memories[storage]
        rows, columns = local.values.shape
        block = HeldBlock(
            tensor=local.tensor,
            rows=(local.first_row, rows),
            columns=(local.first_column, columns),
            memory=0,
            offset=local.values.data_ptr() - begin,
            row_stride=local.values.stride(0),
        )
        found.append((handle, block))
    return found
