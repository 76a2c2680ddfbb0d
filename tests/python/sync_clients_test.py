"""The synchronous clients are what isobit_tools.sync_clients makes from the asyncio ones, apart from layout
and the order of imports. They have the same methods."""

import ast
import inspect
import io
import tokenize
import unittest

import isobit
from isobit import aio
from isobit_tools import sync_clients


def comments(text: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def meaning(text: str) -> tuple[str, set[str], list[str]]:
    """What a formatter does not change: statements, names that are imported and used, comments."""
    tree = ast.parse(text)
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    imported = {f"{of.module}.{name.name}" for of in imports for name in of.names if name.name in names}
    tree.body = [node for node in tree.body if node not in imports]
    return ast.dump(tree), imported, comments(text)


class SyncClientsTest(unittest.TestCase):
    def texts(self, name: str) -> tuple[str, str]:
        package = sync_clients.PACKAGE
        return (package / "aio" / name).read_text("utf-8"), (package / name).read_text("utf-8")

    def test_the_synchronous_clients_are_made_from_the_asyncio_ones(self):
        for name in sync_clients.NAMES:
            with self.subTest(name=name):
                asynchronous, committed = self.texts(name)
                self.assertEqual(meaning(sync_clients.synchronous(asynchronous, name)), meaning(committed))
                self.assertNotRegex(committed, "(?i)async|await")

    def test_control_each_kind_of_change_is_found(self):
        asynchronous, committed = self.texts("client.py")
        for before, after in (
            ('"Generate"', '"Score"'),  # a statement
            ("Ends a pause.", "Ends the pause."),  # a docstring
            ("import Chunk, Sample", "import Sample"),  # an import
            ("# fmt: skip", "# Skip"),  # a comment
        ):
            with self.subTest(change=after):
                changed = asynchronous.replace(before, after, 1)
                self.assertNotEqual(changed, asynchronous)
                made = sync_clients.synchronous(changed, "client.py")
                self.assertNotEqual(meaning(made), meaning(committed))

    def test_both_have_the_same_methods_and_arguments(self):
        for name in ("ComparatorClient", "RolloutClient", "ScorerClient"):
            ours, theirs = (
                {
                    method: list(inspect.signature(value).parameters)
                    for method, value in inspect.getmembers(getattr(package, name), inspect.isfunction)
                    if not method.startswith("_")
                }
                for package in (isobit, aio)
            )
            self.assertGreater(len(ours), 5)
            self.assertEqual(ours, theirs, name)


if __name__ == "__main__":
    unittest.main()
