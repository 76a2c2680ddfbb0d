"""The shapes and dtypes of the operators' results, for fake tensors, torch.compile and opcheck."""

import torch
from torch import Tensor


def _like(t: Tensor, shape, dtype: torch.dtype) -> Tensor:
    return t.new_empty(shape, dtype=dtype)


def _embedding(ids, table, unique_ids, starts, rows, packs):
    return _like(table, (ids.shape[0], table.shape[1]), torch.bfloat16)


def _embedding_backward(dy, unique_ids, starts, rows, vocab, packs):
    return _like(dy, (vocab, dy.shape[1]), torch.float32)


def _rms_norm_backward(dy, x, weight, eps, packs):
    return torch.empty_like(x), _like(x, weight.shape, torch.float32)


def _swiglu(gate_up):
    return _like(gate_up, (gate_up.shape[0], gate_up.shape[1] // 2), torch.bfloat16)


def _qkv(qkv, positions, cosine, sine, q_norm, k_norm, eps, heads, kv_heads, head_dim, packs):
    rows = qkv.shape[0]
    return tuple(_like(qkv, (rows, n * head_dim), torch.bfloat16) for n in (heads, kv_heads, kv_heads))


def _qkv_backward(
    dq, dk, dv, qkv, positions, cosine, sine, q_norm, k_norm, eps, heads, kv_heads, head_dim, packs
):
    columns = (heads + 2 * kv_heads) * head_dim
    norms = (0 if q_norm is None else head_dim,)
    return (
        _like(dq, (dq.shape[0], columns), torch.bfloat16),
        _like(dq, norms, torch.float32),
        _like(dq, norms, torch.float32),
    )


def _attention(q, k, v, cu_seqlens, sequences, head_dim, window):
    return torch.empty_like(q), _like(q, (q.shape[1] // head_dim, q.shape[0]), torch.float32)


def _attention_backward(dout, q, k, v, out, log_sums, cu_seqlens, sequences, head_dim, window):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _linear(x, weights, biases, packs):
    return _like(x, (x.shape[0], sum(w.shape[0] for w in weights)), torch.bfloat16)


def _linear_backward_weights(dy, x, rows, packs):
    return [_like(x, (n, x.shape[1]), torch.float32) for n in rows]


def _logprobs(hidden, weight, targets, temperature, top_k, top_p, min_p, block_rows, packs):
    rows = hidden.shape[0]
    return (
        _like(hidden, (rows,), torch.float32),
        _like(hidden, (rows,), torch.float32),
        _like(hidden, (rows, 6), torch.int32),
    )


def _logprobs_backward(
    dlogprobs, dentropies, hidden, weight, targets, temperature, top_k, top_p, min_p, state, block_rows
):
    return torch.empty_like(hidden), _like(weight, weight.shape, torch.float32)


def _policy_loss(logprobs, advantages, weights, old_logprobs, reference_logprobs, clip_low, clip_high, kl):
    return torch.empty_like(logprobs), torch.empty_like(logprobs)


FAKES = {
    "embedding": _embedding,
    "embedding_backward": _embedding_backward,
    "embedding_backward_tied": lambda *_: None,
    "rms_norm": lambda x, weight, eps, packs: torch.empty_like(x),
    "rms_norm_backward": _rms_norm_backward,
    "swiglu": _swiglu,
    "swiglu_backward": lambda ds, gate_up: torch.empty_like(gate_up),
    "qkv": _qkv,
    "qkv_backward": _qkv_backward,
    "attention": _attention,
    "attention_backward": _attention_backward,
    "linear": _linear,
    "linear_add": lambda x, weight, bias, residual, unit, packs: torch.empty_like(residual),
    "linear_backward_input": lambda dy, weights: _like(
        dy, (dy.shape[0], weights[0].shape[1]), torch.bfloat16
    ),
    "linear_backward_weights": _linear_backward_weights,
    "column_sums": lambda x, packs: _like(x, (x.shape[1],), torch.float32),
    "logits": lambda hidden, weight: _like(hidden, (hidden.shape[0], weight.shape[0]), torch.float32),
    "logprobs": _logprobs,
    "logprobs_backward": _logprobs_backward,
    "policy_loss": _policy_loss,
    "loss_function": lambda x, function: (torch.empty_like(x), torch.empty_like(x)),
    "tree_sum": lambda x: _like(x, (), torch.float32),
    "sequence_sums": lambda x, bounds: _like(x, (bounds.shape[0] - 1,), torch.float32),
    "square_sums": lambda x: _like(x, (x.shape[0],), torch.float64),
    "weight_sums": lambda block, *_: _like(block, (3,), torch.int64),
    "tree_sum64": lambda x: _like(x, (), torch.float64),
    "adamw": lambda *_: None,
    "dither": lambda *_: None,
}


def register() -> None:
    for name, fake in FAKES.items():
        torch.library.register_fake(f"isobit::{name}", fake)
