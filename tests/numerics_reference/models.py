"""Small models that together have every config field that matters to the arithmetic."""

import json
from pathlib import Path

import numpy as np

# Fields of all of them: heads that four ranks cannot share equally, sizes that are no multiple of 16.
SMALL = {
    "vocab_size": 211,
    "hidden_size": 90,
    "intermediate_size": 83,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 24,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}
CONFIGS = {
    "llama-biases-linear": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope_scaling": {"rope_type": "linear", "factor": 2.5},
        "torch_dtype": "float32",
    },
    "qwen2-windows": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 33,
        "max_window_layers": 1,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
    "qwen3-yarn": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    },
    # Tiles of 64 keys.
    "qwen3-wide-heads": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 160,
        "attention_bias": True,
    },
}


def write_config(name: str, directory: Path) -> Path:
    path = directory / f"{name}.json"
    path.write_text(json.dumps(SMALL | CONFIGS[name]))
    return path


def widen_to_fp32(directory: Path) -> None:
    """Rewrites the checkpoint in fp32, every value moved by up to half a bf16 step, and some to ties."""
    random = np.random.default_rng(3)
    path = directory / "model.safetensors"
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header, data = {}, b""
    for name, entry in json.loads(content[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = (start + offset for offset in entry["data_offsets"])
        bits = np.frombuffer(content[begin:end], "<u2").astype(np.uint32) << 16
        bits |= random.choice([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], bits.shape).astype(np.uint32)
        stored = bits.astype("<u4").tobytes()
        header[name] = entry | {"dtype": "F32", "data_offsets": [len(data), len(data) + len(stored)]}
        data += stored
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
