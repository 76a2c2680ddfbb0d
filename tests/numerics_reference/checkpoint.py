"""A model directory: config.json, and safetensors as bf16 parameters (C9 of docs/NUMERICS.md)."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from numerics_reference import arithmetic, rope


@dataclass(frozen=True)
class Config:
    """The fields of config.json that determine the arithmetic."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: np.float32
    theta: float
    scaling: rope.Scaling
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int, ...]  # 0: none

    @property
    def scale(self) -> np.float32:
        return np.float32(float.fromhex("0x1.71547652b82fep+0") / math.sqrt(self.head_dim))


def read_scaling(raw: dict) -> rope.Scaling:
    given = raw.get("rope_scaling")
    if given is None:
        return rope.Scaling()
    return rope.Scaling(
        given["rope_type"],
        given["factor"],
        given.get("low_freq_factor", 1.0),
        given.get("high_freq_factor", 1.0),
        given.get("original_max_position_embeddings", raw["max_position_embeddings"]),
        given.get("beta_fast", 32.0),
        given.get("beta_slow", 1.0),
        given.get("truncate", True),
        given.get("attention_factor", 0.0),
        given.get("mscale", 0.0),
        given.get("mscale_all_dim", 0.0),
    )


def read_windows(raw: dict) -> tuple[int, ...]:
    layers = raw["num_hidden_layers"]
    window = raw.get("sliding_window") or 0
    if raw["model_type"] == "llama" or (raw["model_type"] != "mistral" and not raw.get("use_sliding_window")):
        window = 0
    kinds = raw.get("layer_types", ["sliding_attention" if window else "full_attention"] * layers)
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)


def read_config(directory: Path) -> Config:
    raw = json.loads((directory / "config.json").read_text())
    kind = raw["model_type"]
    attention_bias = kind in ("llama", "qwen3") and raw.get("attention_bias", False)
    return Config(
        vocab=raw["vocab_size"],
        hidden=raw["hidden_size"],
        intermediate=raw["intermediate_size"],
        layers=raw["num_hidden_layers"],
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
        head_dim=raw["head_dim"],
        eps=np.float32(raw["rms_norm_eps"]),
        theta=float(raw["rope_theta"]),
        scaling=read_scaling(raw),
        tied=raw["tie_word_embeddings"],
        qkv_bias=kind == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=kind == "llama" and raw.get("mlp_bias", False),
        qk_norm=kind == "qwen3",
        windows=read_windows(raw),
    )


def parameter(dtype: str, data: bytes) -> np.ndarray:
    if dtype == "BF16":
        return arithmetic.from_bits(np.frombuffer(data, "<u2").astype(np.uint32) << 16)
    stored = {"F16": "<f2", "F32": "<f4"}[dtype]
    return arithmetic.bf16(np.frombuffer(data, stored).astype(np.float32))


def read_parameters(directory: Path) -> dict[str, np.ndarray]:
    """Every tensor by name, in bf16 values."""
    parameters = {}
    for path in directory.glob("*.safetensors"):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                values = parameter(entry["dtype"], content[start + begin : start + end])
                parameters[name] = values.reshape(entry["shape"])
    return parameters
