"""Tests of the gateway's parts without services: fields, sampling parameters, stop strings, tools, numbers.

python tests/gateway/parts_test.py
"""

import json
import math
import struct
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace

import grpc
import msgspec
import numpy as np
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models

from isobit import Tokenizer
from isobit.errors import (
    AbortedError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
)
from isobit.gateway.errors import BadRequest, HttpError, as_http, openai_body
from isobit.gateway.fields import checked, json_of, object_of
from isobit.gateway.hosts import check_browser
from isobit.gateway.http import encode
from isobit.gateway.logprobs import content, prompt_rows, ranked
from isobit.gateway.sampling import SamplingFields, sampling_of
from isobit.gateway.text import SampleText, Stops, TokenTexts
from isobit.gateway.tools import ToolCallReader, check_parser, wants_calls
from isobit.v1 import types_pb2
from isobit_tools.byte_tokenizer import EOS, write_tokenizer
from isobit_tools.services import run_model_tool
from isobit_tools.testing import BIN_DIR


class FieldsTest(unittest.TestCase):
    class Request(msgspec.Struct):
        max_tokens: int | None = None
        prompt: list[int] | None = None

    def test_unknown_and_unoffered_fields_are_named(self):
        for fields, name in (
            ({"max_token": 1}, "max_token"),
            ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"best_of": 2}, "best_of"),
            ({"use_beam_search": True}, "use_beam_search"),
            ({"max_tokens": "5"}, "max_tokens"),
            ({"max_tokens": 5.0}, "max_tokens"),
            ({"max_tokens": True}, "max_tokens"),
            ({"prompt": [1, "x"]}, "prompt[1]"),
        ):
            with self.assertRaises(BadRequest) as caught:
                checked(fields, self.Request)
            self.assertEqual(caught.exception.param, name)
            self.assertIn(name, caught.exception.message)
        with self.assertRaisesRegex(BadRequest, "did you mean max_tokens"):
            checked({"max_token": 1}, self.Request)

    def test_the_place_is_named(self):
        with self.assertRaises(BadRequest) as caught:
            checked({"max_tokens": "5"}, self.Request, "sampling_params.")
        self.assertEqual(caught.exception.param, "sampling_params.max_tokens")

    def test_harmless_fields_and_nulls_pass(self):
        fields = {"user": "x", "cache_salt": "7", "best_of": 1, "response_format": {"type": "text"},
                  "structured_outputs": None, "length_penalty": 1, "max_tokens": 3}  # fmt: skip
        self.assertEqual(checked(fields, self.Request).max_tokens, 3)
        self.assertEqual(object_of(b'{"a": null, "b": 1}'), {"b": 1})
        self.assertEqual(object_of(b" "), {})

    def test_one_is_not_true(self):
        with self.assertRaises(BadRequest):
            checked({"use_beam_search": 0, "best_of": True}, self.Request)

    def test_bad_json(self):
        for body in (b"{", b"[" * 100000, b'{"a":' * 100000, b'"\xff"', b"{} {}", b'{"a": NaN}', b"1e999"):
            with self.assertRaises(BadRequest):
                json_of(body)
        for body in (b"[]", b"3", b'"x"', b"null"):
            with self.assertRaisesRegex(BadRequest, "expected a JSON object"):
                object_of(body)

    def test_deep_values_of_known_fields(self):
        deep = json_of(b"[" * 400 + b"]" * 400)
        with self.assertRaises(BadRequest):
            checked({"prompt": deep}, self.Request)


