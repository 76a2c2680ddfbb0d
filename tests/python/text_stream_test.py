"""Tests of streamed text, which must be decode()'s, and of masks of the assistant's tokens.

python tests/python/text_stream_test.py        (in an environment where the package `isobit` is installed)
"""

import json
import pickle
import tempfile
import unittest
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from isobit import Tokenizer
from isobit.tokenizer import TextStream

TEXTS = (
    "plain words", "naïve café", "漢字 and 🙂🙃", "tab\tnew\nline", "🙂", "a 漢", "  two  spaces ", "",
    "\ufffd of its own", "漢字漢字漢", "e\u0301",
)  # fmt: skip
# The letter of each byte in a byte-level vocabulary: those that print are their own.
_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES = {byte: chr(byte) for byte in _PLAIN} | {
    byte: chr(256 + i) for i, byte in enumerate(sorted(set(range(256)) - set(_PLAIN)))
}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def byte_level(merges=(), trim=None) -> RawTokenizer:
    """A token for each byte, and for each of `merges`."""
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    raw = RawTokenizer(models.BPE(vocab, list(merges)))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    if trim is not None:
        raw.post_processor = processors.ByteLevel(trim_offsets=trim)
    raw.add_special_tokens(["<|end|>"])
    return raw


def byte_fallback() -> RawTokenizer:
    """As Llama 2's: pieces, and a token for each other byte."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("▁", *"andworsplitcef", "▁a", "é", "\ufffd"):
        vocab.setdefault(piece, len(vocab))
    return RawTokenizer.from_str(
        json.dumps(
            {
                "version": "1.0", "added_tokens": [], "pre_tokenizer": None, "post_processor": None,
                "normalizer": {"type": "Sequence", "normalizers": [
                    {"type": "Prepend", "prepend": "▁"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
                "decoder": {"type": "Sequence", "decoders": [
                    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                    {"type": "ByteFallback"}, {"type": "Fuse"},
                    {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
                "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "fuse_unk": True,
                          "byte_fallback": True, "vocab": vocab, "merges": ["▁ a"]},
            }
        )
    )  # fmt: skip


def words() -> RawTokenizer:
    """A token for each word, and none for spaces."""
    vocab = ["<unk>", "[", "]", "user", "assistant", "yes", "no", "why", "ok"]
    raw = RawTokenizer(models.WordLevel({word: i for i, word in enumerate(vocab)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return raw


class Counting:
    """A tokenizer that counts the ids that it decodes."""

    def __init__(self, raw: RawTokenizer):
        self._raw = raw
        self.decoded = 0

    def decode(self, ids, **options) -> str:
        self.decoded += len(ids)
        return self._raw.decode(ids, **options)

    def __getattr__(self, name: str):
        return getattr(self._raw, name)


class TokenizersTest(unittest.TestCase):
    def tokenizer(self, raw: RawTokenizer) -> Tokenizer:
        folder = self.enterContext(tempfile.TemporaryDirectory())
        raw.save(str(Path(folder) / "tokenizer.json"))
        return Tokenizer(folder)


class StreamTest(TokenizersTest):
    def assert_streams_as_decoded(self, tokenizer: Tokenizer, ids: list[int]) -> None:
        for skip in (True, False):
            stream = tokenizer.stream(skip_special_tokens=skip)
            for _ in range(2):  # finish() begins another text
                text = "".join(stream.add([token]) for token in ids) + stream.finish()
                self.assertEqual(text, tokenizer.decode(ids, skip_special_tokens=skip), ids)

    def test_all_ids_give_the_text_of_decode(self):
        random = np.random.default_rng(1)
        merged = byte_level([("a", "n"), ("Ġ", "a"), ("æ", "¼"), ("¢", "å")])  # parts of 漢 and 字
        for name, raw in {"bytes": byte_level(), "merged": merged, "fallback": byte_fallback()}.items():
            tokenizer = self.tokenizer(raw)
            rows = [tokenizer.encode(text, add_special_tokens=False).tolist() for text in TEXTS]
            early = [ids[:cut] for ids in rows for cut in range(len(ids))]
            cut_within = [[*ids[:-1], *rows[0]] for ids in rows if ids]
            noise = [random.integers(3, tokenizer.vocab_size, 12).tolist() for _ in range(300)]
            for kind, some in {"whole": rows, "early": early, "cut": cut_within, "noise": noise}.items():
                with self.subTest(name, kind=kind):
                    for ids in some:
                        self.assert_streams_as_decoded(tokenizer, ids)

    def test_text_comes_as_soon_as_it_is_whole(self):
        stream = self.tokenizer(byte_level()).stream()
        ids = self.tokenizer(byte_level()).encode("a🙂b").tolist()
        self.assertEqual([stream.add([token]) for token in ids], ["a", "", "", "", "🙂", "b"])
        self.assertEqual(stream.finish(), "")

    def test_a_long_run_of_bytes_is_not_held_back_to_its_end(self):
        tokenizer = self.tokenizer(byte_fallback())
        text = "漢字" * 200
        stream = tokenizer.stream()
        pieces = [stream.add([token]) for token in tokenizer.encode(text)]
        self.assertEqual("".join(pieces) + stream.finish(), text)
        self.assertGreater(sum(map(bool, pieces)), 20)
        stray = [*tokenizer.encode(text).tolist(), 3 + 0xFF]
        self.assertIn("漢字漢字\ufffd", "".join(stream.add([token]) for token in stray) + stream.finish())

    def test_noise_of_any_length(self):
        random = np.random.default_rng(2)
        tokenizer = self.tokenizer(byte_level([("æ", "¼"), ("¢", "å")]))
        table = {byte: tokenizer.library.token_to_id(letter) for byte, letter in BYTES.items()}
        for _ in range(40):
            ids = random.integers(0, tokenizer.vocab_size, 200)
            partial = random.choice([0x80, 0xBF, 0xE6, 0xF0, 0x9F, 0x99, 0x83], 200)  # seldom a character
            self.assert_streams_as_decoded(tokenizer, ids.tolist())
            self.assert_streams_as_decoded(tokenizer, [table[int(byte)] for byte in partial])

    def test_a_token_without_text_is_decoded_a_bounded_number_of_times(self):
        count = 2000
        bytes_, fallback = byte_level(), byte_fallback()
        for name, raw, token in (
            ("a byte that continues", bytes_, bytes_.token_to_id(BYTES[0x80])),
            ("a byte that begins", bytes_, bytes_.token_to_id(BYTES[0xE6])),
            ("special", bytes_, bytes_.token_to_id("<|end|>")),
            ("of a padded vocabulary", bytes_, 100_000),
            ("a stray byte", fallback, fallback.token_to_id("<0xFF>")),
            ("U+FFFD itself", fallback, fallback.token_to_id("\ufffd")),
        ):
            with self.subTest(name):
                counting = Counting(raw)
                stream = TextStream(counting, skip_special_tokens=True)
                text = "".join(stream.add([token]) for _ in range(count))
                self.assertLess(counting.decoded, 150 * count)
                self.assertLess(len(stream.finish()), 100)
                self.assertGreaterEqual(len(raw.decode([token] * count)), len(text))

    def test_tokenizers_are_pickled(self):
        tokenizer = self.tokenizer(byte_level())
        self.assertEqual(pickle.loads(pickle.dumps(tokenizer)).decode([50, 51]), tokenizer.decode([50, 51]))


class MaskTest(TokenizersTest):
    def masked(self, tokenizer: Tokenizer, reply: str) -> list[int]:
        chat = [
            {"role": "user", "content": "why"},
            {"role": "assistant", "content": reply},
            {"role": "user", "content": "ok"},
        ]
        ids, mask = tokenizer.encode_chat_with_mask(chat, template=TEMPLATE)
        self.assertEqual((ids.shape, mask.dtype), (mask.shape, np.bool_))
        return ids[mask].tolist()

    def test_the_mask_has_the_tokens_of_the_reply_and_no_other(self):
        spaces = byte_level([("Ġ", "y"), ("Ġ", "Ġ")])
        replies = (
            "yes",
            "café",
            "漢字",
            "🙂",
            "é",
            "a🙂b",
            "",
            "yes no",
            "yes ",
            " yes",
            "  ",
            "yes \n",
            " 🙂 ",
        )
        for name, raw in {
            "bytes": byte_level(), "words": words(), "spaces": spaces, "trimmed": byte_level(trim=True),
            "untrimmed": byte_level(trim=False),
        }.items():  # fmt: skip
            tokenizer = self.tokenizer(raw)
            for reply in replies:
                with self.subTest(name, reply=reply):
                    expected = tokenizer.encode(reply, add_special_tokens=False).tolist()
                    self.assertEqual(self.masked(tokenizer, reply), expected)

    def test_a_token_on_the_border_counts(self):
        tokenizer = self.tokenizer(byte_level([("]", "y"), ("s", "[")]))
        self.assertEqual(tokenizer.decode(self.masked(tokenizer, "yes")), "]yes[")


if __name__ == "__main__":
    unittest.main()
