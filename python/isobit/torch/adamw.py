"""AdamW by the contract (C15): fp32 masters, moments in fp32 or bf16, and every expression in a defined
order."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from isobit.torch import functional as F
from isobit.torch.gradients import local, refuse

_MOMENTS = ("exp_avg", "exp_avg_sq")
# With bf16 moments, this many elements have fp32 moments at the same time: they fit into a GPU's cache.
_CHUNK = 1 << 21

# Numbers from here on are infinite in fp32.
_FP32_END = 2.0**128 - 2.0**103
# Options of torch's Adam and AdamW that make another optimizer, each with the value that switches it off.
_OTHER_OPTIMIZERS = {
    "amsgrad": False,
    "maximize": False,
    "differentiable": False,
    "decoupled_weight_decay": True,
}


def _power(base: float, n: int) -> float:
    """Returns base^n, computed as n - 1 products in float64."""
    result = base
    for _ in range(n - 1):
        result *= base
    return result


def step_factors(
    step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> list[float]:
    """Returns the factors of step `step` >= 1 (C15), in float64, in the order of `functional.adamw_`, which
    rounds them to fp32."""
    beta1, beta2 = map(float, betas)
    lr, eps, weight_decay = float(lr), float(eps), float(weight_decay)  # a scheduler may set tensors
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
    """Returns the groups of ranks that hold different parts of these gradients."""
    groups: dict[dist.ProcessGroup, None] = {}
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            for dimension, placement in enumerate(gradient.placements):
                if not placement.is_replicate():
                    groups[gradient.device_mesh.get_group(dimension)] = None
    return list(groups)


def _check_numbers(options: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not 0.0 <= float(options[name]) < math.inf:
            raise ValueError(f"{name}: expected at least 0 and finite, got {options[name]}")
    betas = options["betas"]
    if len(betas) != 2 or not all(0.0 < float(beta) < 1.0 for beta in betas):
        raise ValueError(f"betas: expected two numbers between 0 and 1, got {betas}")
    numbers = {name: options[name] for name in ("lr", "betas", "eps", "weight_decay")}
    if not all(abs(factor) < _FP32_END for factor in step_factors(1, **numbers)):  # later ones are smaller
        raise ValueError(f"expected numbers whose factors float32 can hold, got {numbers}")
    for name, none in _OTHER_OPTIMIZERS.items():
        if options.get(name, none) != none:
            raise ValueError(f"{name}: expected {none}, got {options[name]}: that is another optimizer")


def _check_groups(groups: list[dict[str, Any]]) -> None:
    """Runs _check_numbers for each group, since schedulers and saved states set numbers, too. Errors have the
    group's index."""
    for index, group in enumerate(groups):
        try:
            _check_numbers(group)
        except ValueError as error:
            raise ValueError(f"AdamW: param_groups[{index}]: {error}") from None


def _first_element(parameter: torch.Tensor) -> int:
    """Returns the number of a shard's first element in the whole parameter, in row-major order."""
    if not isinstance(parameter, DTensor) or not parameter.ndim:
        return 0
    _, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return offset[0] * math.prod(parameter.shape[1:])


def _update(tensors: list[torch.Tensor | None], factors: list[float], step: int, first: int) -> None:
    """Makes one step for a master, m, v, gradient and working copy (or None), all one-dimensional and on one
    device. first: the number of their first element in the whole parameter."""
    master, m, v, gradient, working = tensors
    if m.dtype == torch.float32:
        return F.adamw_(master, m, v, gradient, working, factors)
    for begin in range(0, master.numel(), _CHUNK):
        p, kept_m, kept_v, g, w = (None if t is None else t[begin : begin + _CHUNK] for t in tensors)
        new_m, new_v = kept_m.float(), kept_v.float()
        F.adamw_(p, new_m, new_v, g, w, factors)
        F.dither_(kept_m, new_m, step, 0, first + begin)
        F.dither_(kept_v, new_v, step, 1, first + begin)


