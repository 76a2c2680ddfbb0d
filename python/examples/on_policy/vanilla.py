"""The trainer for comparison: the same step on transformers' own bf16 kernels, torch's FSDP2 and AdamW.
Its logprobs are not the rollout's, and its bits depend on the number of ranks."""

from collections.abc import Sequence

import torch
from completions import Completion
from learner import Learner, Recipe, Terms
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


class _PlainSum:
    """Stands for isobit's GradientSum: autograd adds up the passes itself."""

    def add_pass(self) -> None: ...
    def finish(self) -> None: ...


class VanillaLearner(Learner):
    def _shard(self, model: torch.nn.Module) -> torch.nn.Module:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in [*model.model.layers, model]:
            fully_shard(module, mesh=self._mesh, mp_policy=policy)
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
        return model

    def _optimizer(self, **numbers) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), **numbers)

    def _gradient_sum(self, passes_per_slot: int):
        return _PlainSum()

    def _clip(self) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.max_norm)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _forward(self, completions: Sequence[Completion], packs: list[int]) -> tuple[Tensor, Tensor]:
        # Every rank has to take part in every pass: one without completions computes two tokens for nobody.
        sequences = [torch.tensor(c.sequence) for c in completions] or [torch.zeros(2, dtype=torch.long)]
        ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True).to(self._device)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(s) for s in sequences], batch_first=True)
        logits = self.model(input_ids=ids, attention_mask=mask.to(self._device), use_cache=False).logits
        everything = torch.log_softmax(logits[:, :-1].float() / self.recipe.temperature, dim=-1)
        wanted = torch.zeros(ids.shape[0], ids.shape[1] - 1, dtype=torch.bool)
        for row, completion in enumerate(completions):
            begin = len(completion.prompt) - 1
            wanted[row, begin : begin + len(completion.tokens)] = True
        wanted = wanted.to(self._device)
        rows = everything[wanted]
        logprobs = rows.gather(1, ids[:, 1:][wanted][:, None])[:, 0]
        return logprobs, -(rows.exp() * rows).sum(-1)

    def _loss(self, logprobs: Tensor, old: Tensor, terms: Terms) -> Tensor:
        return loss(logprobs, old, terms, self.recipe)


def loss(logprobs: Tensor, old: Tensor, terms: Terms, recipe: Recipe) -> Tensor:
    """The clipped loss, a scalar. With a correction, a token that the present weights drew weighs by its
    probability in the trainer over that in the rollout, truncated; a stale one has that ratio already."""
    ratio = torch.exp(logprobs - old)
    clipped = ratio.clamp(1 - recipe.clip_low, 1 + recipe.clip_high)
    weights = terms.weights
    if recipe.correction:
        importance = torch.exp(logprobs.detach() - terms.sampled).clamp(max=recipe.correction)
        weights = torch.where(terms.stale, weights, weights * importance)
    return -(torch.minimum(ratio * terms.advantages, clipped * terms.advantages) * weights).sum()
