"""Makes a model directory in the form of Hugging Face out of a GGUF file.

It uses the packages gguf and safetensors; it does not need torch and transformers.
"""

import json
import os
import tempfile
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

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

_MAX_LAYERS = 1024

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


class ConversionError(Exception):
    """This script cannot convert the package or its GGUF file: it is not the expected one."""


def undo_rope_permutation(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Restores Hugging Face's row order of a q or k projection.

    GGUF rotates neighbouring pairs (2i, 2i+1) of a head, Hugging Face the pairs (i, i + head_dim/2), so
    the rows of each head are stored interleaved there.

    Args:
      rows: [num_heads * head_dim, hidden]
    """
    paired = rows.reshape(num_heads, rows.shape[0] // num_heads // 2, 2, rows.shape[1])
    return paired.swapaxes(1, 2).reshape(rows.shape)


def to_bf16_bytes(name: str, values: np.ndarray) -> bytes:
    """Rounds fp32 to bf16, to nearest even; little-endian bytes."""
    if not np.isfinite(values).all():
        raise ConversionError(f"tensor {name} holds a value that is not finite")
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    return rounded.astype("<u2").tobytes()


def make_config(metadata: dict) -> dict:
    """config.json of a LlamaForCausalLM; `metadata` is the GGUF header's key-value section."""
    hidden_size = metadata["llama.embedding_length"]
    num_heads = metadata["llama.attention.head_count"]
    head_dim = metadata["llama.rope.dimension_count"]
    if num_heads * head_dim != hidden_size:
        raise ConversionError(
            f"llama.rope.dimension_count is {head_dim}, expected hidden/heads = {hidden_size}/{num_heads}"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "max_position_embeddings": metadata["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": num_heads,
        "num_hidden_layers": metadata["llama.block_count"],
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "pretraining_tp": 1,
        # GGUF keeps these as fp32; the shortest decimal that gives the same fp32 is what the author wrote.
        "rms_norm_eps": float(str(np.float32(metadata["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_scaling": None,
        "rope_theta": float(str(np.float32(metadata["llama.rope.freq_base"]))),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": metadata["llama.vocab_size"],
    }


def tensor_names(num_layers: int) -> dict[str, str]:
    """The Hugging Face name of every tensor that the GGUF file must hold, by its GGUF name."""
    if num_layers > _MAX_LAYERS:
        raise ConversionError(f"llama.block_count is {num_layers}, expected at most {_MAX_LAYERS}")
    names = dict(_GLOBAL_TENSORS)
    for layer in range(num_layers):
        for gguf_name, hf_name in _LAYER_TENSORS.items():
            names[f"blk.{layer}.{gguf_name}"] = f"model.layers.{layer}.{hf_name}"
    return names


def write_weights(tensors: list, config: dict, path: Path) -> None:
    """Dequantises the GGUF tensors and writes them as one bf16 safetensors file."""
    from gguf.quants import dequantize
    from safetensors import serialize_file
    from tqdm import tqdm

    names = tensor_names(config["num_hidden_layers"])
    found = {tensor.name for tensor in tensors}
    if found != names.keys():
        raise ConversionError(
            f"tensors missing: {sorted(names.keys() - found)}; not expected: {sorted(found - names.keys())}"
        )
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
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
    """Rebuilds the byte-level BPE tokenizer from the GGUF header and checks it."""
    kind = (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"])
    if kind != ("gpt2", "smollm"):
        raise ConversionError(f"tokenizer is {kind}, expected ('gpt2', 'smollm')")
    tokens = metadata["tokenizer.ggml.tokens"]
    types = metadata["tokenizer.ggml.token_type"]
    if unknown := set(types) - {_NORMAL_TOKEN, _CONTROL_TOKEN}:
        raise ConversionError(f"token types {sorted(unknown)} are not expected")
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # GGUF's `smollm`: splits off every digit, then applies GPT-2's regular expression; adds no leading space.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    check_tokenizer(tokenizer, tokens, control)
    return tokenizer


def check_tokenizer(tokenizer: Tokenizer, tokens: list[str], control: list[str]) -> None:
    """Raises unless ids, special tokens, digit splitting and round trips are as the GGUF file implies."""
    if tokenizer.get_vocab_size() != len(tokens):
        raise ConversionError(f"tokenizer has {tokenizer.get_vocab_size()} tokens, expected {len(tokens)}")
    for token in control:
        ids = tokenizer.encode(f"a{token}b").ids
        if tokens.index(token) not in ids or len(ids) != 3:
            raise ConversionError(f"special token {token} became {ids}, expected one id in the middle")
    if len(tokenizer.encode("31415").ids) != 5:
        raise ConversionError("digits are not split one by one")
    for text in ("Hello, world!", "  two  spaces\n\n\ttab", "naïve café, 東京 🙂", "x = 10**9  # I'm 42"):
        decoded = tokenizer.decode(tokenizer.encode(text).ids)
        if decoded != text:
            raise ConversionError(f"tokenizer round trip of {text!r} gives {decoded!r}")


def make_tokenizer_config(metadata: dict) -> dict:
    """tokenizer_config.json: names of the special tokens and the chat template."""
    tokens = metadata["tokenizer.ggml.tokens"]
    bos, eos, unknown, padding = (
        tokens[metadata[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos", "unknown", "padding")
    )
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "additional_special_tokens": [bos, eos],
        "bos_token": bos,
        "chat_template": metadata["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
        "model_max_length": metadata["llama.context_length"],
        "pad_token": padding,
        # This class uses tokenizer.json as it is; GPT2Tokenizer may replace its pre-tokenizer.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": unknown,
    }


def convert(gguf_path: Path, output: Path) -> None:
    """Writes the Hugging Face files of `gguf_path` into the directory `output`, which exists.

    Raises:
      ConversionError: the file is not the expected one.
    """
    try:
        convert_expected(gguf_path, output)
    except (ConversionError, ImportError):
        raise
    except Exception as error:  # the libraries that read it raise whatever their code runs into
        raise ConversionError(
            f"{gguf_path} is not a GGUF file of SmolLM2: {type(error).__name__}: {error}"
        ) from error


def convert_expected(gguf_path: Path, output: Path) -> None:
    """Like convert, but raises any exception if the file is not the expected one."""
    from isobit.convert.bounded_gguf import BoundedGGUFReader

    reader = BoundedGGUFReader(gguf_path)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    if metadata["general.architecture"] != "llama":
        raise ConversionError(f"architecture is {metadata['general.architecture']}, expected llama")
    config = make_config(metadata)
    generation_config = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    write_weights(reader.tensors, config, output / "model.safetensors")
    make_tokenizer(metadata).save(str(output / "tokenizer.json"))
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation_config),
        ("tokenizer_config.json", make_tokenizer_config(metadata)),
    ):
        (output / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def is_complete(output: Path) -> bool:
    """Whether `output` holds every file; the directory appears by one rename, so files are never partial."""
    return all((output / name).is_file() for name in OUTPUT_FILES)


def make_model_from(gguf: Path, output: Path) -> None:
    """Makes the model directory `output`, which must not exist.

    It is written beside `output` and renamed at the end, so that an interrupted run leaves nothing that looks
    like a model. ConversionError: the file is not one that can be converted, or `output` is there.
    """
    if output.exists():
        raise ConversionError(f"{output} exists already")
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}-", dir=output.parent) as scratch:
        result = Path(scratch) / "result"
        result.mkdir()
        convert(gguf, result)
        os.rename(result, output)