class SamplingTest(unittest.TestCase):
    def params(self, **fields) -> types_pb2.SamplingParams:
        return sampling_of(SamplingFields(**fields)).params

    def test_values_that_mean_none(self):
        self.assertFalse(self.params(seed=-1).HasField("seed"))
        for top_k in (0, -1, 2**31, 2**40):
            self.assertLessEqual(self.params(top_k=top_k).top_k, 0)
        self.assertEqual(self.params(top_k=2**30).top_k, 2**30)
        self.assertFalse(self.params().HasField("temperature"))
        self.assertTrue(self.params(temperature=0).HasField("temperature"))

    def test_errors_have_the_dialects_names(self):
        with self.assertRaises(BadRequest) as caught:
            sampling_of(SamplingFields(seed=-2), at="sampling_params.", names={"seed": "sampling_seed"})
        self.assertEqual(caught.exception.param, "sampling_params.sampling_seed")
        for bad in ({"stop": [""]}, {"stop": ["x"] * 65}, {"logit_bias": {"a": 1.0}}, {"top_k": -2},
                    {"min_tokens": 2**32}, {"seed": 2**64}):  # fmt: skip
            with self.assertRaises(BadRequest, msg=bad):
                self.params(**bad)

    def test_seeds_of_64_bits(self):
        self.assertEqual(self.params(seed=2**64 - 1).seed, 2**64 - 1)


class StopsTest(unittest.TestCase):
    def run_pieces(
        self, stops: list[str], pieces: list[str], include: bool = False
    ) -> tuple[str, str | None]:
        found, given = Stops(stops, include), ""
        for piece in pieces:
            text, stop = found.add(piece)
            given += text
            if stop is not None:
                return given, stop
        return given + found.finish(), None

    def test_however_the_text_comes(self):
        text = "one two three two"
        for size in range(1, len(text) + 1):
            pieces = [text[i : i + size] for i in range(0, len(text), size)]
            self.assertEqual(self.run_pieces(["three"], pieces), ("one two ", "three"))
            self.assertEqual(self.run_pieces(["three"], pieces, include=True), ("one two three", "three"))
            self.assertEqual(self.run_pieces(["four", "twos"], pieces), (text, None))

    def test_the_first_in_the_text_wins(self):
        self.assertEqual(self.run_pieces(["b", "ab"], ["xab"]), ("x", "ab"))

    def test_what_may_be_a_begin_is_held_back(self):
        found = Stops(["END"], include=False)
        self.assertEqual(found.add("aE"), ("a", None))
        self.assertEqual(found.add("N"), ("", None))
        self.assertEqual(found.add("x"), ("ENx", None))


class TextTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        scratch = tempfile.TemporaryDirectory()
        cls.addClassCleanup(scratch.cleanup)
        model = Path(scratch.name).resolve() / "model"
        run_model_tool(BIN_DIR, "config", "tiny-llama", str(model))
        write_tokenizer(model)
        cls.model = model
        cls.tokenizer = Tokenizer(model)
        cls.texts = TokenTexts(cls.tokenizer)

    def test_bytes_of_every_byte(self):
        whole = "é漢🙂 tab\t\n".encode()
        ids = self.tokenizer.encode(whole.decode()).tolist()
        self.assertEqual(b"".join(map(self.texts.bytes_of, ids)), whole)
        self.assertEqual(self.texts.bytes_of(EOS), b"<|im_end|>")
        self.assertEqual(self.texts.bytes_of(498), b"")  # the vocabulary is padded

    def text(self, ids: list[int], sizes: int = 1, **options) -> tuple[str, str | None, int]:
        sample = SampleText(self.texts, ends=frozenset({EOS}), **options)
        given = ""
        taken = 0
        for i in range(0, len(ids), sizes):
            text, count, stop = sample.add(ids[i : i + sizes])
            given, taken = given + text, taken + count
            if stop is not None:
                return given, stop, taken
        text, stop = sample.finish()
        return given + text, stop, taken

    def test_incomplete_characters_lag(self):
        sample = SampleText(self.texts, ends=frozenset())
        ids = self.tokenizer.encode("🙂").tolist()
        self.assertEqual(len(ids), 4)
        self.assertEqual([sample.add([token])[0] for token in ids], ["", "", "", "🙂"])
        sample.add(ids[:2])
        self.assertEqual(sample.finish(), ("\ufffd", None))

    def test_streams_give_what_decode_gives(self):
        """Of random ids, most of which are no character: what is given never changes, and nothing waits."""
        source = np.random.default_rng(3)
        for texts, tokenizer in ((self.texts, self.tokenizer), *self.other_tokenizers()):
            for skip in (True, False):
                for _ in range(200):
                    ids = source.integers(0, 499, source.integers(1, 60)).tolist()
                    stream = texts.stream(skip)
                    text = "".join(stream.add([token]) for token in ids) + stream.finish()
                    self.assertEqual(text, tokenizer.decode(ids, skip_special_tokens=skip))

    def other_tokenizers(self) -> list[tuple[TokenTexts, Tokenizer]]:
        """One with words, and a space that belongs to the next one."""
        directory = self.model.with_name("words")
        directory.mkdir(exist_ok=True)
        vocab = {f"\u2581w{i}": i for i in range(300)} | {f"x{i}": i for i in range(300, 450)}
        raw = RawTokenizer(models.BPE(vocab=vocab, merges=[]))
        raw.decoder = decoders.Metaspace()
        raw.add_special_tokens(["<s>", "</s>"])
        raw.save(str(directory / "tokenizer.json"))
        tokenizer = Tokenizer(directory)
        self.assertFalse(TokenTexts(tokenizer).is_byte_level)
        return [(TokenTexts(tokenizer), tokenizer)]

    def test_nothing_is_decoded_twice(self):
        """Stray bytes, tokens without a text and special ones cost each the same, however many there are."""
        self.assertTrue(self.texts.is_byte_level)
        stray = next(token for token in range(256) if self.texts.bytes_of(token) == b"\xff")
        for ids in ([stray] * 20000, [EOS] * 20000, [498] * 20000):
            stream = self.texts.stream(True)
            text = "".join(stream.add([token]) for token in ids) + stream.finish()
            self.assertEqual(text, "\ufffd" * 20000 if ids[0] == stray else "")
        ((texts, _),) = self.other_tokenizers()
        stream = texts.stream(True)
        self.assertEqual(stream.add([450] * 20000) + stream.finish(), "")

    def test_the_token_that_ends_adds_no_text(self):
        ids = [*self.tokenizer.encode("hi").tolist(), EOS]
        self.assertEqual(self.text(ids, skip_special_tokens=False)[0], "hi")
        self.assertEqual(self.text(ids, skip_special_tokens=False, include_stop=True)[0], "hi<|im_end|>")

    def test_stop_strings_end_between_tokens(self):
        ids = self.tokenizer.encode("abc xyz!").tolist()
        for sizes in range(1, len(ids) + 1):
            text, stop, taken = self.text(ids, sizes, stop=("yz",))
            self.assertEqual((text, stop), ("abc x", "yz"))
            self.assertEqual(taken, ids.index(self.tokenizer.encode("z")[0]) + 1)

    def test_no_stop_string_before_min_tokens(self):
        ids = self.tokenizer.encode("aXbX").tolist()
        self.assertEqual(self.text(ids, stop=("X",), min_tokens=3)[:2], ("aXb", "X"))

    def test_logprobs_of_prompt_and_content(self):
        top = types_pb2.TopLogprobs(token_ids=[5, 7, 9], logprobs=[-0.5, -1.0, -math.inf])
        self.assertEqual(ranked(7, -1.0, top), [(7, -1.0, 2), (5, -0.5, 1)])
        self.assertEqual(ranked(11, -9.0, top), [(11, -9.0, None), (5, -0.5, 1), (7, -1.0, 2)])
        self.assertEqual(ranked(7, -1.0, None), [(7, -1.0, None)])
        scored = types_pb2.TokenLogprobs(token_ids=[7], logprobs=[-1.0], top=[top])
        rows = prompt_rows([1, 7], scored, self.texts)
        self.assertIsNone(rows[0])
        self.assertEqual(list(rows[1]), ["7", "5"])  # the own one first, whatever its rank
        scored = types_pb2.TokenLogprobs(token_ids=[11], logprobs=[-9.0], top=[top])
        ranks = {token: entry["rank"] for token, entry in prompt_rows([1, 11], scored, self.texts)[1].items()}
        self.assertEqual(ranks, {"11": 4, "5": 1, "7": 2})  # readers sort by it
        scored = types_pb2.TokenLogprobs(token_ids=[11], logprobs=[-9.0])
        self.assertIsNone(prompt_rows([1, 11], scored, self.texts)[1]["11"]["rank"])
        piece = SimpleNamespace(token_ids=[7], logprobs=[-1.0], top=[top])
        (entry,) = content(piece, None, 1)
        self.assertEqual(
            (entry["token"], entry["token_id"], len(entry["top_logprobs"])), ("token_id:7", 7, 1)
        )
        self.assertEqual(len(content(piece, None, None)[0]["top_logprobs"]), 2)
        self.assertEqual(content(piece, None, 0)[0]["top_logprobs"], [])
        for value in (math.nan, -math.inf):
            with self.assertRaises(InternalError):
                content(SimpleNamespace(token_ids=[7], logprobs=[value], top=[]), None, 0)


