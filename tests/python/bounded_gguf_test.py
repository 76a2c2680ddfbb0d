"""Tests of isobit.convert.bounded_gguf, and of the converter on damaged files.

python tests/python/bounded_gguf_test.py        (in an environment where `isobit_tools` is installed)
"""

import tempfile
import unittest
from pathlib import Path

from isobit.convert import bounded_gguf, gguf

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus" / "gguf_fuzz"
COUNT_OFFSETS = {"tensors": 8, "metadata": 16}  # of two uint64 after magic number and version


class BoundedGGUFTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.directory = Path(scratch.name)

    def damaged(self, offset, value):
        """A path to a file of a model whose uint64 at `offset` is `value`."""
        content = bytearray((CORPUS / "one_layer.gguf").read_bytes())
        content[offset : offset + 8] = value.to_bytes(8, "little")
        path = self.directory / "model.gguf"
        path.write_bytes(content)
        return path

    def test_a_whole_file_becomes_a_model(self):
        gguf.convert(CORPUS / "whole.gguf", self.directory)
        self.assertEqual({path.name for path in self.directory.iterdir()}, set(gguf.OUTPUT_FILES))

    def test_a_count_beyond_the_file_ends_the_reading(self):
        for what, offset in COUNT_OFFSETS.items():
            with self.subTest(what):
                path = self.damaged(offset, 2**40)
                with self.assertRaisesRegex(EOFError, "the file has 3584 bytes, but its header needs"):
                    bounded_gguf.BoundedGGUFReader(path)
                with self.assertRaisesRegex(
                    gguf.ConversionError, "is not a GGUF file that can be converted: EOFError"
                ):
                    gguf.convert(path, self.directory)


if __name__ == "__main__":
    unittest.main()
