"""Checks the documents: links lead somewhere, and what docs/architecture and comments name exists.

Of every page, each relative link must lead to a file or folder, and its anchor to a heading. A page of
docs/architecture names a file as `folder/file.cc`, from the root, and a function, type or constant as
`folder/file.cc:Name`: the file must exist, and define or declare the name; a call or a comment is not enough.
Of the C++ sources, comments may name a file with its folders, and a test as `SuiteTest.Name` or
`SuiteTest.Na*`.
"""

import fnmatch
import re
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("*.md", "docs/**/*.md", "kernels/**/*.md", "tests/**/*.md", "python/**/*.md", "deploy/**/*.md")
MAX_COLUMNS = 120

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
NAMED = re.compile(r"`((?:[\w.-]+/)+[\w.-]+\.(?:h|cc|cuh?|inc|py|proto|txt|md|json))(?::([A-Za-z_][\w:]*))?`")
COMMENT = re.compile(r"//[^\n]*")
SOURCES = ("common", "kernels", "rollout", "trainer_bridge")
TEST = re.compile(r"\bTEST(?:_[FP])?\(\s*(\w+),\s*(\w+)\)")
SUITE = re.compile(r"^class (\w+Test)\(", re.MULTILINE)  # of Python
NAMED_TEST = re.compile(r"\b[A-Z]\w*Test\.(?:[A-Z]\w*\*?|\*)")
NAMED_FILE = re.compile(rf"(?<![\w/])(?:{'|'.join(SOURCES)}|tests|docs)/[\w/]+\.(?:h|cc|cuh?|inc|py|md)\b")
# Between a function's parameters and its body: qualifiers, a return type, a constructor's list.
BODY = re.compile(r"\s*(?:const|noexcept|override|final|\s)*(?:->[^;{]*)?(?::[^;{]*)?\{")
DECLARED = re.compile(r"\s*(?:const|noexcept|override|final|\s)*(?:=\s*0\s*)?;")


