"""Losses by the contract (C14): of tokens, of sequences, of pairs, and the pieces for other losses. Neither
their bits nor those of their gradients depend on threads, ranks, packs or the device.

Weights are fp32. Put the divisor of a mean into the weights (`token_mean_weights` and the like): it is a
count over the whole batch, known before the backward pass. Divide by nothing afterwards. `lengths` are the
numbers of scored tokens of each sequence of a pass, in order: `Batch.scored_lengths`.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

_ops = torch.ops.isobit


def _check_bounds(clip_low: float, clip_high: float) -> None:
    for name, value in (("clip_low", clip_low), ("clip_high", clip_high)):
        if not value >= 0:
            raise ValueError(f"{name}: expected at least 0, got {value}")


def _check_factor(name: str, value: float) -> None:
    """Checks a penalty's factor as fp32 has it: a float64 that fp32 cannot hold is infinite there."""
    if not 0 <= value <= torch.finfo(torch.float32).max:
        raise ValueError(f"{name}: expected a finite number of at least 0, got {value}")


# ---- Losses of tokens


def token_losses(
    logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    old_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl: float = 0.0,
) -> Tensor:
    """Returns the loss of each token times its weight, fp32 [tokens] (C14): the policy gradient; with
    old_logprobs the clipped loss; with reference_logprobs plus kl times k3. All arguments are fp32 [tokens].
    Differentiable in logprobs.

    Divide by nothing afterwards: put the divisor of the batch's mean into `weights`. Leave out rows with a
    logprob of -inf (a token that the filters exclude): the result is infinite there or, if the weight or the
    advantage is 0, NaN. A NaN makes the result NaN, and also the gradient, except for the logprob in the
    plain policy gradient.

    Args:
        clip_low, clip_high: the ratio is clipped to 1 - clip_low and 1 + clip_high. At least 0; math.inf: not
            clipped.
        kl: the factor of k3, at least 0.

    Raises:
        ValueError: kl without reference_logprobs; clip_low, clip_high or kl is out of range; an argument
            other than logprobs requires a gradient.
    """
    _check_bounds(clip_low, clip_high)
    _check_factor("kl", kl)
    if kl != 0.0 and reference_logprobs is None:
        raise ValueError(f"kl: expected reference_logprobs with kl {kl}, got none")
    return _ops.policy_loss(
        logprobs, advantages, weights, old_logprobs, reference_logprobs, clip_low, clip_high, kl
    )[0]


def policy_loss(logprobs: Tensor, advantages: Tensor, weights: Tensor, *others, **options) -> Tensor:
    """Returns fp32 []: the sum of token_losses, with its arguments, in C14's order. Differentiable in
    logprobs."""
    return tree_sum(token_losses(logprobs, advantages, weights, *others, **options))


def cispo_loss(
    logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    old_logprobs: Tensor,
    clip_low: float = math.inf,
    clip_high: float = 4.0,
) -> Tensor:
    """Returns CISPO's loss, fp32 []: the policy gradient's loss, with advantages weighted by the ratio, which
    is clipped to 1 - clip_low and 1 + clip_high; no gradient goes through the ratio. All tensors are fp32
    [tokens]. Differentiable in logprobs."""
    _check_bounds(clip_low, clip_high)
    one = torch.ones((), dtype=torch.float32, device="cpu")
    bounds = [(one - clip_low).item(), (one + clip_high).item()]
    ratio = exp(logprobs.detach() - old_logprobs).clamp(*bounds)
    return policy_loss(logprobs, ratio * advantages, weights)


# ---- Losses of sequences and pairs


