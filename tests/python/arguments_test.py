"""Tests of what the clients say of wrong arguments before anything is sent, of their timeouts, and of repr().

python tests/python/arguments_test.py        (in an environment where the package `isobit` is installed)
"""

import contextlib
import copy
import importlib.metadata
import io
import math
import pickle
import tempfile
import unittest
from pathlib import Path

import grpc
import numpy as np

import isobit
from isobit import aio, calls, token
from isobit.arguments import integer
from isobit.results import Chunk, TokenLogprobs, TopLogprobs
from isobit.sampling import to_proto
from isobit.targets import is_loopback
from isobit.timeouts import Deadline, checked_timeout

NOBODY = "127.0.0.1:1"  # a call that is sent there fails as UnavailableError
KINDS = [getattr(module, name) for module in (isobit, aio) for name in aio.__all__]
TRUE = (True, np.True_, np.array(True))


class IntegersTest(unittest.TestCase):
    def setUp(self):
        self.rollout = self.enterContext(isobit.RolloutClient(NOBODY))
        self.scorer = self.enterContext(isobit.ScorerClient(NOBODY))
        self.comparator = self.enterContext(isobit.ComparatorClient(NOBODY))

    def test_no_bool_is_an_integer(self):
        a, b, c = self.rollout, self.scorer, self.comparator
        for true in TRUE:
            for name, call in {
                "prompt": lambda t=true: a.generate([5, t]),
                "prompt alone": lambda t=true: a.generate([t]),
                "prompt of an array": lambda: a.generate(np.array([True, False])),
                "tuple": lambda t=true: a.generate((t, 5)),
                "batch": lambda t=true: a.generate_batch([[5], [5, t]]),
                "max_concurrency": lambda t=true: a.generate_batch([[5]], max_concurrency=t),
                "draft": lambda t=true: a.generate([5], draft_token_ids=[5, t]),
                "drafts": lambda t=true: a.generate([5], draft_token_ids=[[5], [t]]),
                "timeout_ms": lambda t=true: a.generate([5], timeout_ms=t),
                "timeout": lambda t=true: a.generate([5], timeout=t),
                "stop_token_ids": lambda t=true: a.generate([5], stop_token_ids=[t]),
                "seed": lambda t=true: a.generate([5], seed=t),
                "temperature": lambda t=true: a.generate([5], temperature=t),
                "weight_version": lambda t=true: a.update_weights("model", weight_version=t),
                "probe": lambda t=true: a.probe([5, t]),
                "probe's row": lambda t=true: a.probe([5], site=(0, 0), row=t),
                "probe's site": lambda t=true: a.probe([5], site=(t, 0)),
                "scored prompt": lambda t=true: b.score([([5, t], [6])]),
                "completion": lambda t=true: b.score([([5], [6, t])]),
                "scored version": lambda t=true: b.score([([5], [6])], weight_version=t),
                "compared": lambda t=true: c.compare([[5, t]]),
                "compared at a time": lambda t=true: c.compare([[5]], max_concurrency=t),
                "interval": lambda t=true: c.watch(interval_ms=t),
                "window": lambda t=true: c.watch(window_sequences=t),
                "localised": lambda t=true: c.localise([5], [t]),
            }.items():
                with self.subTest(name, true=repr(true)), self.assertRaises(TypeError):
                    call()

    def test_integers_of_any_library_are_integers(self):
        rows = ([5, 6], (5, 6), range(5, 7), np.array([5, 6], np.uint8), [np.int32(5), 6], [np.array(5), 6])
        for row in rows:
            self.assertEqual(calls.token_list(row, "row"), [5, 6])
        self.assertEqual(calls.token_list([], "row"), [])
        self.assertEqual(integer("n", np.uint64(7), (0, 9)), 7)

    def test_ids_out_of_range_are_named(self):
        for row in ([1, -1], [1, 2**32], [1, 2**70], [np.int64(1), -1]):
            with self.subTest(row), self.assertRaisesRegex(ValueError, r"row\[1\] is .*, expected 0 to"):
                calls.token_list(row, "row")


