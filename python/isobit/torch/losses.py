"""Losses by contract (C14): of tokens, of sequences, of pairs, and what others are made of. Their bits, and
those of their gradients, depend on neither threads nor ranks, packs or the device.

Weights are fp32. What a mean divides by is that of the whole batch, known before the backward pass: it
belongs into the weights (`token_mean_weights` and its like), and nothing is divided afterwards. `lengths` are
the scored tokens of each sequence of a pass, in order: `Batch.scored_lengths`.
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
    """Of a penalty. As fp32 has it: a float64 that fp32 cannot hold is infinite there."""
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
    """The loss of each token, fp32 [tokens], times its weight (C14): the policy gradient's; with old_logprobs
    the clipped one's; with reference_logprobs plus kl times k3. All fp32 [tokens]. Differentiable in
    logprobs. A logprob of -inf, of a token that the filters leave out, makes a value that is infinite or,
    with a weight or an advantage of 0, NaN: leave such rows out beforehand. A NaN makes the value NaN and,
    but for the policy gradient's logprob, the gradient.

    Divide by nothing afterwards: what the batch's mean divides by belongs into weights.

    Args:
        clip_low, clip_high: the ratio is cut to 1 - clip_low and 1 + clip_high; at least 0, math.inf: not
            cut.

    Raises:
        ValueError: kl without reference_logprobs; a bound or kl is out of range; another argument than
            logprobs requires a gradient.
    """
    _check_bounds(clip_low, clip_high)
    _check_factor("kl", kl)
    if kl != 0.0 and reference_logprobs is None:
        raise ValueError(f"kl: expected reference_logprobs with kl {kl}, got none")
    return _ops.policy_loss(
        logprobs, advantages, weights, old_logprobs, reference_logprobs, clip_low, clip_high, kl
    )[0]


def policy_loss(logprobs: Tensor, advantages: Tensor, weights: Tensor, *others, **options) -> Tensor:
    """The sum of token_losses, with its arguments, in C14's order: fp32 []. Differentiable in logprobs."""
    return tree_sum(token_losses(logprobs, advantages, weights, *others, **options))


def cispo_loss(
    logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    old_logprobs: Tensor,
    clip_low: float = math.inf,
    clip_high: float = 4.0,
) -> Tensor:
    """CISPO's loss, fp32 []: the policy gradient's, whose advantages are weighed by the ratio, cut to
    1 - clip_low and 1 + clip_high; no gradient goes through the ratio. All tensors fp32 [tokens].
    Differentiable in logprobs."""
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
    """GSPO's loss, fp32 []: the clipped one of each sequence, whose ratio is the geometric mean of its
    tokens' ratios. Differentiable in logprobs.

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
    """DPO's loss, fp32 []: sequence 2i is the chosen one of pair i, 2i + 1 the rejected one. Differentiable
    in logprobs. A pair has to be in one pass: `plan(..., together=2)`.

    Args:
        logprobs, reference_logprobs: fp32 [tokens].
        weights: fp32 [pairs].
        lengths: as in sequence_sums, of an even number of sequences.

    Raises:
        ValueError: the number of sequences is odd, or beta is not a finite number of at least 0.
    """
    _check_factor("beta", beta)
    if len(lengths) % 2:
        raise ValueError(f"lengths: expected pairs of sequences, chosen and rejected, got {len(lengths)}")
    sums = sequence_sums(logprobs - reference_logprobs, lengths)
    margins = beta * (sums[0::2] - sums[1::2])
    return tree_sum(-log_sigmoid(margins) * weights)


# ---- Weights: what means divide by


def token_mean_weights(
    lengths: Sequence[int], batch_tokens: int, device: torch.device | str = "cpu"
) -> Tensor:
    """fp32 [tokens] of a pass: 1 / batch_tokens, the scored tokens of the whole batch. A mean over tokens, as
    in DAPO."""
    return _weights([_share(batch_tokens=batch_tokens)] * len(lengths), lengths, device)


def sequence_mean_weights(
    lengths: Sequence[int], batch_sequences: int, device: torch.device | str = "cpu"
) -> Tensor:
    """fp32 [tokens] of a pass: 1 / (batch_sequences * length): a mean over the sequences of the whole batch
    of means over tokens, as in GRPO's first form."""
    shares = [_share(batch_sequences=batch_sequences, length=max(n, 1)) for n in lengths]
    return _weights(shares, lengths, device)


def constant_weights(
    lengths: Sequence[int], batch_sequences: int, constant: int, device: torch.device | str = "cpu"
) -> Tensor:
    """fp32 [tokens] of a pass: 1 / (batch_sequences * constant), with a constant such as the most tokens that
    a completion may have, as in Dr. GRPO."""
    share = _share(batch_sequences=batch_sequences, constant=constant)
    return _weights([share] * len(lengths), lengths, device)


def _share(**divisors: float) -> float:
    """1 / the divisors' product."""
    for name, value in divisors.items():
        if not 0 < value < math.inf:
            raise ValueError(f"{name}: expected a number above 0, got {value}")
    return 1 / math.prod(divisors.values())


def _weights(of_sequences: list[float], lengths: Sequence[int], device) -> Tensor:
    weights = torch.tensor(of_sequences, dtype=torch.float32, device="cpu")
    return weights.repeat_interleave(torch.tensor(lengths, dtype=torch.int64, device="cpu")).to(device)


# ---- What other losses are made of


def tree_sum(x: Tensor) -> Tensor:
    """The sum of x, fp32 [n], in C5's tree with one value a leaf: fp32 []. Differentiable."""
    return _ops.tree_sum(x)


def sequence_sums(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """The tree_sum of each sequence's part of x, fp32 [tokens]: fp32 [sequences]. Differentiable.

    Args:
        lengths: how many elements of x belong to each sequence, in order.

    Raises:
        ValueError: a length is below 0, or they do not add up to x's.
    """
    if x.dim() != 1 or min(lengths, default=0) < 0 or sum(lengths) != len(x):
        raise ValueError(f"lengths: expected parts of x, {list(x.shape)}, got {list(lengths)}")
    bounds = list(itertools.accumulate(lengths, initial=0))
    return _ops.sequence_sums(x.contiguous(), torch.tensor(bounds, dtype=torch.int32, device=x.device))


def _function(x: Tensor, name: str) -> Tensor:
    return _ops.loss_function(x.reshape(-1).contiguous(), name)[0].reshape(x.shape)


def exp(x: Tensor) -> Tensor:
    """e to the power of x, fp32 of any shape (C14). Differentiable, as those that follow. torch's own differs
    between CPU and GPU."""
    return _function(x, "exp")


def log(x: Tensor) -> Tensor:
    """The natural logarithm of x; NaN below 0."""
    return _function(x, "log")


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return _function(x, "sigmoid")


def log_sigmoid(x: Tensor) -> Tensor:
    """log(sigmoid(x)), accurate on both sides of 0."""
    return _function(x, "log_sigmoid")
