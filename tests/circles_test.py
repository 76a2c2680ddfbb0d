"""Checks that no file needs itself: the includes of the C++ and CUDA sources, and the imports of the Python
modules, have no circle.

An import counts wherever it stands, in a function or only for types, too. An import of a module is not one of
the package that it is in.
"""

import ast
import re
import tempfile
import unittest
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE_FOLDERS = ("bench", "common", "kernels", "rollout", "trainer_bridge", "tools", "tests")
SOURCE_SUFFIXES = {".h", ".cc", ".cu", ".cuh", ".inc"}
PYTHON_FOLDERS = ("python", "python/tools", "python/examples/on_policy")  # where modules are found
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)

Graph = dict[str, set[str]]


def includes(root: Path) -> Graph:
    """The files that each source includes, by their paths from the root."""
    files = {
        path.relative_to(root).as_posix(): path
        for folder in SOURCE_FOLDERS
        for path in (root / folder).rglob("*")
        if path.suffix in SOURCE_SUFFIXES
    }
    return {name: files.keys() & INCLUDE.findall(path.read_text("utf-8")) for name, path in files.items()}


def module_names(folder: Path) -> dict[str, Path]:
    """The modules below a folder of the search path."""
    found = {}
    for path in folder.rglob("*.py"):
        parts = path.relative_to(folder).with_suffix("").parts
        if "build" not in parts:
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(root: Path) -> Graph:
    """The modules of the root's packages that each of them imports."""
    modules = {}
    for folder in PYTHON_FOLDERS:
        modules.update(module_names(root / folder))
    graph: Graph = {name: set() for name in modules}
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Import):
                graph[name] |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = package.split(".")[: package.count(".") + 2 - node.level] if node.level else []
                base = ".".join([*base, *([node.module] if node.module else [])])
                for alias in node.names:
                    whole = f"{base}.{alias.name}"
                    graph[name].add(whole if whole in modules else base)
        graph[name] &= modules.keys()
        graph[name].discard(name)
    return graph


def circle(graph: Graph) -> list[str]:
    """A circle of the graph, from one node back to it; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


class RepositoryTest(unittest.TestCase):
    def test_includes_have_no_circle(self):
        graph = includes(ROOT)
        self.assertGreater(sum(map(len, graph.values())), 2000)
        self.assertEqual(circle(graph), [])

    def test_imports_have_no_circle(self):
        graph = imports(ROOT)
        self.assertGreater(sum(map(len, graph.values())), 300)
        self.assertEqual(circle(graph), [])


class ControlTest(unittest.TestCase):
    """Circles are found, however they are written."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = Path(scratch.name)

    def write(self, files: dict[str, str]) -> None:
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def test_circles_of_includes_are_found(self):
        self.write({
            "kernels/a.h": '#include "common/b.h"\n#include <vector>\n',
            "common/b.h": '// #include "kernels/a.h"\n',
            "kernels/a.cc": '#include "kernels/a.h"\n',
        })  # fmt: skip
        self.assertEqual(circle(includes(self.root)), [])
        self.write(
            {"common/b.h": '#  include "rollout/c.inc"\n', "rollout/c.inc": '#include "kernels/a.h"\n'}
        )
        found = circle(includes(self.root))
        self.assertEqual((len(found), set(found)), (4, {"kernels/a.h", "common/b.h", "rollout/c.inc"}))

    def test_circles_of_imports_are_found(self):
        self.write({
            "python/p/__init__.py": "from p import a\n",
            "python/p/a.py": "import os\nfrom p.q import b\n",
            "python/p/q/__init__.py": "",
            "python/p/q/b.py": "from p.q.c import X\n",
            "python/p/q/c.py": "X = 1\n",
            "python/tools/t/d.py": "import p\n",
        })  # fmt: skip
        self.assertEqual(circle(imports(self.root)), [])
        self.assertEqual(imports(self.root)["t.d"], {"p"})
        for closing in (
            "import p.a",
            "import p.a as short",
            "from p import a",
            "from p.a import Y",
            "from ..a import Y",
            "from .. import a",
            "def f():\n    from p import a",
            "if TYPE_CHECKING:\n    from p.a import Y",
        ):
            with self.subTest(closing=closing):
                self.write({"python/p/q/c.py": f"{closing}\n"})
                found = circle(imports(self.root))
                self.assertEqual((len(found), set(found)), (4, {"p.a", "p.q.b", "p.q.c"}))
        self.write({"python/p/q/c.py": "import t.d\n"})
        self.assertEqual(set(circle(imports(self.root))), {"p", "p.a", "p.q.b", "p.q.c", "t.d"})


if __name__ == "__main__":
    unittest.main()
