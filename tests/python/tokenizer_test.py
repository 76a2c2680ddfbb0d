"""Tests of isobit.tokenizer on a byte-level tokenizer made here.

python tests/python/tokenizer_test.py        (in an environment where the package `isobit` is installed)
"""

import json
import tempfile
import unittest
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from isobit import Tokenizer

TEMPLATE = (
    "{% for message in messages %}\n"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\n"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + eos_token + '\\n' -}}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class TokenizerTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.directory = Path(scratch.name)
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        raw = RawTokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        raw.save(str(self.directory / "tokenizer.json"))

    def write_config(self, **config):
        (self.directory / "tokenizer_config.json").write_text(json.dumps(config))

    def test_round_trip_and_dtype(self):
        tokenizer = Tokenizer(self.directory)
        ids = tokenizer.encode("héllo 🙂")
        self.assertEqual((ids.dtype, ids.ndim), (np.int32, 1))
        self.assertEqual(tokenizer.decode(ids), "héllo 🙂")

    def test_streamed_text_never_splits_a_character(self):
        tokenizer = Tokenizer(self.directory)
        stream = tokenizer.stream()
        pieces = [stream.add([token]) for token in tokenizer.encode("a🙂b")]
        self.assertEqual(pieces, ["a", "", "", "", "🙂", "b"])

    def test_chat_follows_the_template(self):
        self.write_config(chat_template=TEMPLATE, eos_token={"content": "<|im_end|>"})
        tokenizer = Tokenizer(self.directory)
        text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        self.assertEqual(tokenizer.render_chat("hi"), text)
        ids = tokenizer.encode_chat([{"role": "user", "content": "hi"}])
        self.assertEqual(tokenizer.decode(ids, skip_special_tokens=False), text)
        self.assertEqual(np.count_nonzero(ids >= 256), 3)
        with self.assertRaisesRegex(ValueError, "no tools here"):
            tokenizer.render_chat([{"role": "tool", "content": ""}])

    def test_what_is_missing_is_named(self):
        with self.assertRaisesRegex(ValueError, "chat_template"):
            Tokenizer(self.directory).encode_chat("hi")
        with self.assertRaisesRegex(FileNotFoundError, r"tokenizer\.json"):
            Tokenizer(self.directory / "nowhere")


if __name__ == "__main__":
    unittest.main()