def _check_form(name: str, parameter: torch.Tensor, moments: torch.dtype) -> None:
    gradient = parameter.grad
    if parameter.dtype not in (torch.bfloat16, torch.float32) or gradient.dtype != torch.float32:
        raise RuntimeError(
            f"AdamW: {name}: expected a parameter in bfloat16 or float32 with a gradient in float32, got"
            f" {parameter.dtype} with {gradient.dtype}"
        )
    placements = [t.placements if isinstance(t, DTensor) else None for t in (parameter, gradient)]
    if placements[0] != placements[1]:
        raise RuntimeError(
            f"AdamW: {name}: expected a gradient sharded like its parameter, {placements[0]}, got"
            f" {placements[1]}"
        )
    if moments != torch.float32 and not all(p.is_replicate() or p.is_shard(0) for p in placements[0] or ()):
        raise RuntimeError(
            f"AdamW: {name}: expected shards of dimension 0 for moments in {moments}, got {placements[0]}"
        )


def _check_loaded(name: str, parameter: torch.Tensor, values: dict[str, Any], moments: torch.dtype) -> None:
    """Raises ValueError unless a saved state fits this parameter."""
    for key in ("exp_avg", "exp_avg_sq", "master"):
        value = values.get(key)
        if value is not None and _layout(value) != _layout(parameter):
            raise ValueError(
                f"AdamW: {name}: {key}: expected {_layout(parameter)}, as the parameter, got {_layout(value)}"
                ": torch.distributed.checkpoint.state_dict.set_optimizer_state_dict shards whole states"
            )
    moment = values.get("exp_avg")
    if moment is not None and "master" in values and moment.dtype != moments:
        raise ValueError(
            f"AdamW: {name}: expected moments in {moments}, as AdamW(moments=) says, got {moment.dtype}:"
            " that is another recipe"
        )
    has_fp32_moments = moment is not None and moment.dtype == torch.float32
    if parameter.dtype != torch.float32 and has_fp32_moments and "master" not in values:
        raise ValueError(
            f"AdamW: {name}: expected a master with moments in float32, got none: the masters were the"
            f" float32 weights that were saved, and are lost in {parameter.dtype}; load into float32"
            " parameters (fully_shard) and save again: that state has masters"
        )


