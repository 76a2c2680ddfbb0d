"""Tests of isobit.Tokenizer on a byte-level tokenizer made here: ids, special tokens, and their files.

python tests/python/tokenizer_test.py        (in an environment where the package `isobit` is installed)

Where transformers is installed, its AutoTokenizer must give the same for each of TRANSFORMERS_CASES.
"""

import importlib.util
import json
import os
import tempfile
import unittest
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from isobit import Tokenizer

PROBE = "Hi<|im_end|> <tool>x<image><s>"
# Writes every variable of a special token that is defined.
VARIABLES = (
    "{% for name, token in ["
    + ", ".join(
        f"('{name}', {name}_token)"
        for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image", "audio")
    )
    + "] %}{% if token is defined %}{{ name }}={{ token }} {% endif %}{% endfor %}{{ messages[0].content }}"
)


def raw_tokenizer() -> RawTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    raw.add_tokens(["<tool>"])
    return raw


def with_limits(raw: RawTokenizer) -> None:
    raw.enable_truncation(8)
    raw.enable_padding(length=8, pad_id=257, pad_token="<|im_end|>")


def with_bos(raw: RawTokenizer) -> None:
    raw.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 256)]
    )


def added(content: str, **more) -> dict:
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    return {"content": content, **flags, **more}


NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
MAP = {"bos_token": {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False,
                     "single_word": False}, "eos_token": "<|im_start|>"}  # fmt: skip