def anchor_of(heading: str) -> str:
    """The anchor of a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def after_parentheses(text: str, opening: int) -> str:
    """What follows the parenthesis that closes the one at `opening`; empty if none does."""
    depth = 0
    for i in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[i], 0)
        if depth == 0:
            return text[i + 1 : i + 2000]
    return ""


def has_function(text: str, name: str) -> bool:
    """Whether C++ text defines or declares a function of that name, as written."""
    for found in re.finditer(rf"(?<![\w.>:]){re.escape(name)}(?:<[^<>()]*>)?\(", text):
        rest = after_parentheses(text, found.end() - 1)
        if BODY.match(rest):
            return True
        before = text[: found.start()].rstrip()
        if DECLARED.match(rest) and re.search(r"(?:\b(?!return\b)\w+|[*&>])$", before):
            return True
    return False


def has_type(text: str, name: str) -> bool:
    return bool(
        re.search(rf"\b(?:class|struct|enum|union)\s+(?:class\s+)?{name}\b\s*(?:final\s*)?[:{{]", text)
    )


def defines(text: str, suffix: str, symbol: str) -> bool:
    """Whether a source of that suffix defines or declares the symbol, `Name` or `Class::Name`."""
    *scopes, name = symbol.split("::")
    if suffix == ".py":
        return bool(re.search(rf"^\s*(?:def|class) {name}\b|^{name}\b.* = ", text, re.MULTILINE))
    text = COMMENT.sub("", text)
    if suffix == ".proto":
        return bool(re.search(rf"\b(?:message|rpc|service|enum) {name}\b", text))
    if scopes and has_function(text, symbol):
        return True
    if scopes and not has_type(text, scopes[-1]):
        return False
    if has_function(text, name) or has_type(text, name):
        return True
    return bool(re.search(rf"\b{name}\b(?:\[[^\]]*\])?\s*=(?!=)", text))


def link_faults(root: Path, page: Path) -> list[str]:
    """One line for each relative link of a page whose target does not exist."""
    faults = []
    for text, target in LINK.findall(FENCE.sub("", page.read_text("utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        to = (page.parent / path).resolve() if path else page
        named = NAMED.fullmatch(text)
        if not to.exists():
            faults.append(f"{target}: no such file")
        elif named and to != (root / named.group(1)).resolve():
            faults.append(f"{text} leads to {target}")
        elif anchor:
            headings = re.findall(r"^#+ (.*)$", FENCE.sub("", to.read_text("utf-8")), re.MULTILINE)
            if anchor not in map(anchor_of, headings):
                faults.append(f"{target}: no such heading")
    return faults


def name_faults(root: Path, page: Path) -> list[str]:
    """One line for each file or symbol that a page names and that does not exist."""
    faults = []
    for name, symbol in NAMED.findall(FENCE.sub("", page.read_text("utf-8"))):
        path = root / name
        if not path.is_file():
            faults.append(f"{name}: no such file")
        elif symbol and not defines(path.read_text("utf-8"), path.suffix, symbol):
            faults.append(f"{name} has no {symbol}")
    return faults


def comment_faults(root: Path) -> list[str]:
    """The tests and files that comments under SOURCES name and that do not exist."""
    tests = set()
    for path in root.glob("tests/**/*.*"):
        if path.suffix in (".cc", ".cu"):
            tests |= {".".join(found) for found in TEST.findall(path.read_text("utf-8"))}
        elif path.suffix == ".py":
            tests |= {f"{suite}." for suite in SUITE.findall(path.read_text("utf-8"))}
    sources = [path for folder in SOURCES for path in (root / folder).glob("**/*.*")]
    comments = [comment for path in sources for comment in COMMENT.findall(path.read_text("utf-8"))]
    named = {name for comment in comments for name in NAMED_TEST.findall(comment)}
    files = {name for comment in comments for name in NAMED_FILE.findall(comment)}
    gone = [name for name in named if not fnmatch.filter(tests, name)]
    return sorted(gone + [name for name in files if not (root / name).is_file()])


def long_lines(page: Path) -> list[str]:
    """The lines of a page's prose that are too long. Tables may be wider."""
    lines = FENCE.sub("", page.read_text("utf-8")).splitlines()
    return [line for line in lines if len(line) > MAX_COLUMNS and not line.startswith("|")]


class RepositoryTest(unittest.TestCase):
    def test_links_lead_somewhere(self):
        pages = sorted({page for pattern in PAGES for page in ROOT.glob(pattern)})
        self.assertGreater(len(pages), 20)
        for page in pages:
            with self.subTest(page=page.relative_to(ROOT).as_posix()):
                self.assertEqual(link_faults(ROOT, page), [])

    def test_what_the_architecture_names_is_there(self):
        pages = sorted((ROOT / "docs" / "architecture").glob("*.md"))
        self.assertGreater(len(pages), 5)
        named = sum(bool(symbol) for page in pages for _, symbol in NAMED.findall(page.read_text("utf-8")))
        self.assertGreater(named, 100)
        for page in pages:
            with self.subTest(page=page.name):
                self.assertEqual(name_faults(ROOT, page), [])
                self.assertEqual(long_lines(page), [])

    def test_what_comments_name_is_there(self):
        self.assertEqual(comment_faults(ROOT), [])


