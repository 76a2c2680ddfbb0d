"""Recordings of a rollout, computed again by a scorer: equal bits at another tensor-parallel size; whatever
is changed in a recording is named; what cannot be computed is said; an audit that was stopped goes on."""

import contextlib
import importlib.util
import io
import json
import os
import shutil
import unittest
from pathlib import Path
from unittest import mock

from isobit import ComparatorClient, RolloutClient, calls
from isobit.cli import main as isobit
from isobit.errors import InvalidArgumentError
from isobit.launch import ServiceError, Setting, run_model_tool
from isobit.recording import Recorder, lines_of, sum_of, write_parquet
from isobit_tools.testing import BIN_DIR, ServiceTest

DRAWS = (
    {"temperature": 0.8, "top_p": 0.9, "top_k": 40},
    {"temperature": 1.0, "repetition_penalty": 1.2, "logit_bias": {5: 1.5}, "min_tokens": 3},
    {},
)


class AuditTest(ServiceTest):
    setting = Setting("tree", tp_size=4, shards=1)

    @classmethod
    def make_model(cls):
        for seed, name in enumerate(("model", "other")):
            run_model_tool(BIN_DIR, "make", "tiny-qwen2", str(cls.scratch / name), f"--seed={seed}")

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.recorded = None
        cls.enterClassContext(mock.patch.dict(os.environ, XDG_STATE_HOME=str(cls.scratch / "state")))

    def recording(self) -> Path:
        """A copy of what a rollout at TP 4 sampled: three draws of two samples, then one of other weights."""
        if type(self).recorded is None:
            file = self.scratch / "recorded.jsonl"
            rollout = self.start("rollout")
            with RolloutClient(rollout.target) as client:
                for number, draw in enumerate(DRAWS):
                    with Recorder(file) as recorder:  # each goes on where the one before ended
                        samples = client.generate([1, 2, 3 + number], seed=1, n=2, max_tokens=9, **draw)
                        recorder.add([1, 2, 3 + number], samples, n=2, seed=1, max_tokens=9, **draw)
                client.update_weights("other")
                with Recorder(file) as recorder:
                    recorder.add([7, 8], client.generate([7, 8], seed=2, max_tokens=5))
            type(self).recorded = file
        copy = self.log_dir / "run.jsonl"
        shutil.copy(type(self).recorded, copy)
        return copy

    def audit(self, file: Path, *flags: str, models=("model", "other")) -> tuple[int, str]:
        given = [f"--model={self.scratch / model}" for model in models]
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            status = isobit(["audit", str(file), f"--bin_dir={BIN_DIR}", *given, *flags])
        return status, out.getvalue()

    def test_equal_bits(self):
        file = self.recording()
        report, page = self.log_dir / "report.json", self.log_dir / "report.html"
        status, said = self.audit(file, f"--json={report}", f"--html={page}")
        self.assertEqual(status, 0, said)
        found = json.loads(report.read_text())
        self.assertEqual((found["passed"], len(found["equal"]), found["lines"]), (True, 7, 7))
        self.assertIn(f"0 of {found['tokens']} tokens unequal, in 7 of 7 samples", said)
        self.assertGreater(found["tokens"], 30)
        self.assertIn("run.jsonl: PASSED", page.read_text())

    def test_what_a_comparator_records(self):
        """Its file passes; a bit that is changed in it is named, as is a line that is."""
        rollout, scorer = self.start("rollout"), self.start("scorer")
        file = self.log_dir / "compared.jsonl"
        comparator = self.start(
            "comparator", f"--rollout={rollout.target}", f"--scorer={scorer.target}", f"--record_file={file}"
        )
        ids = ["Grüße\x7f", '\u2028"\\', ""]
        with ComparatorClient(comparator.target) as client:
            request = calls.compare_request([[1, 2, 3], [4, 5], [6]], "raw", "none", False, None, {"n": 2})
            for prompt, name in zip(request.prompts, ids, strict=True):
                prompt.prompt_id = name
            list(client._stub.Compare(request, timeout=60))
            for draw in DRAWS:
                client.compare([[1, 2, 3]], n=2, max_tokens=9, seed=3, **draw)
            client.compare([[1, 2, 3]], max_tokens=4, min_p=1e-5, stop_token_ids=[4, 5], ignore_eos=True)
        self.services.stop()
        *lines, seal = file.read_text("utf-8").splitlines()
        self.assertEqual(len(lines), 6 + 6 + 1)
        self.assertEqual(json.loads(seal)["samples"], 13)
        status, said = self.audit(file, models=("model",))
        self.assertEqual(status, 0, said)
        self.assertIn("in 13 of 13 samples", said)
        self.assertEqual(
            {json.loads(line)["request_id"].rpartition("/")[0] for line in lines[:6]}, {*ids[:2], "2"}
        )
        tampered = self.log_dir / "tampered.jsonl"
        changed = json.loads(lines[4])
        changed["logprobs"] = changed["logprobs"][:-1] + "01"[changed["logprobs"][-1] == "0"]
        tampered.write_text("\n".join([*lines[:4], json.dumps(changed), *lines[5:], seal]) + "\n")
        status, said = self.audit(tampered, models=("model",))
        self.assertEqual(status, 1)
        self.assertIn("line 5: its sum does not fit", said)

    def test_a_comparator_that_dies_leaves_no_seal(self):
        rollout, scorer = self.start("rollout"), self.start("scorer")
        file = self.log_dir / "compared.jsonl"
        flags = (f"--rollout={rollout.target}", f"--scorer={scorer.target}", f"--record_file={file}")
        comparator = self.start("comparator", *flags)
        with self.assertRaisesRegex(ServiceError, "another process records there"):
            self.start("comparator", *flags)
        with self.assertRaisesRegex(BlockingIOError, "another recorder has it"):
            Recorder(file)
        with ComparatorClient(comparator.target) as client:
            client.compare([[1, 2, 3]], n=2, max_tokens=9, seed=3)
        self.wait_until(lambda: file.read_bytes().count(b"\n") == 2, "both samples are recorded")
        status, said = self.audit(file, models=("model",))
        self.assertEqual(status, 3, said)
        self.assertIn("a recorder has it open", said)
        comparator.process.kill()
        comparator.process.wait()
        status, said = self.audit(file, models=("model",))
        self.assertEqual(status, 3, said)
        self.assertIn("its writer did not close it", said)
        status, said = self.audit(file, "--seal", models=("model",))
        self.assertEqual(status, 0, said)
        self.assertIn("in 2 of 2 samples", said)

    @unittest.skipIf(importlib.util.find_spec("pyarrow") is None, "SKIPPED: no pyarrow")
    def test_parquet(self):
        """A recording in Parquet is the same recording, with its sums."""
        file, table = self.recording(), self.log_dir / "run.parquet"
        status, said = self.audit(file, f"--parquet={table}")
        self.assertEqual(status, 0, said)
        self.assertEqual(list(lines_of(table)), [json.loads(line) for line in file.read_text().splitlines()])
        status, said = self.audit(table)
        self.assertEqual(status, 0, said)
        self.assertIn("in 7 of 7 samples", said)
        tampered = self.log_dir / "tampered.parquet"
        lines = list(lines_of(table))
        lines[2]["tokens"][0] ^= 1
        write_parquet(lines, tampered)
        status, said = self.audit(tampered)
        self.assertEqual(status, 1)
        self.assertIn("line 3: its sum does not fit", said)

    def test_what_was_changed_is_named(self):
        def changed(row, name, value):
            return {**row, name: value(row[name])}

        changes = {
            "tokens": lambda ids: [ids[0] ^ 1, *ids[1:]],
            "logprobs": lambda bits: bits[:-1] + "01"[bits[-1] == "0"],
            "prompt": lambda ids: [*ids[:-1], ids[-1] + 1],
            "sampling": lambda options: {**options, "temperature": 0.7},
            "logprob_mode": lambda _: "raw",
        }
        for name, change in changes.items():
            with self.subTest(field=name):
                file = self.recording()
                rows = [json.loads(line) for line in file.read_text().splitlines()]
                rows[1] = changed(rows[1], name, change)
                file.write_text("".join(json.dumps(row) + "\n" for row in rows))
                status, said = self.audit(file)
                self.assertEqual(status, 1)
                self.assertRegex(said, r"line 2: its sum does not fit")
                self.assertIn("in 6 of 7 samples", said)
                # Whoever makes the sums fit again is found by the bits.
                before = ""
                for row in rows:
                    row["sum"] = before = sum_of(before, row)
                file.write_text("".join(json.dumps(row) + "\n" for row in rows))
                status, said = self.audit(file)
                self.assertEqual(status, 1, said)
                self.assertRegex(
                    said, r"line 2, request \S+, sample 1, token \d+ \(id \d+\): recorded [0-9a-f]{8}"
                )
                self.assertIn("in 7 of 7 samples", said)

    def test_what_is_lost_or_broken(self):
        lines = self.recording().read_text().splitlines(keepends=True)
        cases = {
            "line 3: its sum": [*lines[:2], *lines[3:]],
            "line 2: its sum": [lines[0], lines[2], lines[1], *lines[3:]],
            "line 7: it is cut off": [*lines[:6], lines[6][:-20]],
            "line 1: it is not JSON": ["{\n", *lines[1:]],
            "line 1: expected an object with format, time": ["[]\n", *lines[1:]],
            "0 of 0 tokens unequal, in 0 of 0 samples": [],
        }
        for message, kept in cases.items():
            with self.subTest(message):
                file = self.log_dir / "run.jsonl"
                file.write_text("".join(kept))
                status, said = self.audit(file)
                self.assertEqual(status, 1 if kept else 3)
                self.assertIn(message, said)

    def test_weights_that_nobody_has(self):
        file = self.recording()
        digest = json.loads(file.read_text().splitlines()[-2])["weights"]
        status, said = self.audit(file, models=("model",))
        self.assertEqual(status, 1)
        self.assertIn(f"1 samples not computed: no scorer or model has the weights {digest}", said)
        with self.subTest("goes on"):
            status, said = self.audit(file, "--resume", models=("other",))
            self.assertEqual(status, 0, said)
            self.assertIn("in 7 of 7 samples", said)
        with self.subTest("control: from the beginning"):
            status, said = self.audit(file, models=("other",))
            self.assertIn("in 1 of 7 samples", said)

    def test_other_arithmetic(self):
        file = self.recording()
        self.setting = Setting("vanilla", tp_size=1, shards=1)
        scorer = self.start("scorer")
        status, said = self.audit(file, f"--scorer={scorer.target}", models=())
        self.assertEqual(status, 1)
        self.assertIn("6 samples not computed: other arithmetic or another model: recorded fingerprint", said)

    def test_what_the_recorder_refuses(self):
        file = self.recording()
        with Recorder(file) as recorder, self.assertRaises((InvalidArgumentError, TypeError, ValueError)):
            recorder.add([1], [], temperatur=1.0)
        with file.open("a") as torn:
            torn.write('{"format"')
        with self.assertRaisesRegex(ValueError, "the last line is not whole"):
            Recorder(file)
        (self.log_dir / "text").write_text("Hello\n")
        with self.assertRaisesRegex(ValueError, "not one of a recording"):
            Recorder(self.log_dir / "text")
        for arguments in ([str(file)], [str(file), "--model=nowhere"], ["nowhere", f"--model={self.model}"]):
            with contextlib.redirect_stderr(io.StringIO()) as said:
                status = isobit(["audit", *arguments])
            self.assertEqual(status, 2)
            self.assertIn("expected", said.getvalue())


if __name__ == "__main__":
    unittest.main()
