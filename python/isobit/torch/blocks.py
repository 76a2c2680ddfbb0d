"""The training pass of each kind of block: what it makes of the residual stream. A layer of a model is a list
of kinds (`model_facts`), which are those of kernels/blocks. Autograd makes the backward pass.
"""

from __future__ import annotations

import torch

from isobit.torch import functional as F
from isobit.torch.gradients import keep_fp32


def trained(*parameters):
    """Returns the parameters, with gradients that stay float32."""
    for p in parameters:
        if p is None:
            continue
        if p.dtype is not torch.bfloat16:
            raise ValueError(
                f"expected parameters in bfloat16, got {p.dtype}: load the model with dtype=torch.bfloat16,"
                " or let isobit.torch.fully_shard cast it"
            )
        if not p.is_leaf and torch.is_grad_enabled():
            raise TypeError(
                "expected parameters that are leaves of autograd, got computed ones, as FSDP1 and"
                " DataParallel make them, which round gradients to bfloat16: use isobit.torch.fully_shard"
                " (FSDP2), which does not"
            )
        if p.requires_grad and p.is_leaf:
            keep_fp32(p)
    return parameters


def attention(layer, facts, index, call, hidden):
    b, module = call.batch, layer.self_attn
    cosine, sine = call.rope
    norms = (module.q_norm.weight, module.k_norm.weight) if facts.qk_norm else (None, None)
    (norm, *norms) = trained(layer.input_layernorm.weight, *norms)
    h = F.rms_norm(hidden, norm, facts.eps, b.packs)
    h = _linear(h, (module.q_proj, module.k_proj, module.v_proj), b)
    q, k, v = F.qkv(h, b.positions, cosine, sine, *norms, facts.eps, facts.heads, facts.kv_heads,
                    facts.head_dim, b.packs)  # fmt: skip
    h = F.attention(q, k, v, b.cu_seqlens, b.sequences, facts.head_dim, facts.windows[index])
    return _linear_add(h, module.o_proj, hidden, facts.heads // facts.kv_heads * facts.head_dim, b)


def gated_mlp(layer, facts, index, call, hidden):
    b, module = call.batch, layer.mlp
    (norm,) = trained(layer.post_attention_layernorm.weight)
    h = F.rms_norm(hidden, norm, facts.eps, b.packs)
    h = F.swiglu(_linear(h, (module.gate_proj, module.up_proj), b))
    return _linear_add(h, module.down_proj, hidden, 16, b)


BLOCKS = {"attention": attention, "gated_mlp": gated_mlp}


def _linear(x, modules, batch):
    weights = trained(*(m.weight for m in modules))
    biases = [b for b in trained(*(m.bias for m in modules)) if b is not None]
    return F.linear(x, list(weights), biases, batch.packs)


def _linear_add(x, module, residual, unit, batch):
    weight, bias = trained(module.weight, module.bias)
    return F.linear_add(x, weight, bias, residual, unit, batch.packs)