class _States(defaultdict):
    """The states of the parameters. A state is made when it is first read, since torch.distributed.checkpoint
    reads all of them, and would otherwise make them by a step on gradients that are not fp32."""

    def __init__(self, states: dict[torch.Tensor, dict[str, Any]], fresh: Callable[[torch.Tensor], dict]):
        super().__init__(None, states)
        self._fresh = fresh

    def __missing__(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        self[parameter] = state = self._fresh(parameter)
        return state

    def __reduce__(self):
        return dict, (dict(self),)

    def __bool__(self) -> bool:
        return True


def _differs(parameter: torch.Tensor, master: torch.Tensor) -> bool:
    """Whether a master, rounded to bf16, differs from the parameter."""
    rounded = [local(t).to(parameter.device, torch.bfloat16) for t in (parameter, master)]
    return not torch.equal(*(t.view(torch.int16) for t in rounded))


def _layout(t: torch.Tensor) -> str:
    placed = f" {t.placements}" if isinstance(t, DTensor) else ""
    return f"{list(t.shape)}{placed}"


class AdamW(torch.optim.Optimizer):
    """torch.optim.AdamW's interface with the contract's bits, on any number of ranks.

    A bf16 parameter has an fp32 master in the state ("master"), and becomes bf16(master) at each step. An
    fp32 parameter, such as a shard under FSDP2 with MixedPrecisionPolicy(param_dtype=torch.bfloat16), is its
    own master. If other weights are loaded into bf16 parameters after the first step, make a new AdamW, since
    a step overwrites the parameters with the masters.

    The state has torch's form ("step", "exp_avg", "exp_avg_sq"), plus a master of each parameter.
    state_dict(), load_state_dict(), torch.distributed.checkpoint and its get_state_dict work as with
    torch.optim.AdamW: also before the first step, onto another number of ranks, and from plain bf16
    parameters to FSDP2's fp32 shards and back. The model's weights must be loaded as well, before or after
    the state. If the masters do not belong to the weights, the next step raises an error; it gives fp32
    parameters the masters' bits.

    Args:
        params: parameters or groups of them, bf16 or fp32; tensors or DTensors. Gradients are fp32. With
            named_parameters(), errors contain the names.
        lr, betas, eps, weight_decay: as for torch.optim.AdamW; each group may have its own.
        moments: torch.float32; or torch.bfloat16, which saves 4 bytes per parameter. bfloat16 is another
            recipe: it changes bits, and is rounded without a drift (C15).
        offload: True keeps the moments, and the masters of bf16 parameters, in host memory, and computes the
            step there: the same bits with less GPU memory, but more time.

    Raises:
        ValueError: a number is out of range, `moments` is another dtype, or an option makes another optimizer
            (amsgrad, maximize). Raised here, in load_state_dict, or in step if the value was set later.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        moments: torch.dtype = torch.float32,
        offload: bool = False,
    ):
        if moments not in (torch.float32, torch.bfloat16):
            raise ValueError(f"moments: expected torch.float32 or torch.bfloat16, got {moments}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._moments, self._offload = moments, offload
        self._own(self.state)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_moments": self._moments, "_offload": self._offload}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._own(self.state)

    def _own(self, states: dict[torch.Tensor, dict[str, Any]]) -> None:
        self.state = _States(states, self._fresh_state)
        self._loaded: set[torch.Tensor] = set()  # parameters with loaded masters that no step has used yet

    def _kept(self, t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns t in the form in which the state keeps it."""
        return t.to("cpu" if self._offload else t.device, dtype)

    def _fresh_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the state of a parameter before its first step. An fp32 parameter is its own master."""
        moments = [torch.zeros_like(self._kept(parameter.detach(), self._moments)) for _ in _MOMENTS]
        return {
            "step": torch.tensor(0.0, dtype=torch.float32, device="cpu"),
            **dict(zip(_MOMENTS, moments, strict=True)),
            "master": self._master_of(parameter),
        }

    def _master_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns the master made from the present weights."""
        weights = parameter.detach()
        return weights if weights.dtype == torch.float32 else self._kept(weights, torch.float32)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Like torch's. The numbers of the group are checked."""
        _check_numbers({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def _named_parameters(self) -> list[tuple[str, torch.Tensor, dict[str, Any]]]:
        """Returns name, parameter and group of each parameter."""
        found = []
        for group in self.param_groups:
            unnamed = [f"parameter {len(found) + i}" for i in range(len(group["params"]))]
            names = group.get("param_names", unnamed)
            found += [(n, p, group) for n, p in zip(names, group["params"], strict=True)]
        return found

    def _master(self, parameter: torch.Tensor) -> torch.Tensor:
        """Returns the current master. Before the first step it follows the weights, which other code may
        load."""
        state = self.state[parameter]
        if parameter in self._loaded:
            return state["master"]
        if parameter.dtype == torch.float32:
            return parameter.detach()
        if "master" not in state or state["step"] == 0:  # a state of torch.optim.AdamW has no masters
            return self._master_of(parameter)
        return state["master"]

    def state_dict(self) -> dict[str, Any]:
        """Like torch's, for all parameters that are trained, and with masters. Masters of fp32 parameters are
        copies (4 bytes per parameter), since a checkpoint may be read into the state and into the parameters
        at the same time."""
        parameters = [p for _, p, _ in self._named_parameters()]
        for parameter in parameters:
            if parameter.requires_grad:
                self.state[parameter]  # makes the state if it is missing
        saved = super().state_dict()
        for index, parameter in enumerate(parameters):
            if index in saved["state"]:
                master = self._master(parameter)
                if parameter.dtype == torch.float32 and parameter not in self._loaded:
                    master = master.clone()
                saved["state"][index] = {**saved["state"][index], "master": master}
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's, but keeps values in fp32 that torch would round to the dtype of a bf16 parameter.

        Raises:
            ValueError: a number is out of range, as in the constructor; a tensor does not have its
                parameter's shape or shards; a bf16 parameter has fp32 moments but no master, because a model
                in fp32 saved them; or the moments are of the other recipe. Then nothing is loaded.
        """
        saved = [state_dict["state"].get(i) for group in state_dict["param_groups"] for i in group["params"]]
        named = self._named_parameters()
        _check_groups([{**self.defaults, **group} for group in state_dict["param_groups"]])
        if len(saved) == len(named):  # otherwise torch raises an error
            for (name, parameter, _), values in zip(named, saved, strict=True):
                _check_loaded(name, parameter, values or {}, self._moments)
        super().load_state_dict(state_dict)
        for (_, parameter, _), values in zip(named, saved, strict=True):
            for name in (*_MOMENTS, "master"):
                if values and name in values:
                    dtype = torch.float32 if name == "master" else self._moments
                    here = values[name].detach().to(parameter.device, dtype, copy=True)
                    self.state[parameter][name] = self._kept(here, dtype)
            if values and "master" in values:
                self._loaded.add(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Makes one step for every parameter that has a gradient. Waits for the GPU once.

        Raises:
            FloatingPointError: a gradient has a NaN or an infinity; the message names the parameter. Nothing
                is updated, and every rank that holds a shard of it raises this.
            RuntimeError: a parameter is neither bf16 nor fp32; its gradient is not fp32
                (`keep_fp32_gradients`), or not sharded like the parameter; or its weights do not belong to
                the masters from load_state_dict. Nothing is updated.
            ValueError: a number is out of range, as in the constructor.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _check_groups(self.param_groups)
        stepped = [item for item in self._named_parameters() if item[1].grad is not None]
        if stepped:
            self._check(stepped)
        for _, parameter, group in stepped:
            self._step(parameter, group)
        return loss

    def _check(self, stepped: list[tuple[str, torch.Tensor, dict[str, Any]]]) -> None:
        for name, parameter, _ in stepped:
            _check_form(name, parameter, self._moments)
        gradients = [parameter.grad for _, parameter, _ in stepped]
        shards = [shard if shard.numel() else shard.new_zeros(1) for shard in map(local, gradients)]
        greatest = torch.stack(torch._foreach_norm(shards, math.inf))  # one pass over all gradients
        others = torch.tensor(
            [p in self._loaded and _differs(p, self._master(p)) for _, p, _ in stepped], device="cpu"
        )
        bad = torch.stack([~greatest.isfinite(), others.to(greatest.device)]).int()
        for shard_group in _shard_groups(gradients):
            dist.all_reduce(bad, dist.ReduceOp.MAX, group=shard_group)
        not_finite, unlike = (
            [name for (name, _, _), is_bad in zip(stepped, flags, strict=True) if is_bad]
            for flags in bad.tolist()
        )
        refuse(not_finite)
        if unlike:
            raise RuntimeError(
                f"AdamW: {unlike[0]}: expected the weights that belong to the loaded masters, got others:"
                " load the model's weights from the same checkpoint, or make a new AdamW"
            )

    def _step(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, master = self.state[parameter], self._master(parameter)
        if parameter.dtype == torch.float32 and parameter in self._loaded:
            parameter.copy_(master)
            master = parameter.detach()
        self._loaded.discard(parameter)
        state["master"] = master
        state["step"] += 1
        numbers = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        step = int(state["step"].item())
        tensors = [master, *(state[name] for name in _MOMENTS), parameter.grad]
        tensors = [self._at_step(local(t)) for t in tensors]
        weights = local(parameter.detach()).view(-1)
        working = None
        if parameter.dtype == torch.bfloat16:
            working = torch.empty_like(weights, device="cpu") if self._offload else weights
        _update([*tensors, working], step_factors(step, **numbers), step, _first_element(parameter))
        if self._offload:  # otherwise everything was computed in place
            weights.copy_(tensors[0] if working is None else working)

    def _at_step(self, t: torch.Tensor) -> torch.Tensor:
        """Returns t on the device that computes the step: t itself, or a copy in host memory of a weight or
        gradient on a GPU."""
        return (t.to("cpu") if self._offload else t).contiguous().view(-1)
