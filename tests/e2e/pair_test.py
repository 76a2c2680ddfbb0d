"""`isobit pair` and `isobit compare`: what they compare, print and answer with, and that nothing is left."""

import contextlib
import io
import json
import os
import signal
import unittest

from cli_case import CliTest, Command, is_alive

from isobit import ComparatorClient
from isobit.cli import main
from isobit.launch import run_model_tool
from isobit_tools.testing import BIN_DIR, http_get

FIELDS = {
    "verdict", "tokens", "unequal", "impossible", "max_abs_dp", "max_abs_dlogp", "kl_k3", "weights",
    "fingerprints", "sequences",
}  # fmt: skip
ADDRESSES = {"page", "rollout", "scorer", "comparator"}


class PairTest(CliTest):
    def pair(self, *words: str) -> Command:
        return self.isobit("pair", str(self.model), "--max_tokens=8", *words)

    def test_it_proves_and_stays_up_until_ctrl_c(self):
        command = self.pair()
        self.assertRegex(command.first_line(), r"^0 of [1-9]\d tokens differ\n$")
        command.wait_for(lambda: "Ctrl-C stops everything.\n" in command.out, "it did not stay up")
        addresses = dict(line.split() for line in command.out[1:5])
        self.assertEqual(addresses.keys(), ADDRESSES)
        self.assertIn("<html", http_get(addresses["page"]))
        with ComparatorClient(addresses["comparator"]) as client:
            tokens = client.get_server_info().total.statistics.num_tokens
        self.assertEqual(command.out[0], f"0 of {tokens} tokens differ\n")
        pids = command.children()
        self.assertEqual(pids.keys(), {"rollout", "scorer", "comparator"})
        self.assertEqual(command.end(signal.SIGINT), 0, command.text)
        self.assertFalse(any(map(is_alive, pids.values())))
        ends = [line.split()[0] for line in command.said if line.endswith("stopped\n")]
        self.assertEqual(ends, ["comparator", "scorer", "rollout"])

    def test_once(self):
        command = self.pair("--once", "--json")
        self.assertEqual(command.end(), 0, command.text)
        (line,) = command.out
        found = json.loads(line)
        self.assertEqual(found.keys(), FIELDS)
        self.assertEqual((found["verdict"], found["unequal"]), ("equal", 0))
        self.assertEqual(found["tokens"], sum(one["tokens"] for one in found["sequences"]))
        self.assertGreater(found["tokens"], 8)
        self.assertEqual(found["weights"]["rollout"], found["weights"]["scorer"])
        self.assertEqual([one["prompt"] for one in found["sequences"]], list(range(8)))
        self.assertEqual(
            found["sequences"][0].keys(), {"prompt", "sample", "tokens", "unequal", "first_unequal"}
        )

    def test_a_difference_is_found(self):
        """Control: numerics that depend on the tensor-parallel size."""
        prompts = self.log_dir / "prompts"
        prompts.write_text("Hello\nA longer one\n")
        command = self.pair("--once", f"--prompts={prompts}", "--numerics=vanilla", "--tp_size=4")
        self.assertEqual(command.end(), 1, command.text)
        self.assertRegex(command.out[0], r"^[1-9]\d* of 16 tokens differ$")
        self.assertRegex(command.text, r"prompt +sample +tokens +unequal +first")
        self.assertNotIn("\x1b", command.text)

    def test_what_cannot_be_compared(self):
        command = self.pair("--once", "--scorer_numerics=vanilla")
        self.assertEqual(command.end(), 3, command.text)
        self.assertIn("FAILED_PRECONDITION", command.text)

    def test_a_port_that_was_named_must_be_free_and_others_are_found(self):
        port = self.taken_port()
        command = self.pair("--once", f"--page_port={port}")
        self.assertEqual(command.end(), 3, command.text)
        self.assertIn(f"--page_port: cannot listen on 127.0.0.1:{port}", command.text)

    def test_each_that_dies_ends_all(self):
        for kind in ("rollout", "scorer", "comparator"):
            with self.subTest(kind):
                command = self.pair()
                command.first_line()
                pids = command.children()
                os.kill(pids[kind], signal.SIGKILL)
                self.assertEqual(command.end(), 3, command.text)
                self.assertIn(f"error: {kind} ended with status -9", command.text)
                self.assertFalse(any(map(is_alive, pids.values())))


class CompareTest(CliTest):
    def setUp(self):
        super().setUp()
        self.trio = self.start_all()

    def compare(self, *words: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main(["compare", *words, "--max_tokens=4"])
        return status, out.getvalue(), err.getvalue()

    def test_through_a_comparator(self):
        target = f"--comparator={self.trio['comparator'].target}"
        self.assertEqual(self.compare(target)[:2], (0, "0 of 32 tokens differ\n"))
        self.assertEqual(self.compare(target, "1 2 3", "--n=2")[:2], (0, "0 of 8 tokens differ\n"))
        self.assertEqual(
            self.compare(target, "Why?", f"--model={self.model}")[:2], (0, "0 of 4 tokens differ\n")
        )
        status, out, _ = self.compare(target, "1 2 3", "--json")
        self.assertEqual((status, json.loads(out).keys()), (0, FIELDS))
        status, _, err = self.compare(target, "Why?")
        self.assertEqual(status, 2)
        self.assertIn("expected token ids, or --model", err)
        status, _, err = self.compare(target, "99999")
        self.assertEqual(status, 2, err)
        self.assertIn("INVALID_ARGUMENT", err)

    def test_between_two_services(self):
        flipped = self.scratch / "flipped"
        run_model_tool(BIN_DIR, "flip-bit", str(self.model), "model.norm.weight", "0", "13", str(flipped))
        other = self.start("scorer", f"--model={flipped.name}")
        rollout = f"--rollout={self.trio['rollout'].target}"
        status, out, _ = self.compare(rollout, f"--scorer={self.trio['scorer'].target}")
        self.assertEqual((status, out), (0, "0 of 32 tokens differ\n"))
        status, out, err = self.compare(rollout, f"--scorer={other.target}")
        self.assertEqual((status, out), (3, ""), err)
        self.assertIn("FAILED_PRECONDITION", err)
        status, out, err = self.compare(rollout, f"--scorer={other.target}", "--allow_weight_mismatch")
        self.assertEqual(status, 1, err)
        self.assertRegex(out, r"^[1-9]\d* of 32 tokens differ")


if __name__ == "__main__":
    unittest.main()
