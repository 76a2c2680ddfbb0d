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

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from isobit.torch import functional as F
from isobit.torch.batch import Batch, Sampling
from isobit.torch.model_checks import check_modules

_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# Arguments of a call that change nothing here.
_HARMLESS = {
    "num_items_in_batch",
    "max_length_q",
    "max_length_k",
    "cache_position",
}
# What transformers may be asked for by its config, too.
_OUTPUTS = ("output_attentions", "output_hidden_states")


class _Facts:
    """What the ops need of a model's config, and its rotary table."""

    def __init__(self, architecture: str, config_json: str):
        self.family = architecture.removesuffix("ForCausalLM")
        self.config_json = json.dumps({**json.loads(config_json), "architectures": [architecture]})
        try:
            facts = torch.ops.isobit.model_facts(self.config_json)
        except RuntimeError as error:
            raise ValueError(f"patch: {error}") from None
        self.__dict__.update(json.loads(facts))
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_tables": {}}  # torch.load may put tensors elsewhere than they were

    def check(self, model: nn.Module) -> None:
        check_modules(model, self.family, self.layers, self.tied)

    def rope(self, positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        table = self._tables.get(device)
        if table is None or table[0].shape[0] < positions:
            if positions > self.max_positions:
                raise ValueError(f"a sequence has {positions} tokens; the model takes {self.max_positions}")
            size = min(self.max_positions, 1 << (positions - 1).bit_length())
            with torch.inference_mode(False):  # the backward pass of a later call saves them
                table = tuple(t.to(device) for t in torch.ops.isobit.rope_table(self.config_json, size))
            self._tables[device] = table
        return table


def patch(model: nn.Module) -> nn.Module:
    """Patches `model` in place and returns it.

    It can be copied and pickled. torch.compile leaves its forward pass as it is. After modules were replaced
    (resize_token_embeddings) it has to be patched again.

    Args:
        model: a Llama (SmolLM2 too), Mistral, Qwen2 or Qwen3 for causal language modelling, as
            transformers loads it, in bfloat16; or in float32 if FSDP2 casts it (fully_shard).

    Raises:
        TypeError: another class of model, or of a module in it (an adapter, a quantised layer, another norm);
            something else replaced a module's forward before.
        ValueError: a field of the config that the kernels do not honour, by its name and value; a hook inside
            a layer. Modules are checked again in each call.
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
    facts = _Facts(name, config.to_json_string())
    facts.check(model)
    for module in _bound_modules(model):
        forward = vars(module).get("forward")
        if not isinstance(forward, _Forward | None):
            raise TypeError(
                f"{type(module).__name__}: expected its class's forward, got {forward}: patch comes"
                " before whatever else replaces it"
            )
    decoder = model.model
    _bind(decoder.embed_tokens, _embedding, facts)
    for index, layer in enumerate(decoder.layers):
        _bind(layer, _layer, facts, facts.windows[index])
    _bind(decoder.norm, _final_norm, facts)
    _bind(model.lm_head, _head, facts)
    _bind(decoder, _decoder, facts)
    _bind(model, _score, facts, kind=_ModelForward)
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
        TypeError: the model is not patched, or an argument is of another class.
    """
    if not getattr(model, "isobit_patched", False):
        raise TypeError("logprobs: expected a model that isobit.torch.patch has patched")
    for name, value, expected in (("batch", batch, Batch), ("sampling", sampling, Sampling | None)):
        if not isinstance(value, expected):
            raise TypeError(f"logprobs: {name}: expected {expected}, got {type(value).__name__}")
    return model(isobit_call=_Call(batch, sampling or Sampling()))


class _Call:
    """One pass of a model, handed from module to module. (Not a pytree: FSDP does not look inside.)"""

    def __init__(self, batch: Batch, sampling: Sampling | None):
        self.batch = batch
        self.sampling = sampling  # None: logits, not logprobs
        self.tied = None  # F.TiedGradient of a model with tied weights
        self.rope = None  # (cosine, sine)


class _Forward:
    """The forward of a patched module: `function` where a call has isobit_call, else what it was. An object,
    as pickle would replace a bound method by the class's own."""

    def __init__(self, module, function, facts):
        self._module = module
        self._function = function
        self._facts = facts

    @property
    def __signature__(self):  # generate looks at it
        return inspect.signature(functools.partial(type(self._module).forward, self._module))

    def __call__(self, *args, isobit_call=None, **kwargs):
        if isobit_call is None:
            return self._without_call(*args, **kwargs)
        return _eagerly(self._function, self._module, *self._facts, isobit_call, *args, **kwargs)

    def _without_call(self, *args, **kwargs):
        return self._original(*args, **kwargs)

    def _original(self, *args, **kwargs):
        return type(self._module).forward(self._module, *args, **kwargs)


class _ModelForward(_Forward):
    """That of the model itself, which computes calls in transformers' form too, unless they have a cache."""

    def _without_call(self, *args, **kwargs):
        if kwargs.get("past_key_values") is None and not kwargs.get("use_cache"):
            return _eagerly(self._computed, *args, **kwargs)
        if kwargs.get("labels") is not None:
            raise ValueError(
                "labels: expected use_cache=False: a call with a cache runs transformers' own operators"
            )
        return self._original(*args, **kwargs)

    def _computed(self, *args, **kwargs):
        call = self.__signature__.bind(*args, **kwargs).arguments
        call.update(call.pop("kwargs", {}))
        return _forward(self._module, *self._facts, **call)


@torch.compiler.disable
def _eagerly(function, *args, **kwargs):
    """torch.compile would round the gradients of parameters to bfloat16."""
    return function(*args, **kwargs)


def _bound_modules(model):
    decoder = model.model
    return (model, decoder, decoder.embed_tokens, *decoder.layers, decoder.norm, model.lm_head)


def _bind(module, function, *facts, kind=_Forward):
    module.forward = kind(module, function, facts)
    module.isobit_patched = True


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
    if b.device != table.device:
        raise ValueError(f"batch: expected tensors on {table.device}, where the model is, got {b.device}")
    if b.max_id >= table.shape[0]:
        raise ValueError(f"ids and labels: expected 0 to {table.shape[0] - 1}, got {b.max_id}")
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
    biases = [b for b in _weights(*(m.bias for m in modules)) if b is not None]
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
    rows = call.sampling.rows(b)
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
    facts.check(model)
    for module in _bound_modules(model):
        if not hasattr(module, "isobit_patched"):
            raise TypeError(
                f"expected modules that isobit.torch.patch has patched, got a new {type(module).__name__}:"
                " patch the model again after modules were replaced"
            )
    if torch.is_grad_enabled() and isinstance(model, FSDPModule) and not hasattr(model, "isobit_sharded"):
        raise TypeError("expected isobit.torch.fully_shard, got torch's, which divides gradients")
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
    return_dict=None,
    **others,
):
    """A call in the form of transformers, without a cache: logits, or with labels the loss."""
    from transformers.modeling_outputs import (
        CausalLMOutputWithPast,
    )  # here alone: others need no transformers

    others = {name: getattr(model.config, name, None) for name in _OUTPUTS} | others
    for name, value in others.items():
        if value is not None and value is not False and name not in _HARMLESS:
            raise ValueError(f"{name}: not supported by a model that isobit.torch.patch has patched")
    if input_ids is None or input_ids.dim() != 2:
        got = None if input_ids is None else list(input_ids.shape)
        raise ValueError(f"input_ids: expected the tokens [sequences, length], got {got}")
    if labels is not None and labels.shape != input_ids.shape:
        raise ValueError(f"labels: expected {list(input_ids.shape)}, as input_ids, got {list(labels.shape)}")
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
        result = CausalLMOutputWithPast(loss=F.policy_loss(out.logprobs, ones, ones / max(count, 1)))
    else:
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        result = CausalLMOutputWithPast(logits=_padded(out, input_ids, attention_mask)[:, keep])
    by_name = getattr(model.config, "return_dict", True) if return_dict is None else return_dict
    return result if by_name else result.to_tuple()


