"""The weight digest in NumPy: against the definition, word by word in plain integers; by blocks; and what
isobit-model prints for a checkpoint's files."""

import itertools
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from isobit import weight_digest as wd
from isobit_tools.bf16_files import bf16_tensors

M = 2**64


def by_definition(values: np.ndarray) -> str:
    """docs/API.md, "The weight digest", step by step; `values` are bits of bfloat16."""
    shape = values.shape
    columns = shape[-1] if len(shape) >= 2 else 1
    flat = [int(value) for value in values.reshape(-1)]
    rows = [flat[at : at + columns] for at in range(0, len(flat), columns)] if columns else []
    words = []
    for row in rows:
        row += [0] * (-columns % 4)
        for at in range(0, len(row), 4):
            words.append(sum(row[at + j] << (16 * j) for j in range(4)))
    sums = [0, 0]
    for index, word in enumerate(words):
        x = word ^ ((index + 1) * 0x9E3779B97F4A7C15 % M)
        x ^= x >> 32
        x = x * 0xBF58476D1CE4E5B9 % M
        x ^= x >> 32
        for lane, factor in enumerate((0x94D049BB133111EB, 0xFF51AFD7ED558CCD)):
            y = x * factor % M
            sums[lane] = (sums[lane] + (y ^ (y >> 32))) % M
    return f"{sums[0]:016x}{sums[1]:016x}"


def random_bits(shape) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 1 << 16, shape, dtype=np.uint16)


class WeightDigestTest(unittest.TestCase):
    def test_follows_its_definition(self):
        for shape in [(1,), (7,), (3, 5), (4, 8), (2, 3, 6), (5000,), (3, 70001), (900, 12), (3, 0)]:
            values = random_bits(shape)
            self.assertEqual(wd.tensor_digest(values), by_definition(values), shape)
        scalar = np.array(5, np.uint16)
        self.assertEqual(wd.tensor_digest(scalar), by_definition(scalar))

    def test_golden_values(self):
        # Those of tests/common/checkpoint/weight_digest_test.cc.
        counting = np.arange(15, dtype=np.uint16).reshape(3, 5)
        a = wd.tensor_digest(np.array([1.0, -2.0], np.float32))
        b = wd.tensor_digest(counting)
        square = wd.tensor_digest(np.arange(65536, dtype=np.uint16).reshape(256, 256))
        self.assertEqual(a, "7b1c530f6c9ce66681a091658810a374")
        self.assertEqual(b, "84df1995e04eb555f2471723004df1e9")
        self.assertEqual(square, "061d16ecadbab8b015468d44b4985141")
        self.assertEqual(
            wd.weight_digest({"b": ((3, 5), b), "a": ((2,), a)}),
            "9c383dff68f787e1ce475dfb3dd7ef6e9138bda09295d612bb015f21150e930b",
        )

    def test_any_cut_adds_up(self):
        for rows, columns in ((37, 24), (37, 23), (100, 1), (2, 40000)):
            values = random_bits((rows, columns))
            whole = wd.tensor_digest(values if columns > 1 else values[:, 0])
            cut_rows = [0, 1, rows // 2, rows]
            cut_columns = sorted({0, columns // 8 * 4, columns})
            sums = np.zeros(2, np.uint64)
            for top, bottom in reversed(list(itertools.pairwise(cut_rows))):
                for left, right in itertools.pairwise(cut_columns):
                    sums += wd.block_sums(values[top:bottom, left:right], columns, top, left)
            self.assertEqual(wd.sums_hex(sums), whole, (rows, columns))
        with self.assertRaisesRegex(ValueError, "expected multiples of 4"):
            wd.block_sums(values[:, 2:4], columns, 0, 2)

    def test_rounds_as_the_services_do(self):
        ones = 0x3F80 << 16
        bits = [ones, ones + 0x7FFF, ones + 0x8000, ones + 0x8001, ones + 0x18000, 0x7F7FFFFF, 0x7F800001,
                0xFF80FFFF, 0x00008000, 0x80018000]  # fmt: skip
        rounded = wd.bf16_bits(np.array(bits, np.uint32).view(np.float32))
        expected = [0x3F80, 0x3F80, 0x3F80, 0x3F81, 0x3F82, 0x7F80, 0x7FC0, 0xFFC0, 0x0000, 0x8002]
        self.assertEqual([hex(v) for v in rounded], [hex(v) for v in expected])
        self.assertEqual(wd.bf16_bits(np.array([1.5, -0.25], np.float16)).tolist(), [0x3FC0, 0xBE80])
        with self.assertRaisesRegex(ValueError, "float64"):
            wd.bf16_bits(np.zeros(3))

    def test_one_model_has_one_digest(self):
        """What a checkpoint may hold beside its weights does not count."""
        plain = {"model.embed_tokens.weight": ((5, 2), "e"), "x": ((2,), "x")}
        digest = wd.weight_digest(plain)
        self.assertEqual(wd.weight_digest({**plain, "lm_head.weight": ([5, 2], "e")}), digest)
        for name in ("model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq",
                     "rotary_emb.cos_cached", "model.rotary_pos_emb.sin_cached"):  # fmt: skip
            self.assertEqual(wd.weight_digest({**plain, name: ((8,), "f")}), digest, name)
        others = {"lm_head.weight": ((5, 2), "h"), "lm_head.bias": ((5, 2), "e"), "inv_freq": ((8,), "f")}
        for name, tensor in others.items():
            self.assertNotEqual(wd.weight_digest({**plain, name: tensor}), digest, f"control: {name}")

    def test_files_have_it(self):
        """A model in bf16 and in fp32."""
        tool = Path(os.environ["ISOBIT_BIN_DIR"]) / "isobit-model"

        def model(*arguments: str) -> str:
            command = [str(tool), *arguments]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout

        with tempfile.TemporaryDirectory() as scratch:
            for shape in ("tiny-qwen3", "tiny-llama"):
                one = Path(scratch) / shape
                model("make", shape, str(one))
                wide, tensors = {}, {}
                for name, array in bf16_tensors(one).items():
                    tensors[name] = (array.shape, wd.tensor_digest(array))
                    wide[name] = (array.astype(np.uint32) << 16).view(np.float32)
                    wide[name].reshape(-1)[0] *= np.float32(1 + 2**-12)  # rounds away
                digest = wd.weight_digest(tensors)
                self.assertEqual(model("verify", str(one)).split()[0], digest)
                save_file(wide, one / "model.safetensors")
                self.assertEqual(model("verify", str(one)).split()[0], digest)
                next(iter(wide.values())).reshape(-1)[5] *= np.float32(1 + 2**-6)
                save_file(wide, one / "model.safetensors")
                self.assertNotEqual(model("verify", str(one)).split()[0], digest, "control")


if __name__ == "__main__":
    unittest.main()
