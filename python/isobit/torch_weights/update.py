"""A PyTorch trainer's weights for the services: whole tensors one at a time, or their places on a GPU that
the service can reach; and the digest of weights from their shards.

    for client in (rollout, scorer):
        update_weights(model, client, weight_version=step)  # on every rank

It needs torch, but not the operators of isobit.torch: it can send the weights of any trainer.
"""

import dataclasses
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from isobit import cuda_ipc
from isobit.weight_digest import (
    INDEX_KEY,
    LANES,
    MIX,
    WORD_VALUES,
    block_sums,
    rows_and_columns,
    sums_hex,
    weight_digest,
)
from isobit.weights import HeldBlock, HeldWeights, WeightSpec, checkpoint_name

if TYPE_CHECKING:
    from isobit.torch_weights.senders import WeightsUpdateGroup

_STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# Words that are mixed at the same time. Each needs four intermediate results of 8 bytes.
_CHUNK = 1 << 23


class NamedWeights:
    """The parameters of a model as (name, tensor), vectors first, each once. Of tied parameters only the
    first is included, as in a Hugging Face checkpoint. `specs` lists them.

    With FSDP2 every rank must iterate over it, in step: each tensor is gathered when it is reached, and no
    rank holds more than one.
    """

    def __init__(self, model: nn.Module):
        # The same order as in isobit.weights.specs_of.
        self._parameters = sorted(_parameters(model), key=lambda item: item[1].dim() > 1)
        self.specs = [
            WeightSpec(name, _sent_dtype(name, p.dtype), tuple(p.shape)) for name, p in self._parameters
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
    parameters = _parameters(model)
    specs = [WeightSpec(name, _STORED[p.dtype], tuple(p.shape)) for name, p in parameters]
    try:
        own = _own_blocks(parameters)
        torch.cuda.synchronize()
    except Exception as error:
        own = error
    together = told_by_all(own)
    for failed in together:
        if isinstance(failed, Exception):
            raise failed
    if not _is_first():
        return HeldWeights(specs, [], [])
    handles = sorted({handle for of_rank in together for handle, _ in of_rank})
    number_of = {handle: number for number, handle in enumerate(handles)}
    blocks = [
        dataclasses.replace(block, memory=number_of[handle])
        for of_rank in together
        for handle, block in of_rank
    ]
    return HeldWeights(specs, handles, blocks)


def update_weights(
    model: nn.Module,
    client: Any = None,
    *,
    transport: Literal["stream", "cuda_ipc", "nccl"] = "stream",
    group: "WeightsUpdateGroup | None" = None,
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


def told_by_first(told: Any) -> Any:
    """Returns the first rank's value on every rank. Every rank must call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return told
    objects = [told]
    dist.broadcast_object_list(objects, group=_cpu_group())
    return objects[0]


def told_by_all(own: Any) -> list[Any]:
    """Returns the values of all ranks, in their order, on every rank. Every rank must call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    together = [None] * dist.get_world_size()
    dist.all_gather_object(together, own, group=_cpu_group())
    return together


_cpu_groups: "weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup]" = weakref.WeakKeyDictionary()


def _cpu_group() -> dist.ProcessGroup:
    """Returns a group of all ranks of the default group, on the CPU. It is made at the first call, which
    every rank must make.

    In an NCCL group, a rank that waits for the others runs a kernel on its GPU meanwhile. A service on that
    GPU would share its time with that kernel, and NCCL cannot set up a sender beside it: all would wait for
    each other.
    """
    world = dist.group.WORLD
    if dist.get_backend() == "gloo":
        return world
    if world not in _cpu_groups:
        _cpu_groups[world] = dist.new_group(backend="gloo")
    return _cpu_groups[world]


def _stream(model: nn.Module, client: Any, expected_digest: str | None, arguments: dict) -> Exception | None:
    weights = named_weights(model)
    if not _is_first():
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
    if not _is_first():
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


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


@dataclasses.dataclass(frozen=True)
class LocalPart:
    """This rank's part of a parameter, on a GPU: a matrix with contiguous rows; a vector is one column."""

    tensor: int  # the parameter's number in a list
    values: Tensor
    first_row: int
    first_column: int


def local_parts(parameters: list[tuple[str, Tensor]]) -> list[LocalPart]:
    """Returns this rank's parts of the parameters, without those that another rank counts.

    Raises:
        ValueError: a part is not on a GPU, or its rows are not contiguous.
    """
    found = []
    for number, (name, parameter) in enumerate(parameters):
        local, first = parameter, (0,) * parameter.dim()
        if isinstance(parameter, DTensor):
            local = parameter.to_local()
            first = _offset(name, parameter)
            if first is None:
                continue
        if local.device.type != "cuda":
            raise ValueError(f"{name}: expected a tensor on a GPU, got one on {local.device}")
        if local.numel() == 0:
            continue
        if local.stride()[-1:] not in ((1,), ()):
            raise ValueError(f"{name}: expected contiguous rows, got strides {tuple(local.stride())}")
        matrix = local if local.dim() > 1 else local.reshape(-1, 1)
        found.append(LocalPart(number, matrix, first[0] if first else 0, first[1] if len(first) > 1 else 0))
    return found


def _own_blocks(parameters: list[tuple[str, Tensor]]) -> list[tuple[bytes, HeldBlock]]:
    """Returns this rank's parts of the parameters, each with the handle of its memory."""
    memories: dict[int, tuple[bytes, int]] = {}  # handle and first address, by the storage's address
    found = []
    for part in local_parts(parameters):
        storage = part.values.untyped_storage().data_ptr()
        if storage not in memories:
            memories[storage] = cuda_ipc.export_memory(storage)
        handle, begin = memories[storage]
        rows, columns = part.values.shape
        block = HeldBlock(
            tensor=part.tensor,
            rows=(part.first_row, rows),
            columns=(part.first_column, columns),
            memory=0,
            offset=part.values.data_ptr() - begin,
            row_stride=part.values.stride(0),
        )
        found.append((handle, block))
    return found


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


def model_digest(model: nn.Module) -> str:
    """Returns the digest that a service reports for the model's weights, 64 hex digits (docs/API.md, "The
    weight digest"). Nothing is gathered.

    Every rank of the default group must call it, and gets the same result. `model`: as for named_weights.
    """
    parameters = _parameters(model)
    sums = [_shard_sums(name, p) for name, p in parameters]
    together = torch.stack([of_one.to(sums[0].device) for of_one in sums]) if sums else torch.zeros(0, 2)
    shards = [i for i, (_, p) in enumerate(parameters) if isinstance(p, DTensor)]
    if shards:
        of_shards = together[shards]
        dist.all_reduce(of_shards)  # modulo 2^64
        together[shards] = of_shards
    return weight_digest(
        {
            name: (tuple(p.shape), sums_hex([value % 2**64 for value in pair]))
            for (name, p), pair in zip(parameters, together.tolist(), strict=True)
        }
    )


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


def _parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    _refuse_flat_shards(model)
    found = []
    for given, parameter in model.named_parameters():
        name = checkpoint_name(given)
        _sent_dtype(name, parameter.dtype)
        found.append((name, parameter.detach()))
    return found


def _sent_dtype(name: str, dtype: torch.dtype) -> str:
    if dtype in (torch.float32, torch.bfloat16):
        return "BF16"
    if dtype is torch.float16:
        return "F16"
    raise TypeError(f"{name}: expected float32, bfloat16 or float16, got {dtype}")


def _whole(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return _rounded(parameter)
    local = _rounded(parameter.to_local())
    shard = DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False,
                               shape=parameter.shape, stride=parameter.stride())  # fmt: skip
    return shard.full_tensor()


def _rounded(values: Tensor) -> Tensor:
    """Returns float32 as bfloat16, to nearest. A NaN keeps its sign and upper bits, which a cast does not
    guarantee."""
    if values.dtype is not torch.float32:
        return values
    rounded = values.to(torch.bfloat16)
    is_nan = values.isnan()
    if is_nan.any():
        quiet = ((values.view(torch.int32) >> 16) | 0x40).to(torch.int16).view(torch.bfloat16)
        rounded = torch.where(is_nan, quiet, rounded)
    return rounded


def _shard_sums(name: str, parameter: Tensor) -> Tensor:
    """Returns the sums of this rank's part of a tensor, int64 [2]; zeros if another rank counts it."""
    rows, columns = rows_and_columns(parameter.shape)
    first_row = first_column = 0
    local = parameter
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        offset = _offset(name, parameter)
        if offset is None or local.numel() == 0:
            return torch.zeros(2, dtype=torch.int64, device=local.device)
        if local.dim() > 0:
            first_row = offset[0] * (rows // parameter.shape[0])
        if local.dim() > 1:
            first_column = offset[-1]
    if (
        local.device.type == "cuda"
        and local.dtype is not torch.float16
        and hasattr(torch.ops.isobit, "weight_sums")
    ):
        width = local.shape[-1] if local.dim() > 1 else 1
        block = local.contiguous().reshape(-1, width)
        # The third says where a value is not finite; the service checks that itself.
        return torch.ops.isobit.weight_sums(block, columns, first_row, first_column)[:2]
    values = _rounded(local.contiguous())
    if values.dtype is torch.float16:
        values = _rounded(values.float())
    width = local.shape[-1] if local.dim() > 1 else 1
    block = values.reshape(-1, width)
    try:
        if block.device.type == "cpu":  # NumPy is three times faster than torch here
            # Uses a copy, since a storage that NumPy has seen can no longer be resized, which FSDP1 does.
            values = block.clone().view(torch.uint16).numpy()
            host = block_sums(values, columns, first_row, first_column)
            return torch.from_numpy(host.view(np.int64))
        return _block_sums(block, columns, first_row, first_column)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _offset(name: str, parameter: DTensor) -> Sequence[int] | None:
    """Returns where the local shard begins; None if another rank has the same shard and counts it."""
    dims = (0, parameter.dim() - 1)
    for placement in parameter.placements:
        if type(placement) is not Replicate and (type(placement) is not Shard or placement.dim not in dims):
            raise ValueError(f"{name}: expected a shard of rows or columns, or a replica, got {placement}")
    coordinate = parameter.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    if any(at and p.is_replicate() for at, p in zip(coordinate, parameter.placements, strict=True)):
        return None
    return _global_offset(tuple(parameter.shape), parameter.device_mesh, tuple(parameter.placements))


# Cached: it takes about 0.1 ms for each of hundreds of parameters, and their cut does not change.
@functools.lru_cache(maxsize=65536)
def _global_offset(shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple) -> Sequence[int]:
    return compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)[1]


def _signed(value: int) -> int:
    """Returns the int64 with the same 64 bits."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def _fold(x: Tensor) -> Tensor:
    """Returns x ^ (x >> 32); the shift inserts zeros."""
    return x ^ ((x >> 32) & 0xFFFFFFFF)


def _block_sums(block: Tensor, columns: int, first_row: int, first_column: int) -> Tensor:
    """isobit.weight_digest.block_sums for bfloat16 [rows, width] on any device. Returns int64 [2]."""
    width = block.shape[1]
    if width % WORD_VALUES and first_column + width != columns:
        raise ValueError(
            f"columns {first_column} to {first_column + width} of {columns}: expected multiples of 4"
        )
    row_words = -(-columns // WORD_VALUES)
    padding = -width % WORD_VALUES
    if padding:
        block = nn.functional.pad(block, (0, padding))
    if block.storage_offset() % WORD_VALUES or not block.is_contiguous():
        block = block.contiguous().clone()
    words = block.view(torch.int64)
    start = first_row * row_words + first_column // WORD_VALUES
    if words.shape[1] == row_words:
        words = words.view(1, -1)
    steps = torch.arange(min(words.shape[1], _CHUNK), device=words.device) * _signed(INDEX_KEY)
    rows_at_once = max(1, _CHUNK // words.shape[1])
    sums = torch.zeros(2, dtype=torch.int64, device=words.device)
    for row in range(0, words.shape[0], rows_at_once):
        some = words[row : row + rows_at_once]
        rows = torch.arange(row, row + some.shape[0], device=words.device)
        keys = (rows * row_words + (start + 1)) * _signed(INDEX_KEY)
        for at in range(0, words.shape[1], _CHUNK):
            part = some[:, at : at + _CHUNK]
            x = part ^ (keys[:, None] + (steps[: part.shape[1]] + _signed(at * INDEX_KEY)))
            x = _fold(_fold(x) * _signed(MIX))
            sums += torch.stack([_fold(x * _signed(lane)).sum() for lane in LANES])
    return sums
