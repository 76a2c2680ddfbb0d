"""Tests of isobit.convert.smollm2 that need no download.

python tests/python/smollm2_test.py        (in an environment where `isobit_tools` is installed)
"""

import tempfile
import unittest
import zipfile
from pathlib import Path

import numpy as np

from isobit.convert import gguf, smollm2


class ArithmeticTest(unittest.TestCase):
    def test_bf16_rounds_to_nearest_even(self):
        cases = {
            0x3F800000: 0x3F80,
            0x3F807FFF: 0x3F80,
            0x3F808000: 0x3F80,  # a tie, down to even
            0x3F818000: 0x3F82,  # a tie, up to even
            0x3F808001: 0x3F81,
            0x80000000: 0x8000,
            0xBFFFFFFF: 0xC000,  # carries into the exponent
        }
        values = np.array(list(cases), np.uint32).view(np.float32)
        rounded = np.frombuffer(gguf.to_bf16_bytes("w", values), "<u2")
        np.testing.assert_array_equal(rounded, list(cases.values()))

    def test_values_that_are_not_finite_are_refused_by_name(self):
        with self.assertRaisesRegex(gguf.ConversionError, "tensor w "):
            gguf.to_bf16_bytes("w", np.array([1, np.inf], np.float32))

    def test_rope_rows_return_to_half_split_order(self):
        # One head of 6 rows is stored as 0 3 1 4 2 5; two heads, one after the other.
        stored = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])[:, None]
        restored = gguf.undo_rope_permutation(stored, num_heads=2)
        np.testing.assert_array_equal(restored[:, 0], np.arange(12))


class MakeModelTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.directory = Path(scratch.name)
        self.output = self.directory / "models" / "model"

    def make_wheel(self, member):
        wheel = self.directory / "package.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(member, b"not a model")
        return wheel

    def test_a_wrong_file_is_refused_and_leaves_nothing(self):
        for member, message in ((smollm2.GGUF_MEMBER, "expected b179c952"), ("other", "cannot read")):
            with self.assertRaisesRegex(gguf.ConversionError, message):
                smollm2.make_model(self.output, self.make_wheel(member))
            self.assertEqual(list(self.output.parent.iterdir()), [])

    def test_a_complete_directory_is_left_alone(self):
        self.output.mkdir(parents=True)
        for name in gguf.OUTPUT_FILES:
            (self.output / name).write_text(name)
        smollm2.make_model(self.output, self.make_wheel("other"))
        self.assertEqual((self.output / "config.json").read_text(), "config.json")

    def test_an_incomplete_directory_is_refused(self):
        self.output.mkdir(parents=True)
        (self.output / "config.json").write_text("{}")
        with self.assertRaisesRegex(gguf.ConversionError, "not a complete model"):
            smollm2.make_model(self.output)


if __name__ == "__main__":
    unittest.main()
