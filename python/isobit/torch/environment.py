"""What the operators and torch's sums between them compute in, whatever the caller has set: no autocast,
whose dtypes are others; and, on the CPU, subnormal numbers, which the contract has and
torch.set_flush_denormal(True) takes for zero. The operators themselves keep those on their own."""

import contextlib
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# Their product is a subnormal number.
_SMALLEST_NORMAL, _HALF = sys.float_info.min, 0.5


def _flushes() -> bool:
    """Whether this thread takes subnormal numbers for zero: by Python's floats, which no tracer sees."""
    return _SMALLEST_NORMAL * _HALF == 0.0


@contextlib.contextmanager
def keep_subnormals() -> Iterator[None]:
    """This thread keeps subnormal numbers; then it does what it did before."""
    flushes = _flushes()
    if flushes:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushes:
            torch.set_flush_denormal(True)


def _without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    casts = device.type in ("cpu", "cuda") and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if casts else contextlib.nullcontext()


@contextlib.contextmanager
def forward_environment(device: torch.device) -> Iterator[None]:
    """For a forward pass on this device."""
    on_cpu = device.type == "cpu"
    with _without_autocast(device), keep_subnormals() if on_cpu else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def backward_environment(gradients: Sequence[Tensor | None]) -> Iterator[None]:
    """For an operator's backward pass. Subnormal numbers are kept until all of the backward pass ends, since
    autograd itself adds up gradients in between."""
    device = next((g.device for g in gradients if g is not None), torch.device("cpu"))
    if device.type == "cpu" and _flushes():
        torch.set_flush_denormal(False)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: torch.set_flush_denormal(True))
    with _without_autocast(device):
        yield


def refuse_flushing_threads() -> None:
    """Raises RuntimeError if a thread of torch's own on the CPU flushes subnormal numbers, as those do that
    were started while the program had asked for it."""
    # torch gives a thread 32,768 values at least: enough for each to get some.
    smallest = torch.ones(32768 * torch.get_num_threads(), dtype=torch.int32, device="cpu")
    with keep_subnormals():
        if not torch.equal((smallest.view(torch.float32) + 0.0).view(torch.int32), smallest):
            raise RuntimeError(
                "expected subnormal numbers, which the contract has, got threads of torch that take them for"
                " zero: they were started after torch.set_flush_denormal(True), or after a library that does"
                " the same was loaded (gcc's -ffast-math)"
            )
