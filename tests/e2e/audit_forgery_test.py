"""Recordings that lie, under logprobs that a scorer computed for them: tokens that nobody can draw, samples
that are gone, states of other audits. Beside them honest recordings under the same parameters, which must
pass."""

import contextlib
import dataclasses
import io
import json
import os
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

from isobit import RolloutClient, ScorerClient
from isobit.audit import run as audit
from isobit.cli import main as isobit
from isobit.launch import Setting
from isobit.recording import Recorder, sum_of
from isobit_tools.testing import ServiceTest

PROMPT, FORGED = [5, 6, 7], [11, 12, 13, 14, 15, 16]
VOCAB = 499  # of the model; the first test checks it
# Parameters under which FORGED cannot be drawn from PROMPT.
NARROW = {
    "top_k": {"top_k": 1},
    "top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 1.0},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": FORGED},
    "temperature 0": {"temperature": 0.0},
    "temperature 0 with penalties": {"temperature": 0, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
    "temperature 0 with a bias": {"temperature": 0, "logit_bias": {40: 3.0, 41: -1.0}},
    "temperature 0.001": {"temperature": 0.001},
    "a bias against them": {"logit_bias": dict.fromkeys(FORGED, -1000.0)},
    "a bias for another": {"logit_bias": {42: 1000.0}},
}
# Honest samples are drawn under these, too.
WIDE = {
    "none": {},
    "hot": {"temperature": 1000.0},
    "all at once": {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "presence_penalty": 1.0,
                    "repetition_penalty": 1.3, "frequency_penalty": -1.0, "min_tokens": 3,
                    "logit_bias": {9: -5.0}},
    "top lists": {"logprobs": 3, "stop_token_ids": [1, 2, 3]},
}  # fmt: skip


