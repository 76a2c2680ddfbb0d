"""Gradients in fp32: kept so by autograd, and summed over passes and slots in the contract's order (C10)."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from isobit.torch.plan import is_power_of_two


def local(t: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return t.to_local() if isinstance(t, DTensor) else t


def refuse(names: Sequence[str]) -> None:
    """Raises FloatingPointError if there are names: of parameters whose gradients are not finite."""
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise FloatingPointError(f"the gradient of {names[0]}{more} holds NaN or infinity")


def refuse_repeated(parameters: Sequence[Tensor]) -> None:
    """Raises ValueError if a parameter comes twice: it would count twice."""
    if len({id(p) for p in parameters}) != len(parameters):
        raise ValueError("parameters: expected each once, got one twice")


def tree_sum(sums: list[Tensor]) -> Tensor:
    """The balanced tree over tensors of one shape, adjacent ones first, in place of the first of each pair.
    Their number is a power of two."""
    while len(sums) > 1:
        sums = [sums[i].add_(sums[i + 1]) for i in range(0, len(sums), 2)]
    return sums[0]


class TreeCounter:
    """The balanced tree over tensors that come one after the other: a binary counter of partial sums, so that
    of 2^n tensors at most n + 1 are held. Takes over the tensors it is given."""

    def __init__(self):
        self._levels: list[tuple[int, Tensor]] = []  # how many tensors a sum has, biggest first

    def add(self, t: Tensor) -> None:
        size = 1
        while self._levels and self._levels[-1][0] == size:
            t = self._levels.pop()[1].add_(t)
            size *= 2
        self._levels.append((size, t))

    def take(self) -> Tensor:
        """The sum of all since the last take, whose number must have been a power of two."""
        (_, total), *others = self._levels
        if others:
            raise ValueError(f"expected 2^n summands, got {sum(size for size, _ in self._levels)}")
        self._levels = []
        return total


class GradientSum:
    """The gradient of a step: each parameter's `.grad` of the passes, a balanced tree over the passes of a
    slot, then a chain over slots. torch's own `+=` would be a chain over everything.

        optimizer.zero_grad()
        total = GradientSum(model.parameters(), plan.passes_per_slot(world, lanes_per_pass))
        for part in plan.passes(rank, world, lanes_per_pass):
            loss_of(part).backward()
            total.add_pass()
        total.finish()  # the gradients are in .grad

    Holds up to log2(passes_per_slot) + 1 more gradients of each parameter (2 more if there are several
    slots).

    Args:
        parameters: those that are trained. Their gradients are fp32 (`keep_fp32_gradients`); with FSDP2 each
            rank's shards, summed over ranks by `TreeReduceScatter`.

    Raises:
        RuntimeError: a parameter still has a gradient, to which the first pass would add.
        TypeError: parameters has something that is not a leaf tensor, as the pairs of named_parameters().
        ValueError: passes_per_slot is not a power of two, or a parameter comes twice.
    """

    def __init__(self, parameters: Iterable[Tensor], passes_per_slot: int):
        everything = list(parameters)
        for p in everything:
            if not isinstance(p, Tensor) or not p.is_leaf:
                raise TypeError(f"GradientSum: expected parameters, got {type(p).__name__}")
        refuse_repeated(everything)
        if not is_power_of_two(passes_per_slot):
            raise ValueError(f"passes_per_slot: expected a power of two, got {passes_per_slot}")
        self._parameters = [p for p in everything if p.requires_grad]
        if any(p.grad is not None for p in self._parameters):
            raise RuntimeError(
                "GradientSum: expected no gradients yet: optimizer.zero_grad() before each step"
            )
        self._passes_per_slot = passes_per_slot
        self._pass = 0
        self._counters = [TreeCounter() for _ in self._parameters]
        self._totals: list[Tensor | None] = [None] * len(self._parameters)

    @torch.no_grad()
    def add_pass(self) -> None:
        """Takes the gradients of a pass out of `.grad`.

        Raises:
            RuntimeError: a parameter has no gradient, or one that is not fp32. None is taken then.
        """
        for index, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is None or gradient.dtype != torch.float32:
                got = "none" if gradient is None else str(gradient.dtype)
                raise RuntimeError(
                    f"parameter {index} {list(parameter.shape)}: expected a gradient in fp32, got {got}"
                )
        for parameter, counter in zip(self._parameters, self._counters, strict=True):
            counter.add(parameter.grad)
            parameter.grad = None
        self._pass += 1
        if self._pass % self._passes_per_slot == 0:
            self._end_slot()

    def _end_slot(self) -> None:
        for index, counter in enumerate(self._counters):
            total = self._totals[index]
            slot = counter.take()
            self._totals[index] = slot if total is None else total.add_(slot)

    @torch.no_grad()
    def finish(self) -> None:
        """Puts the sums into `.grad`; the object is then as new.

        Raises:
            RuntimeError: the last slot lacks passes.
        """
        if self._pass % self._passes_per_slot:
            raise RuntimeError(
                f"expected {self._passes_per_slot} passes for each slot, got {self._pass} in all"
            )
        for parameter, total in zip(self._parameters, self._totals, strict=True):
            parameter.grad = total
        self._totals = [None] * len(self._parameters)
        self._pass = 0


def keep_fp32_gradients(module: torch.nn.Module) -> None:
    """Lets autograd keep the gradients of bf16 parameters in fp32, as the operators return them. Otherwise it
    rounds each to bf16 before any sum, and bits depend on the number of ranks."""
    for parameter in module.parameters():
        if parameter.requires_grad and parameter.is_leaf and parameter.dtype != torch.float32:
            parameter.grad_dtype = torch.float32
