"""Tests of isobit.sampling and isobit.generation_config: names, strict types, and a model's defaults.

python tests/python/sampling_test.py        (in an environment where the package `isobit` is installed)
"""

import json
import math
import tempfile
import unittest
from pathlib import Path

import numpy as np

from isobit import sampling_defaults
from isobit.sampling import to_proto
from isobit.v1 import types_pb2

FIELDS = types_pb2.SamplingParams.DESCRIPTOR.fields
INTEGERS = ("top_k", "seed", "n", "max_tokens", "min_tokens", "logprobs")
NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


class SamplingTest(unittest.TestCase):
    def refused(self, error, name, value, message=""):
        """Checks that `value` of `name` is refused, and that the error names the parameter."""
        with self.subTest(name=name, value=value), self.assertRaisesRegex(error, f"{name}.*{message}"):
            taken = to_proto({name: value})
            self.fail(f"{value!r} was taken as {taken}")

    def test_aliases_and_numpy_scalars(self):
        message = to_proto({"max_new_tokens": np.int64(9), "top_p": np.float32(0.5), "top_k": None})
        self.assertEqual((message.max_tokens, message.top_p), (9, 0.5))
        self.assertFalse(message.HasField("top_k"))
        message = to_proto({"logit_bias": {3: -1}, "stop_token_ids": np.array([1, 2])})
        self.assertEqual((dict(message.logit_bias), list(message.stop_token_ids)), ({3: -1.0}, [1, 2]))
        message = to_proto({"temperature": 0, "ignore_eos": np.bool_(True), "seed": 2**64 - 1, "top_k": -1})
        self.assertTrue(message.HasField("temperature"))
        self.assertEqual((message.ignore_eos, message.seed, message.top_k), (True, 2**64 - 1, -1))

    def test_errors_name_the_parameter(self):
        with self.assertRaisesRegex(TypeError, "temprature"):
            to_proto({"temprature": 1})
        with self.assertRaisesRegex(TypeError, "max_tokens is given twice"):
            to_proto({"max_tokens": 1, "max_new_tokens": 2})
        self.assertEqual(to_proto({"max_tokens": 1, "max_new_tokens": 1}).max_tokens, 1)

    def test_every_field_is_covered(self):
        self.assertEqual(
            {field.name for field in FIELDS},
            {*INTEGERS, *NUMBERS, "ignore_eos", "stop_token_ids", "logit_bias"},
        )

    def test_integers_are_strict(self):
        for name in INTEGERS:
            for value in (1.7, 1.0, np.float32(2), True, np.bool_(True), "3", b"3", [1], np.array([1])):
                self.refused(TypeError, name, value, "expected an integer")
            self.refused(ValueError, name, 2**64, "expected")
            if name != "top_k":
                self.refused(ValueError, name, -1, "is -1, expected 0 to")

    def test_numbers_are_strict(self):
        for name in NUMBERS:
            for value in ("0.5", True, [0.5], None.__class__, 1j):
                self.refused(TypeError, name, value, "expected a number")
            for value in (math.nan, math.inf, np.float32("nan"), 1e39, 10**400):
                self.refused(ValueError, name, value, "expected a finite number")

    def test_containers_and_flags_are_strict(self):
        for value in ([1.7], [True], ["1"], 5, "12", b"12", {1: 2}, np.array([1.7]), [[1]]):
            self.refused(TypeError, "stop_token_ids", value, "expected")
        for value in ([-1], [2**32], np.array([-1])):
            self.refused(ValueError, "stop_token_ids", value, r"\[0\] is -?\d+, expected 0 to 4294967295")
        for value in ({"5": 1.0}, {5.5: 1.0}, {True: 1.0}, {5: "1"}, {5: None}, [(5, 1.0)], 5):
            self.refused(TypeError, "logit_bias", value, "expected")
        for value in ({-5: 1.0}, {5: math.nan}):
            self.refused(ValueError, "logit_bias", value, "expected")
        for value in (1, 0, "yes", 1.0):
            self.refused(TypeError, "ignore_eos", value, "expected True or False")

    def test_stop_strings_are_named_as_the_clients_part(self):
        for name in ("stop", "stop_strings"):
            self.refused(TypeError, name, ["###"], "know no stop strings.*stop_token_ids")
            self.assertEqual(to_proto({name: None}), types_pb2.SamplingParams())


class DefaultsTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.directory = Path(scratch.name)

    def defaults(self, **config):
        (self.directory / "generation_config.json").write_text(json.dumps(config))
        return sampling_defaults(self.directory)

    def test_every_name_is_read(self):
        options = self.defaults(
            do_sample=True, temperature=0.6, top_p=0.9, top_k=20, min_p=0.05, repetition_penalty=1.1,
            max_new_tokens=64, min_new_tokens=2, eos_token_id=[7, 8], pad_token_id=9, bos_token_id=1,
            num_beams=1, bad_words_ids=None, transformers_version="5.0.0",
        )  # fmt: skip
        self.assertEqual(
            options,
            {
                "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1,
                "max_tokens": 64, "min_tokens": 2, "stop_token_ids": [7, 8],
            },
        )  # fmt: skip
        self.assertEqual(to_proto(options).top_k, 20)

    def test_no_sampling_is_temperature_zero(self):
        self.assertEqual(
            self.defaults(do_sample=False, temperature=0.7, top_p=0.8, top_k=50, min_p=0.1, eos_token_id=2),
            {"temperature": 0.0, "stop_token_ids": [2]},
        )
        self.assertEqual(self.defaults(), {})
        self.assertEqual(self.defaults(temperature=None, top_p=0.8), {"top_p": 0.8})

    def test_what_changes_nothing_passes(self):
        inert = {
            "min_length": 0, "num_return_sequences": 1, "token_healing": False, "max_time": None,
            "force_words_ids": None, "constraints": None, "dola_layers": None, "forced_decoder_ids": [],
            "a_field_of_tomorrow": None, "_from_model_config": True, "cache_implementation": "static",
            "output_scores": True, "max_length": 4096, "prompt_lookup_num_tokens": 3,
        }  # fmt: skip
        self.assertEqual(self.defaults(do_sample=True, temperature=0.7, **inert), {"temperature": 0.7})

    def test_what_is_wrong_is_named(self):
        with self.assertRaisesRegex(FileNotFoundError, r"generation_config\.json"):
            sampling_defaults(self.directory)
        for name, value in (
            ("num_beams", 4),
            ("no_repeat_ngram_size", 3),
            ("suppress_tokens", [1]),
            ("top_k", 20.5),
            ("temperature", "0.6"),
            ("temperature", math.nan),
            ("eos_token_id", [1.5]),
            ("do_sample", "no"),
            ("min_length", 20),
            ("num_return_sequences", 4),
            ("token_healing", True),
            ("max_time", 0.5),
            ("force_words_ids", [[5]]),
            ("constraints", [{}]),
            ("dola_layers", "high"),
            ("a_field_of_tomorrow", 1),
        ):
            with self.subTest(name=name, value=value):
                where = "stop_token_ids" if name == "eos_token_id" else name
                with self.assertRaisesRegex(ValueError, rf"generation_config\.json: {where}"):
                    self.defaults(**{name: value})
        for text in ("[1]", "{", "{}\0", "{}{}", '{"a":' * 100_000):
            (self.directory / "generation_config.json").write_text(text)
            with self.assertRaisesRegex(ValueError, r"generation_config\.json"):
                sampling_defaults(self.directory)


if __name__ == "__main__":
    unittest.main()