class ForgeryTest(ServiceTest):
    setting = Setting("tree", tp_size=1, shards=1)

    def setUp(self):
        super().setUp()
        self.enterContext(mock.patch.dict(os.environ, XDG_STATE_HOME=str(self.log_dir / "state")))
        rollout, self.service = self.launch("rollout"), self.launch("scorer")
        for service in (rollout, self.service):
            self.services.wait_serving(service)
        self.rollout = self.enterContext(RolloutClient(rollout.target))
        self.scorer = self.enterContext(ScorerClient(self.service.target))
        self.path = self.log_dir / "run.jsonl"

    def audit(self, file: Path, *flags: str) -> tuple[int, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = isobit(["audit", str(file), f"--scorer={self.service.target}", *flags])
        return status, out.getvalue() + err.getvalue()

    def record(self, tokens, logprobs, mode="processed", **sampling) -> Path:
        """A recording of a sample that has these tokens."""
        (sample,) = self.rollout.generate(PROMPT, max_tokens=1, ignore_eos=True, logprob_mode=mode)
        tokens = dataclasses.replace(
            sample.tokens, token_ids=np.array(tokens, np.int32), logprobs=np.array(logprobs, np.float32),
            weight_versions=np.full(len(tokens), sample.weight_version.id, np.uint64),
        )  # fmt: skip
        self.path.unlink(missing_ok=True)
        with Recorder(self.path) as recorder:
            recorder.add(PROMPT, [dataclasses.replace(sample, tokens=tokens)], **sampling)
        return self.path

    def forge(self, mode="processed", tokens=FORGED, **sampling) -> Path:
        """A recording of arbitrary tokens with the logprobs that a scorer computes for them."""
        (score,) = self.scorer.score([(PROMPT, tokens)], logprob_mode=mode, **sampling)
        return self.record(tokens, score.tokens.logprobs, mode, **sampling)

    def test_tokens_that_nobody_can_draw_are_found(self):
        self.assertEqual(self.scorer.get_server_info().server.model.vocab_size, VOCAB)
        for name, sampling in NARROW.items():
            for mode in ("processed", "raw"):
                with self.subTest(name, mode=mode):
                    status, said = self.audit(self.forge(mode, **sampling))
                    self.assertEqual(status, 1, said)
                    self.assertIn("0 of 6 tokens unequal", said)
                    self.assertRegex(
                        said, r"run.jsonl: FAILED[^\n]*\n(.*\n)*  line 1, request \S+, sample 0, token \d"
                    )
        with self.subTest("control: without parameters any tokens can be drawn"):
            self.assertEqual(self.audit(self.forge())[0], 0)

    def test_honest_samples_pass_under_all_parameters(self):
        with Recorder(self.path) as recorder:
            for sampling in (*NARROW.values(), *WIDE.values()):
                for mode in ("processed", "raw"):
                    samples = self.rollout.generate(
                        PROMPT, max_tokens=40, n=4, seed=3, ignore_eos=True, logprob_mode=mode, **sampling
                    )
                    recorder.add(PROMPT, samples, ignore_eos=True, **sampling)
        status, said = self.audit(self.path)
        self.assertEqual(status, 0, said)
        self.assertIn(f"in {(len(NARROW) + len(WIDE)) * 2 * 4} of", said)

    def test_what_dictates_is_named(self):
        for name, sampling in {
            "logit_bias": {"logit_bias": {42: 1000.0}},
            "top_k": {"top_k": 1},
            "min_tokens": {"min_tokens": 8, "stop_token_ids": FORGED, "top_k": 1},
        }.items():
            for mode in ("processed", "raw"):
                with self.subTest(name, mode=mode):
                    self.path.unlink(missing_ok=True)
                    with Recorder(self.path) as recorder:
                        samples = self.rollout.generate(
                            PROMPT, max_tokens=8, ignore_eos=True, logprob_mode=mode, **sampling
                        )
                        recorder.add(PROMPT, samples, ignore_eos=True, **sampling)
                    status, said = self.audit(self.path)
                    self.assertEqual(status, 0, said)
                    self.assertIn("PASSED, but parameters dictated 8 of 8 tokens", said)
                    self.assertRegex(said, rf"8 of 8 tokens were certain .*{name} in 1 samples")

    def test_logprobs_and_ids_that_no_rollout_gives(self):
        for value in (-np.inf, np.inf, np.nan, 5.0):
            status, said = self.audit(self.record(FORGED, [value] * 6))
            self.assertEqual(status, 1)
            self.assertIn("no token is drawn with the recorded logprob", said)
        for tokens in ([VOCAB], [2**31 - 1]):
            status, said = self.audit(self.record(tokens, [-1.0]))
            self.assertEqual(status, 1)
            self.assertIn("1 samples not computed: the scorer refuses line 1", said)
        status, said = self.audit(self.forge(tokens=[11, 12, 13], stop_token_ids=[12]))
        self.assertEqual(status, 1)
        self.assertIn("token 1 (id 12): a sample ends at its first stop token", said)

    def whole(self, count: int = 4) -> list[bytes]:
        """The lines of an honest recording in self.path."""
        self.path.unlink(missing_ok=True)
        with Recorder(self.path) as recorder:
            for number in range(count):
                prompt = [5, 6 + number]
                recorder.add(prompt, self.rollout.generate(prompt, max_tokens=4, ignore_eos=True))
        return self.path.read_bytes().splitlines(keepends=True)

    def test_a_recording_that_was_cut_is_incomplete(self):
        lines = self.whole()
        self.assertEqual(self.audit(self.path)[0], 0)
        for kept in (4, 3, 1, 0):
            for flags in ((), ("--resume",)):
                with self.subTest(kept=kept, flags=flags):
                    self.path.write_bytes(b"".join(lines[:kept]))
                    status, said = self.audit(self.path, *flags)
                    self.assertEqual(status, 3, said)
                    self.assertIn("run.jsonl: INCOMPLETE\n", said)
                    self.assertIn("no seal at its end", said)
        with self.subTest("its writer died, and it is sealed later"):
            self.path.write_bytes(b"".join(lines[:2]) + lines[2][:30])
            self.assertEqual(self.audit(self.path)[0], 1, "a line is cut off")
            self.assertEqual(isobit(["audit", str(self.path), "--seal"]), 0)
            status, said = self.audit(self.path)
            self.assertEqual(status, 0, said)
            self.assertIn("in 2 of 2 samples", said)

    def test_only_this_users_state_of_this_recording_is_believed(self):
        self.whole(1)
        state = self.path.with_name("run.jsonl.audit")
        self.assertEqual(self.audit(self.path)[0], 0)
        good = json.loads(state.read_text())
        line = json.loads(self.path.read_bytes().splitlines()[0])
        forged = self.record(line["tokens"], [-0.5] * 4)
        forged_sum = json.loads(forged.read_bytes().splitlines()[0])["sum"]
        for found in (good, {**good, "equal": {forged_sum: 4}}):
            state.write_text(json.dumps(found))
            status, said = self.audit(forged, "--resume")
            self.assertEqual(status, 1, said)
            self.assertIn("note: ", said)
            self.assertIn("tokens unequal, in 1 of 1 samples", said)
        state.unlink()
        self.assertEqual(self.audit(forged)[0], 1)
        os.environ["XDG_STATE_HOME"] = str(self.log_dir / "another user")
        status, said = self.audit(forged, "--resume")
        self.assertIn("was not written by this user's audit; everything is computed again", said)
        for junk in (b"", b"junk", b"[" * 200_000, b'{"equal": [], "faults": 3}', b"\xff"):
            state.write_bytes(junk)
            status, said = self.audit(forged, "--resume")
            self.assertEqual(status, 1, said)

    def test_a_state_goes_on_where_a_recording_was_continued(self):
        self.whole(2)
        self.assertEqual(self.audit(self.path)[0], 0)
        with Recorder(self.path) as recorder:
            recorder.add(PROMPT, self.rollout.generate(PROMPT, max_tokens=4, ignore_eos=True))
        asked = []
        score = audit.score
        audit.score = lambda scorer, batch: (asked.extend(batch), score(scorer, batch))[1]
        self.addCleanup(setattr, audit, "score", score)
        status, said = self.audit(self.path, "--resume")
        self.assertEqual((status, len(asked)), (0, 1), said)
        self.assertIn("in 3 of 3 samples", said)

    def test_what_an_audit_writes_is_private_and_follows_no_symlink(self):
        self.whole(1)
        victim = self.log_dir / "victim"
        victim.write_text("precious")
        outputs = {name: self.log_dir / f"out.{name}" for name in ("json", "html")}
        links = [
            self.path.with_name("run.jsonl.audit"),
            self.path.with_name("run.jsonl.audit.part"),
            *outputs.values(),
        ]
        for link in links:
            link.symlink_to(victim)
        status, said = self.audit(self.path, *(f"--{name}={path}" for name, path in outputs.items()))
        self.assertEqual(status, 0, said)
        self.assertEqual(victim.read_text(), "precious")
        for path in (links[0], *outputs.values()):
            self.assertFalse(path.is_symlink())
            self.assertEqual(path.stat().st_mode & 0o777, 0o600)

    def test_odd_files_are_errors_of_one_line(self):
        lines = self.whole(1)
        for name, data in {
            "brackets": b"[" * 200_000 + b"\n",
            "closed": b"[" * 99_999 + b"]" * 99_999 + b"\n",
            "no text": b"\xff\xfe\n",
            "nested": lines[0].replace(b'"sampling":{}', b'"sampling":' + b"[" * 9999 + b"]" * 9999),
            "huge": lines[0].replace(b'"index":0', b'"index":' + b"9" * 5000),
            "twice": lines[0].replace(b'"index":0', b'"index":0,"index":0'),
            "parquet": b"PAR1" + lines[0],
        }.items():
            with self.subTest(name):
                self.path.write_bytes(data)
                for flags in ((), (f"--parquet={self.log_dir / 'out'}",)):
                    status, said = self.audit(self.path, *flags)
                    self.assertIn(status, (1, 2), said)
                    self.assertNotIn("Traceback", said)
                    self.assertTrue(all(len(line) < 600 for line in said.splitlines()), said[:900])

    def test_a_line_that_was_recorded_twice_or_elsewhere_is_found(self):
        lines = self.whole(3)
        for made in ([*lines[:1], *lines], [*lines[:3], lines[2], lines[3]], [lines[1], *lines]):
            self.path.write_bytes(b"".join(made))
            self.assertEqual(self.audit(self.path)[0], 1)
        rows, before = [json.loads(line) for line in [*lines[:2], lines[3]]], ""
        for row in rows:  # sums that fit, and a seal that does not count
            row["sum"] = before = sum_of(before, row)
        self.path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        status, said = self.audit(self.path)
        self.assertEqual(status, 1)
        self.assertIn("the seal says 3 samples, there are 2", said)


if __name__ == "__main__":
    unittest.main()
