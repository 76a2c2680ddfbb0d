"""Gradients in fp32: autograd keeps them so, and they are summed over passes and slots in the contract's
order (C10)."""

import functools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from isobit.torch.environment import keep_subnormals, refuse_flushing_threads
from isobit.torch.plan import is_power_of_two


def local(t: Tensor) -> Tensor:
    """Returns this rank's part of a tensor."""
    return t.to_local() if isinstance(t, DTensor) else t


def refuse(names: Sequence[str]) -> None:
    """Raises FloatingPointError if `names`, the parameters whose gradients are not finite, is not empty."""
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise FloatingPointError(f"the gradient of {names[0]}{more} holds NaN or infinity")


def named_once(parameters: Tensor | Iterable[Tensor | tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Returns pairs of name and parameter, from parameters or from pairs as in named_parameters(). Parameters
    without a name become "parameter 0", ...

    Raises:
        TypeError: an item is neither.
        ValueError: a parameter comes twice; the message has both names.
    """
    items = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    named = [item if isinstance(item, tuple) else (f"parameter {i}", item) for i, item in enumerate(items)]
    names: dict[int, str] = {}
    for name, p in named:
        if not isinstance(p, Tensor) or not p.is_leaf:
            raise TypeError(f"{name}: expected a parameter, got {type(p).__name__}")
        if id(p) in names:
            raise ValueError(
                f"parameters: expected each once, got {names[id(p)]} and {name}, which are the same"
            )
        names[id(p)] = name
    return named


def tree_sum(sums: list[Tensor]) -> Tensor:
    """Returns the sum of tensors of one shape in a balanced tree, adjacent ones first. It overwrites the
    first tensor of each pair. The number of tensors must be a power of two."""
    while len(sums) > 1:
        sums = [sums[i].add_(sums[i + 1]) for i in range(0, len(sums), 2)]
    return sums[0]


class TreeCounter:
    """A balanced tree over tensors that come one after the other. It works as a binary counter of partial
    sums, so at most n + 1 of 2^n tensors are in memory. It owns the tensors that it is given."""

    def __init__(self):
        self._levels: list[tuple[int, Tensor]] = []  # number of tensors in a sum, and the sum; largest first

    def add(self, t: Tensor) -> None:
        size = 1
        while self._levels and self._levels[-1][0] == size:
            t = self._levels.pop()[1].add_(t)
            size *= 2
        self._levels.append((size, t))

    def take(self) -> Tensor:
        """Returns the sum of all tensors since the last take. Their number must be a power of two."""
        (_, total), *others = self._levels
        if others:
            raise ValueError(
                f"expected a power of two of tensors, got {sum(size for size, _ in self._levels)}"
            )
        self._levels = []
        return total


class GradientSum:
    """The gradient of a step. It sums each parameter's `.grad` in a balanced tree over the passes of a slot,
    and then in a chain over slots. torch's own `+=` would be a chain over all passes; it is refused.

        optimizer.zero_grad()
        total = GradientSum(model.parameters(), plan.passes_per_slot(world, lanes_per_pass))
        for part in plan.passes(rank, world, lanes_per_pass):
            loss_of(part).backward()
            total.add_pass()
        total.finish()  # the gradients are in .grad

    It holds up to log2(passes_per_slot) + 1 more gradients of each parameter (2 more if there are several
    slots).

    Args:
        parameters: the parameters that are trained, or (name, parameter) pairs, whose names appear in errors.
            Their gradients are fp32 (`keep_fp32_gradients`); with FSDP2 they are each rank's shards, summed
            over ranks by `TreeReduceScatter`.
        passes_per_slot: the number of passes in a slot, a power of two.

    Raises:
        RuntimeError: a parameter still has a gradient, to which the first pass would add; or torch's own
            threads on the CPU flush subnormal numbers.
        TypeError: an item of parameters is not a leaf tensor.
        ValueError: passes_per_slot is not a power of two, or a parameter comes twice.
    """

    def __init__(self, parameters: Iterable[Tensor | tuple[str, Tensor]], passes_per_slot: int):
        named = named_once(parameters)
        if not is_power_of_two(passes_per_slot):
            raise ValueError(f"passes_per_slot: expected a power of two, got {passes_per_slot}")
        self._named = [(name, p) for name, p in named if p.requires_grad]
        if names := [name for name, p in self._named if p.grad is not None]:
            raise RuntimeError(
                f"GradientSum: expected no gradients yet, got one of {names[0]}: call"
                " optimizer.zero_grad() before each step"
            )
        refuse_flushing_threads()
        self._passes_per_slot = passes_per_slot
        self._pass = 0
        self._counters = [TreeCounter() for _ in self._named]
        self._totals: list[Tensor | None] = [None] * len(self._named)

    @torch.no_grad()
    @keep_subnormals()
    def add_pass(self) -> None:
        """Takes the gradients of a pass out of `.grad`.

        Raises:
            RuntimeError: a parameter has no gradient, or one that is not fp32. Then none is taken.
        """
        for name, parameter in self._named:
            gradient = parameter.grad
            if gradient is None or gradient.dtype != torch.float32:
                got = "none" if gradient is None else str(gradient.dtype)
                raise RuntimeError(f"{name} {list(parameter.shape)}: expected a gradient in fp32, got {got}")
        for (_, parameter), counter in zip(self._named, self._counters, strict=True):
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
        """Puts the sums into `.grad`. Afterwards the object can be used for the next step.

        Raises:
            RuntimeError: the last slot has too few passes.
        """
        if self._pass % self._passes_per_slot:
            raise RuntimeError(
                f"expected {self._passes_per_slot} passes for each slot, got {self._pass} in total"
            )
        for (_, parameter), total in zip(self._named, self._totals, strict=True):
            parameter.grad = total
            if total is not None:
                total.isobit_pass = True  # another backward pass must not add to it
        self._totals = [None] * len(self._named)
        self._pass = 0


def keep_fp32_gradients(module: nn.Module) -> None:
    """Makes autograd keep the gradients of bf16 parameters in fp32, as the operators return them. Otherwise
    autograd rounds each to bf16 before any sum, and bits depend on the number of ranks. A backward pass that
    adds to the gradient of another one is then an error (see `accumulate_slots`)."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.is_leaf and parameter.dtype != torch.float32:
            keep_fp32(parameter)
            name_parameter(parameter, name)


def keep_fp32(parameter: Tensor) -> None:
    """keep_fp32_gradients for one parameter, which must be a leaf that requires a gradient."""
    if parameter.grad_dtype is not torch.float32:
        parameter.grad_dtype = torch.float32
    watch(parameter)


def name_parameter(parameter: Tensor, name: str) -> None:
    """Gives the parameter a name for errors of hooks, which do not know its module. The first name stays: it
    is the name in the whole model."""
    if not hasattr(parameter, "isobit_name"):
        parameter.isobit_name = name


def watch(parameter: Tensor) -> None:
    """Makes a second backward pass that adds to the parameter's gradient an error. Under FSDP2 the parameter
    is a shard (FSDP2 reports each reduced gradient of it) or what FSDP2 has gathered (which waits for the sum
    over ranks)."""
    hooks = parameter._post_accumulate_grad_hooks
    if hooks is None or _refuse_second_pass not in hooks.values():
        parameter.register_post_accumulate_grad_hook(_refuse_second_pass)


# INVARIANT: no sum over passes by autograd's own += goes unseen (tests/torch/accumulation_test.py).
def _refuse_second_pass(parameter: Tensor) -> None:
    gradient = parameter.grad
    # A first gradient is a new tensor; autograd and FSDP2 add to an existing one in place.
    if hasattr(gradient, "isobit_pass") and not hasattr(parameter, "isobit_slots"):
        name = getattr(parameter, "isobit_name", "parameter")
        raise RuntimeError(
            f"{name} {list(parameter.shape)}: a backward pass added to the gradient of an earlier one, so"
            " its bits depend on the cut into passes and ranks: sum passes with isobit.torch.GradientSum,"
            " and drop gradients with zero_grad(), to None. If each backward pass is a whole slot, allow it"
            " with isobit.torch.accumulate_slots(model)"
        )
    gradient.isobit_pass = True


def accumulate_slots(model: nn.Module) -> None:
    """Allows backward passes to add to each other's gradients, for trainers that accumulate gradients
    themselves.

    Each backward pass must then be a whole slot (all of its lanes, on all ranks): autograd's sum is C10's
    chain over slots. How the batch is cut into passes becomes part of the recipe: it changes bits.

    Args:
        model: call this after fully_shard, when its parameters are those that are trained.
    """
    for parameter in model.parameters():
        parameter.isobit_slots = True


# Optimizers that mix the gradient's dtype with the parameter's.
_TAKE_OTHER_DTYPES = ("SGD",)


@functools.cache
def refuse_other_optimizers() -> None:
    """From now on, torch's own optimizers raise an error with advice for fp32 gradients of bf16 parameters,
    before anything is changed. Otherwise they would fail without advice."""
    register_optimizer_step_pre_hook(_refuse_step)


def _refuse_step(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or kind.__name__ in _TAKE_OTHER_DTYPES:
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and p.dtype is torch.bfloat16 and p.grad.dtype is torch.float32:
                raise TypeError(
                    f"torch.optim.{kind.__name__}: a parameter {list(p.shape)} in bfloat16 has a gradient in"
                    " float32, as in a model patched by isobit.torch.patch: use isobit.torch.AdamW, which"
                    " keeps masters in float32"
                )
