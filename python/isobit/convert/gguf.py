"""Makes a model directory in Hugging Face's format from a GGUF file.

It converts Llama, Qwen2 and Qwen3 with the tokenizers of SmolLM and Qwen, since their GGUF files contain
everything that is needed. Anything else is an error, such as another tokenizer, a scaled rotary embedding, or
a mixture of experts.

It uses the packages gguf and safetensors; it does not need torch or transformers.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

OUTPUT_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)

# GGUF's token types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
_NORMAL_TOKEN = 1
_CONTROL_TOKEN = 3
_USER_TOKEN = 4  # found in the text before it is split, but has no control function
_UNUSED_TOKEN = 5

_MAX_LAYERS = 1024

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_HEAD = "output.weight"  # if missing, the head has the rows of the embedding
_GLOBAL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_MORE_LAYER_TENSORS = {
    "llama": {},
    "qwen2": {f"attn_{kind}.bias": f"self_attn.{kind}_proj.bias" for kind in "qkv"},
    "qwen3": {f"attn_{kind}_norm.weight": f"self_attn.{kind}_norm.weight" for kind in "qk"},
}
# Keys (after the architecture's name) that change the arithmetic, each with the value that changes nothing.
_MUST_BE = {
    "rope.scaling.type": "none",
    "attention.sliding_window": 0,
    "expert_count": 0,
    "attn_logit_softcapping": 0,
    "final_logit_softcapping": 0,
}
# The way Qwen's tokenizers split text.
_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class ConversionError(Exception):
    """A file cannot be converted: it is of an unsupported kind, or not the expected one."""


def undo_rope_permutation(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Restores Hugging Face's order of the rows of a q or k projection.

    GGUF rotates neighbouring pairs (2i, 2i+1) of a head, Hugging Face the pairs (i, i + head_dim/2). So GGUF
    stores the rows of each head interleaved.

    Args:
      rows: [num_heads * head_dim, hidden], any dtype.

    Returns:
      An array of the same shape and dtype.
    """
    paired = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, rows.shape[1])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def to_bf16_bytes(name: str, values: np.ndarray) -> bytes:
    """Rounds fp32 values to bf16, to nearest even. Returns little-endian bytes.

    Raises:
      ConversionError: a value is not finite.
    """
    if not np.isfinite(values).all():
        raise ConversionError(f"tensor {name} has a value that is not finite")
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return rounded.astype("<u2").tobytes()


