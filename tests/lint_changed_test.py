"""What lint_changed.py chooses, remembers and says, in a small repository with a clang-tidy of its own."""

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest.mock import patch

import lint_changed

# Finds what contains "bad", and keeps the names that it was asked for.
TIDY = """#!/bin/bash
[[ $1 != --version ]] || exit 0
file=${@: -1}
echo $file >>asked
! grep -n bad $file
"""


class LintChangedTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = Path(scratch.name).resolve()
        self.write("bin/clang-tidy", TIDY)
        (self.root / "bin/clang-tidy").chmod(0o755)
        path = f"{self.root / 'bin'}:{os.environ['PATH']}"
        for change in (
            patch.dict(os.environ, PATH=path, GIT_CONFIG_GLOBAL="/dev/null", GIT_CONFIG_SYSTEM="/dev/null"),
            patch.object(lint_changed, "ROOT", self.root),
            patch.object(lint_changed, "CACHE", self.root / "cache"),
        ):
            change.start()
            self.addCleanup(change.stop)
        self.git("init", "--quiet", "--initial-branch=main")
        self.write(".clang-tidy", "Checks: all\n")
        self.write("a.cc", '#include "a.h"\n')
        self.write("b.cc", '#include "d/shared.h"\n')
        self.write("c.cc", '#include <made.pb.h>\n#include "d/shared.h"\n')
        self.write("build/proto/made.pb.h", "")
        self.write("build/proto/made.pb.cc", "int bad;\n")
        self.write("a.h", "")
        self.write("d/shared.h", "")
        entries = [
            {
                "directory": str(self.root),
                "file": name,
                "command": f"c++ -I{self.root} -isystem {self.root}/build/proto {name}",
            }
            for name in ("a.cc", "b.cc", "c.cc", "build/proto/made.pb.cc")
        ]
        self.write("build/compile_commands.json", json.dumps(entries))
        self.commit()

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def git(self, *arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *identity, *arguments], cwd=self.root, check=True, capture_output=True)

    def commit(self) -> None:
        self.git("add", "*.cc", "*.h", ".clang-tidy")
        self.git("commit", "--quiet", "--message=a")

    def lint(self, *flags: str) -> tuple[int, list[str], str]:
        """The exit status, the files that clang-tidy was asked for, and what was printed."""
        lint_changed._included.cache_clear()
        lint_changed._text_hash.cache_clear()
        (self.root / "asked").unlink(missing_ok=True)
        printed = io.StringIO()
        arguments = ["lint_changed.py", str(self.root / "build"), *flags]
        with patch.object(sys, "argv", arguments), contextlib.redirect_stdout(printed):
            status = lint_changed.main()
        asked = self.root / "asked"
        return status, sorted(asked.read_text().split()) if asked.exists() else [], printed.getvalue()

    def test_on_main_all_files_are_checked_and_clean_ones_remembered(self):
        self.assertEqual(self.lint()[:2], (0, ["a.cc", "b.cc", "c.cc"]))
        status, asked, printed = self.lint()
        self.assertEqual((status, asked), (0, []))
        self.assertIn("3 known to be clean, 0 found clean, 0 not clean, 0 not checked", printed)

    def test_a_branch_is_checked_from_where_it_left_main(self):
        self.git("checkout", "--quiet", "-b", "branch")
        self.write("b.cc", "int b;\n")
        self.commit()
        self.write("c.cc", "int c;\n")  # not committed
        self.assertEqual(self.lint()[1], ["b.cc", "c.cc"])

    def test_a_header_is_checked_through_a_file_that_includes_it(self):
        self.git("checkout", "--quiet", "-b", "branch")
        self.write("a.h", "int a;\n")
        self.write("d/shared.h", "int d;\n")
        self.commit()
        self.assertEqual(self.lint()[1], ["a.cc", "b.cc"])

    def test_what_decides_the_result_is_in_the_key(self):
        self.lint()
        self.write("d/shared.h", "int d;\n")
        self.assertEqual(self.lint()[1], ["b.cc", "c.cc"])
        self.write("build/proto/made.pb.h", "int made;\n")
        self.assertEqual(self.lint()[1], ["c.cc"])
        self.write(".clang-tidy", "Checks: more\n")
        self.commit()
        self.assertEqual(self.lint()[1], ["a.cc", "b.cc", "c.cc"])

    def test_a_finding_fails_and_is_not_remembered(self):
        self.write("b.cc", "int bad;\n")
        self.commit()
        for _ in range(2):
            status, asked, printed = self.lint()
            self.assertEqual(status, 1)
            self.assertIn("b.cc", asked)
            self.assertIn("1:int bad;", printed)

    def test_files_without_time_are_named(self):
        status, asked, printed = self.lint("--minutes", "0")
        self.assertEqual((status, asked), (0, []))
        self.assertIn("3 files are NOT CHECKED: a.cc b.cc c.cc", printed)


if __name__ == "__main__":
    unittest.main()