def gspo_loss(
    logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    old_logprobs: Tensor,
    lengths: Sequence[int],
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """Returns GSPO's loss, fp32 []: the clipped loss of each sequence, whose ratio is the geometric mean of
    its tokens' ratios. Differentiable in logprobs.

    Args:
        logprobs, old_logprobs: fp32 [tokens].
        advantages, weights: fp32 [sequences].
        lengths: as in sequence_sums, each at least 1.
    """
    if min(lengths, default=1) < 1:
        raise ValueError(f"lengths: expected at least 1 token in each sequence, got {list(lengths)}")
    counts = torch.tensor(lengths, dtype=torch.float32, device=logprobs.device)
    means = sequence_sums(logprobs - old_logprobs, lengths) / counts
    zeros = torch.zeros_like(means, requires_grad=False)
    return policy_loss(means, advantages, weights, zeros, clip_low=clip_low, clip_high=clip_high)


def dpo_loss(
    logprobs: Tensor,
    reference_logprobs: Tensor,
    weights: Tensor,
    lengths: Sequence[int],
    beta: float = 0.1,
) -> Tensor:
    """Returns DPO's loss, fp32 []: sequence 2i is the chosen one of pair i, 2i + 1 the rejected one.
    Differentiable in logprobs. Both sequences of a pair must be in the same pass: `plan(..., together=2)`.

    Args:
        logprobs, reference_logprobs: fp32 [tokens].
        weights: fp32 [pairs].
        lengths: as in sequence_sums, for an even number of sequences.

    Raises:
        ValueError: the number of sequences is odd, or beta is not a finite number of at least 0.
    """
    _check_factor("beta", beta)
    if len(lengths) % 2:
        raise ValueError(f"lengths: expected pairs of sequences, chosen and rejected, got {len(lengths)}")
    sums = sequence_sums(logprobs - reference_logprobs, lengths)
    margins = beta * (sums[0::2] - sums[1::2])
    return tree_sum(-log_sigmoid(margins) * weights)


# ---- Weights: the divisors of means


def token_mean_weights(
    lengths: Sequence[int], batch_tokens: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Returns fp32 [tokens] of a pass: 1 / batch_tokens, where batch_tokens counts the scored tokens of the
    whole batch. This gives a mean over tokens, as in DAPO."""
    return _weights([_share(batch_tokens=batch_tokens)] * len(lengths), lengths, device)


def sequence_mean_weights(
    lengths: Sequence[int], batch_sequences: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Returns fp32 [tokens] of a pass: 1 / (batch_sequences * length). This gives a mean over the sequences
    of the whole batch of means over tokens, as in the first form of GRPO."""
    shares = [_share(batch_sequences=batch_sequences, length=max(n, 1)) for n in lengths]
    return _weights(shares, lengths, device)


def constant_weights(
    lengths: Sequence[int], batch_sequences: int, constant: int, device: torch.device | str = "cpu"
) -> Tensor:
    """Returns fp32 [tokens] of a pass: 1 / (batch_sequences * constant), with a constant such as the largest
    number of tokens in a completion, as in Dr. GRPO."""
    share = _share(batch_sequences=batch_sequences, constant=constant)
    return _weights([share] * len(lengths), lengths, device)


def _share(**divisors: float) -> float:
    """Returns 1 / the product of the divisors."""
    for name, value in divisors.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}: expected a number above 0, got {value}")
    return 1 / math.prod(divisors.values())


def _weights(of_sequences: list[float], lengths: Sequence[int], device) -> Tensor:
    weights = torch.tensor(of_sequences, dtype=torch.float32, device="cpu")
    return weights.repeat_interleave(torch.tensor(lengths, dtype=torch.int64, device="cpu")).to(device)


# ---- Pieces for other losses


def tree_sum(x: Tensor) -> Tensor:
    """Returns fp32 []: the sum of x, fp32 [n], in C5's tree with one value for each leaf. Differentiable."""
    return _ops.tree_sum(x)


def sequence_sums(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Returns fp32 [sequences]: the tree_sum of each sequence's part of x, fp32 [tokens]. Differentiable.

    Args:
        lengths: how many elements of x belong to each sequence, in order.

    Raises:
        ValueError: a length is below 0, or they do not add up to the length of x.
    """
    if x.dim() != 1 or min(lengths, default=0) < 0 or sum(lengths) != len(x):
        raise ValueError(
            f"lengths: expected their sum to be the length of x, {list(x.shape)}, got {list(lengths)}"
        )
    bounds = list(itertools.accumulate(lengths, initial=0))
    return _ops.sequence_sums(x.contiguous(), torch.tensor(bounds, dtype=torch.int32, device=x.device))


def _function(x: Tensor, name: str) -> Tensor:
    return _ops.loss_function(x.reshape(-1).contiguous(), name)[0].reshape(x.shape)


def exp(x: Tensor) -> Tensor:
    """Returns e to the power of x, fp32 of any shape (C14). Differentiable, like the next three. torch's own
    exp differs between CPU and GPU."""
    return _function(x, "exp")


def log(x: Tensor) -> Tensor:
    """Returns the natural logarithm of x; NaN below 0."""
    return _function(x, "log")


def sigmoid(x: Tensor) -> Tensor:
    """Returns 1 / (1 + exp(-x))."""
    return _function(x, "sigmoid")


def log_sigmoid(x: Tensor) -> Tensor:
    """Returns log(sigmoid(x)), accurate on both sides of 0."""
    return _function(x, "log_sigmoid")
