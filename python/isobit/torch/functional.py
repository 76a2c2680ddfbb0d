"""The operators: thin, typed names for `torch.ops.isobit.*`, with the arguments and results of each.
losses.py has the operators for losses, and the losses made of them.

All tensors are contiguous and on one device; bf16 is torch.bfloat16. Every operator raises RuntimeError for a
wrong argument; the message names it and says what was expected and what came. Token rows are the rows of a
pass. `packs` are the bounds of its packs in token rows (`Batch.packs`). Gradients of parameters are summed
for each pack, and then over packs in a balanced tree (NUMERICS.md, C10). Gradients of activations are bf16.
Gradients of bf16 parameters are fp32; autograd rounds them to bf16 unless `keep_fp32_gradients` was called.

On GPUs the operators run on the current stream. There the values of index tensors (ids, positions, targets)
and of sampling are not checked: an index out of range reads memory outside the tensor. `Batch`, `Sampling`
and `patch` check them beforehand.

torch.compile rounds the gradients of bf16 parameters to bf16; so patched models are excluded from
compilation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from isobit.torch import autograd, fakes
from isobit.torch.autograd import TiedGradient
from isobit.torch.library import load
from isobit.torch.losses import (
    cispo_loss,
    constant_weights,
    dpo_loss,
    exp,
    gspo_loss,
    log,
    log_sigmoid,
    policy_loss,
    sequence_mean_weights,
    sequence_sums,
    sigmoid,
    token_losses,
    token_mean_weights,
    tree_sum,
)

if TYPE_CHECKING:
    from isobit.torch.batch import Batch

__all__ = [
    "LogProbs",
    "TiedGradient",
    "adamw_",
    "attention",
    "cispo_loss",
    "constant_weights",
    "dither_",
    "dpo_loss",
    "embedding",
    "exp",
    "gspo_loss",
    "linear",
    "linear_add",
    "log",
    "log_sigmoid",
    "logits",
    "logprobs",
    "policy_loss",
    "qkv",
    "rms_norm",
    "sequence_mean_weights",
    "sequence_sums",
    "sigmoid",
    "square_sums",
    "swiglu",
    "tied_embedding",
    "token_losses",
    "token_mean_weights",
    "tree_sum",
    "tree_sum64",
]

load()
fakes.register()
autograd.register()

_ops = torch.ops.isobit

# Rows of logits that logprobs has in memory at the same time. Changes no bit.
BLOCK_ROWS = 2048


def embedding(batch: Batch, table: Tensor) -> Tensor:
    """Returns bf16 [token rows, hidden]: the rows of `table`, bf16 [vocab, hidden], for the batch's ids (C9,
    step 1). Differentiable in table."""
    rows = (batch.unique_ids, batch.starts, batch.rows_by_id)
    return _ops.embedding(batch.ids, table, *rows, batch.packs)


def tied_embedding(batch: Batch, table: Tensor, tied: TiedGradient) -> Tensor:
    """Like embedding, for a table that is also lm_head's weight. The gradient includes both uses: `logprobs`
    with the same `tied` stores its part there, and the backward pass of this function, which comes later,
    adds to it."""
    rows = (batch.unique_ids, batch.starts, batch.rows_by_id)
    return autograd.TiedEmbedding.apply(table, batch.ids, rows, batch.packs, tied)


def rms_norm(x: Tensor, weight: Tensor, eps: float, packs: Sequence[int]) -> Tensor:
    """Returns bf16 [token rows, columns]: the RMSNorm (C5) of x, bf16 in the same shape, with weight, bf16
    [columns]. Differentiable in both."""
    return _ops.rms_norm(x, weight, eps, packs)


def linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], packs: Sequence[int]) -> Tensor:
    """Returns bf16 [token rows, n]: x, bf16 [token rows, k], times one to three weights, bf16 [n_i, k],
    stacked: q, k and v, or gate and up (C3, chain). biases: none, or one bf16 [n_i] for each weight.
    Differentiable in all."""
    return _ops.linear(x, list(weights), list(biases), packs)


def linear_add(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, unit: int, packs: Sequence[int]
) -> Tensor:
    """Returns bf16 [token rows, n]: residual, bf16 in the same shape, plus x, bf16 [token rows, k], times
    weight, bf16 [n, k] (C3, tree; AddResidual). Differentiable in x, weight, bias and residual.

    unit: the number of columns in a unit of k: 16 for down_proj; heads / kv_heads * head_dim for o_proj.
    """
    return _ops.linear_add(x, weight, bias, residual, unit, packs)


def swiglu(gate_up: Tensor) -> Tensor:
    """Returns bf16 [token rows, columns]: SwiGLU of bf16 [token rows, 2 * columns], first the gates, then the
    ups. Differentiable."""
    return _ops.swiglu(gate_up)


def qkv(
    qkv: Tensor,
    positions: Tensor,
    cosine: Tensor,
    sine: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    heads: int,
    kv_heads: int,
    head_dim: int,
    packs: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v, bf16 [token rows, heads or kv_heads * head_dim]: q and k are normalised, if there
    are norms, and rotated (C9, step 2). Differentiable in qkv and the norms.

    Args:
        qkv: bf16 [token rows, (heads + 2 * kv_heads) * head_dim].
        positions: int32 [token rows], below max_positions.
        cosine, sine: fp32 [max_positions, head_dim / 2] (C5).
        q_norm, k_norm: bf16 [head_dim], both or none.
    """
    return _ops.qkv(qkv, positions, cosine, sine, q_norm, k_norm, eps, heads, kv_heads, head_dim, packs)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    sequences: Sequence[int],
    head_dim: int,
    window: int = 0,
) -> Tensor:
    """Returns bf16 [token rows, heads * head_dim]: causal attention (C6). Differentiable in q, k, v.

    Args:
        q: bf16 [token rows, heads * head_dim]; k, v: bf16 [token rows, kv_heads * head_dim].
        sequences: bounds of the sequences in token rows, [sequences + 1], from 0; the result is 0 in rows
            after the last bound.
        cu_seqlens: the same, int32, on the device.
        window: the number of keys that a row sees, its own included; 0: all keys up to its own.
    """
    return _ops.attention(q, k, v, cu_seqlens, sequences, head_dim, window)[0]


