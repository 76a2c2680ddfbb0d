"""The operators: thin, typed names for `torch.ops.isobit.*`, with what each takes and gives. Those of losses,
and the losses made of them, are in losses.py.

All tensors are contiguous and on one device; bf16 is torch.bfloat16. Every operator raises RuntimeError,
naming the argument, what was expected and what came. Token rows are the rows of a pass. `packs` are the
bounds of its packs in token rows (`Batch.packs`): gradients of parameters are summed for each pack, then over
packs in a balanced tree (NUMERICS.md, C10). Gradients of activations are bf16, those of bf16 parameters fp32:
autograd rounds these to bf16 unless `keep_fp32_gradients` was called.

On GPUs the operators run on the current stream, and values of index tensors (ids, positions, targets) and of
sampling are not checked: an index out of range reads memory that is not its own. `Batch`, `Sampling` and
`patch` check them beforehand.

torch.compile rounds the gradients of bf16 parameters to bf16; patched models stay out of it.
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

# Rows of logits that exist at a time, in logprobs. Changes no bit.
BLOCK_ROWS = 2048


def embedding(batch: Batch, table: Tensor) -> Tensor:
    """bf16 [token rows, hidden]: the rows of table, bf16 [vocab, hidden], by the batch's ids (C9, step 1).
    Differentiable in table."""
    rows = (batch.unique_ids, batch.starts, batch.rows_by_id)
    return _ops.embedding(batch.ids, table, *rows, batch.packs)


def tied_embedding(batch: Batch, table: Tensor, tied: TiedGradient) -> Tensor:
    """As embedding, of a table that is lm_head's weight as well. Its gradient is that of both: `logprobs`
    with the same `tied` leaves its part there, and this function's backward pass, which comes later, adds to
    it."""
    rows = (batch.unique_ids, batch.starts, batch.rows_by_id)
    return autograd.TiedEmbedding.apply(table, batch.ids, rows, batch.packs, tied)


def rms_norm(x: Tensor, weight: Tensor, eps: float, packs: Sequence[int]) -> Tensor:
    """bf16 [token rows, columns] of x, likewise, and weight, bf16 [columns] (C5). Differentiable in both."""
    return _ops.rms_norm(x, weight, eps, packs)


def linear(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], packs: Sequence[int]) -> Tensor:
    """bf16 [token rows, n]: x, bf16 [token rows, k], times one to three weights, bf16 [n_i, k], one below the
    other: q, k and v, or gate and up (C3, chain). biases: none, or one bf16 [n_i] for each. Differentiable in
    all."""
    return _ops.linear(x, list(weights), list(biases), packs)


def linear_add(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, unit: int, packs: Sequence[int]
) -> Tensor:
    """bf16 [token rows, n]: residual, likewise, plus x, bf16 [token rows, k], times weight, bf16 [n, k] (C3,
    tree; AddResidual). Differentiable in all four.

    unit: columns of a unit of k: 16 for down_proj; heads / kv_heads * head_dim for o_proj.
    """
    return _ops.linear_add(x, weight, bias, residual, unit, packs)


def swiglu(gate_up: Tensor) -> Tensor:
    """bf16 [token rows, columns] of bf16 [token rows, 2 * columns]: gates, then ups. Differentiable."""
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
    """q, k, v, bf16 [token rows, heads or kv_heads * head_dim]: q and k normalised, if there are norms, and
    rotated (C9, step 2). Differentiable in qkv and the norms.

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
    """bf16 [token rows, heads * head_dim], causal (C6). Differentiable in q, k, v.

    Args:
        q: bf16 [token rows, heads * head_dim]; k, v: bf16 [token rows, kv_heads * head_dim].
        sequences: bounds of the sequences in token rows, [sequences + 1], from 0; rows beyond become 0.
        cu_seqlens: the same, int32, on the device.
        window: keys that a row sees, its own included; 0: all before it.
    """
    return _ops.attention(q, k, v, cu_seqlens, sequences, head_dim, window)[0]


def logits(hidden: Tensor, weight: Tensor, packs: Sequence[int] = ()) -> Tensor:
    """fp32 [rows, vocab]: hidden, bf16 [rows, hidden size], times lm_head's weight, bf16 [vocab, hidden
    size]. Without a gradient: logprobs have one. packs: ignored."""
    return _ops.logits(hidden, weight)


class LogProbs(NamedTuple):
    """fp32 [rows] both, in nats."""

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
    """The logprobs of targets and their rows' entropies (C7, C8); NaN in a row with a logit that is NaN or
    infinite. Differentiable in hidden and weight.

    Logits exist for block_rows rows at a time; the backward pass computes them again.

    Args:
        hidden: bf16 [rows, hidden size], the rows whose logprobs are asked for.
        weight: lm_head's, bf16 [vocab, hidden size].
        targets: int32 [rows].
        packs: bounds of the packs in these rows (`Batch.scored_packs`).
        temperature, top_p, min_p: fp32 [rows]; top_k: int32 [rows]. None: 1, 1, 0, 0 (all). A temperature of
            0 counts as 1 without filters.
        batch, tied: of a weight that is the embedding's as well; `tied_embedding` then has its gradient.
        block_rows: a multiple of 16.
    """
    rows = (hidden, weight, targets, temperature, top_k, top_p, min_p, block_rows, packs)
    if tied is None:
        return LogProbs(*_ops.logprobs(*rows)[:2])
    return LogProbs(*autograd.TiedLogProbs.apply(*rows, batch.unique_ids, tied))


def square_sums(x: Tensor) -> Tensor:
    """float64 [rows]: the sum of squares of each row of x, fp32 [rows, columns] (C15)."""
    return _ops.square_sums(x)


def tree_sum64(x: Tensor) -> Tensor:
    """The sum of x, float64 [n], in a balanced tree, adjacent values first: float64 []."""
    return _ops.tree_sum64(x)


def adamw_(
    parameter: Tensor,
    m: Tensor,
    v: Tensor,
    gradient: Tensor,
    working: Tensor | None,
    factors: Sequence[float],
) -> None:
    """One AdamW step in place (C15): parameter (the master), m and v, fp32 of one shape with gradient;
    working, bf16 of that shape, becomes bf16(parameter). factors: `adamw.step_factors`."""
    _ops.adamw(parameter, m, v, gradient, working, factors)


def dither_(out: Tensor, x: Tensor, step: int, moment: int, first: int) -> None:
    """out, bf16, becomes the moment x of AdamW's step `step`, fp32 of that shape, each value as one of its
    two neighbours in bf16 (C15). moment: 0 for m, 1 for v. first: the number of x's first element in the
    whole parameter, in row-major order."""
    _ops.dither(out, x, step, moment, first)