def _padded(logits, input_ids, attention_mask):
    """The logits of all token rows as transformers gives them, [sequences, length, vocab]; 0 at padding."""
    shape = (*input_ids.shape, logits.shape[-1])
    if logits.shape[0] == input_ids.numel():
        return logits.view(shape)
    padded = logits.new_zeros(shape)
    padded[attention_mask.bool()] = logits
    return padded


def _sequence_bounds(input_ids, attention_mask, position_ids, cu_seq_lens):
    """Row bounds of a batch without padding, [1, rows]; None: rows of one sequence each."""
    length = input_ids.shape[1]
    whole = attention_mask is None or bool(attention_mask.all())
    if cu_seq_lens is not None:
        bounds = torch.as_tensor(cu_seq_lens).tolist()
        if input_ids.shape[0] != 1 or not whole or bounds[:1] != [0] or bounds[-1] != length or (
            sorted(set(bounds)) != bounds
        ):  # fmt: skip
            raise ValueError(
                f"cu_seq_lens_q: expected ascending bounds from 0 to {length} of one row of tokens without"
                f" padding, got {bounds} of {list(input_ids.shape)}"
            )
        return bounds
    if position_ids is None:
        return None
    if position_ids.shape[-1] != length:
        raise ValueError(f"position_ids: expected {length} in each row, got {position_ids.shape[-1]}")
    expected = torch.arange(length, device=input_ids.device).expand_as(position_ids)
    if not whole:
        expected = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        position_ids = torch.where(attention_mask.bool(), position_ids, expected)
    if bool((position_ids == expected).all()):
        return None
    positions = position_ids.reshape(-1).tolist()
    bounds = [*(row for row, position in enumerate(positions) if position == 0), len(positions)]
    counted = [row for b, e in itertools.pairwise(bounds) for row in range(e - b)]
    if not whole or position_ids.shape[0] != 1 or counted != positions:
        raise ValueError("position_ids: expected 0, 1, ... in each sequence")
    return bounds
