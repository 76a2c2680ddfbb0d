"""Checks that no function of the C++ and CUDA product code is longer than 120 lines.

A function's lines are those from its body's opening brace to the closing one, lambdas inside it included. A
small parser of braces finds bodies: a block belongs to a function if the text before it has a parameter list
and is not the head of a namespace, a type or an extern "C".
"""

import re
import tempfile
import unittest
from pathlib import Path

from structure_test import ROOT, sources

MAX_LINES = 120

# Where members of a class in place of a function's lambdas cost time: 1.07 of it for sequences of 1,024
# tokens (H200, 2026-11-29).
EXCEPTIONS = [("kernels/cuda/sm90/attention/prefill.cuh", "Consume")]

# Comments, preprocessor lines, raw strings, strings, and characters (not the ' of 1'000).
NOT_CODE = re.compile(
    r'//[^\n]*|/\*.*?\*/|^[ \t]*#(?:[^\n]*\\\n)*[^\n]*|R"([^(\s]*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"'
    r"|(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'",
    re.DOTALL | re.MULTILINE,
)
NO_FUNCTION = re.compile(
    r"^(template\s*<.*>\s*)?(inline\s+)?(namespace|class|struct|union|enum|extern)\b", re.DOTALL
)
INSIDE_A_HEAD = re.compile(r"\s*[,){]")  # after a block: it initialises a member or a parameter


def function_bodies(text: str) -> list[tuple[int, int, str]]:
    """For each function: the line of its opening brace, its number of lines, and the text before it."""
    code = NOT_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match.group()), text)
    found = []
    blocks = []  # those that are open: where the text before each starts, and where it opens
    start = 0
    for match in re.finditer(r"[{};]", code):
        if match.group() == "{":
            blocks.append((start, match.start()))
        elif match.group() == "}":
            before, opening = blocks.pop()
            head = " ".join(code[before:opening].split())
            if ")" in head and not NO_FUNCTION.match(head):
                line = code.count("\n", 0, opening) + 1
                found.append((line, code.count("\n", opening, match.start()) + 1, head))
            if INSIDE_A_HEAD.match(code, match.end()):
                start = before
                continue
        start = match.end()
    if blocks:
        raise ValueError(f"a block does not end: {code[slice(*blocks[-1])].strip()}")
    return found


def long_functions(root: Path) -> list[str]:
    """One line for each function of more than MAX_LINES lines."""
    return [
        f"{path.relative_to(root)}:{line}: {lines} lines: {head[-200:]}"
        for path in sources(root)
        for line, lines, head in function_bodies(path.read_text("utf-8"))
        if lines > MAX_LINES
    ]


class FunctionLengthTest(unittest.TestCase):
    def test_no_function_is_too_long(self):
        found = long_functions(ROOT)
        for path, name in EXCEPTIONS:
            excepted = [line for line in found if line.startswith(f"{path}:") and f" {name}(" in line]
            self.assertEqual(len(excepted), 1, f"{name} of {path} is no exception")
            found.remove(*excepted)
        self.assertEqual(found, [])

    def test_functions_are_found(self):
        for name, function in {
            "kernels/cuda/sm90/attention/prefill.cuh": "PrefillKernel(",
            "kernels/cuda/sm90/log_probs/ranked.cu": "RankedLogProbs(",
            "kernels/cpu/attention.cc": "Block& block",
            "rollout/schedule/batching.cc": "Scheduler::",
        }.items():
            with self.subTest(file=name):
                bodies = function_bodies((ROOT / name).read_text("utf-8"))
                self.assertTrue(any(function in head for _, _, head in bodies))


class ControlTest(unittest.TestCase):
    BODY = '  Call(1\'000, \'{\', "}", R"({)");  // {\n'

    def lengths(self, text: str) -> list[int]:
        return [lines for _, lines, _ in function_bodies(text)]

    def test_a_long_function_is_found(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernels" / "a.cuh"
            path.parent.mkdir()
            for lines in (MAX_LINES, MAX_LINES + 1):
                path.write_text("__global__ void Kernel(int x) {\n" + self.BODY * (lines - 2) + "}\n")
                self.assertEqual(len(long_functions(Path(folder))), lines - MAX_LINES)

    def test_every_kind_of_function_counts(self):
        for head in (
            "int F()",
            "template <int kN>\n__global__ void __launch_bounds__(kN, 1)\n    F(const P& p)",
            "A::A(int x) : x_{x}, y_(x)",
            "A::A(B b = {}) : x_{b}",
            "bool A::operator()(int x) const noexcept",
            "auto F(int x) -> decltype(x)",
            "const auto f = [&](int x)",
            "struct A { void F()",
            "namespace {\nvoid F()",
        ):
            with self.subTest(head=head):
                closing = "}" * (head.count("{") - head.count("}"))
                self.assertIn(3, self.lengths(f"{head} {{\n{self.BODY}}}{closing}\n"))

    def test_other_blocks_do_not_count(self):
        for head in ("namespace a", "class A : public B<decltype(f())>", "enum class E", "int a[] ="):
            with self.subTest(head=head):
                self.assertEqual(self.lengths(f"{head} {{\n\n}};\n"), [])
        self.assertEqual(self.lengths("#define F(x) \\\n  { x }\n"), [])


if __name__ == "__main__":
    unittest.main()