class NewcomersTest(unittest.TestCase):
    def test_targets(self):
        for target in (
            "http://127.0.0.1:50051", "http://127.0.0.1:50051/", "https://a.b:1", "grpc://a:1", "tcp://a:1",
            "127.0.0.1", "localhost", "", ":50051", "localhost:", "localhost:http", "localhost:0",
            "localhost:65536", "localhost:50051/", "local host:50051", "user@host:1", "::1:50051", "::1",
            "localhost:-1", "a:1:2",
        ):  # fmt: skip
            for kind in (isobit.RolloutClient, aio.ScorerClient):
                with self.subTest(target), self.assertRaisesRegex(ValueError, "expected host:port"):
                    kind(target)
        with self.assertRaisesRegex(TypeError, "host:port"):
            isobit.RolloutClient(50051)
        for target in ("localhost:1", "[::1]:50051", "a-b.c:65535", "dns:///a:1", "unix:/tmp/socket"):
            isobit.RolloutClient(target)

    def test_loopback(self):
        for target in (
            "localhost:1", "LOCALHOST:1", "127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "a.localhost:1",
            "[::ffff:127.0.0.1]:1", "dns:///localhost:1", "ipv4:127.0.0.1:1", "unix:/a",
        ):  # fmt: skip
            self.assertTrue(is_loopback(target), target)
        for target in ("10.0.0.1:1", "localhost.example:1", "mylocalhost:1", "[fd00::1]:1", "dns:///a:1"):
            self.assertFalse(is_loopback(target), target)

    def test_texts_lists_and_pairs(self):
        with (
            isobit.RolloutClient(NOBODY) as a,
            isobit.ScorerClient(NOBODY) as b,
            isobit.ComparatorClient(NOBODY) as c,
        ):
            for call, words in (
                (lambda: a.generate("Why?"), "token ids.*Tokenizer"),
                (lambda: a.generate(["a", "b"]), "token ids.*Tokenizer"),
                (lambda: a.generate(np.array(["a"])), "token ids.*Tokenizer"),
                (lambda: a.generate([[1, 2], [3, 4]]), "generate_batch"),
                (lambda: a.generate([[1, 2], [3]]), "generate_batch"),
                (lambda: a.generate(np.ones((2, 2), int)), "generate_batch"),
                (lambda: a.generate(5), "one row of integers"),
                (lambda: a.generate({"role": "user"}), "one row of integers"),
                (lambda: a.generate({1, 2}), "one row of integers"),
                (lambda: a.generate_batch("Why?"), "Tokenizer"),
                (lambda: a.generate_batch(["Why?"]), "Tokenizer"),
                (lambda: a.generate_batch([1, 2]), "single prompt"),
                (lambda: b.score([("a", "b")]), "Tokenizer"),
                (lambda: b.score(([1, 2], [3, 4])), "pair"),
                (lambda: b.score([1, 2]), "pair"),
                (lambda: b.score([[1, 2, 3]]), "pair"),
                (lambda: c.compare([1, 2]), r"\[prompt\]"),
                (lambda: c.compare("Why?"), "Tokenizer"),
            ):
                with self.assertRaisesRegex(TypeError, words):
                    call()

    def test_names_of_other_engines(self):
        for name, meant in (
            ("max_token", "max_tokens"), ("maxtokens", "max_tokens"), ("max_completion_tokens", "max_tokens"),
            ("temprature", "temperature"), ("num_return_sequences", "use n"), ("do_sample", "temperature=0"),
            ("eos_token_id", "stop_token_ids"), ("stop_token_id", "stop_token_ids"), ("timeouts", "timeout"),
            ("top_logprobs", "logprobs"), ("sampling_params", r"\*\*sampling_params"),
            ("streaming", "stream=True"),
            ("messages", "encode_chat"), ("stop_sequences", "stop_token_ids"), ("beam_width", "there are"),
        ):  # fmt: skip
            with self.subTest(name), self.assertRaisesRegex(TypeError, f"{name}.*{meant}"):
                to_proto({name: 1})

    def test_no_limit_is_not_the_default_of_16(self):
        for name in ("max_tokens", "max_new_tokens"):
            with self.assertRaisesRegex(ValueError, f"{name} is None.*no limit"):
                to_proto({name: None})
        self.assertFalse(to_proto({"seed": None}).HasField("max_tokens"))

    def test_names_of_a_hub_are_no_directories(self):
        for read in (isobit.Tokenizer, isobit.sampling_defaults):
            with self.assertRaisesRegex(
                FileNotFoundError, "some-org/some-model is not a directory.*downloaded"
            ):
                read("some-org/some-model")

    def test_misspelt_flags(self):
        for words, expected in (
            (["--token-file=x", "name", "admin"], "unknown flag --token-file; did you mean --token_file?"),
            (["--tokenfile", "x"], "unknown flag --tokenfile; did you mean --token_file?"),
            (["--unlike=3"], "unknown flag --unlike"),
        ):
            err = io.StringIO()
            with contextlib.redirect_stderr(err), self.assertRaises(SystemExit) as end:
                token.main(words)
            self.assertEqual(end.exception.code, 2)
            self.assertIn(expected, err.getvalue())
        out = io.StringIO()
        with contextlib.redirect_stdout(out), self.assertRaises(SystemExit) as end:
            token.main(["--version"])
        self.assertEqual(end.exception.code, 0)
        self.assertEqual(out.getvalue(), f"python -m isobit.token {isobit.__version__}\n")

    def test_version(self):
        self.assertEqual(isobit.__version__, importlib.metadata.version("isobit"))


