"""The arithmetic environment of the operators and of torch's sums between them, whatever the caller has set:
no autocast, which would change dtypes; and, on the CPU, subnormal numbers, which the contract requires and
torch.set_flush_denormal(True) replaces by zero. The operators themselves keep subnormal numbers without
this."""

import contextlib
import sys
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# The product of these two is a subnormal number.
_SMALLEST_NORMAL, _HALF = sys.float_info.min, 0.5


def _flushes() -> bool:
    """Whether this thread replaces subnormal numbers by zero. Tested with Python's floats, which no tracer
    sees."""
    return _SMALLEST_NORMAL * _HALF == 0.0


@contextlib.contextmanager
def keep_subnormals() -> Iterator[None]:
    """Makes this thread keep subnormal numbers in the block; afterwards it does what it did before."""
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
    """The environment for a forward pass on this device."""
    on_cpu = device.type == "cpu"
    with _without_autocast(device), keep_subnormals() if on_cpu else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def backward_environment(gradients: Sequence[Tensor | None]) -> Iterator[None]:
    """The environment for an operator's backward pass. Subnormal numbers are kept until the whole backward
    pass ends, since autograd itself adds gradients in between."""
    device = next((g.device for g in gradients if g is not None), torch.device("cpu"))
    if device.type == "cpu" and _flushes():
        torch.set_flush_denormal(False)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: torch.set_flush_denormal(True))
    with _without_autocast(device):
        yield


def refuse_flushing_threads() -> None:
    """Raises RuntimeError if one of torch's own threads on the CPU replaces subnormal numbers by zero.
    Threads do that if they were started while the program had asked for it."""
    # torch gives each thread at least 32,768 values, so this is enough for all threads.
    smallest = torch.ones(32768 * torch.get_num_threads(), dtype=torch.int32, device="cpu")
    with keep_subnormals():
        if not torch.equal((smallest.view(torch.float32) + 0.0).view(torch.int32), smallest):
            raise RuntimeError(
                "expected subnormal numbers, which the contract has, got threads of torch that replace them"
                " by zero: they were started after torch.set_flush_denormal(True), or after a library that"
                " does the same was loaded (gcc's -ffast-math)"
            )
