"""Checks the comments of our protos: each message, enum and rpc has one, above it, of its own.

Not of proto/vllm, whose comments are its authors'.
"""

import re
import unittest
from pathlib import Path

PROTOS = Path(__file__).resolve().parents[2] / "proto" / "isobit" / "v1"
NAMED = re.compile(r"\s*(message|enum|rpc)\s+(\w+)")


def faults(text: str) -> list[str]:
    """What is wrong with a proto's comments, one line each."""
    found, owners = [], {}
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not (named := NAMED.match(line)):
            continue
        first = number
        while first > 0 and lines[first - 1].lstrip().startswith("//"):
            first -= 1
        comment = tuple(part.strip() for part in lines[first:number])
        what = f"line {number + 1}: {named[1]} {named[2]}"
        if not comment:
            found.append(f"{what} has no comment above it")
        elif comment in owners:
            found.append(f"{what} has the comment of {owners[comment]}")
        if len(set(comment)) < len(comment):
            found.append(f"{what} has a line of its comment twice")
        owners.setdefault(comment, named[2])
    return found


class CommentsTest(unittest.TestCase):
    def test_every_message_enum_and_rpc_has_its_comment(self):
        protos = sorted(PROTOS.glob("*.proto"))
        self.assertGreaterEqual(len(protos), 5)
        for proto in protos:
            with self.subTest(proto=proto.name):
                self.assertEqual(faults(proto.read_text()), [])

    def test_faults_are_found(self):
        """The control."""
        kept = "// Asks.\nmessage A {\n  uint32 a = 1;\n}\n\n// Answers.\nmessage B {}\n"
        self.assertEqual(faults(kept), [])
        for text, told in (
            (kept.replace("// Answers.\n", ""), "line 6: message B has no comment above it"),
            (kept.replace("Answers", "Asks"), "line 7: message B has the comment of A"),
            (kept.replace("// Asks.\n", "// Asks.\n// Asks.\n"), "message A has a line of its comment twice"),
            ("service S {\n  rpc Do(A) returns (B);\n}\n", "line 2: rpc Do has no comment above it"),
            ("// A.\n\nenum E {}\n", "line 3: enum E has no comment above it"),
        ):
            with self.subTest(told=told):
                self.assertEqual(len(faults(text)), 1)
                self.assertIn(told, faults(text)[0])


if __name__ == "__main__":
    unittest.main()
