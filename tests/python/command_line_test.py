"""Command lines of the Python programs: versions, and hints at flags that were meant.

python tests/python/command_line_test.py         (in an environment where `isobit_tools[test]` is installed)
"""

import contextlib
import io
import subprocess
import sys
import unittest
from pathlib import Path

from isobit.command_line import Parser

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = (
    ["-m", "isobit.token"],
    ["-m", "isobit.convert.smollm2"],
    ["-m", "isobit_tools.train_demo"],
)


class CommandLineTest(unittest.TestCase):
    def test_every_program_has_a_version_and_help(self):
        for program in PROGRAMS:
            for flag in ("--version", "--help", "-h"):
                with self.subTest(program=program, flag=flag):
                    done = subprocess.run(
                        [sys.executable, *program, flag], capture_output=True, text=True, check=False
                    )
                    self.assertEqual(done.returncode, 0, done.stderr)
                    self.assertRegex(done.stdout, r"\d+\.\d+" if flag == "--version" else "usage: ")

    def test_every_program_uses_this_parser(self):
        sources = [*(ROOT / "python" / "isobit").rglob("*.py"), *(ROOT / "python" / "tools").rglob("*.py")]
        users = [path.stem for path in sources if "ArgumentParser" in path.read_text("utf-8")]
        self.assertEqual(users, ["command_line"])

    def test_a_flag_that_does_not_exist(self):
        parser = Parser(prog="x")
        for flag in ("--model", "--tp_size", "--max_tokens", "--lr"):
            parser.add_argument(flag)
        parser.add_argument("file")
        for wrong, meant in (
            ("--mdoel=1", "--model"),
            ("--tp-size", "--tp_size"),
            ("--tensor-parallel-size=2", "--tp_size"),
            ("--max-new-tokens", "--max_tokens"),
            ("--learning_rate", "--lr"),
            ("--max_tokns", "--max_tokens"),
            ("--colour", ""),
        ):
            with self.subTest(wrong), contextlib.redirect_stderr(io.StringIO()) as said:
                with self.assertRaises(SystemExit) as ended:
                    parser.parse_args([wrong, "3"])
                self.assertEqual(ended.exception.code, 2)
                hint = f"; did you mean {meant}?" if meant else ""
                self.assertIn(f"unknown flag {wrong.partition('=')[0]}{hint}\n", said.getvalue())
        self.assertEqual(parser.parse_args(["--mod=a", "--", "--file"]).file, "--file")


if __name__ == "__main__":
    unittest.main()