# By name: a change of the raw tokenizer, and the files beside tokenizer.json.
TRANSFORMERS_CASES = {
    "limits": (with_limits, {}),
    "limits and a pad token": (with_limits, {"tokenizer_config.json": {"pad_token": "<pad>"}}),
    "a post-processor": (
        with_bos,
        {"tokenizer_config.json": {"bos_token": "<|im_start|>", "add_bos_token": False}},
    ),
    "add_bos_token without one": (
        None,
        {"tokenizer_config.json": {"bos_token": "<s>", "add_bos_token": True}},
    ),
    "texts": (
        None,
        {"tokenizer_config.json": {"bos_token": "<s>", "eos_token": "<|im_end|>", "pad_token": None}},
    ),
    "objects": (None, {"tokenizer_config.json": {"eos_token": {"__type": "AddedToken", **added("<tool>")}}}),
    "a map": (
        None,
        {
            "special_tokens_map.json": MAP,
            "tokenizer_config.json": {"eos_token": "<|im_end|>", "sep_token": "a"},
        },
    ),
    "a map that is past": (
        None,
        {
            "special_tokens_map.json": MAP,
            "tokenizer_config.json": {
                "eos_token": "<|im_end|>",
                "added_tokens_decoder": {"259": added("<image>")},
            },
        },
    ),
    "a decoder": (
        None,
        {
            "tokenizer_config.json": {
                "added_tokens_decoder": {
                    "260": added("<s>", lstrip=True),
                    "259": added("<image>", special=False),
                    "258": added("<tool>"),
                },
                "bos_token": "<s>",
                "cls_token": "<tool>",
            }
        },
    ),
    "added_tokens.json": (
        None,
        {"added_tokens.json": {"<s>": 260, "<image>": 259}, "tokenizer_config.json": {"bos_token": "<s>"}},
    ),
    "extra tokens": (None, {"tokenizer_config.json": {"extra_special_tokens": ["<image>", "<s>"]}}),
    "additional tokens": (None, {"tokenizer_config.json": {"additional_special_tokens": ["<s>", "<image>"]}}),
    "named extra tokens": (
        None,
        {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<image>"}, "audio_token": "<s>"}},
    ),
    "split": (None, {"tokenizer_config.json": {"split_special_tokens": True, "eos_token": "<|im_end|>"}}),
    "no template": (None, {"tokenizer_config.json": {"chat_template": None}}),
    "a template": (None, {"tokenizer_config.json": {"chat_template": "C"}}),
    "named templates": (None, {"tokenizer_config.json": {"chat_template": NAMED}}),
    "no default": (None, {"tokenizer_config.json": {"chat_template": NAMED[1:]}}),
    "a file": (None, {"chat_template.jinja": "F\n", "tokenizer_config.json": {"chat_template": NAMED}}),
    "files": (
        None,
        {
            "chat_template.jinja": "F",
            "additional_chat_templates/rag.jinja": "R",
            "additional_chat_templates/tool_use.jinja": "U",
            "additional_chat_templates/notes.txt": "N",
            "tokenizer_config.json": {"chat_template": "C"},
        },
    ),
    "files without a default": (
        None,
        {"additional_chat_templates/rag.jinja": "R", "tokenizer_config.json": {"chat_template": "C"}},
    ),
    "two defaults": (
        None,
        {"additional_chat_templates/default.jinja": "A", "chat_template.jinja": "F"},
    ),
}


class DirectoryTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.directory = Path(scratch.name)

    def write(self, change=None, files=None) -> Path:
        """A new model directory with these files beside tokenizer.json."""
        directory = Path(tempfile.mkdtemp(dir=self.directory))
        raw = raw_tokenizer()
        if change is not None:
            change(raw)
        raw.save(str(directory / "tokenizer.json"))
        for name, content in (files or {}).items():
            path = directory / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return directory

    def tokenizer(self, case: str) -> Tokenizer:
        return Tokenizer(self.write(*TRANSFORMERS_CASES[case]))


class TokenizerTest(DirectoryTest):
    def test_round_trip_and_dtype(self):
        tokenizer = Tokenizer(self.write())
        ids = tokenizer.encode("héllo 🙂")
        self.assertEqual((ids.dtype, ids.ndim), (np.int32, 1))
        self.assertEqual(tokenizer.decode(ids), "héllo 🙂")

    def test_streamed_text_never_splits_a_character(self):
        tokenizer = Tokenizer(self.write())
        stream = tokenizer.stream()
        pieces = [stream.add([token]) for token in tokenizer.encode("a🙂b")]
        self.assertEqual(pieces, ["a", "", "", "", "🙂", "b"])

    def test_kept_truncation_and_padding_are_ignored(self):
        tokenizer = self.tokenizer("limits")
        self.assertEqual(len(tokenizer.encode("Hi")), 2)
        self.assertEqual(len(tokenizer.encode("a longer text")), 13)
        self.assertEqual(
            len(tokenizer.encode_chat("a longer text", template="{{ messages[0].content }}")), 13
        )

    def test_special_tokens_come_from_every_place(self):
        for case, expected in {
            "limits": "pad=<|im_end|> ",
            "limits and a pad token": "pad=<pad> ",
            "texts": "bos=<s> eos=<|im_end|> ",
            "objects": "eos=<tool> ",
            "a map": "bos=<s> eos=<|im_start|> sep=a ",
            "a map that is past": "eos=<|im_end|> ",
            "named extra tokens": "image=<image> audio=<s> ",
        }.items():
            with self.subTest(case=case):
                self.assertEqual(self.tokenizer(case).render_chat("", template=VARIABLES), expected)
        self.assertEqual(
            self.tokenizer("texts").render_chat("", template="{{bos_token}}", bos_token="B"), "B"
        )

    def test_special_tokens_are_one_id_each(self):
        for case, text, expected in (
            ("texts", "<s>", [259]),
            ("a decoder", " <s><image>", [260, 259]),
            ("extra tokens", "<s><image>", [260, 259]),
            ("added_tokens.json", "<s><image>", [260, 259]),
            ("additional tokens", "<s><image>", [259, 260]),
            ("a post-processor", "<|im_end|>", [256, 257]),
            ("add_bos_token without one", "<tool>", [258]),
        ):
            with self.subTest(case=case):
                self.assertEqual(self.tokenizer(case).encode(text).tolist(), expected)
        self.assertEqual(len(self.tokenizer("split").encode("<|im_end|>")), len("<|im_end|>"))
        self.assertEqual(self.tokenizer("a post-processor").encode("", add_special_tokens=False).tolist(), [])
        self.assertEqual(self.tokenizer("objects").decode([258]), "")
        self.assertEqual(Tokenizer(self.write()).decode([258]), "<tool>")

    def test_templates_come_from_every_place(self):
        for case, plain, with_tools in (
            ("a template", "C", "C"),
            ("named templates", "D", "T"),
            ("a file", "F", "F"),
            ("files", "F", "U"),
            ("two defaults", "A", "A"),
        ):
            with self.subTest(case=case):
                tokenizer = self.tokenizer(case)
                self.assertEqual(tokenizer.render_chat("hi"), plain)
                self.assertEqual(tokenizer.render_chat("hi", tools=[]), with_tools)
        self.assertEqual(self.tokenizer("files").render_chat("hi", template="rag"), "R")
        self.assertEqual(self.tokenizer("no default").render_chat("hi", tools=[]), "T")

    def test_what_is_missing_is_named(self):
        with self.assertRaisesRegex(ValueError, "no chat template: pass one"):
            self.tokenizer("no template").encode_chat("hi")
        with self.assertRaisesRegex(ValueError, "called 'default'; there are: tool_use"):
            self.tokenizer("no default").encode_chat("hi")
        with self.assertRaisesRegex(ValueError, "called 'rags'; there are: default, rag, tool_use"):
            self.tokenizer("files").encode_chat("hi", template="rags")
        with self.assertRaisesRegex(FileNotFoundError, r"tokenizer\.json"):
            Tokenizer(self.directory / "nowhere")
        for name, content in (
            ("tokenizer_config.json", "{"),
            ("tokenizer_config.json", "[]"),
            ("tokenizer_config.json", "{}\0"),
            ("tokenizer_config.json", "{}{}"),
            ("tokenizer_config.json", '{"a":' * 100_000),
            ("special_tokens_map.json", "[" * 100_000),
            ("tokenizer_config.json", {"chat_template": [1]}),
            ("special_tokens_map.json", "x"),
            ("tokenizer.json", "{}"),
        ):
            with self.subTest(name=name), self.assertRaisesRegex(ValueError, name.replace(".", r"\.")):
                Tokenizer(self.write(files={name: content}))


@unittest.skipUnless(importlib.util.find_spec("transformers"), "transformers is not installed")
class TransformersTest(DirectoryTest):
    def test_every_directory_means_the_same_to_transformers(self):
        os.environ["HF_HUB_OFFLINE"] = "1"
        import transformers

        for case, (change, files) in TRANSFORMERS_CASES.items():
            directory = self.write(change, files)
            mine, theirs = Tokenizer(directory), transformers.AutoTokenizer.from_pretrained(directory)
            with self.subTest(case=case):
                for text in ("Hi", PROBE, "a longer text" * 9, ""):
                    for special in (True, False):
                        self.assertEqual(
                            mine.encode(text, special).tolist(),
                            theirs.encode(text, add_special_tokens=special),
                        )
                ids = theirs.encode(PROBE)
                for skip in (True, False):
                    self.assertEqual(mine.decode(ids, skip), theirs.decode(ids, skip_special_tokens=skip))
                for options in ({"template": VARIABLES}, {}, {"tools": []}, {"template": "rag"}):
                    self.assertEqual(self.ours(mine, options), self.theirs(theirs, options), options)

    def test_what_transformers_saves_is_read(self):
        import transformers

        templates = {
            "default": "D {{ eos_token }}",
            "tool_use": "T {{ tools | tojson }}",
            "rag": "{{ documents }}",
        }
        for number, (kept, in_files) in enumerate(
            ((templates, True), (templates, False), ("S", True), ("S", False), ({"rag": "R"}, True))
        ):
            theirs = transformers.PreTrainedTokenizerFast(
                tokenizer_object=raw_tokenizer(),
                eos_token="<|im_end|>",
                bos_token=transformers.AddedToken("<s>", lstrip=True, special=True),
                extra_special_tokens=["<image>"],
                chat_template=kept,
            )
            theirs.backend_tokenizer.enable_truncation(4)
            directory = self.directory / str(number)
            theirs.save_pretrained(directory, save_jinja_files=in_files)
            mine, theirs = Tokenizer(directory), transformers.AutoTokenizer.from_pretrained(directory)
            with self.subTest(
                kept=kept, in_files=in_files, files=sorted(p.name for p in directory.iterdir())
            ):
                self.assertEqual(mine.encode(PROBE).tolist(), theirs.encode(PROBE))
                for options in ({"template": VARIABLES}, {}, {"tools": []}, {"template": "rag"}):
                    self.assertEqual(self.ours(mine, options), self.theirs(theirs, options), options)

    def ours(self, tokenizer, options):
        try:
            return tokenizer.render_chat("<hi>", **options)
        except ValueError:
            return "refused"

    def theirs(self, tokenizer, options):
        template = options.get("template")
        if template == "rag" and template not in (tokenizer.chat_template or {}):
            return "refused"  # transformers would take the name for the text of a template
        try:
            return tokenizer.apply_chat_template(
                [{"role": "user", "content": "<hi>"}],
                tools=options.get("tools"),
                chat_template=template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except ValueError:
            return "refused"


if __name__ == "__main__":
    unittest.main()
