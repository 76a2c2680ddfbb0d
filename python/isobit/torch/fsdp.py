"""FSDP2 with gradients whose bits do not depend on the number of ranks."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from isobit.torch.gradients import keep_fp32_gradients, name_parameter, tree_sum, watch
from isobit.torch.model_checks import refuse_shared
from isobit.torch.plan import is_power_of_two


class TreeReduceScatter(ReduceScatter):
    """FSDP2's reduce-scatter as a balanced tree over ranks, in rank order, in fp32: the top levels of the
    lanes' tree (C10). Each rank sends every other rank its chunk (all-to-all), and adds the chunks that it
    owns itself.

    `fully_shard` installs it. The number of ranks must be a power of two.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp,
        async_op: bool = False,
    ) -> None:
        """Sets output_tensor [n] to the tree over ranks of their n elements of input_tensor [world * n],
        fp32.

        Raises:
            RuntimeError: op is not a plain sum, dtypes are not fp32, async_op is set, or the number of ranks
                is not a power of two.
        """
        world = dist.get_world_size(group)
        if not is_power_of_two(world):
            raise RuntimeError(
                f"TreeReduceScatter: expected the number of ranks to be a power of two, got {world}"
            )
        if op != dist.ReduceOp.SUM or async_op:
            raise RuntimeError(f"TreeReduceScatter: expected a plain sum without async_op, got {op}")
        if input_tensor.dtype != torch.float32 or output_tensor.dtype != torch.float32:
            raise RuntimeError(f"TreeReduceScatter: expected float32, got {input_tensor.dtype}")
        chunks = torch.empty_like(input_tensor)
        dist.all_to_all_single(chunks, input_tensor, group=group)
        output_tensor.copy_(tree_sum(list(chunks.view(world, -1).unbind())))


def fully_shard(
    model: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    blocks: Iterable[nn.Module] | None = None,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Puts a model under FSDP2, in place, with the contract's gradients: fp32 from autograd, summed over
    ranks by TreeReduceScatter, not divided by anything. Make the optimizer afterwards.

    Args:
        model: its parameters are fp32, the masters that `AdamW` updates; the forward pass sees them as bf16.
            (For a bf16 checkpoint, call `model.float()` before.)
        mesh: one dimension; the number of ranks is a power of two. None: all ranks of the default group.
        blocks: the modules that are gathered one at a time. None: the modules in `model.model.layers`.
        reshard_after_forward: as in torch's fully_shard.

    Raises:
        ValueError: a parameter is not fp32, or has two names; the mesh has more than one dimension, or its
            number of ranks is not a power of two.
        TypeError: in a forward pass, which checks again: a module is under torch's own fully_shard, or
            settings that gradients depend on were changed.
    """
    refuse_shared(model)
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ValueError(f"{name}: expected float32, the master of its bf16 copy, got {parameter.dtype}")
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(
            f"mesh: expected 1 dimension, got {mesh.ndim}: replicas would be summed in another order"
        )
    if mesh is not None or dist.is_initialized():
        world = dist.get_world_size() if mesh is None else mesh.size()
        if not is_power_of_two(world):
            raise ValueError(f"mesh: expected the number of ranks to be a power of two, got {world}")
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for module in [*(model.model.layers if blocks is None else blocks), model]:
        torch_fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        module.set_custom_reduce_scatter(TreeReduceScatter())
        module.isobit_sharded = True
        # Runs after FSDP2's own hook, which puts the bf16 parameters into the module.
        module.register_forward_pre_hook(lambda module, _: _before_forward(module))
    for name, parameter in model.named_parameters():
        watch(parameter)
        name_parameter(parameter, name)
    return model


def _before_forward(module: nn.Module) -> None:
    check_sharding(module)
    keep_fp32_gradients(module)


def check_sharding(model: nn.Module) -> None:
    """Raises TypeError if a module in `model` is under FSDP2 but not through fully_shard: its gradients would
    be divided, or summed in another order. Does nothing if no gradient is computed."""
    if not torch.is_grad_enabled():
        return
    for name, module in model.named_modules():
        if not isinstance(module, FSDPModule):
            continue
        name = name or type(module).__name__
        if not getattr(module, "isobit_sharded", False):
            raise TypeError(
                f"{name}: expected isobit.torch.fully_shard, got torch's, which divides gradients by the"
                " number of ranks"
            )
        for group in _groups(module):
            if wrong := _changed_setting(group):
                raise TypeError(f"{name}: {wrong}")


def _groups(module: nn.Module) -> list:
    """Returns FSDP2's parameter groups of a module: one or none, in later versions several."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [g for g in (groups or [getattr(state, "_fsdp_param_group", None)]) if g is not None]


def _changed_setting(group) -> str:
    """Returns an error message if a setting was changed after fully_shard, otherwise ""."""
    if not group.reduce_grads:
        return (
            "set_requires_gradient_sync(False): expected True: gradients would be summed over passes before"
            " ranks; isobit.torch.GradientSum sums passes"
        )
    if not isinstance(group._reduce_scatter_comm, TreeReduceScatter):
        got = type(group._reduce_scatter_comm).__name__
        return f"set_custom_reduce_scatter: expected TreeReduceScatter, got {got}"
    if group.gradient_divide_factor != 1.0 or not group.force_sum_reduction_for_comms:
        return (
            "expected sums of gradients, got set_gradient_divide_factor"
            f"({group.gradient_divide_factor}), set_force_sum_reduction_for_comms"
            f"({group.force_sum_reduction_for_comms})"
        )
    return ""