class TimeoutsTest(unittest.TestCase):
    def test_numbers(self):
        for endless in (None, math.inf, 1e10, 8e9, np.float32(math.inf), 10**30):
            self.assertIsNone(checked_timeout(endless))
        for seconds in (0, 1, 0.5, 86400 * 365, np.float32(0.5), np.int64(3)):
            self.assertEqual(checked_timeout(seconds), float(seconds))
        for wrong in (math.nan, -1, -0.001, -math.inf, np.float64(math.nan)):
            with self.assertRaisesRegex(ValueError, "timeout is"):
                checked_timeout(wrong)
        for wrong in ("5", b"5", True, np.False_, [1.0, 2.0], object()):
            with self.assertRaisesRegex(TypeError, "timeout is"):
                checked_timeout(wrong)
        self.assertEqual((Deadline(None).left_s(), Deadline(None).bounded(3)), (None, 3))
        self.assertTrue(Deadline(0).is_over())

    def test_every_call_checks_its_timeout(self):
        with (
            isobit.RolloutClient(NOBODY) as a,
            isobit.ScorerClient(NOBODY) as b,
            isobit.ComparatorClient(NOBODY) as c,
        ):
            for call in (
                lambda **t: a.generate([1], **t), lambda **t: a.generate([1], stream=True, **t), a.get_load,
                lambda **t: a.generate_batch([[1]], **t), a.wait_until_serving, a.pause_generation, a.wake_up,
                a.get_server_info, lambda **t: a.update_weights("m", **t), lambda **t: a.abort("x", **t),
                lambda **t: a.update_weights_from_stream({}, **t), lambda **t: b.score([([1], [2])], **t),
                lambda **t: b.score([([1], [2])], stream=True, **t), lambda **t: c.compare([[1]], **t),
                lambda **t: c.record([], **t), c.watch, lambda **t: c.localise([1], **t),
            ):  # fmt: skip
                for wrong in (math.nan, -1):
                    with self.assertRaisesRegex(ValueError, "timeout is"):
                        call(timeout=wrong)


class CopiesTest(unittest.TestCase):
    def test_clients_are_pickled_and_copied_as_they_were_made(self):
        with tempfile.TemporaryDirectory() as folder:
            (secret := Path(folder) / "token").write_text("word")
            for kind in KINDS:
                for options in ({}, {"token": "word"}, {"token_file": secret}, {"wait_if_full": False}):
                    client = kind("localhost:50051", **options)
                    for other in (
                        pickle.loads(pickle.dumps(client)),
                        copy.deepcopy(client),
                        copy.copy(client),
                    ):
                        self.assertIsNot(other, client)
                        self.assertEqual((type(other), other._made_of), (kind, client._made_of))

    def test_grpc_credentials_are_refused(self):
        client = isobit.RolloutClient("localhost:50051", grpc.ssl_channel_credentials())
        with self.assertRaisesRegex(TypeError, "tls_ca"):
            pickle.dumps(client)

    def test_repr_names_class_and_target_but_no_secret(self):
        for kind in KINDS:
            text = repr(kind("127.0.0.1:7001", token="secret-word"))
            self.assertEqual(text, f"{kind.__name__}('127.0.0.1:7001', token=...)")
        self.assertIn("wait_if_full=False", repr(isobit.RolloutClient("a:1", wait_if_full=False)))

    def test_repr_of_results_is_short(self):
        many = np.arange(100_000, dtype=np.int32)
        top = (TopLogprobs(many[:20], many[:20].astype(np.float32)),) * 5000
        tokens = TokenLogprobs(many, many.astype(np.float32), many.astype(np.uint64), top)
        text = repr(Chunk("r", 0, tokens))
        self.assertLess(len(text), 1000)
        self.assertIn("Chunk(request_id='r', index=0, tokens=TokenLogprobs(token_ids=int32[100000]", text)


if __name__ == "__main__":
    unittest.main()