class ControlTest(unittest.TestCase):
    """Every rule finds a violation of it."""

    SOURCE = """
// Called(x) { is told of in a comment.
namespace a {
class Thing final : public Base {
 public:
  explicit Thing(int x) : x_(x) {}
  absl::Status Run(const Args& args,
                   int n) const override;
};
struct Later;
constexpr int kRows[] = {1, 2};
template <typename T>
__global__ void __launch_bounds__(256) Kernel(T* out) { Called(out); }
absl::Status Other::Stop() {
  if (Called(1)) { return Called(2); }
  ISOBIT_RETURN_IF_ERROR(Called(3));
  return status.Member(4);
}
}  // namespace a
"""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = Path(scratch.name)
        (self.root / "docs").mkdir()
        (self.root / "a").mkdir()
        (self.root / "a" / "b.cc").write_text(self.SOURCE)
        (self.root / "README.md").write_text("# One\n## Two: the `x`, and [y](z.md)\n")
        self.page = self.root / "docs" / "page.md"

    def test_links_are_followed(self):
        good = "[a](../README.md#two-the-x-and-y) [b](../a) [`a/b.cc:Thing`](../a/b.cc) [c](https://x.org/y)"
        self.page.write_text(good + "\n```\n[d](gone.md)\n```\n")
        self.assertEqual(link_faults(self.root, self.page), [])
        cases = {
            "[a](gone.md)": "gone.md: no such file",
            "[a](../README.md#three)": "../README.md#three: no such heading",
            "[a](#here)": "#here: no such heading",
            "[`a/c.cc:Thing`](../a/b.cc)": "`a/c.cc:Thing` leads to ../a/b.cc",
        }
        for text, fault in cases.items():
            with self.subTest(text=text):
                self.page.write_text(text)
                self.assertEqual(link_faults(self.root, self.page), [fault])

    def test_names_are_looked_up(self):
        for name in ("Thing", "Thing::Run", "Thing::Thing", "kRows", "Kernel", "Other::Stop"):
            with self.subTest(name=name):
                self.page.write_text(f"`a/b.cc:{name}` and `a/b.cc`\n")
                self.assertEqual(name_faults(self.root, self.page), [])
        for name in ("Called", "Thin", "Thing::Stop", "Later", "Thing::Walk", "Other::Run", "Member", "Gone"):
            with self.subTest(name=name):
                self.page.write_text(f"`a/b.cc:{name}`\n")
                self.assertEqual(name_faults(self.root, self.page), [f"a/b.cc has no {name}"])
        self.page.write_text("`a/gone.cc` `a/gone.cc:Run`\n")
        self.assertEqual(name_faults(self.root, self.page), ["a/gone.cc: no such file"] * 2)

    def test_python_and_proto_are_looked_up(self):
        (self.root / "a" / "b.py").write_text("X: int = 1\n\ndef run(a):\n    walk(a)\n")
        (self.root / "a" / "b.proto").write_text("message Hello {\n  // message World\n}\n")
        self.page.write_text("`a/b.py:run` `a/b.py:X` `a/b.proto:Hello`\n")
        self.assertEqual(name_faults(self.root, self.page), [])
        self.page.write_text("`a/b.py:walk` `a/b.proto:World`\n")
        self.assertEqual(len(name_faults(self.root, self.page)), 2)

    def test_comments_are_looked_up(self):
        for folder in ("tests", "rollout"):
            (self.root / folder).mkdir()
        (self.root / "tests" / "a_test.cc").write_text("TEST_P(AlphaTest, IsFirst) {}\n")
        source = self.root / "rollout" / "a.h"
        source.write_text(
            "// (AlphaTest.IsFirst, AlphaTest.Is*, AlphaTest.*; rollout/a.h).\nBetaTest.Runs();\n"
        )
        self.assertEqual(comment_faults(self.root), [])
        source.write_text("// (AlphaTest.IsLast, BetaTest.*, AlphaTest.Was*; tests/b_test.cc).\n")
        expected = ["AlphaTest.IsLast", "AlphaTest.Was*", "BetaTest.*", "tests/b_test.cc"]
        self.assertEqual(comment_faults(self.root), expected)

    def test_long_lines_are_found(self):
        self.page.write_text(f"| {'x' * 200} |\n{'y' * 120}\n```\n{'z' * 130}\n```\n")
        self.assertEqual(long_lines(self.page), [])
        self.page.write_text("y" * 121)
        self.assertEqual(len(long_lines(self.page)), 1)


if __name__ == "__main__":
    unittest.main()
