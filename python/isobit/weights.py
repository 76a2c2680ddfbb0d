"""New weights as the messages of UpdateWeightsFromStream. It does not need torch, but accepts its tensors."""

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from isobit.weight_digest import bf16_bits, tensor_digest, weight_digest

# What module wrappers insert into a parameter's name, and what they put before it.
_WITHIN = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.", "_forward_module.")
_BEFORE = "module."
# Bytes of one message. Small ones cost little, and the service can start packing early.
PIECE_BYTES = 4 << 20


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """The description of a tensor, which is sent before its bytes."""

    name: str  # as in a Hugging Face checkpoint
    dtype: str  # as sent: BF16 or F16
    shape: tuple[int, ...]


class WeightSource(Protocol):
    """Tensors that come one at a time, such as those of isobit.torch.named_weights."""

    specs: Sequence[WeightSpec]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Yields names and tensors, in the order of `specs`."""


@dataclasses.dataclass(frozen=True)
class HeldBlock:
    """A block of rows and columns of a tensor, row-major, in GPU memory that a process has exported. A tensor
    counts as a matrix here; a vector has one column."""

    tensor: int  # its index in HeldWeights.specs
    rows: tuple[int, int]  # the first row, and the number of rows
    columns: tuple[int, int]
    memory: int  # the index of the memory in HeldWeights.handles
    offset: int  # bytes from the beginning of the memory
    row_stride: int  # in values


@dataclasses.dataclass(frozen=True)
class HeldWeights:
    """Weights in the GPU memory of processes on the service's host, for update_weights_from_tensor.
    isobit.torch.held_weights makes it for a model."""

    specs: Sequence[WeightSpec]  # with the stored dtype: F32, BF16 or F16
    handles: Sequence[bytes]  # cudaIpcMemHandle_t, 64 bytes each
    blocks: Sequence[HeldBlock]


@dataclasses.dataclass(frozen=True)
class DistributedWeights:
    """Weights that a trainer's processes send by NCCL, for update_weights_from_distributed.
    isobit.torch.WeightsUpdateGroup makes it, and sends the weights."""

    specs: Sequence[WeightSpec]  # with the dtype as sent: BF16 or F16
    blocks: Sequence[HeldBlock]  # `memory` is the sender's rank; offset and row_stride are not used
    group_ids: Sequence[bytes]  # the ncclUniqueId of the group of each receiving rank
    num_senders: int
    has_joined: bool  # whether an earlier update has joined these groups
    nccl_version: int


# Names and tensors: NumPy arrays (float32, float16, ml_dtypes' bfloat16, or bits of bfloat16 as uint16) or
# torch tensors (float32, float16, bfloat16) on any device. float32 is rounded to bfloat16 before it is sent.
Weights = Mapping[str, Any] | Iterable[tuple[str, Any]] | WeightSource


def checkpoint_name(name: str) -> str:
    """Returns a parameter's name in a checkpoint, without what torch.compile, activation checkpointing, FSDP
    or DistributedDataParallel (in any order) have added to it."""
    for part in _WITHIN:
        name = name.replace(part, "")
    while name.startswith(_BEFORE):
        name = name.removeprefix(_BEFORE)
    return name


def specs_of(tensors: Weights) -> tuple[list[WeightSpec], Iterable[tuple[str, Any]]]:
    """Returns the tensors' specs, and the tensors in the order in which they will be sent, under their names
    in a checkpoint.

    An iterator without specs is read to its end. Of torch tensors that are the same, such as tied weights in
    a state dict, only the first is included, as in a checkpoint. Vectors come first: they are small, so a
    layer is complete, and packed, as soon as its matrices have arrived.
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
    """Returns the tensor's values in host memory as they are sent: bits of bfloat16 as uint16, or float16.

    Raises:
      ValueError: the tensor does not match its spec.
    """
    if _sent_dtype(spec.name, tensor) != spec.dtype or tuple(tensor.shape) != spec.shape:
        raise ValueError(
            f"{spec.name}: expected {spec.dtype} {list(spec.shape)}, got {tensor.dtype} {list(tensor.shape)}"
        )
    if _is_torch(tensor):
        host = tensor.detach().to("cpu").contiguous()
        torch = sys.modules["torch"]  # imported by the caller; this module does not need it
        if host.dtype is torch.bfloat16:
            return host.view(torch.uint16).numpy()
        tensor = host.numpy()
    array = np.ascontiguousarray(tensor).reshape(
        tensor.shape
    )  # reshape, since ascontiguousarray makes a vector of a scalar
    return array if spec.dtype == "F16" else bf16_bits(array)


class DigestOfSent:
    """Computes the digest of weights while they are sent, one tensor after the other."""

    def __init__(self):
        self._tensors: dict[str, tuple[tuple[int, ...], str]] = {}

    def add(self, spec: WeightSpec, values: np.ndarray) -> None:
        self._tensors[spec.name] = (spec.shape, tensor_digest(values))

    def hex(self) -> str:
        return weight_digest(self._tensors)


def digest_of(tensors: Weights) -> str:
    """Returns the digest that a service reports for these weights, 64 hex digits (docs/API.md, "The weight
    digest")."""
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
            f"{name}: expected a whole tensor, got a shard: isobit.torch.named_weights gathers shards"
        )
    dtype = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
    if dtype in ("float32", "bfloat16") or (dtype == "uint16" and not _is_torch(tensor)):
        return "BF16"
    if dtype == "float16":
        return "F16"
    raise TypeError(f"{name}: expected float32, float16, bfloat16 or its bits as numpy.uint16, got {dtype}")
