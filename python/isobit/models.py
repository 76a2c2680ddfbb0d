"""Which models isobit computes, and what a config.json says about one: family, size, memory per token.

The table supported_models.json is shared with docs/models.md and with the C++ parser, whose errors quote it.
A config is any JSON object: if a field is missing or wrong, the error is a ConfigError, never another
exception. The C++ parser decides which configs services accept (`isobit-model check`).
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEAVES = 8  # C3 of docs/NUMERICS.md: tensor-parallel ranks share these
TP_SIZES = (1, 2, 4, 8)

_MAX_CONFIG_BYTES = 4 << 20
_UNIT = 16  # columns of a unit (C3)
_MAX_SIZE = 1 << 32  # far above what the parser accepts


class ConfigError(Exception):
    """A config.json cannot be read, or a field is missing or wrong; the message names the file or field."""


@dataclass(frozen=True)
class Family:
    """A row of the table."""

    family: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    supported: bool
    since: str = ""  # a release; only for supported families, like the next two
    models: str = ""
    refused: str = ""  # which models of the family are refused
    why: str = ""  # only for families that are not supported


@functools.cache
def families() -> tuple[Family, ...]:
    """All rows of the table."""
    table = json.loads(Path(__file__).with_name("supported_models.json").read_text("utf-8"))
    return tuple(
        Family(**{name: tuple(value) if isinstance(value, list) else value for name, value in row.items()})
        for row in table["families"]
    )


def supported_text() -> str:
    """The supported families with their architectures, for messages."""
    return ", ".join(f"{row.family} ({', '.join(row.architectures)})" for row in families() if row.supported)


def read_config(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a config.json.

    Raises:
      ConfigError: there is none.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    if len(data) > _MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} has more than {_MAX_CONFIG_BYTES >> 20} MiB")
    try:
        config = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # also raised if it is not UTF-8
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} has a JSON {type(config).__name__}, expected an object")
    return config


def architecture_of(config: dict[str, Any]) -> str | None:
    """The architecture that a config names; None if it names none, or several."""
    names = config.get("architectures")
    if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str):
        return names[0]
    return None


def family_of(config: dict[str, Any]) -> Family | None:
    """The row for the config's architecture, or else for its model_type."""
    architecture = architecture_of(config)
    model_type = config.get("model_type")
    for row in families():
        if architecture in row.architectures:
            return row
    return next((row for row in families() if model_type in row.model_types), None)


def text_config_of(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that is about text. For a model with images it is a nested object."""
    for name in ("text_config", "llm_config", "language_config", "thinker_config"):
        if isinstance(config.get(name), dict):
            return text_config_of(config[name])
    return config


def context_of(config: dict[str, Any]) -> int | None:
    """The number of tokens in a context, including the extension by yarn; None if the config does not say."""
    text = text_config_of(config)
    tokens = text.get("max_position_embeddings")
    if not _is_size(tokens):
        return None
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    if isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) == "yarn":
        original = rope.get("original_max_position_embeddings") or tokens
        factor = rope.get("factor")
        if _is_size(original) and isinstance(factor, int | float) and 1 <= factor <= 1e6:
            return max(tokens, int(original * factor))
    return tokens


def quantisation_of(config: dict[str, Any]) -> str | None:
    """A short description of how the weights are quantised; None if they are not."""
    for holder in (config, text_config_of(config)):
        for name in ("quantization_config", "compression_config", "quantization"):
            found = holder.get(name)
            if isinstance(found, dict):
                method = found.get("quant_method") or found.get("quant_algo") or "an unnamed method"
                bits = found.get("bits")
                return f"{method}, {bits} bits" if _is_size(bits) else str(method)
            if found is not None:
                return f"{name} = {found!r}"[:100]
    return None


def dtype_of(config: dict[str, Any]) -> str | None:
    """The dtype that a config names, such as "bfloat16"; None if it names none."""
    text = text_config_of(config)
    for holder in (config, text):
        for name in ("dtype", "torch_dtype"):
            if isinstance(holder.get(name), str):
                return holder[name]
    return None


@dataclass(frozen=True)
class Shape:
    """The sizes of a model of a supported family."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @property
    def parameters(self) -> int:
        """The number of parameters; tied embeddings count once."""
        query, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = 2 * self.hidden * (query + kv) + 3 * self.hidden * self.intermediate + 2 * self.hidden
        layer += self.qkv_bias * (query + 2 * kv) + self.o_bias * self.hidden
        layer += self.mlp_bias * (2 * self.intermediate + self.hidden) + self.qk_norm * 2 * self.head_dim
        return self.layers * layer + (1 if self.tied else 2) * self.vocab * self.hidden + self.hidden

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the embedding in bf16."""
        return 2 * self.vocab * self.hidden

    def weight_bytes(self, tp_size: int) -> list[int]:
        """Bytes of each rank's weights in bf16, without embedding, biases and norms."""
        per_kv_head = 2 * self.head_dim * (self.heads // self.kv_heads + 1) * self.hidden
        return [
            2
            * (
                _share(self.vocab, rank, tp_size) * self.hidden
                + self.layers * 3 * self.hidden * _share(self.intermediate, rank, tp_size)
                + self.layers * per_kv_head * self._kv_heads(rank, tp_size)
            )
            for rank in range(tp_size)
        ]

    def kv_bytes(self, tp_size: int) -> list[int]:
        """Bytes that one token takes in the KV cache of each rank."""
        token = 2 * 2 * self.layers * self.head_dim
        return [token * self._kv_heads(rank, tp_size) for rank in range(tp_size)]

    def _kv_heads(self, rank: int, tp_size: int) -> int:
        return _units_of(self.kv_heads, rank, tp_size)


def shape_of(config: dict[str, Any]) -> Shape:
    """Returns the sizes of a model of a supported family, with the defaults of the C++ parser.

    Raises:
      ConfigError: a size is missing or wrong; the message names the field.
    """
    row = family_of(config)
    if row is None or not row.supported:
        raise ConfigError("the sizes of this architecture are not known")
    heads = _size(config, "num_attention_heads")
    hidden = _size(config, "hidden_size")
    kv_heads = _size(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads is {heads}, expected a multiple of {kv_heads}")
    head_dim = _size(config, "head_dim", None if row.family == "Qwen3" else max(1, hidden // heads))
    bias = row.family in ("Llama", "Qwen3") and config.get("attention_bias") is True
    return Shape(
        vocab=_size(config, "vocab_size"),
        hidden=hidden,
        intermediate=_size(config, "intermediate_size"),
        layers=_size(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tied=config.get("tie_word_embeddings") is True,
        qkv_bias=bias or row.family == "Qwen2",
        o_bias=bias,
        mlp_bias=row.family == "Llama" and config.get("mlp_bias") is True,
        qk_norm=row.family == "Qwen3",
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _MAX_SIZE


def _size(config: dict[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ConfigError(f"{name} is missing")
    if not _is_size(value):
        raise ConfigError(f"{name} is {value!r:.60}, expected a positive integer")
    return value


def _units_of(units: int, rank: int, tp_size: int) -> int:
    """The number of whole units in a rank's leaves (C4)."""
    leaves = LEAVES // tp_size
    return (rank + 1) * leaves * units // LEAVES - rank * leaves * units // LEAVES


def _share(size: int, rank: int, tp_size: int) -> int:
    """The number of columns of a rank. It is up to 15 too large if the last unit is not full."""
    return _UNIT * _units_of(-(-size // _UNIT), rank, tp_size)
