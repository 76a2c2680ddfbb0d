"""Checks that the tables of docs/benchmarks equal their data, and that a hand-edited table is noticed."""

import contextlib
import io
import json
import re
import shutil
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench" / "reports"))
import benchmark_pages


class BenchmarkPagesTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name) / "benchmarks"
        shutil.copytree(benchmark_pages.ROOT, self.root)

    def check(self, *arguments: str) -> tuple[int, str]:
        """The exit status and the messages of a run over the copy."""
        messages = io.StringIO()
        with contextlib.redirect_stderr(messages), contextlib.redirect_stdout(messages):
            status = benchmark_pages.main(["--root", str(self.root), *arguments])
        return status, messages.getvalue()

    def change_data(self, change: object) -> None:
        """Lets `change` edit the first table of the headline data."""
        path = self.root / "data" / "headline.json"
        data = json.loads(path.read_text())
        change(data["tables"][0])
        path.write_text(json.dumps(data))

    def test_pages_are_what_their_data_make_of_them(self) -> None:
        self.assertEqual(benchmark_pages.main(["--check"]), 0)

    def test_every_page_fails_when_a_cell_is_edited_by_hand(self) -> None:
        pages = sorted(self.root.glob("*.md"))
        self.assertGreaterEqual(len(pages), 7)
        for path in pages:
            with self.subTest(path.name):
                page = path.read_text()
                block = benchmark_pages.BLOCK.search(page)
                self.assertIsNotNone(block, f"{path.name} has no table")
                row = block.end("body") - 3  # the last character of the last cell
                path.write_text(page[:row] + "7" + page[row:])
                status, messages = self.check("--check")
                self.assertEqual(status, 1)
                self.assertIn(path.name, messages)
                self.assertEqual(self.check()[0], 0)
                self.assertEqual(path.read_text(), page, "rewriting restores the page")

    def test_every_page_begins_with_few_headline_figures_and_how_to_repeat_them(self) -> None:
        tables = benchmark_pages.read_tables(self.root / "data")
        for path in sorted(self.root.glob("*.md")):
            with self.subTest(path.name):
                page = path.read_text()
                block = benchmark_pages.BLOCK.search(page)
                headlines = tables[block["file"], block["id"]]
                self.assertLessEqual(len(headlines["rows"]), 10)
                self.assertLessEqual(len(headlines["columns"]), 4)
                self.assertEqual(re.findall(r"^## (.*)$", page, re.MULTILINE)[0], "Run it again")
                self.assertLess(block.end(), page.index("\n## "))

    def test_a_figure_changed_in_the_data_alone_is_seen(self) -> None:
        self.change_data(lambda table: table["rows"][0].__setitem__(0, "another"))
        self.assertEqual(self.check("--check")[0], 1)

    def test_data_that_cannot_be_shown_are_errors(self) -> None:
        cases = {
            "lacks ['date']": lambda table: table["measured"].pop("date"),
            "cells for": lambda table: table["rows"][0].pop(),
            "no table headline.json#": lambda table: table.update(id="renamed"),
            "unknown fields ['note']": lambda table: table.update(note="a word"),
        }
        original = (self.root / "data" / "headline.json").read_text()
        for message, change in cases.items():
            with self.subTest(message):
                self.change_data(change)
                status, messages = self.check("--check")
                self.assertEqual(status, 1)
                self.assertIn(message, messages)
                (self.root / "data" / "headline.json").write_text(original)

    def test_a_table_that_no_page_shows_is_an_error(self) -> None:
        page = self.root / "README.md"
        block = benchmark_pages.BLOCK.search(page.read_text())
        page.write_text(page.read_text().replace(block[0], ""))
        status, messages = self.check("--check")
        self.assertEqual(status, 1)
        self.assertIn("on no page", messages)

    def test_a_mark_without_its_end_is_an_error(self) -> None:
        page = self.root / "README.md"
        page.write_text(page.read_text() + "\n<!-- table: headline.json#lost -->\n")
        status, messages = self.check("--check")
        self.assertEqual(status, 1)
        self.assertIn("without its end", messages)

    def test_cells(self) -> None:
        self.assertEqual(benchmark_pages.cell_text(1234.5, 2), "1,234.50")
        self.assertEqual(benchmark_pages.cell_text(1234, None), "1,234")
        self.assertEqual(benchmark_pages.cell_text([0.97, "!"], 2), "0.97!")
        self.assertEqual(benchmark_pages.cell_text(None, 2), "")
        self.assertEqual(benchmark_pages.cell_text("30 / 40", 2), "30 / 40")


if __name__ == "__main__":
    unittest.main()
