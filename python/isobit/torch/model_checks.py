"""Refuses a model whose modules are not those that the operators compute: an adapter, another kind of norm or
a hook would have no effect in a patched model."""

from torch import nn

# Suffixes of transformers' class names, by the module's name.
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
    """Fails unless `model` is what transformers makes of its config. FSDP2 may have wrapped modules.

    Args:
        family: how its classes' names begin: "Llama", "Qwen3".
        layers, tied: num_hidden_layers and tie_word_embeddings of its config.

    Raises:
        TypeError: a module of another class.
        ValueError: other layers, a hook that would not be called, weights that are not tied as expected.
    """
    if len(model.model.layers) != layers:
        raise ValueError(f"model.layers: expected {layers}, num_hidden_layers, got {len(model.model.layers)}")
    for name, module in model.named_modules():
        _check_class(name, module, family)
        if name.startswith("model.layers.") and name.count(".") > 2:
            _check_hooks(name, module)
    if model.lm_head.bias is not None:
        raise ValueError("lm_head.bias: expected none")
    if tied != (model.lm_head.weight is model.model.embed_tokens.weight):
        raise ValueError(f"tie_word_embeddings is {tied}, but the model's weights say otherwise")


def _check_class(name: str, module: nn.Module, family: str) -> None:
    leaf = name.rpartition(".")[2]
    plain = None
    if leaf.endswith("_proj") or leaf == "lm_head":
        plain = nn.Linear
    elif leaf == "embed_tokens":
        plain = nn.Embedding
    # A subclass that computes the same, as FSDP2's, is as good.
    if plain is not None and type(module).forward is not plain.forward:
        raise TypeError(f"{name}: expected a plain {plain.__name__}, got {type(module).__name__}")
    suffix = _SUFFIXES.get(leaf)
    if suffix is not None and family + suffix not in {c.__name__ for c in type(module).__mro__}:
        raise TypeError(f"{name}: expected {family + suffix}, got {type(module).__name__}")


def _check_hooks(name: str, module: nn.Module) -> None:
    for kind in _HOOKS:
        for hook in (getattr(module, kind) or {}).values():
            # Those that transformers leaves behind only watch its own forward pass.
            if not (getattr(hook, "__module__", None) or "").startswith("transformers."):
                raise ValueError(
                    f"{name}: expected no hooks inside a layer, where modules are not called, got {hook!r}"
                )
