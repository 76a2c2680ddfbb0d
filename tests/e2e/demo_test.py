"""The whole demo on a random model: every phase, every mode, and the flipped bit."""

import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path


class DemoTest(unittest.TestCase):
    def test_offline(self):
        with tempfile.TemporaryDirectory() as scratch:
            command = [
                sys.executable,
                "-m",
                "isobit",
                "demo",
                "--offline",
                f"--log_dir={Path(scratch) / 'logs'}",
            ]
            result = subprocess.run(
                [*command, f"--bin_dir={os.environ['ISOBIT_BIN_DIR']}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
        self.assertEqual(result.returncode, 0, result.stdout)
        rows = {
            row[1]: row
            for row in re.finditer(r"^  (\w+) +(\d+) +(\d+) +(\S+) +(\S+) +(\S+)", result.stdout, re.M)
        }
        tokens, unequal, *gaps = rows["tree"].groups()[1:]
        self.assertGreaterEqual(int(tokens), 500)
        self.assertEqual([unequal, *gaps], ["0", "0", "0", "0"])
        for mode in ("batch_invariant", "vanilla"):
            self.assertGreater(int(rows[mode][3]), 0)
        self.assertIn("refused with FAILED_PRECONDITION", result.stdout)
        self.assertRegex(result.stdout, r"flipped bit: [1-9]\d* of \d+ tokens unequal with the check off")


if __name__ == "__main__":
    unittest.main()