def make_config(metadata: dict, is_tied: bool) -> dict:
    """Returns the content of config.json. `metadata`: the key-value section of the GGUF header."""
    kind = metadata["general.architecture"]
    if kind not in _ARCHITECTURES:
        raise ConversionError(f"architecture is {kind}, expected {', '.join(_ARCHITECTURES)}")
    for name, harmless in _MUST_BE.items():
        if (value := metadata.get(f"{kind}.{name}", harmless)) != harmless:
            raise ConversionError(f"{kind}.{name} is {value}, expected {harmless}")
    hidden_size = metadata[f"{kind}.embedding_length"]
    num_heads = metadata[f"{kind}.attention.head_count"]
    head_dim = metadata.get(f"{kind}.attention.key_length", hidden_size // num_heads)
    rotated = metadata.get(f"{kind}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise ConversionError(
            f"{kind}.rope.dimension_count is {rotated}, expected {head_dim}, the dimension of a head"
        )
    return {
        "architectures": [_ARCHITECTURES[kind]],
        **({} if kind == "qwen2" else {"attention_bias": False}),
        "attention_dropout": 0.0,
        **_token_ids(metadata, "bos", "eos"),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.041666666666666664 if kind == "llama" else 0.02,
        "intermediate_size": metadata[f"{kind}.feed_forward_length"],
        "max_position_embeddings": metadata[f"{kind}.context_length"],
        **({"mlp_bias": False} if kind == "llama" else {}),
        "model_type": kind,
        "num_attention_heads": num_heads,
        "num_hidden_layers": metadata[f"{kind}.block_count"],
        "num_key_value_heads": metadata.get(f"{kind}.attention.head_count_kv", num_heads),
        **_token_ids(metadata, "pad"),
        **({"pretraining_tp": 1} if kind == "llama" else {}),
        # GGUF stores these as fp32; the author wrote the shortest decimal that gives the same fp32.
        "rms_norm_eps": float(str(np.float32(metadata[f"{kind}.attention.layer_norm_rms_epsilon"]))),
        "rope_scaling": None,
        "rope_theta": float(str(np.float32(metadata[f"{kind}.rope.freq_base"]))),
        **({} if kind == "llama" else {"sliding_window": None}),
        "tie_word_embeddings": is_tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        **({} if kind == "llama" else {"use_sliding_window": False}),
        "vocab_size": metadata.get(f"{kind}.vocab_size", len(metadata["tokenizer.ggml.tokens"])),
    }


def _token_ids(metadata: dict, *names: str) -> dict[str, int]:
    """Returns those of the ids that the header has, such as {"bos_token_id": 1}."""
    keys = {"pad": "padding"}
    found = {name: metadata.get(f"tokenizer.ggml.{keys.get(name, name)}_token_id") for name in names}
    return {f"{name}_token_id": token for name, token in found.items() if token is not None}


def tensor_names(kind: str, num_layers: int, is_tied: bool) -> dict[str, str]:
    """Returns, for the GGUF name of every tensor that the file must have, its Hugging Face name."""
    if num_layers > _MAX_LAYERS:
        raise ConversionError(f"{kind}.block_count is {num_layers}, expected at most {_MAX_LAYERS}")
    names = dict(_GLOBAL_TENSORS) if is_tied else {**_GLOBAL_TENSORS, _HEAD: "lm_head.weight"}
    for layer in range(num_layers):
        for gguf_name, hf_name in {**_LAYER_TENSORS, **_MORE_LAYER_TENSORS[kind]}.items():
            names[f"blk.{layer}.{gguf_name}"] = f"model.layers.{layer}.{hf_name}"
    return names


def write_weights(tensors: list, config: dict, path: Path) -> None:
    """Dequantises the GGUF tensors and writes them as one safetensors file in bf16."""
    from gguf.quants import dequantize
    from safetensors import serialize_file
    from tqdm import tqdm

    kind = config["model_type"]
    names = tensor_names(kind, config["num_hidden_layers"], config["tie_word_embeddings"])
    found = {tensor.name for tensor in tensors}
    if found != names.keys():
        raise ConversionError(
            f"tensors missing: {sorted(names.keys() - found)}; not expected: {sorted(found - names.keys())}"
        )
    # Of the three, only Llama rotates other pairs in GGUF than in Hugging Face's format.
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    heads = heads if kind == "llama" else {}
    converted = {}
    for tensor in tqdm(tensors, desc="converting to bf16", unit="tensor"):
        values = dequantize(tensor.data, tensor.tensor_type)
        name = names[tensor.name]
        projection = name.split(".")[-2]
        if projection in heads:
            values = undo_rope_permutation(values, heads[projection])
        converted[name] = {
            "dtype": "bfloat16",
            "shape": list(values.shape),
            "data": to_bf16_bytes(name, values),
        }
    serialize_file(converted, path, {"format": "pt"})


def make_tokenizer(metadata: dict) -> Tokenizer:
    """Rebuilds the byte-level BPE tokenizer from the GGUF header, and checks it."""
    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind not in (("gpt2", "smollm"), ("gpt2", "qwen2")):
        raise ConversionError(f"tokenizer is {kind}, expected ('gpt2', 'smollm') or ('gpt2', 'qwen2')")
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        raise ConversionError("tokenizer.ggml.add_bos_token is true, expected false")
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    if unknown := set(types) - {_NORMAL_TOKEN, _CONTROL_TOKEN, _USER_TOKEN, _UNUSED_TOKEN}:
        raise ConversionError(f"token types {sorted(unknown)} are not expected")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    _set_splits(tokenizer, kind[1])
    tokenizer.decoder = decoders.ByteLevel()
    of_type = {kind: [t for t, its in zip(tokens, types, strict=True) if its == kind] for kind in set(types)}
    control = of_type.get(_CONTROL_TOKEN, [])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    plain = of_type.get(_USER_TOKEN, [])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in plain])
    check_tokenizer(tokenizer, tokens, [*control, *plain])
    return tokenizer