class NumbersTest(unittest.TestCase):
    def test_json_keeps_every_bit(self):
        random = np.random.default_rng(1)
        bits = random.integers(0, 2**32, 200_000, dtype=np.uint32)
        # The shortest decimal of the float32 itself would be read as another one.
        bits[:6] = [0x15AE43FD, 0x95AE43FD, 0x80000000, 0, 1, 0x80000001]
        values = bits.view(np.float32)
        values = values[np.isfinite(values)]
        text = encode(values.tolist())
        back = json.loads(text)
        self.assertTrue(all(type(value) is float for value in back))  # -0 and 0 must not become integers
        self.assertEqual(np.array(back, np.float32).tobytes(), values.tobytes())
        for number in text.decode().strip("[]").split(","):
            self.assertRegex(number, r"[.e]")

    def test_control_shortest_float32_loses_a_bit(self):
        wrong = np.float32(float(str(struct.unpack("f", struct.pack("I", 0x95AE43FD))[0])))
        self.assertEqual(wrong.view(np.uint32), 0x95AE43FD)  # of the widened double: kept
        shortest = np.format_float_scientific(np.uint32(0x95AE43FD).view(np.float32), unique=True)
        self.assertNotEqual(np.float32(float(shortest)).view(np.uint32), 0x95AE43FD)


class ToolsTest(unittest.TestCase):
    CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "<é>", "b": [1, 2.0]}}\n</tool_call>'

    def read(self, text: str, size: int) -> tuple[str, list[tuple[str, str]]]:
        reader, plain, calls = ToolCallReader(), "", []
        for i in range(0, len(text), size):
            more, found = reader.add(text[i : i + size])
            plain, calls = plain + more, calls + found
        more, found = reader.finish()
        return plain + more, [(call.name, call.arguments) for call in calls + found]

    def test_calls_however_the_text_comes(self):
        expected = [("f", '{"a": "<é>", "b": [1, 2.0]}')]  # as the model wrote it
        for size in (1, 2, 3, 7, 1000):
            self.assertEqual(self.read(f"so: {self.CALL}", size), ("so: ", expected))
            self.assertEqual(self.read(f"{self.CALL}\n{self.CALL}\n", size)[1], expected * 2)
            self.assertEqual(self.read("a <tool_cat> b <", size), ("a <tool_cat> b <", []))
            self.assertEqual(
                self.read("<tool_call>{bad}</tool_call>x", size)[0], "<tool_call>{bad}</tool_call>x"
            )
            self.assertEqual(self.read(self.CALL.removesuffix("</tool_call>"), size)[1], expected)
            self.assertEqual(self.read("<tool_call>{", size), ("<tool_call>{", []))

    def test_arguments_as_text(self):
        text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
        self.assertEqual(self.read(text, 5)[1], [("f", '{"a": 1}')])

    def test_other_forms_are_refused_by_name(self):
        for template, name in (
            ("<tool_call> <function=x>", "qwen3_coder"),
            ("[TOOL_CALLS]", "mistral"),
            ("<|python_tag|>", "llama3_json"),
            ("plain", "hermes"),
        ):
            with self.assertRaisesRegex(BadRequest, name):
                check_parser("auto", template)
        check_parser("auto", "<tool_call>")
        check_parser("hermes", "anything")
        with self.assertRaises(BadRequest):
            check_parser("none", "<tool_call>")

    def test_choices(self):
        tools = [{"type": "function"}]
        self.assertTrue(wants_calls(tools, None))
        self.assertTrue(wants_calls(tools, "auto"))
        self.assertFalse(wants_calls(tools, "none"))
        self.assertFalse(wants_calls([], None))
        for choice in ("required", {"type": "function", "function": {"name": "f"}}):
            with self.assertRaisesRegex(BadRequest, "tool_choice"):
                wants_calls(tools, choice)


