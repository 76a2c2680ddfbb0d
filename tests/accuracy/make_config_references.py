"""Writes how transformers reads config.json: for each architecture, every field that matters, with
missing, null, zero, usual and odd values. config_test.cc compares isobit's parser with the file.

    python tests/accuracy/make_config_references.py

Needs torch and transformers 5 (requirements-config.txt), and takes minutes. In each case transformers builds
a tiny model from the config and runs it once; any error on the way is recorded as the answer "error".
"""

import json
import logging
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

OUTPUT = Path(__file__).parent / "references" / "configs.json"
TOKENS = 12  # of the run; the attention masks show every window below it

MISSING = object()
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
BASE = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16384,
    "rope_theta": 20000.0,
}

ODD = [None, 0, "4", 4.0, True, [4], {"a": 4}]  # without the field, a size is that of a large model
FLAGS = [MISSING, None, True, False, 0, 1, "true"]
NUMBERS = [MISSING, None, 0, 0.0, 1, 1e-6, 0.5, "0.5", True, [0.5]]
FULL, SLIDING = "full_attention", "sliding_attention"
TYPES = [FULL, SLIDING, FULL, SLIDING]
# Field -> the values it is tried with. Fields that stand for a group are tried alone.
VALUES = {
    "vocab_size": ODD,
    "hidden_size": ODD,
    "intermediate_size": ODD,
    "num_hidden_layers": ODD,
    "num_attention_heads": ODD,
    "num_key_value_heads": [MISSING, *ODD, 1, 3, -1],
    "head_dim": [MISSING, *ODD, 16, 8, 7, -4],
    "hidden_act": [MISSING, None, "silu", "swish", "gelu", "SiLU", "", 0, True],
    "rms_norm_eps": [*NUMBERS, -1e-5],
    "max_position_embeddings": [MISSING, *ODD, 100000, -1],
    "tie_word_embeddings": FLAGS,
    "attention_bias": FLAGS,
    "mlp_bias": FLAGS,
    "qkv_bias": FLAGS,
    "rope_theta": [*NUMBERS, 10000, 1000000.0, -1],
    "partial_rotary_factor": [*NUMBERS, 1.0],
    "sliding_window": [MISSING, *ODD, 5, 4096, -5],
    "use_sliding_window": FLAGS,
    "max_window_layers": [MISSING, *ODD, 28, -1],
    "layer_types": [MISSING, None, [], TYPES, [FULL] * 4, [SLIDING] * 4, FULL],
    "attention_dropout": [MISSING, None, 0, 0.0, 0.1, 1, "0"],
    "pretraining_tp": [MISSING, None, 0, 1, 2, "2"],
    "rope_interleaved": FLAGS,
    "use_mrope": FLAGS,
    "is_causal": FLAGS,
    "is_encoder_decoder": FLAGS,
    "per_layer_config": [MISSING, None, {}, {"0": {"head_dim": 24}}],
    "quantization_config": [MISSING, None],
    "attention_multiplier": [0.5],
    "logit_scale": [0.5],
    "logits_scaling": [0.5],
    "residual_multiplier": [0.5],
    "embedding_multiplier": [0.5],
    "attn_logit_softcapping": [0.5],
    "final_logit_softcapping": [0.5],
    "scale_embeddings": [True],
    "num_experts": [4],
    "original_max_position_embeddings": [MISSING, None, 32],
    "torch_dtype": [MISSING, None, "float32", "bfloat16", "float16"],
    "dtype": [MISSING, None, "float32", "bfloat16", "float16"],
    "use_cache": FLAGS,
    "initializer_range": [MISSING, None, 0, 0.02, 0.5],
    "temperature": [0.6],
    "repetition_penalty": [1.5],
    "pad_token_id": [MISSING, None, 0, 49],
    "bos_token_id": [MISSING, None, 0, 49],
    "eos_token_id": [MISSING, None, 0, 49, [1, 2], []],
    "output_attentions": [True],
    "output_hidden_states": [True],
    "chunk_size_feed_forward": [1],
    "id2label": [{"0": "a", "1": "b", "2": "c"}],
    "torchscript": [False],
}
# Values of the rotary object's fields, per type, beside those that make it whole.
ROPE_WHOLE = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4096,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},  # both bounds between pairs
}
ROPE_COMMON = {"rope_theta", "partial_rotary_factor", "type"}
ROPE_KNOWN = {
    "default": ROPE_COMMON,
    "linear": ROPE_COMMON | {"factor"},
    "llama3": ROPE_COMMON | set(ROPE_WHOLE["llama3"]),
    "yarn": ROPE_COMMON
    | set(ROPE_WHOLE["yarn"])
    | {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
}
ROPE_VALUES = {
    "rope_theta": [MISSING, None, 0, 10000, 500000.0],
    "partial_rotary_factor": [None, 0.5, 1.0, 1],
    "type": ["default", "linear", "yarn", "mrope"],
    "factor": [MISSING, None, 0, 1, 1.0, 2, 2.5, 0.5, "2"],
    "low_freq_factor": [MISSING, None, 0, 2],
    "high_freq_factor": [MISSING, None, 0, 2],
    "original_max_position_embeddings": [MISSING, None, 0, 512, 16384, 4096.0],
    "attention_factor": [None, 0, 1, 1.0, 0.5, 1.3, "1"],
    "beta_fast": [None, 0, 8, 16.5],
    "beta_slow": [None, 0, 0.5, 2],
    "mscale": [None, 0, 1, 0.7],
    "mscale_all_dim": [None, 0, 1, 0.7],
    "truncate": [None, True, False],
    "unknown": [1],
}


def window_cases(architecture: str):
    """The fields of sliding windows act together."""
    if architecture.startswith("Qwen"):
        for use in (MISSING, None, True, False):
            for window in (MISSING, None, 0, 5):
                for first in (MISSING, None, 0, 2, 4):
                    yield {"use_sliding_window": use, "sliding_window": window, "max_window_layers": first}
                yield {"use_sliding_window": use, "sliding_window": window, "layer_types": TYPES}
                yield {"use_sliding_window": use, "sliding_window": window, "layer_types": [FULL] * 4}
    else:
        for window in (None, 5):
            for types in ([FULL] * 4, [SLIDING] * 4, TYPES):
                yield {"sliding_window": window, "layer_types": types}


def rope_cases():
    for name in ("rope_scaling", "rope_parameters"):
        yield {name: None}
        yield {name: {}}
        yield {name: "linear"}
        yield {name: {"full_attention": {"rope_type": "default", "rope_theta": 5000.0}}}
        yield {name: {"rope_type": None}}
        yield {name: {"rope_theta": 5000.0}, "rope_theta": MISSING}
        yield {name: {"rope_type": "dynamic", "factor": 2.0}}
        yield {name: {"rope_type": "unknown", "factor": 2.0}}
        for kind, whole in ROPE_WHOLE.items():
            yield {name: {"rope_type": kind} | whole}
            yield {name: {"type": kind} | whole}
            yield {name: {"rope_type": kind} | whole, "rope_theta": MISSING}
            for field, values in ROPE_VALUES.items():
                for value in values if field in ROPE_KNOWN[kind] else values[-1:]:
                    rope = {"rope_type": kind} | whole
                    if value is MISSING:
                        rope.pop(field, None)
                    else:
                        rope[field] = value
                    yield {name: rope}
    yield {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}}
    yarn = {"rope_type": "yarn"} | ROPE_WHOLE["yarn"]
    for extra in (
        {"mscale": 1.0, "mscale_all_dim": 0.5},
        {"mscale": 0.5, "mscale_all_dim": 1, "attention_factor": 1.2},
        {"beta_fast": 4, "beta_slow": 2, "truncate": False},
        {"beta_fast": 1, "beta_slow": 32},
        {"factor": None, "original_max_position_embeddings": 2048},
    ):
        yield {"rope_scaling": yarn | extra}