def _set_splits(tokenizer: Tokenizer, pre: str) -> None:
    """Sets how text is split before pairs are merged."""
    if pre == "smollm":
        # Splits off every digit, then applies GPT-2's regular expression; adds no leading space.
        steps: list[Any] = [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    else:
        tokenizer.normalizer = normalizers.NFC()
        steps = [
            pre_tokenizers.Split(Regex(_QWEN_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)


def check_tokenizer(tokenizer: Tokenizer, tokens: list[str], control: list[str]) -> None:
    """Checks ids, special tokens, digit splitting and round trips against what the GGUF file implies.

    Raises:
      ConversionError: one of them is wrong.
    """
    if tokenizer.get_vocab_size() != len(tokens):
        raise ConversionError(f"tokenizer has {tokenizer.get_vocab_size()} tokens, expected {len(tokens)}")
    for token in control:
        ids = tokenizer.encode(f"a{token}b").ids
        if tokens.index(token) not in ids or len(ids) != 3:
            raise ConversionError(f"special token {token} gave the ids {ids}, expected one id in the middle")
    if len(tokenizer.encode("31415").ids) != 5:
        raise ConversionError("digits are not split one by one")
    for text in ("Hello, world!", "  two  spaces\n\n\ttab", "naïve café, 東京 🙂", "x = 10**9  # I'm 42"):
        decoded = tokenizer.decode(tokenizer.encode(text).ids)
        if decoded != text:
            raise ConversionError(f"tokenizer round trip of {text!r} gives {decoded!r}")


def make_tokenizer_config(metadata: dict) -> dict:
    """Returns the content of tokenizer_config.json: the names of the special tokens, and the chat
    template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    named = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    ids = {name: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for name, theirs in named.items()}
    special = {f"{name}_token": tokens[token] for name, token in ids.items() if token is not None}
    template = metadata.get("tokenizer.chat_template")
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "additional_special_tokens": [
            special[name] for name in ("bos_token", "eos_token") if name in special
        ],
        **special,
        **({"chat_template": template} if template else {}),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata[f"{metadata['general.architecture']}.context_length"],
        # This class uses tokenizer.json unchanged; GPT2Tokenizer may replace its pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return dict(sorted(config.items()))


def convert(gguf_path: Path, output: Path) -> None:
    """Writes the Hugging Face files for `gguf_path` into the existing directory `output`.

    Raises:
      ConversionError: the file cannot be converted.
    """
    try:
        convert_expected(gguf_path, output)
    except (ConversionError, ImportError):
        raise
    except Exception as error:  # the libraries that read a damaged file may raise anything
        raise ConversionError(
            f"{gguf_path} is not a GGUF file that can be converted: {type(error).__name__}: {error}"
        ) from error


def convert_expected(gguf_path: Path, output: Path) -> None:
    """Like convert, but raises any exception if the file is not as expected."""
    from isobit.convert.bounded_gguf import BoundedGGUFReader

    reader = BoundedGGUFReader(gguf_path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    config = make_config(metadata, is_tied=all(tensor.name != _HEAD for tensor in reader.tensors))
    generation_config = _token_ids(metadata, "bos", "eos", "pad")
    write_weights(reader.tensors, config, output / "model.safetensors")
    make_tokenizer(metadata).save(str(output / "tokenizer.json"))
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation_config),
        ("tokenizer_config.json", make_tokenizer_config(metadata)),
    ):
        (output / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def is_complete(output: Path) -> bool:
    """Whether `output` has every file. The directory appears by one rename, so files are never partial."""
    return all((output / name).is_file() for name in OUTPUT_FILES)


def make_model_from(gguf: Path, output: Path) -> None:
    """Makes the model directory `output`, which must not exist.

    The files are written next to `output`, and renamed at the end, so that an interrupted run leaves nothing
    that looks like a model.

    Raises:
      ConversionError: the file cannot be converted, or `output` exists.
    """
    if output.exists():
        raise ConversionError(f"{output} exists already")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch:
        result = Path(scratch) / "result"
        result.mkdir()
        convert(gguf, result)
        os.rename(result, output)
