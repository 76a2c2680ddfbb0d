"""Makes a Hugging Face decoder compute with isobit's kernels: the forward pass has the rollout's and
the scorer's bits, the backward pass those of NUMERICS.md, C10 to C14.

`patch` replaces the `forward` of some modules of one model object. Parameters, names, state_dict and
`generate` stay as they were: a call with a cache runs the model's own code.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import types

import torch
from torch import nn

from isobit.torch import functional as F
from isobit.torch.batch import Batch, Sampling

_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Arguments of a call that change nothing here.
_HARMLESS = {
    "use_cache",
    "return_dict",
    "num_items_in_batch",
    "max_length_q",
    "max_length_k",
    "cache_position",
}


class _Facts:
    """What the ops need of a model's config, and its rotary table."""

    def __init__(self, config_json: str):
        self.config_json = config_json
        self.__dict__.update(json.loads(torch.ops.isobit.model_facts(config_json)))
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def rope(self, positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        table = self._tables.get(device)
        if table is None or table[0].shape[0] < positions:
            if positions > self.max_positions:
                raise ValueError(f"a sequence has {positions} tokens; the model takes {self.max_positions}")
            size = min(self.max_positions, 1 << (positions - 1).bit_length())
            table = tuple(t.to(device) for t in torch.ops.isobit.rope_table(self.config_json, size))
            self._tables[device] = table
        return table


def patch(model: nn.Module) -> nn.Module:
    """Patches `model` in place and returns it.

    Args:
        model: a Llama (SmolLM2 too), Mistral, Qwen2 or Qwen3 for causal language modelling, as
            transformers loads it, in bfloat16; or in float32 if FSDP2 casts it (fully_shard).

    Raises:
        TypeError: another class of model, or a module in the place of a linear layer or norm (an
            adapter, a quantised layer).
        ValueError: a field of the config that the kernels do not honour, by its name and value.
    """
    name = next((c.__name__ for c in type(model).__mro__ if c.__name__ in _ARCHITECTURES), None)
    if name is None:
        raise TypeError(f"patch: expected one of {', '.join(_ARCHITECTURES)}; got {type(model).__name__}")
    config = model.config
    for field in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"):
        if getattr(config, field, 0):
            raise ValueError(
                f"{field}: expected 0, got {getattr(config, field)}: dropout has no place in the contract"
            )
    facts = _Facts(json.dumps({**json.loads(config.to_json_string()), "architectures": [name]}))
    decoder = model.model
    for module_name, module in model.named_modules():
        leaf = module_name.rpartition(".")[2]
        if (leaf.endswith("_proj") or leaf == "lm_head") and type(module) is not nn.Linear:
            raise TypeError(f"{module_name}: expected a plain Linear, got {type(module).__name__}")
        if leaf == "embed_tokens" and type(module) is not nn.Embedding:
            raise TypeError(f"{module_name}: expected a plain Embedding, got {type(module).__name__}")
    if facts.tied != (model.lm_head.weight is decoder.embed_tokens.weight):
        raise ValueError(f"tie_word_embeddings is {facts.tied}, but the model's weights say otherwise")

    _bind(decoder.embed_tokens, _embedding, facts)
    for index, layer in enumerate(decoder.layers):
        _bind(layer, _layer, facts, facts.windows[index])
    _bind(decoder.norm, _final_norm, facts)
    _bind(model.lm_head, _head, facts)
    _bind(decoder, _decoder, facts)
    _bind_model(model, facts)
    return model


def logprobs(model: nn.Module, batch: Batch, sampling: Sampling | None = None) -> F.LogProbs:
    """Scores the batch's targets: the rollout's and the scorer's bits, differentiable.

    Args:
        model: a patched model (FSDP2 may have wrapped it).
        batch: on the model's device.
        sampling: of the tokens' draw. None: temperature 1 without filters.

    Returns:
        logprobs and entropies, float32 [scored rows], in the order of batch.scored. Rows times
        vocabulary are never in memory at once, in neither pass.

    Raises:
        ValueError: a shape, dtype or device that is not as expected.
        TypeError: the model is not patched.
    """
    if not getattr(model, "isobit_patched", False):
        raise TypeError("logprobs: expected a model that isobit.torch.patch has patched")
    return model(isobit_call=_Call(batch, sampling or Sampling()))


class _Call:
    """One pass of a model, handed from module to module. (Not a pytree: FSDP does not look inside.)"""

    def __init__(self, batch: Batch, sampling: Sampling | None):
        self.batch = batch
        self.sampling = sampling  # None: logits, not logprobs
        self.tied = None  # F.TiedGradient of a model with tied weights
        self.rope = None  # (cosine, sine)


def _bind(module, function, *facts):
    """Lets `module` compute `function` where a call has isobit_call, else what it did."""
    original = type(module).forward

    @functools.wraps(original)  # generate looks at the signature
    def forward(self, *args, isobit_call=None, **kwargs):
        if isobit_call is None:
            return original(self, *args, **kwargs)
        return function(self, *facts, isobit_call, *args, **kwargs)

    module.forward = types.MethodType(forward, module)


def _bind_model(model, facts):
    original = type(model).forward

    @functools.wraps(original)
    def forward(self, *args, isobit_call=None, **kwargs):
        if isobit_call is not None:
            return _score(self, facts, isobit_call)
        call = inspect.signature(original).bind(self, *args, **kwargs).arguments
        call.pop("self")
        call.update(call.pop("kwargs", {}))
        if call.get("past_key_values") is not None or call.get("use_cache"):
            return original(self, *args, **kwargs)
        return _forward(self, facts, **call)

    model.forward = types.MethodType(forward, model)
    model.isobit_patched = True


def _weights(*parameters):
    """The parameters, with gradients that stay float32."""
    for p in parameters:
        if p is None:
            continue
        if p.dtype is not torch.bfloat16:
            raise ValueError(
                f"expected parameters in bfloat16, got {p.dtype}: load the model with dtype=torch.bfloat16,"
                " or let isobit.torch.fully_shard cast it"
            )
        if p.requires_grad and p.is_leaf and p.grad_dtype is not torch.float32:
            p.grad_dtype = torch.float32
    return parameters


def _embedding(module, facts, call, ids):
    b = call.batch
    (table,) = _weights(module.weight)
    if b.max_id >= table.shape[0]:
        raise ValueError(f"ids: expected 0 to {table.shape[0] - 1}, got {b.max_id}")
    if facts.tied:
        return F.tied_embedding(b, table, call.tied)
    return F.embedding(b, table)


def _layer(layer, facts, window, call, hidden):
    b, attention, mlp = call.batch, layer.self_attn, layer.mlp
    cosine, sine = call.rope
    qkv = (attention.q_proj, attention.k_proj, attention.v_proj)
    q_norm, k_norm = (attention.q_norm.weight, attention.k_norm.weight) if facts.qk_norm else (None, None)
    _weights(layer.input_layernorm.weight, layer.post_attention_layernorm.weight, q_norm, k_norm)
    h = F.rms_norm(hidden, layer.input_layernorm.weight, facts.eps, b.packs)
    h = _linear(h, qkv, b)
    q, k, v = F.qkv(h, b.positions, cosine, sine, q_norm, k_norm, facts.eps, facts.heads, facts.kv_heads,
                    facts.head_dim, b.packs)  # fmt: skip
    h = F.attention(q, k, v, b.cu_seqlens, b.sequences, facts.head_dim, window)
    hidden = _linear_add(h, attention.o_proj, hidden, facts.heads // facts.kv_heads * facts.head_dim, b)
    h = F.rms_norm(hidden, layer.post_attention_layernorm.weight, facts.eps, b.packs)
    h = F.swiglu(_linear(h, (mlp.gate_proj, mlp.up_proj), b))
    return _linear_add(h, mlp.down_proj, hidden, 16, b)


def _linear(x, modules, batch):
    weights = _weights(*(m.weight for m in modules))
    biases = [] if modules[0].bias is None else list(_weights(*(m.bias for m in modules)))
    return F.linear(x, list(weights), biases, batch.packs)


def _linear_add(x, module, residual, unit, batch):
    weight, bias = _weights(module.weight, module.bias)
    return F.linear_add(x, weight, bias, residual, unit, batch.packs)


def _final_norm(module, facts, call, hidden):
    return F.rms_norm(hidden, *_weights(module.weight), facts.eps, call.batch.packs)


def _head(module, facts, call, hidden):
    b = call.batch
    (weight,) = _weights(module.weight)
    if call.sampling is None:
        return F.logits(hidden, weight, b.packs)
    rows = call.sampling.rows(b.scored_sequences)
    return F.logprobs(
        hidden[b.scored], weight, b.targets, **rows, packs=b.scored_packs, batch=b, tied=call.tied
    )


def _decoder(decoder, facts, call):
    call.rope = facts.rope(call.batch.max_length, call.batch.device)
    hidden = decoder.embed_tokens(call.batch.ids, isobit_call=call)
    for layer in decoder.layers:
        hidden = layer(hidden, isobit_call=call)
    return decoder.norm(hidden, isobit_call=call)


def _score(model, facts, call):
    if facts.tied:
        call.tied = F.TiedGradient()
    return model.lm_head(model.model(isobit_call=call), isobit_call=call)


def _forward(
    model,
    facts,
    input_ids=None,
    attention_mask=None,
    position_ids=None,
    labels=None,
    logits_to_keep=0,
    cu_seq_lens_q=None,
    num_items_in_batch=None,
    **others,
):
    """A call in the form of transformers, without a cache: logits, or with labels the loss."""
    from transformers.modeling_outputs import (
        CausalLMOutputWithPast,
    )  # here alone: others need no transformers

    for name, value in others.items():
        if value not in (None, False) and name not in _HARMLESS:
            raise ValueError(f"{name}: not supported by a model that isobit.torch.patch has patched")
    if input_ids is None:
        raise ValueError("input_ids: expected the tokens [sequences, length]; got None")
    bounds = _sequence_bounds(input_ids, attention_mask, position_ids, cu_seq_lens_q)
    if bounds is None:
        batch = Batch.from_padded(input_ids, attention_mask, labels=labels)
    else:
        cuts = list(itertools.pairwise(bounds))
        tokens, marks = input_ids[0].cpu(), None if labels is None else labels[0].cpu()
        batch = Batch.of([tokens[b:e] for b, e in cuts], device=input_ids.device,
                         labels=None if marks is None else [marks[b:e] for b, e in cuts])  # fmt: skip
    call = _Call(batch, None if labels is None else Sampling())
    out = _score(model, facts, call)
    if labels is not None:
        count = batch.scored.numel() if num_items_in_batch is None else float(num_items_in_batch)
        ones = torch.ones_like(out.logprobs)
        return CausalLMOutputWithPast(loss=F.policy_loss(out.logprobs, ones, ones / max(count, 1)))
    if bounds is not None or attention_mask is None or bool(attention_mask.all()):
        logits = out.view(*input_ids.shape, -1)
    else:
        logits = out.new_zeros(*input_ids.shape, out.shape[-1])
        logits[attention_mask.bool()] = out
    keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    return CausalLMOutputWithPast(logits=logits[:, keep])


def _sequence_bounds(input_ids, attention_mask, position_ids, cu_seq_lens):
    """Row bounds of a batch without padding, [1, rows]; None: rows of one sequence each."""
    if cu_seq_lens is None and position_ids is not None:
        expected = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(position_ids)
        if attention_mask is not None:
            expected = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
            position_ids = torch.where(attention_mask.bool(), position_ids, expected)
        if bool((position_ids == expected).all()):
            return None
        if attention_mask is None and position_ids.shape[0] == 1:
            starts = torch.nonzero(position_ids[0] == 0).reshape(-1).tolist()
            bounds = [*starts, input_ids.shape[1]]
            counted = torch.cat([torch.arange(e - b) for b, e in itertools.pairwise(bounds)])
            if starts[:1] == [0] and bool((position_ids[0].cpu() == counted).all()):
                return bounds
        raise ValueError("position_ids: expected 0, 1, ... in each sequence")
    if cu_seq_lens is None:
        return None
    bounds = cu_seq_lens.tolist()
    if (
        input_ids.shape[0] != 1
        or bounds[:1] != [0]
        or bounds[-1] != input_ids.shape[1]
        or sorted(set(bounds)) != bounds
    ):
        raise ValueError(
            f"cu_seq_lens_q: expected ascending bounds from 0 to {input_ids.shape[1]} of one row of tokens"
        )
    return bounds
