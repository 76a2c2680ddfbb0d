"""Training with isobit's numeric contract (docs/NUMERICS.md, C9 to C15) in PyTorch 2.10 and later.

The gradient of a step is a function of the parameters, the ordered batch, the loss and the recipe. It does
not depend on the number of ranks, on how memory limits cut the batch, on the schedule, or on whether a CPU or
a GPU computed it.

`patch` makes a Hugging Face model compute with the kernel set, and `logprobs` scores a `Batch` with it.
`plan` cuts a batch into packs, lanes and slots. `GradientSum`, `fully_shard`, `clip_grad_norm_` and `AdamW`
keep the order of every sum between passes and ranks. `functional` has the operators. `update_weights` sends a
model's weights to rollout and scorer (from GPU to GPU in the groups of `init_weights_update_group`);
`model_digest` is the digest that they then report.
"""

from isobit.torch import functional
from isobit.torch.adamw import AdamW
from isobit.torch.batch import Batch, Sampling
from isobit.torch.clip import clip_grad_norm_
from isobit.torch.fsdp import TreeReduceScatter, fully_shard
from isobit.torch.gradients import GradientSum, accumulate_slots, keep_fp32_gradients
from isobit.torch.patch import logprobs, patch
from isobit.torch.plan import Pass, Plan, plan
from isobit.torch_weights import (
    WeightsUpdateGroup,
    held_weights,
    init_weights_update_group,
    model_digest,
    named_weights,
    update_weights,
)

__all__ = [
    "AdamW",
    "Batch",
    "GradientSum",
    "Pass",
    "Plan",
    "Sampling",
    "TreeReduceScatter",
    "WeightsUpdateGroup",
    "accumulate_slots",
    "clip_grad_norm_",
    "fully_shard",
    "functional",
    "held_weights",
    "init_weights_update_group",
    "keep_fp32_gradients",
    "logprobs",
    "model_digest",
    "named_weights",
    "patch",
    "plan",
    "update_weights",
]
