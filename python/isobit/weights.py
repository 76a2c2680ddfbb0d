"""New weights as the messages of UpdateWeightsFromStream. It needs no torch, and takes its tensors."""

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from isobit.weight_digest import bf16_bits, tensor_digest, weight_digest

# What wrappers of modules put into a parameter's name, and what they put before it.
_WITHIN = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_forward_module.")
_BEFORE = "module."
# Bytes of one message: messages cost little, and the first is packed soon.
PIECE_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """What must be known of a tensor before any bytes are sent."""

    name: str  # in a checkpoint of Hugging Face
    dtype: str  # that is sent: BF16 or F16
    shape: tuple[int, ...]


class WeightSource(Protocol):
    """Tensors that come one at a time, such as isobit.torch.named_weights gives them."""

    specs: Sequence[WeightSpec]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Names and tensors, in the order of `specs`."""


@dataclasses.dataclass(frozen=True)
class HeldBlock:
    """Some rows and columns of a tensor, row-major, in GPU memory that a process has exported. A tensor is a
    matrix here; a vector has one column."""

    tensor: int  # its index in HeldWeights.specs
    rows: tuple[int, int]  # the first, and how many
    columns: tuple[int, int]
    memory: int  # its index in HeldWeights.handles
    offset: int  # bytes from the memory's begin
    row_stride: int  # values


@dataclasses.dataclass(frozen=True)
class HeldWeights:
    """Weights in GPU memory of processes on the service's host, for update_weights_from_tensor.
    isobit.torch.held_weights describes a model's."""

    specs: Sequence[WeightSpec]  # dtype: as stored, F32, BF16 or F16
    handles: Sequence[bytes]  # cudaIpcMemHandle_t
    blocks: Sequence[HeldBlock]


@dataclasses.dataclass(frozen=True)
class DistributedWeights:
    """Weights that a trainer's processes send by NCCL, for update_weights_from_distributed.
    isobit.torch.WeightsUpdateGroup makes it, and sends."""

    specs: Sequence[WeightSpec]  # dtype: as sent, BF16 or F16
    blocks: Sequence[HeldBlock]  # memory: the sender's rank; offset and row_stride are not used
    group_ids: Sequence[bytes]  # ncclUniqueId of each receiving rank's group
    num_senders: int
    has_joined: bool  # the groups are those of an earlier update
    nccl_version: int


# Names and tensors: numpy arrays (float32, float16, ml_dtypes' bfloat16, or bits of bfloat16 as uint16) or
# torch tensors (float32, float16, bfloat16) on any device. float32 is rounded to bfloat16 before it is sent.
Weights = Mapping[str, Any] | Iterable[tuple[str, Any]] | WeightSource


def checkpoint_name(name: str) -> str:
    """The name in a checkpoint of a parameter whose module torch.compile, activation checkpointing, FSDP or
    DistributedDataParallel have wrapped, in any order."""
    for part in _WITHIN:
        name = name.replace(part, "")
    while name.startswith(_BEFORE):
        name = name.removeprefix(_BEFORE)
    return name


def specs_of(tensors: Weights) -> tuple[list[WeightSpec], Iterable[tuple[str, Any]]]:
    """The tensors' specs, and the tensors, as they will be sent, under the names of a checkpoint.

    An iterator without specs is read to its end. Of torch tensors that are one, as tied weights in a state
    dict, only the first counts: a checkpoint has it alone. Vectors come first: they are small, and so a block
    is complete, and packed, as soon as its matrices are there.
    """
    if hasattr(tensors, "specs"):
        return list(tensors.specs), tensors
    items, known = [], set()
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if _is_torch(tensor) and tensor.numel() > 0 and not hasattr(tensor, "full_tensor"):
            place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride())
            if place in known:
                continue
            known.add(place)
        items.append((checkpoint_name(name), tensor))
    items.sort(key=lambda item: len(item[1].shape) > 1)
    return [WeightSpec(name, _sent_dtype(name, tensor), tuple(tensor.shape)) for name, tensor in items], items


def values_of(spec: WeightSpec, tensor: Any) -> np.ndarray:
    """The tensor's values in host memory as they are sent: bits of bfloat16 as uint16, or float16."""
    if _sent_dtype(spec.name, tensor) != spec.dtype or tuple(tensor.shape) != spec.shape:
        raise ValueError(
            f"{spec.name}: expected {spec.dtype} {list(spec.shape)}, got {tensor.dtype} {list(tensor.shape)}"
        )
    if _is_torch(tensor):
        host = tensor.detach().to("cpu").contiguous()
        torch = sys.modules["torch"]  # this module does not need it
        if host.dtype is torch.bfloat16:
            return host.view(torch.uint16).numpy()
        tensor = host.numpy()
    array = np.ascontiguousarray(tensor).reshape(tensor.shape)  # which makes a vector of a scalar
    return array if spec.dtype == "F16" else bf16_bits(array)


class DigestOfSent:
    """The digest of weights as they are sent, one tensor after the other."""

    def __init__(self):
        self._tensors: dict[str, tuple[tuple[int, ...], str]] = {}

    def add(self, spec: WeightSpec, values: np.ndarray) -> None:
        self._tensors[spec.name] = (spec.shape, tensor_digest(values))

    def hex(self) -> str:
        return weight_digest(self._tensors)


def digest_of(tensors: Weights) -> str:
    """The digest that a service reports for these weights, 64 hex digits."""
    specs, items = specs_of(tensors)
    digest = DigestOfSent()
    for spec, (_, tensor) in zip(specs, items, strict=True):
        digest.add(spec, values_of(spec, tensor))
    return digest.hex()


def _is_torch(tensor: Any) -> bool:
    return type(tensor).__module__.partition(".")[0] == "torch"


def _sent_dtype(name: str, tensor: Any) -> str:
    if hasattr(tensor, "full_tensor"):
        raise TypeError(
            f"{name}: expected a whole tensor, got a shard, which isobit.torch.named_weights gathers"
        )
    dtype = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
    if dtype in ("float32", "bfloat16") or (dtype == "uint16" and not _is_torch(tensor)):
        return "BF16"
    if dtype == "float16":
        return "F16"
    raise TypeError(f"{name}: expected float32, float16, bfloat16 or its bits as numpy.uint16, got {dtype}")