class ErrorsTest(unittest.TestCase):
    def test_statuses(self):
        status = grpc.StatusCode
        for error, expected in (
            (InvalidArgumentError(status.INVALID_ARGUMENT, "x"), 400),
            (AbortedError(status.ABORTED, "x"), 409),
            (InternalError(status.INTERNAL, "x"), 500),
            (ResourceExhaustedError(status.RESOURCE_EXHAUSTED, "x"), 413),
        ):
            self.assertEqual(as_http(error).status, expected)
        self.assertEqual(as_http(AbortedError(status.ABORTED, "x")).headers, {"x-should-retry": "false"})
        for message, param in (
            ("sampling.top_p: expected more", "top_p"),
            ("prompt_token_ids + sampling.max_tokens: expected", "max_tokens"),
            ("model_path: expected sampling.x", None),
        ):
            self.assertEqual(as_http(InvalidArgumentError(status.INVALID_ARGUMENT, message)).param, param)
        full = as_http(ResourceExhaustedError(status.RESOURCE_EXHAUSTED, "full", 1500))
        self.assertEqual((full.status, full.headers["retry-after"], full.headers["retry-after-ms"]),
                         (429, "2", "1500"))  # fmt: skip
        late = as_http(ResourceExhaustedError(status.RESOURCE_EXHAUSTED, "full", 10_000_000))
        self.assertLess(int(late.headers["retry-after"]), 120)
        self.assertIn("retry-after", as_http(UnavailableError(status.UNAVAILABLE, "x")).headers)

    def test_what_fails_here_tells_no_inside(self):
        with self.assertLogs("isobit.gateway", "ERROR"):
            found = as_http(RuntimeError("secret path"))
        self.assertEqual(found.status, 500)
        self.assertNotIn("secret", found.message)
        self.assertEqual(openai_body(found)["error"]["code"], 500)


class HostsTest(unittest.TestCase):
    def check(self, server: str, **headers: str) -> None:
        check_browser(
            {"server": (server, 8000)}, {name.encode(): value.encode() for name, value in headers.items()}
        )

    def test_pages_from_elsewhere_are_refused(self):
        self.check("127.0.0.1", host="localhost:8000")
        self.check("127.0.0.1", host="127.0.0.1:8000", origin="http://127.0.0.1:8000")
        self.check("127.0.0.1", host="[::1]:8000")
        self.check("10.0.0.1", host="node0:8000")
        for server, headers in (
            ("127.0.0.1", {"host": "evil.com:8000"}),  # its name leads here
            ("127.0.0.1", {"host": "evil.com:8000", "origin": "http://evil.com:8000"}),
            ("127.0.0.1", {"host": "127.0.0.1:8000", "origin": "http://evil.com"}),
            ("10.0.0.1", {"host": "node0:8000", "origin": "null"}),
        ):
            with self.assertRaises(HttpError) as caught:
                self.check(server, **headers)
            self.assertEqual(caught.exception.status, 403)


if __name__ == "__main__":
    unittest.main()
