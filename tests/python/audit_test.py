"""What an audit finds without a scorer: tokens that cannot be drawn, parameters that dictate, lines and seals
that do not fit, and what another user left in FILE.audit. tests/e2e/audit_test.py audits with services."""

import json
import math
import os
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from isobit.audit import state as audit_state
from isobit.audit.draws import MAX_BEHIND, dictated, why_undrawable
from isobit.audit.records import Record, read
from isobit.audit.report import SHOWN, Difference, Report, html_of, printable, text_of
from isobit.recording import Recorder, bits_hex, sum_of
from isobit.results import TokenLogprobs, TopLogprobs

LINE = {
    "format": 1, "time": 1.5, "request_id": "r", "index": 0, "prompt": [1], "tokens": [7, 8],
    "logprobs": bits_hex(np.array([-1, -2], np.float32)), "logprob_mode": "processed", "sampling": {},
    "weights": "w", "weight_version": 1, "fingerprint": "f", "settings": "d", "finish_reason": "length",
}  # fmt: skip


def record(tokens=(7, 8), logprobs=(-1.0, -2.0), mode="processed", **sampling) -> Record:
    logprobs = np.array(logprobs, np.float32)
    return Record(3, [1], list(tokens), logprobs, mode, sampling, "w", "f", "d", "r", 0, "s")


def processed(logprobs=(-1.0, -2.0), best=((7, -1.0), (8, -2.0))) -> TokenLogprobs:
    top = tuple(TopLogprobs(np.array([id], np.int32), np.array([x], np.float32)) for id, x in best)
    count = len(logprobs)
    return TokenLogprobs(
        np.zeros(count, np.int32), np.array(logprobs, np.float32), np.zeros(count, np.uint64), top
    )


