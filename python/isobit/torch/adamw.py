"""AdamW by the contract (C15): fp32 masters and moments, every expression written out."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from isobit.torch import functional as F
from isobit.torch.gradients import local, refuse


def _power(base: float, n: int) -> float:
    """base^n by n - 1 products in float64."""
    result = base
    for _ in range(n - 1):
        result *= base
    return result


def step_factors(
    step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> list[float]:
    """The factors of step `step` >= 1, in float64, in the order of `functional.adamw_`, which rounds them to
    fp32."""
    beta1, beta2 = map(float, betas)
    lr, eps, weight_decay = float(lr), float(eps), float(weight_decay)  # a scheduler's may be of a tensor
    return [
        1.0 - lr * weight_decay,
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        lr / (1.0 - _power(beta1, step)),
        1.0 / math.sqrt(1.0 - _power(beta2, step)),
        eps,
    ]


def _shard_groups(gradients: list[torch.Tensor]) -> list[dist.ProcessGroup]:
    """The groups of ranks that hold different parts of these gradients."""
    groups: dict[dist.ProcessGroup, None] = {}
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            for dimension, placement in enumerate(gradient.placements):
                if not placement.is_replicate():
                    groups[gradient.device_mesh.get_group(dimension)] = None
    return list(groups)


def _check_numbers(options: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not 0.0 <= options[name] < math.inf:
            raise ValueError(f"{name}: expected at least 0 and finite, got {options[name]}")
    betas = options["betas"]
    if len(betas) != 2 or not all(0.0 < beta < 1.0 for beta in betas):
        raise ValueError(f"betas: expected two numbers between 0 and 1, got {betas}")


def _check_form(name: str, parameter: torch.Tensor) -> None:
    gradient = parameter.grad
    if parameter.dtype not in (torch.bfloat16, torch.float32) or gradient.dtype != torch.float32:
        raise RuntimeError(
            f"AdamW: {name}: expected a parameter in bfloat16 or float32 with a gradient in float32, got"
            f" {parameter.dtype} with {gradient.dtype}"
        )
    placements = [t.placements if isinstance(t, DTensor) else None for t in (parameter, gradient)]
    if placements[0] != placements[1]:
        raise RuntimeError(
            f"AdamW: {name}: expected a gradient sharded as its parameter, {placements[0]}, got"
            f" {placements[1]}"
        )


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW's interface with the contract's bits, on any number of ranks.

    A bf16 parameter has an fp32 master in the state ("master"), and becomes bf16(master) at each step. An
    fp32 parameter, such as a shard under FSDP2 with MixedPrecisionPolicy(param_dtype=torch.bfloat16), is its
    own master. Weights that are loaded into bf16 parameters after the first step need a new AdamW: a step
    writes what the masters say.

    The state has torch's form ("step", "exp_avg", "exp_avg_sq"): state_dict(), load_state_dict() and
    torch.distributed.checkpoint work as with torch.optim.AdamW, also onto another number of ranks.

    Args:
        params: parameters or groups of them, bf16 or fp32; tensors or DTensors. Gradients are fp32. Given as
            named_parameters(), errors have their names.
        lr, betas, eps, weight_decay: as of torch.optim.AdamW; in each group.

    Raises:
        ValueError: a number is out of its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; the numbers of each group are checked."""
        _check_numbers({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
        # torch.optim.AdamW's state_dict has no masters.
        if parameter.dtype != torch.float32 and "master" not in state:
            state["master"] = parameter.detach().to(torch.float32)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but keeps fp32 what torch would round to the dtype of a bf16 parameter."""
        super().load_state_dict(state_dict)
        saved = [state_dict["state"].get(i) for group in state_dict["param_groups"] for i in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter, values in zip(parameters, saved, strict=True):
            for name in ("exp_avg", "exp_avg_sq", "master"):
                if values and name in values and self.state[parameter][name].dtype != torch.float32:
                    value = values[name].detach().to(device=parameter.device, dtype=torch.float32, copy=True)
                    self.state[parameter][name] = value

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step of every parameter that has a gradient. Waits for the GPU once.

        Raises:
            FloatingPointError: a gradient holds NaN or infinity; names the parameter. Nothing is updated, and
                every rank that holds a shard of it raises this.
            RuntimeError: a parameter is neither bf16 nor fp32; its gradient is not fp32
                (`keep_fp32_gradients`), or not sharded like it. Nothing is updated.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        return loss

    def _check(self) -> None:
        names, gradients = [], []
        count = 0
        for group in self.param_groups:
            unnamed = [f"parameter {count + i}" for i in range(len(group["params"]))]
            count += len(unnamed)
            for name, parameter in zip(group.get("param_names", unnamed), group["params"], strict=True):
                if parameter.grad is not None:
                    _check_form(name, parameter)
                    names.append(name)
                    gradients.append(parameter.grad)
        if not gradients:
            return
        shards = [shard if shard.numel() else shard.new_zeros(1) for shard in map(local, gradients)]
        greatest = torch.stack(torch._foreach_norm(shards, math.inf))  # one pass over all gradients
        bad = (~greatest.isfinite()).int()
        for shard_group in _shard_groups(gradients):
            dist.all_reduce(bad, dist.ReduceOp.MAX, group=shard_group)
        refuse([name for name, is_bad in zip(names, bad.tolist(), strict=True) if is_bad])

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient = parameter.grad
        state = self._state_of(parameter)
        state["step"] += 1
        factors = step_factors(
            int(state["step"].item()), group["lr"], group["betas"], group["eps"], group["weight_decay"]
        )
        master = state.get("master")
        F.adamw_(
            local(parameter if master is None else master),
            local(state["exp_avg"]),
            local(state["exp_avg_sq"]),
            local(gradient).contiguous(),
            None if master is None else local(parameter),
            factors,
        )
