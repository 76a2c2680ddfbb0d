"""`isobit convert`: a GGUF file of each architecture becomes a directory with the weights it was made of.

python tests/python/convert_test.py        (in an environment where `isobit_tools` is installed)
"""

import contextlib
import io
import json
import os
import tempfile
import unittest
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from tokenizers import Tokenizer

from isobit.cli import main
from isobit.launch import run_model_tool
from isobit_tools.bf16_files import bf16_tensors

BIN_DIR = Path(os.environ["ISOBIT_BIN_DIR"])
NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "o_proj.weight": "attn_output.weight",
    "gate_proj.weight": "ffn_gate.weight",
    "up_proj.weight": "ffn_up.weight",
    "down_proj.weight": "ffn_down.weight",
    **{f"{k}_proj.{what}": f"attn_{k}.{what}" for k in "qkv" for what in ("weight", "bias")},
    **{f"{k}_norm.weight": f"attn_{k}_norm.weight" for k in "qk"},
}
NORMAL, CONTROL, USER, UNUSED = 1, 3, 4, 5


def gguf_name(name: str) -> str:
    """Of a tensor of Hugging Face."""
    words = name.split(".")
    if name == "model.norm.weight":
        return "output_norm.weight"
    short = NAMES[".".join(words[-2:])]
    return f"blk.{words[2]}.{short}" if words[1] == "layers" else short


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """The order in which GGUF has the rows of Llama's q and k: written from its definition, one head after
    the other, not as the inverse of what is tested."""
    dim = rows.shape[0] // num_heads
    order = [
        h * dim + i + half * dim // 2 for h in range(num_heads) for i in range(dim // 2) for half in (0, 1)
    ]
    return rows[order]


class ConvertTest(unittest.TestCase):
    def setUp(self):
        self.scratch = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def make(self, shape: str) -> Path:
        """A model with a rotary embedding that is not scaled."""
        run_model_tool(BIN_DIR, "config", shape, str(self.scratch / f"{shape}-plan"))
        config = json.loads((self.scratch / f"{shape}-plan" / "config.json").read_text())
        config["rope_scaling"] = None
        plan = self.scratch / f"{shape}.json"
        plan.write_text(json.dumps(config))
        run_model_tool(BIN_DIR, "make", f"--config={plan}", str(self.scratch / shape), "--seed=5")
        return self.scratch / shape

    def write(self, model: Path, pre: str, name: str = "model.gguf", **more) -> Path:
        """`model` as a GGUF file of fp32."""
        config = json.loads((model / "config.json").read_text())
        kind = config["model_type"]
        writer = GGUFWriter(self.scratch / name, kind)
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_rope_freq_base(config["rope_theta"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        self.add_tokenizer(writer, config, pre)
        for key, value in more.items():
            {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool}[type(value)](
                key.replace("__", ".").replace("KIND", kind), value
            )
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        for tensor, bits in bf16_tensors(model).items():
            values = (bits.astype(np.uint32) << 16).view(np.float32)
            if kind == "llama" and (projection := tensor.split(".")[-2]) in heads:
                values = interleave(values, heads[projection])
            writer.add_tensor(gguf_name(tensor), values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return self.scratch / name

    def add_tokenizer(self, writer: GGUFWriter, config: dict, pre: str) -> None:
        from tokenizers import pre_tokenizers

        bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokens = ["<|bos|>", "<|eos|>", "<tool>", *bytes_, "he", "ll"]
        types = [CONTROL, CONTROL, USER] + [NORMAL] * (len(bytes_) + 2)
        while len(tokens) < config["vocab_size"]:
            tokens.append(f"[PAD{len(tokens)}]")
            types.append(UNUSED)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges(["h e", "l l"])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        writer.add_pad_token_id(1)

    def convert(self, file: Path, output: str) -> tuple[int, str]:
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            status = main(["convert", str(file), str(self.scratch / output)])
        return status, said.getvalue()

    def test_each_architecture(self):
        for shape, pre in (("tiny-llama", "smollm"), ("tiny-qwen2", "qwen2"), ("tiny-qwen3", "qwen2")):
            with self.subTest(shape):
                model = self.make(shape)
                status, said = self.convert(self.write(model, pre), f"{shape}-out")
                self.assertEqual(status, 0, said)
                # The digest speaks of every bit of every tensor, and verify reads config.json as services do.
                made, expected = (
                    run_model_tool(BIN_DIR, "verify", str(self.scratch / name))
                    for name in (f"{shape}-out", shape)
                )
                digest = [word for word in expected.split() if len(word) == 64]
                self.assertEqual(len(digest), 1, expected)
                self.assertIn(digest[0], made)
                keys = ("rope_theta", "rms_norm_eps", "head_dim", "tie_word_embeddings", "vocab_size")
                ours, theirs = (
                    json.loads((self.scratch / name / "config.json").read_text())
                    for name in (f"{shape}-out", shape)
                )
                self.assertEqual([ours[key] for key in keys], [theirs[key] for key in keys])

    def test_the_order_of_rows_matters(self):
        """Control: rows of q and k that stay as GGUF has them give other weights."""
        model = self.make("tiny-llama")
        tensors = bf16_tensors(model)
        q = tensors["model.layers.0.self_attn.q_proj.weight"]
        self.assertFalse(np.array_equal(interleave(q, 9), q))

    def test_tokens(self):
        model = self.make("tiny-qwen3")
        self.assertEqual(self.convert(self.write(model, "qwen2"), "out")[0], 0)
        tokenizer = Tokenizer.from_file(str(self.scratch / "out" / "tokenizer.json"))
        self.assertEqual(tokenizer.encode("hello<tool>12<|eos|>").tokens,
                         ["he", "ll", "o", "<tool>", "1", "2", "<|eos|>"])  # fmt: skip
        self.assertEqual(tokenizer.decode(tokenizer.encode("hello<tool><|eos|>").ids), "hello<tool>")
        self.assertEqual(tokenizer.encode("e\u0301").ids, tokenizer.encode("\u00e9").ids)
        self.assertNotIn(400, tokenizer.encode("[PAD400]").ids)

    def test_what_is_not_known_to_be_right_is_refused_by_name(self):
        model = self.make("tiny-qwen3")
        for more, message in (
            ({"KIND__rope__scaling__type": "yarn"}, "qwen3.rope.scaling.type is yarn, expected none"),
            ({"KIND__expert_count": 8}, "qwen3.expert_count is 8"),
            (
                {"KIND__rope__dimension_count": 8},
                "rope.dimension_count is 8, expected 16, the dimension of a head",
            ),
            ({"tokenizer__ggml__add_bos_token": True}, "add_bos_token is true"),
        ):
            with self.subTest(more):
                status, said = self.convert(self.write(model, "qwen2", "odd.gguf", **more), "odd")
                self.assertEqual(status, 3)
                self.assertIn(message, said)
                self.assertFalse((self.scratch / "odd").exists())
        status, said = self.convert(self.write(model, "llama-bpe", "odd.gguf"), "odd")
        self.assertEqual(status, 3)
        self.assertIn("tokenizer is ('gpt2', 'llama-bpe'), expected", said)
        (self.scratch / "there").mkdir()
        self.assertIn("exists already", self.convert(self.write(model, "qwen2"), "there")[1])


if __name__ == "__main__":
    unittest.main()