class DrawsTest(unittest.TestCase):
    def test_likely_tokens_can_be_drawn(self):
        self.assertIsNone(why_undrawable(record(), processed()))
        self.assertIsNone(why_undrawable(record(temperature=0), processed()))
        self.assertIsNone(why_undrawable(record(), processed(best=((1, -0.1), (2, -0.1)))))
        self.assertIsNone(why_undrawable(record(logprobs=(0.0, -0.0)), processed((0.0, -0.0))))

    def test_no_token_has_an_impossible_logprob(self):
        for odd in (-math.inf, math.inf, math.nan, 5.0, 1e-40):
            for at in (0, 1):
                logprobs = [-1.0, -2.0]
                logprobs[at] = odd
                with self.subTest(odd=odd, at=at):
                    self.assertIn(
                        f"line 3, request r, sample 0, token {at} (id {(7, 8)[at]}): no token is drawn with",
                        why_undrawable(record(logprobs=logprobs), processed()),
                    )
                    self.assertIn(
                        "its probability is 0", why_undrawable(record(mode="raw"), processed(logprobs))
                    )

    def test_greedy_tokens_are_the_most_likely_ones(self):
        for zero in (0, 0.0, -0.0):
            self.assertIn(
                "token 1 (id 8): at temperature 0 only the most likely token, 9, can be drawn",
                why_undrawable(record(temperature=zero), processed(best=((7, -1.0), (9, -2.0)))),
            )

    def test_noise_does_not_reach_that_far(self):
        # NUMERICS.md, C8: g = -log(-log(1 - u)) of the least and the largest u.
        least, largest = (-math.log(-math.log1p(-u)) for u in (1 - 2**-24, 2**-33))
        self.assertLess(largest - least, 25.7)
        self.assertLess(25.7 + 2, MAX_BEHIND)
        for behind, seen in ((MAX_BEHIND - 1, False), (MAX_BEHIND + 1, True)):
            why = why_undrawable(record(), processed((-1 - behind, -2), best=((5, -1.0), (8, -2.0))))
            self.assertEqual(why is not None and "it cannot be drawn" in why, seen)

    def test_a_sample_ends_at_its_first_stop_token(self):
        self.assertIsNone(why_undrawable(record(stop_token_ids=[8]), processed()))
        self.assertIn("first stop token", why_undrawable(record(stop_token_ids=[7]), processed()))

    def test_certain_tokens_and_biases_are_named(self):
        certain = processed((0.0, -1.0))
        for sampling, count, names in (
            ({}, 0, []),
            ({"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "min_p": 0}, 0, []),
            ({"temperature": 0, "top_k": 1}, 0, []),
            ({"top_k": 1}, 1, ["top_k"]),
            ({"min_tokens": 4, "top_p": 0.5}, 1, ["top_p", "min_tokens"]),
            ({"temperature": 0.001}, 1, ["temperature"]),
            ({"temperature": 0, "logit_bias": {3: 1000.0}}, 1, ["logit_bias"]),
            ({"logit_bias": {3: 0.0}}, 0, []),
        ):
            with self.subTest(sampling):
                self.assertEqual(dictated(record(**sampling), certain), (count, names))
        self.assertEqual(dictated(record(top_k=5), processed()), (0, []))
        self.assertEqual(dictated(record(logit_bias={3: 1.0}), processed()), (0, ["logit_bias"]))


class VerdictTest(unittest.TestCase):
    GOOD = Report(file="run.jsonl", lines=1, sealed=True, equal={"s": 2}, tokens=2)

    def test_one_word(self):
        for changes, verdict in (
            ({}, "PASSED"),
            ({"sealed": False}, "INCOMPLETE"),
            ({"sealed": False, "equal": {}, "lines": 0}, "INCOMPLETE"),
            ({"equal": {}, "lines": 0}, "FAILED"),
            ({"unequal": {"t": 1}}, "FAILED"),
            ({"undrawable": {"s": "why"}}, "FAILED"),
            ({"undrawable": {"s": "why"}, "sealed": False}, "FAILED"),
            ({"faults": ["line 2"]}, "FAILED"),
            ({"missing": {"why": 1}}, "FAILED"),
        ):
            with self.subTest(changes):
                report = replace(self.GOOD, **changes)
                self.assertEqual((report.verdict, report.passed), (verdict, verdict == "PASSED"))
                self.assertIn(f"run.jsonl: {verdict}", text_of(report))
                self.assertIn(f"run.jsonl: {verdict}", html_of(report))

    def test_dictating_parameters_are_in_the_verdict(self):
        for certain, names, told in (
            (2, ["top_k"], "PASSED, but parameters dictated 2 of 2 tokens\n"),
            (0, ["logit_bias"], "PASSED, with a logit_bias\n"),
            (0, [], "PASSED\n"),
        ):
            report = replace(self.GOOD, dictated={})
            if names:
                report.note_dictated("s", certain, names)
            self.assertIn(told, text_of(report))
        few = replace(self.GOOD, tokens=10, dictated={})
        few.note_dictated("s", 1, ["top_p"])
        self.assertIn("PASSED\n", text_of(few))
        self.assertIn(
            "1 of 10 tokens were certain (probability 1) under sampling parameters: top_p", text_of(few)
        )

    def test_no_text_of_a_recording_forges_a_report(self):
        evil = "x\nrun.jsonl: PASSED\x1b[2J\ud800" + "y" * 9999
        difference = Difference(1, evil, 0, 0, 7, "0" * 8, "1" * 8)
        report = replace(
            self.GOOD, unequal={"t": 1}, differences=[difference.__dict__], missing={evil: 1}, file=evil,
            faults=[printable(evil)] * (SHOWN + 1),
        )  # fmt: skip
        for text in (text_of(report), html_of(report)):
            self.assertNotIn("\x1b", text)
            self.assertNotIn("\nrun.jsonl: PASSED", text)
            text.encode()
        self.assertIn("and 1 more faults", text_of(report))


class ReadTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.path = Path(scratch.name) / "run.jsonl"

    def write(self, *lines: dict, sealed: bool = True) -> None:
        """Lines with sums that fit."""
        rows, before = [], ""
        for line in [*lines, *([{"format": 1, "samples": len(lines)}] if sealed else [])]:
            rows.append({**line, "sum": (before := sum_of(before, line))})
        self.path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def read(self) -> tuple[int, Report]:
        report = Report()
        return len(read(self.path, report)), report

    def test_a_seal_must_fit(self):
        self.write(LINE, LINE)
        count, report = self.read()
        self.assertEqual((count, report.lines, report.sealed, report.faults), (2, 2, True, []))
        lines = self.path.read_text().splitlines(keepends=True)
        for kept, fault in (
            (lines[:2], None),
            (lines[:1], None),
            ([lines[0], lines[2]], "line 2: the seal's sum does not fit"),
            ([lines[2]], "line 1: the seal's sum does not fit"),
            ([*lines, lines[0]], "line 4: it comes after the seal in line 3"),
            ([*lines, lines[2]], "line 4: it comes after the seal in line 3"),
        ):
            with self.subTest(fault):
                self.path.write_text("".join(kept))
                _, report = self.read()
                self.assertEqual(report.sealed, lines[2] in kept)
                if fault is None:
                    self.assertEqual(report.faults, [])
                else:
                    self.assertIn(fault, report.faults[-1])
        before = json.loads(lines[1])["sum"]
        seal = {"format": 1, "samples": 3}
        self.path.write_text("".join(lines[:2]) + json.dumps({**seal, "sum": sum_of(before, seal)}) + "\n")
        self.assertEqual(self.read()[1].faults, ["line 3: the seal says 3 samples, there are 2"])

    def test_odd_fields_with_sums_that_fit_are_faults_of_one_line(self):
        odd = {
            "prompt": ([], None, "1", [1.5], [True], [-1], [2**32], [10**400], [None], [[1]]),
            "tokens": ([], ["a"], [1, 2, 3], {"a": 1}),
            "logprobs": ("", "zz", "0" * 15, None, 7, []),
            "logprob_mode": ("", "other", None, ["raw"]),
            "sampling": (None, [], {"a": 1}, {"top_k": 1.5}, {"temperature": math.nan}, {"logit_bias": [1]},
                         {"logit_bias": {"a": 1}}, {"logit_bias": {"1": -math.inf}}, {"stop_token_ids": 5}),
            "index": (-1, None, "0", 1.5, 10**4000),
            "format": (2, None, [[[]]], 10**4000),
            "request_id": (None, 7, ["r"]), "weights": (None, []), "fingerprint": (None, {}),
        }  # fmt: skip
        for name, values in odd.items():
            for value in values:
                with self.subTest(name=name, value=str(value)[:40]):
                    self.write(LINE, {**LINE, name: value})
                    count, report = self.read()
                    self.assertEqual((count, len(report.faults)), (1, 1), report.faults)
                    self.assertLess(len(report.faults[0]), 500)
                    self.assertNotIn("\n", report.faults[0])

    def test_other_lines_are_faults(self):
        for line in (
            b"[" * 200_000,
            b"[" * 99_999 + b"]" * 99_999,
            b"null",
            b"[]",
            b"7",
            b"\xff\xfe",
            b"",
            b"{}",
        ):
            self.path.write_bytes(line + b"\n")
            count, report = self.read()
            self.assertEqual((count, len(report.faults), report.sealed), (0, 1, False))

    def test_a_recording_that_is_open_is_told(self):
        with Recorder(self.path):
            report = self.read()[1]
            self.assertTrue(report.is_open)
            self.assertIn("a recorder has it open", text_of(report))
        self.assertFalse(self.read()[1].is_open)


class StateTest(unittest.TestCase):
    REPORT = Report(file="run.jsonl", lines=2, sealed=True, equal={"a": 2}, unequal={"b": 1}, tokens=4)

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.dir = Path(scratch.name)
        self.path = self.dir / "run.jsonl.audit"
        self.use_home("mine")

    def use_home(self, name: str) -> None:
        self.enterContext(mock.patch.dict(os.environ, XDG_STATE_HOME=str(self.dir / name)))

    def refused(self, why: str, sums=("a", "b")) -> None:
        with self.assertRaisesRegex(audit_state.StateError, why):
            audit_state.load(self.path, sums)

    def test_what_was_saved_is_loaded_for_its_recording(self):
        audit_state.save(self.path, self.REPORT)
        self.assertEqual(audit_state.load(self.path, ("a", "b")), self.REPORT)
        self.assertEqual(audit_state.load(self.path, ("a", "b", "new")), self.REPORT)
        self.assertEqual(self.path.stat().st_mode & 0o777, 0o600)
        for sums in ((), ("a",), ("b", "c")):
            self.refused("belongs to another recording", sums)

    def test_what_was_changed_is_not_believed(self):
        audit_state.save(self.path, self.REPORT)
        saved = json.loads(self.path.read_text())
        for change in ({"equal": {"a": 2, "b": 2}, "unequal": {}}, {"faults": ["x"]}, {"more": 1},
                       {"code": ""}, {"code": None}, {"code": "\u00e4"}):  # fmt: skip
            self.path.write_text(json.dumps({**saved, **change}))
            self.refused("not written by this user's audit")

    def test_another_users_is_not_believed(self):
        audit_state.save(self.path, self.REPORT)
        self.use_home("theirs")
        self.refused("not written by this user's audit")

    def test_junk_is_not_believed(self):
        for junk in (
            b"",
            b"junk",
            b"[1]",
            b"null",
            b"{}",
            b"[" * 200_000,
            b"\xff",
            b'{"equal": [], "faults": 3}',
        ):
            self.path.write_bytes(junk)
            self.refused("cannot be read|not written by")
        self.path.unlink()
        self.path.symlink_to(self.dir / "elsewhere")
        self.refused("symlink")

    def test_a_key_that_cannot_be_there(self):
        os.environ["XDG_STATE_HOME"] = "/dev/null"
        with self.assertRaisesRegex(audit_state.StateError, "cannot be written"):
            audit_state.save(self.path, self.REPORT)
        self.use_home("broken")
        (self.dir / "broken" / "isobit").mkdir(parents=True)
        (self.dir / "broken" / "isobit" / "audit.key").write_bytes(b"short")
        with self.assertRaisesRegex(audit_state.StateError, "expected 32 bytes, got 5"):
            audit_state.save(self.path, self.REPORT)


if __name__ == "__main__":
    unittest.main()