def cases(architecture: str):
    yield {}
    for field, values in VALUES.items():
        for value in values:
            yield {field: value}
    yield from window_cases(architecture)
    if architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):  # without and with layer_types; one code
        yield from rope_cases()


def config_json(architecture: str, changes: dict) -> dict:
    config = {"architectures": [architecture], "model_type": ARCHITECTURES[architecture]} | BASE
    if architecture == "Qwen3ForCausalLM":
        config["head_dim"] = 12
    for field, value in changes.items():
        if value is MISSING:
            config.pop(field, None)
        else:
            config[field] = value
    return config


class Captured(torch.nn.Module):
    """Replaces a decoder layer and keeps the mask it is given."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.mask = None

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        self.mask = attention_mask
        return self.layer(hidden_states, attention_mask=attention_mask, **kwargs)


def is_causal(mask: torch.Tensor | None) -> bool:
    return mask is not None and bool((mask[0, 0].triu(1) < 0).sum() == TOKENS * (TOKENS - 1) // 2)


def window_of(mask: torch.Tensor | None, stated: int | None) -> int:
    """The window of the last token, 0 for no window; `stated` if the run is shorter than the window."""
    seen = TOKENS if mask is None else int((mask[0, 0, -1] >= 0).sum())
    if seen == 0 or (stated is not None and seen != min(stated, TOKENS)):
        raise ValueError(f"a mask of {seen} for a window of {stated}")
    return stated or 0


@torch.inference_mode()
def meaning(config_text: dict) -> dict:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config_text), encoding="utf-8")
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    body = model.model
    stated = []
    for i, layer in enumerate(body.layers):
        window = getattr(config, "sliding_window", None)
        by_layer = config.model_type.startswith("qwen")
        if config.model_type == "llama" or (by_layer and config.layer_types[i] != SLIDING):
            window = None
        stated.append(window)
        body.layers[i] = Captured(layer)
    logits = model(torch.arange(TOKENS)[None] % config.vocab_size, use_cache=False, return_dict=True).logits
    if not torch.isfinite(logits).all():
        raise ValueError("logits are not finite")
    first = body.layers[0].layer
    attention, mlp = first.self_attn, first.mlp
    return {
        "vocab_size": body.embed_tokens.num_embeddings,
        "hidden_size": body.embed_tokens.embedding_dim,
        "intermediate_size": mlp.gate_proj.out_features,
        "num_layers": len(body.layers),
        "num_heads": attention.q_proj.out_features // attention.head_dim,
        "num_kv_heads": attention.k_proj.out_features // attention.head_dim,
        "head_dim": attention.head_dim,
        "activation": type(mlp.act_fn).__name__,
        "rms_norm_eps": body.norm.variance_epsilon,
        "tied": model.lm_head.weight is body.embed_tokens.weight,
        "qkv_bias": attention.q_proj.bias is not None,
        "o_bias": attention.o_proj.bias is not None,
        "mlp_bias": mlp.down_proj.bias is not None,
        "causal": all(is_causal(layer.mask) for layer in body.layers),
        "qk_norm": hasattr(attention, "q_norm"),
        "windows": [window_of(layer.mask, width) for layer, width in zip(body.layers, stated, strict=True)],
        "inverse_frequencies": [float(str(x)) for x in body.rotary_emb.inv_freq.numpy()],
        "attention_scaling": float(body.rotary_emb.attention_scaling),
    }


def answer(architecture: str, changes: dict) -> dict:
    try:
        return {"meaning": meaning(config_json(architecture, changes))}
    except Exception as error:  # whatever it is, transformers does not serve this config
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:80]}


def main() -> int:
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    lines = []
    for architecture in ARCHITECTURES:
        seen, base = set(), None
        for changes in cases(architecture):
            case = {
                "set": {field: value for field, value in changes.items() if value is not MISSING},
                "unset": [field for field, value in changes.items() if value is MISSING],
            }
            if (key := json.dumps(case)) in seen:
                continue
            seen.add(key)
            result = answer(architecture, changes)
            if base is None:
                base = result["meaning"]
                config = config_json(architecture, {})
                lines.append(json.dumps({"architecture": architecture, "config": config, "meaning": base}))
                continue
            if "meaning" in result:  # what differs from the first line of the architecture
                result["meaning"] = {k: v for k, v in result["meaning"].items() if v != base[k]}
            lines.append(json.dumps(case | result))
    header = f'"torch": "{torch.__version__}",\n"transformers": "{transformers.__version__}"'
    OUTPUT.write_text(f'{{\n{header},\n"cases": [\n' + ",\n".join(lines) + "\n]\n}\n", encoding="utf-8")
    print(f"{OUTPUT}: {len(lines)} cases")
    return 0


if __name__ == "__main__":
    sys.exit(main())
