"""The trainer by isobit's contract: its logprobs have the rollout's bits, and a step's bits do not depend on
the number of ranks (docs/training.md)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from completions import Completion
from ranks import StopSignal, gathered
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

import isobit.torch as it


@dataclass(frozen=True)
class Recipe:
    """What decides about a step's bits beside parameters and batch; `lanes_per_pass` does not."""

    temperature: float
    clip_low: float  # of the ratio to the policy that drew the token
    clip_high: float
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    max_norm: float
    pack_tokens: int
    lanes: int
    lanes_per_pass: int | None = None
    correction: float = 0.0  # the cap of the importance weights; 0: none


@dataclass(frozen=True)
class Terms:
    """What the loss of each completion token takes; tensors fp32 [tokens] but for `stale`."""

    advantages: Tensor
    weights: Tensor
    sampled: Tensor  # the rollout's logprobs
    stale: Tensor  # bool: drawn by earlier weights than the present ones

    @classmethod
    def of(
        cls,
        completions: Sequence[Completion],
        advantages: Sequence[float],
        batch_tokens: int,
        step: int,
        device: torch.device,
    ) -> "Terms":
        """Of a pass. batch_tokens: completion tokens of the whole batch, by which the loss's mean divides."""

        def put(parts: list[np.ndarray], dtype) -> Tensor:
            return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *parts])).to(device)

        a = [
            np.full(len(c.tokens), value, np.float32)
            for c, value in zip(completions, advantages, strict=True)
        ]
        w = [np.full(len(c.tokens), 1 / batch_tokens, np.float32) for c in completions]
        return cls(
            put(a, np.float32),
            put(w, np.float32),
            put([c.logprobs for c in completions], np.float32),
            put([c.steps < step for c in completions], np.bool_),
        )


class Learner:
    """A model under FSDP2 and its optimizer. Every rank calls every method with the same arguments."""

    def __init__(self, model: Path, recipe: Recipe, device: torch.device, stop: StopSignal):
        self.recipe = recipe
        self._device = device
        self._stop = stop
        self._mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        # fp32: FSDP2's shards are the masters, which it gathers as bf16.
        self.model = self._shard(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device))
        self.optimizer = self._optimizer(lr=recipe.lr, betas=recipe.betas, weight_decay=recipe.weight_decay)

    def _shard(self, model: torch.nn.Module) -> torch.nn.Module:
        return it.fully_shard(it.patch(model), mesh=self._mesh)

    def _optimizer(self, **numbers) -> torch.optim.Optimizer:
        return it.AdamW(self.model.named_parameters(), **numbers)

    def _forward(self, completions: Sequence[Completion], packs: list[int]) -> tuple[Tensor, Tensor]:
        """Logprobs and entropies, fp32 [completion tokens]. A rank may have a pass without completions."""
        batch = it.Batch.of(
            [c.sequence for c in completions],
            prompt_lengths=[len(c.prompt) for c in completions],
            packs=packs,
            device=self._device,
        )
        return it.logprobs(self.model, batch, it.Sampling(temperature=self.recipe.temperature))

    def _loss(self, logprobs: Tensor, old: Tensor, terms: Terms) -> Tensor:
        return it.functional.policy_loss(
            logprobs, terms.advantages, terms.weights, old,
            clip_low=self.recipe.clip_low, clip_high=self.recipe.clip_high,
        )  # fmt: skip

    def _gradient_sum(self, passes_per_slot: int):
        return it.GradientSum(self.model.parameters(), passes_per_slot)

    def _clip(self) -> float:
        return float(it.clip_grad_norm_(self.model.named_parameters(), self.recipe.max_norm))

    def _plan(self, completions: Sequence[Completion]) -> it.Plan:
        return it.plan([len(c.sequence) for c in completions], self.recipe.pack_tokens, self.recipe.lanes)

    def _passes(self, cut: it.Plan):
        yield from cut.passes(dist.get_rank(), dist.get_world_size(), self.recipe.lanes_per_pass)

    @torch.no_grad()
    def score(self, completions: Sequence[Completion]) -> list[np.ndarray]:
        """The present weights' logprobs of each completion's tokens, fp32 [tokens]."""
        mine: dict[int, np.ndarray] = {}
        for part in self._passes(self._plan(completions)):
            self._stop.check()
            chosen = part.sequences()
            logprobs, _ = self._forward([completions[i] for i in chosen], part.pack_sizes())
            mine |= _by_completion(completions, chosen, logprobs)
        return gathered(mine)

    def gradients(
        self, completions: Sequence[Completion], advantages: Sequence[float], step: int
    ) -> tuple[list[np.ndarray], float]:
        """Leaves the batch's gradient in the parameters.

        Returns:
            The logprobs that were differentiated, as of score(), and the mean entropy of the distributions
            that the tokens were drawn from, in nats.

        Raises:
            Stopped: a signal came. The gradients are to be dropped.
        """
        cut = self._plan(completions)
        total = self._gradient_sum(cut.passes_per_slot(dist.get_world_size(), self.recipe.lanes_per_pass))
        batch_tokens = sum(len(c.tokens) for c in completions)
        mine: dict[int, np.ndarray] = {}
        mine_entropies: dict[int, np.ndarray] = {}
        for part in self._passes(cut):
            self._stop.check()
            chosen = part.sequences()
            terms = Terms.of(
                [completions[i] for i in chosen],
                [advantages[i] for i in chosen],
                batch_tokens,
                step,
                self._device,
            )
            logprobs, entropies = self._forward([completions[i] for i in chosen], part.pack_sizes())
            # The ratio's denominator: the policy that drew the token. For a token that the present weights
            # drew that is this very pass, and so the ratio is exactly 1.
            old = torch.where(terms.stale, terms.sampled, logprobs.detach())
            self._loss(logprobs, old, terms).backward()
            total.add_pass()
            mine |= _by_completion(completions, chosen, logprobs)
            mine_entropies |= _by_completion(completions, chosen, entropies)
        total.finish()
        entropy = math.fsum(np.concatenate(gathered(mine_entropies)).tolist()) / batch_tokens
        return gathered(mine), entropy

    def step(self) -> float:
        """One optimizer step. Returns the gradient's norm before clipping."""
        norm = self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def drop(self) -> None:
        """Forgets the gradients."""
        self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        """The weights in bf16, by their names in a checkpoint, on the CPU of rank 0; empty on other ranks."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = get_model_state_dict(self.model, options=options)
        if self.model.config.tie_word_embeddings:
            whole.pop("lm_head.weight", None)
        return {name: tensor.to(torch.bfloat16) for name, tensor in whole.items()}


def _by_completion(
    completions: Sequence[Completion], chosen: Sequence[int], values: Tensor
) -> dict[int, np.ndarray]:
    """A pass's values, [tokens], cut into those of its completions."""
    lengths = [len(completions[i].tokens) for i in chosen]
    parts = values.detach().cpu().split(lengths) if lengths else ()
    return {i: part.numpy() for i, part in zip(chosen, parts, strict=True)}
