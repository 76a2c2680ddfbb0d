"""Refuses a model whose modules are not those that the operators compute. In a patched model, an adapter,
another kind of norm or a hook would have no effect, and a module that is used twice has no gradient in the
contract."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

# For the name of a module, the suffix of its class name in transformers.
_SUFFIXES = {
    "norm": "RMSNorm",
    "input_layernorm": "RMSNorm",
    "post_attention_layernorm": "RMSNorm",
    "q_norm": "RMSNorm",
    "k_norm": "RMSNorm",
    "self_attn": "Attention",
    "mlp": "MLP",
}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_modules(model: nn.Module, family: str, layers: int, tied: bool) -> None:
    """Raises an error unless `model` is what transformers makes from its config. FSDP2 may have wrapped
    modules.

    Args:
        family: the beginning of its class names: "Llama", "Qwen3".
        layers, tied: num_hidden_layers and tie_word_embeddings of its config.

    Raises:
        TypeError: a module has another class, or a parametrization.
        ValueError: the number of layers is wrong, a hook would not be called, weights are not tied as
            expected, or a module or parameter is used twice.
    """
    if len(model.model.layers) != layers:
        raise ValueError(f"model.layers: expected num_hidden_layers, {layers}, got {len(model.model.layers)}")
    for name, module in model.named_modules():
        _check_class(name, module, family)
        if name.startswith("model.layers.") and name.count(".") > 2:
            _check_hooks(name, module)
    if model.lm_head.bias is not None:
        raise ValueError("lm_head.bias: expected none")
    if tied != (model.lm_head.weight is model.model.embed_tokens.weight):
        raise ValueError(
            f"tie_word_embeddings is {tied}, but the model's weights are {'not ' if tied else ''}tied"
        )
    refuse_shared(model)


def refuse_shared(model: nn.Module) -> None:
    """Raises ValueError if two names have the same parameter, or the same memory, except for tied embeddings.
    The gradient would be a sum of two by autograd, whose bits depend on the cut into passes."""
    tied = _tied_weight(model)
    names: dict[object, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(_memory(parameter), []).append(name)
    for key, (first, *others) in names.items():
        if len(others) > (tied is not None and key == _memory(tied)):
            raise ValueError(
                f"{others[-1]}: expected a parameter of its own, got that of {first}: its gradient would"
                " depend on the cut into passes; give each a copy"
            )


def _tied_weight(model: nn.Module) -> Tensor | None:
    """Returns the weight that is both embedding and lm_head, as transformers ties them."""
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    weights = [getattr(end, "weight", None) for end in ends]
    return weights[0] if weights[0] is weights[1] else None


def _memory(parameter: Tensor) -> object:
    """Returns a value that two parameters share only if they are the same."""
    held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    address = 0 if held.is_meta or held.numel() == 0 else held.data_ptr()
    return (held.device, address) if address else id(parameter)


def _check_class(name: str, module: nn.Module, family: str) -> None:
    leaf = name.rpartition(".")[2]
    plain = None
    if leaf.endswith("_proj") or leaf == "lm_head":
        plain = nn.Linear
    elif leaf == "embed_tokens":
        plain = nn.Embedding
    if parametrize.is_parametrized(module):
        raise TypeError(
            f"{name}: expected plain parameters, got a parametrization of"
            f" {', '.join(module.parametrizations)}: make them plain, by"
            " torch.nn.utils.parametrize.remove_parametrizations, before patch"
        )
    # A subclass that computes the same, such as FSDP2's, is accepted.
    if plain is not None and type(module).forward is not plain.forward:
        raise TypeError(f"{name}: expected a plain torch.nn.{plain.__name__}, got {_described(module)}")
    suffix = _SUFFIXES.get(leaf)
    if suffix is not None and family + suffix not in {c.__name__ for c in type(module).__mro__}:
        raise TypeError(f"{name}: expected {family + suffix}, got {_described(module)}")


def _described(module: nn.Module) -> str:
    kind = f"{type(module).__module__}.{type(module).__qualname__}"
    if hasattr(module, "base_layer") or kind.startswith("peft."):
        return f"{kind}, an adapter: merge it into the weights first (PEFT: merge_and_unload())"
    return kind


def _check_hooks(name: str, module: nn.Module) -> None:
    for kind in _HOOKS:
        for hook in (getattr(module, kind) or {}).values():
            # Hooks that transformers leaves behind only watch its own forward pass.
            if not (getattr(hook, "__module__", None) or "").startswith("transformers."):
                raise ValueError(
                    f"{name}: expected no hooks inside a layer, where modules are not called, got {hook!r}"
                )


def wrapping_advice(model: object) -> str:
    """Returns advice for a model that is not one of transformers' but contains one; "" if it contains
    none."""
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if kind.startswith("peft."):
        return ": merge its adapters first (merge_and_unload())"
    if any(hasattr(model, name) for name in ("module", "_orig_mod", "_fsdp_wrapped_module")):
        return ": patch the model inside; for several ranks, wrap it with isobit.torch.fully_shard"
    return ""


def refuse_ddp() -> None:
    """Raises TypeError inside a call of DistributedDataParallel that computes gradients."""
    if torch.is_grad_enabled() and DistributedDataParallel._get_active_ddp_module() is not None:
        raise TypeError(
            "expected isobit.torch.fully_shard, got DistributedDataParallel, which averages gradients in the"
            " parameters' dtype and in another order"
        )