def logits(hidden: Tensor, weight: Tensor, packs: Sequence[int] = ()) -> Tensor:
    """Returns fp32 [rows, vocab]: hidden, bf16 [rows, hidden size], times lm_head's weight, bf16 [vocab,
    hidden size]. Not differentiable; logprobs is. packs: ignored."""
    return _ops.logits(hidden, weight)


class LogProbs(NamedTuple):
    """Logprobs and entropies, both fp32 [rows], in nats."""

    logprobs: Tensor
    entropies: Tensor


def logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    packs: Sequence[int],
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    batch: Batch | None = None,
    tied: TiedGradient | None = None,
    block_rows: int = BLOCK_ROWS,
) -> LogProbs:
    """Returns the logprobs of `targets` and the entropies of their rows (C7, C8). Both are NaN in a row with
    a logit that is NaN or infinite. Differentiable in hidden and weight.

    Logits are in memory for block_rows rows at a time; the backward pass computes them again.

    Args:
        hidden: bf16 [rows, hidden size], the rows to score.
        weight: lm_head's, bf16 [vocab, hidden size].
        targets: int32 [rows].
        packs: bounds of the packs in these rows (`Batch.scored_packs`).
        temperature, top_p, min_p: fp32 [rows]; top_k: int32 [rows]. None: 1, 1, 0, 0 (all). A temperature of
            0 counts as 1 without filters.
        batch, tied: for a weight that is also the embedding's; `tied_embedding` then has its gradient.
        block_rows: a multiple of 16.
    """
    rows = (hidden, weight, targets, temperature, top_k, top_p, min_p, block_rows, packs)
    if tied is None:
        return LogProbs(*_ops.logprobs(*rows)[:2])
    return LogProbs(*autograd.TiedLogProbs.apply(*rows, batch.unique_ids, tied))


def square_sums(x: Tensor) -> Tensor:
    """Returns float64 [rows]: the sum of squares of each row of x, fp32 [rows, columns] (C15)."""
    return _ops.square_sums(x)


def tree_sum64(x: Tensor) -> Tensor:
    """Returns float64 []: the sum of x, float64 [n], in a balanced tree that begins with adjacent values."""
    return _ops.tree_sum64(x)


def adamw_(
    parameter: Tensor,
    m: Tensor,
    v: Tensor,
    gradient: Tensor,
    working: Tensor | None,
    factors: Sequence[float],
) -> None:
    """Makes one AdamW step in place (C15).

    Args:
        parameter, m, v: fp32, updated; parameter is the master.
        gradient: fp32 in the same shape.
        working: bf16 in the same shape, becomes bf16(parameter); or None.
        factors: the result of `adamw.step_factors`.
    """
    _ops.adamw(parameter, m, v, gradient, working, factors)


def dither_(out: Tensor, x: Tensor, step: int, moment: int, first: int) -> None:
    """Rounds x, a moment in fp32, into out, bf16 in the same shape: each value becomes one of its two
    neighbours in bf16 (C15).

    Args:
        step: the number of AdamW's step.
        moment: 0 for m, 1 for v.
        first: the number of x's first element in the whole parameter, in row-major order.
    """
    _ops.dither(out, x, step, moment, first)
