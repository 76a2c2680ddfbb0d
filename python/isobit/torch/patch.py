"""Makes a Hugging Face decoder compute with isobit's kernels. The forward pass then has the bits of rollout
and scorer, the backward pass those of NUMERICS.md, C10 to C14.

`patch` replaces the `forward` of some modules of one model object. Parameters, names, state_dict and
`generate` stay unchanged: a call with a cache runs the model's own code.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Sequence

import torch
from torch import nn

from isobit.torch import functional as F
from isobit.torch.batch import Batch, Sampling
from isobit.torch.blocks import BLOCKS, trained
from isobit.torch.environment import forward_environment, refuse_flushing_threads
from isobit.torch.fsdp import check_sharding
from isobit.torch.gradients import name_parameter, refuse_other_optimizers
from isobit.torch.model_checks import check_modules, refuse_ddp, wrapping_advice

_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class _Facts:
    """What the ops need from a model's config, and its rotary table."""

    def __init__(self, architecture: str, config_json: str, ignored_fields: Sequence[str]):
        self.family = architecture.removesuffix("ForCausalLM")
        fields = {**json.loads(config_json), "architectures": [architecture]}
        try:
            facts = torch.ops.isobit.model_facts(json.dumps(fields), ",".join(ignored_fields))
        except RuntimeError as error:
            problem = str(error).partition("config.json: ")[2] or str(error)
            raise ValueError(f"patch: model.config: {problem.replace('--ignore', 'ignore')}") from None
        self.config_json = json.dumps(_without(fields, ignored_fields))
        self.__dict__.update(json.loads(facts))
        self._tables: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_tables": {}}  # torch.load may put tensors on another device

    def check(self, model: nn.Module) -> None:
        check_modules(model, self.family, len(self.layers), self.tied)

    def rope(self, positions: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        table = self._tables.get(device)
        if table is None or table[0].shape[0] < positions:
            if positions > self.max_positions:
                raise ValueError(f"a sequence has {positions} tokens, expected at most {self.max_positions}")
            size = min(self.max_positions, 1 << (positions - 1).bit_length())
            with torch.inference_mode(False):  # since later calls save them for a backward pass
                table = tuple(t.to(device) for t in torch.ops.isobit.rope_table(self.config_json, size))
            self._tables[device] = table
        return table


def _without(fields: dict, names: Sequence[str]) -> dict:
    """Returns a config's fields without these names; a name may be nested, such as "rope_scaling.beta"."""
    for name in names:
        *outer, last = name.split(".")
        inner = functools.reduce(lambda found, key: found.get(key) or {}, outer, fields)
        inner.pop(last, None)
    return fields


def patch(model: nn.Module, *, ignore_config_fields: Sequence[str] = ()) -> nn.Module:
    """Patches `model` in place and returns it.

    A patched model can be copied and pickled. torch.compile leaves its forward pass unchanged. If modules are
    replaced (resize_token_embeddings), patch it again.

    Args:
        model: a Llama (SmolLM2 too), Mistral, Qwen2 or Qwen3 for causal language modelling, as transformers
            loads it, in bfloat16; or in float32 if FSDP2 casts it (fully_shard).
        ignore_config_fields: fields of model.config to accept although the kernels do not honour them. They
            must not change a logprob of this model. The same as the services' flag --ignore_config_fields.

    Raises:
        TypeError: another class of model, or of a module in it (an adapter, a quantised layer, another norm);
            or the forward of a module was already replaced.
        ValueError: the kernels do not honour a field of the config (the message has its name and value); a
            hook is inside a layer; or a module or parameter is used twice (the message has both names). Each
            call checks the modules again.
        RuntimeError: torch's own threads on the CPU flush subnormal numbers.
    """
    name = next((c.__name__ for c in type(model).__mro__ if c.__name__ in _ARCHITECTURES), None)
    if name is None:
        raise TypeError(
            f"patch: expected one of {', '.join(_ARCHITECTURES)}; got {type(model).__name__}"
            f"{wrapping_advice(model)}"
        )
    config = model.config
    for field in ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"):
        if getattr(config, field, 0):
            raise ValueError(
                f"{field}: expected 0, got {getattr(config, field)}: the contract has no dropout"
            )
    facts = _Facts(name, config.to_json_string(), ignore_config_fields)
    facts.check(model)
    refuse_flushing_threads()
    refuse_other_optimizers()
    for module in _bound_modules(model):
        forward = vars(module).get("forward")
        if not isinstance(forward, _Forward | None):
            raise TypeError(
                f"{type(module).__name__}: expected its class's forward, got {forward}: call patch"
                " before anything else replaces it"
            )
    decoder = model.model
    _bind(decoder.embed_tokens, _embedding, facts)
    for index, layer in enumerate(decoder.layers):
        _bind(layer, _layer, facts, index)
    _bind(decoder.norm, _final_norm, facts)
    _bind(model.lm_head, _head, facts)
    _bind(decoder, _decoder, facts)
    _bind(model, _score, facts, kind=_ModelForward)
    for name, parameter in model.named_parameters():
        name_parameter(parameter, name)
    return model


def logprobs(model: nn.Module, batch: Batch, sampling: Sampling | None = None) -> F.LogProbs:
    """Scores the batch's targets, with the bits of rollout and scorer. Differentiable.

    Args:
        model: a patched model (FSDP2 may have wrapped it).
        batch: on the model's device.
        sampling: how the tokens were drawn. None: temperature 1 without filters.

    Returns:
        logprobs and entropies, float32 [scored rows], in nats, in the order of batch.scored. A tensor of rows
            times vocabulary is never in memory as a whole, neither in the forward nor in the backward pass.

    Raises:
        ValueError: a shape, dtype or device is not as expected.
        TypeError: the model is not patched, or an argument is of another class.
    """
    if not getattr(model, "isobit_patched", False):
        raise TypeError(
            f"logprobs: expected a model that isobit.torch.patch has patched, got {type(model).__name__}"
            f"{wrapping_advice(model)}"
        )
    for name, value, expected in (("batch", batch, Batch), ("sampling", sampling, Sampling | None)):
        if not isinstance(value, expected):
            raise TypeError(f"logprobs: {name}: expected {expected}, got {type(value).__name__}")
    return model(isobit_call=_Call(batch, sampling or Sampling()))


class _Call:
    """The state of one pass of a model, handed from module to module. (Not a pytree, so FSDP does not look
    inside.)"""

    def __init__(self, batch: Batch, sampling: Sampling | None):
        self.batch = batch
        self.sampling = sampling  # None: the pass computes logits, not logprobs
        self.tied = None  # an F.TiedGradient if the weights are tied
        self.rope = None  # (cosine, sine)


class _Forward:
    """The forward of a patched module: `function` if a call has isobit_call, otherwise the original one. It
    is an object, since pickle would replace a bound method by the class's own."""

    def __init__(self, module, function, facts):
        self._module = module
        self._function = function
        self._facts = facts

    @property
    def __signature__(self):  # generate reads it
        return inspect.signature(functools.partial(type(self._module).forward, self._module))

    def __call__(self, *args, isobit_call=None, **kwargs):
        if isobit_call is None:
            return self._without_call(*args, **kwargs)
        return _eagerly(self._run, isobit_call, *args, **kwargs)

    def _run(self, call, *args, **kwargs):
        with forward_environment(call.batch.device):
            return self._function(self._module, *self._facts, call, *args, **kwargs)

    def _without_call(self, *args, **kwargs):
        return self._original(*args, **kwargs)

    def _original(self, *args, **kwargs):
        return type(self._module).forward(self._module, *args, **kwargs)


class _ModelForward(_Forward):
    """The forward of the model itself. It also computes calls in transformers' form, unless they have a
    cache."""

    def _without_call(self, *args, **kwargs):
        if kwargs.get("past_key_values") is None and not kwargs.get("use_cache"):
            return _eagerly(self._computed, *args, **kwargs)
        if kwargs.get("labels") is not None:
            raise ValueError(
                "labels: expected use_cache=False: a call with a cache runs transformers' own operators"
            )
        return self._original(*args, **kwargs)

    def _computed(self, *args, **kwargs):
        from isobit.torch.calls import answer  # imported only here, since only this needs transformers

        call = self.__signature__.bind(*args, **kwargs).arguments
        call.update(call.pop("kwargs", {}))
        return answer(self._module, self._scored, **call)

    def _scored(self, batch, sampling):
        return _score(self._module, *self._facts, _Call(batch, sampling))


@torch.compiler.disable
def _eagerly(function, *args, **kwargs):
    """Calls `function` outside torch.compile, which would round the gradients of parameters to bfloat16."""
    return function(*args, **kwargs)


def _bound_modules(model):
    decoder = model.model
    return (model, decoder, decoder.embed_tokens, *decoder.layers, decoder.norm, model.lm_head)


def _bind(module, function, *facts, kind=_Forward):
    module.forward = kind(module, function, facts)
    module.isobit_patched = True


def _embedding(module, facts, call, ids):
    b = call.batch
    (table,) = trained(module.weight)
    if b.device != table.device:
        raise ValueError(f"batch: expected tensors on {table.device}, where the model is, got {b.device}")
    if b.max_id >= table.shape[0]:
        raise ValueError(f"ids and labels: expected 0 to {table.shape[0] - 1}, got {b.max_id}")
    if facts.tied:
        return F.tied_embedding(b, table, call.tied)
    return F.embedding(b, table)


def _layer(layer, facts, index, call, hidden):
    for block in facts.layers[index]:
        hidden = BLOCKS[block](layer, facts, index, call, hidden)
    return hidden


def _final_norm(module, facts, call, hidden):
    return F.rms_norm(hidden, *trained(module.weight), facts.eps, call.batch.packs)


def _head(module, facts, call, hidden):
    b = call.batch
    (weight,) = trained(module.weight)
    if call.sampling is None:
        return F.logits(hidden, weight, b.packs)
    rows = call.sampling.rows(b)
    return F.logprobs(
        hidden[b.scored], weight, b.targets, **rows, packs=b.scored_packs, batch=b, tied=call.tied
    )


def _decoder(decoder, facts, call):
    call.rope = facts.rope(call.batch.max_length, call.batch.device)
    hidden = decoder.embed_tokens(call.batch.ids, isobit_call=call)
    if not hidden.requires_grad and torch.is_grad_enabled():
        # For a frozen embedding: reentrant checkpointing computes gradients only for layers whose input
        # requires one.
        hidden.requires_grad_(any(p.requires_grad for p in decoder.layers.parameters()))
    for layer in decoder.layers:
        hidden = layer(hidden, isobit_call=call)
    return decoder.norm(hidden, isobit_call=call)


def _score(model, facts, call):
    facts.check(model)
    for module in _bound_modules(model):
        if not hasattr(module, "isobit_patched"):
            raise TypeError(
                f"expected modules that isobit.torch.patch has patched, got a new {type(module).__name__}:"
                " patch the model again after replacing modules"
            )
    check_sharding(model)
    refuse_ddp()
    if facts.tied:
        call.tied = F.TiedGradient()
    return model.lm_head(model.model(isobit_call=call), isobit_call=call)
