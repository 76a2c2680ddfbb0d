"""Writes the tables of docs/benchmarks/*.md from docs/benchmarks/data/*.json, or checks that they are there.

A page marks the place of a table by two comments. This script makes everything between them:

    <!-- table: FILE.json#ID -->
    <!-- end of table -->

FILE.json holds {"tables": [TABLE, ...]}, each TABLE an object with

    id        its name within the file
    measured  how the figures were measured, strings: "date", "hardware", "what" (shapes, load); if known also
              "command". Commits are not named: the history of the file says what was measured when
    columns   headers, each a string or {"name": ..., "digits": N}: N digits behind the point, for numbers
    rows      lists of as many cells as columns: a string, a number, null (an empty cell), or [number, mark]

    python3 bench/reports/benchmark_pages.py          rewrites the pages
    python3 bench/reports/benchmark_pages.py --check  changes nothing; exits with 1, naming pages that differ
"""

import argparse
import json
import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"

BLOCK = re.compile(
    r"(?P<begin><!-- table: (?P<file>[\w.-]+)#(?P<id>[\w.-]+) -->\n)"
    r"(?P<body>.*?)(?P<end><!-- end of table -->)",
    re.DOTALL,
)
REQUIRED = ("date", "hardware", "what")
OPTIONAL = ("command",)
PROSE_WIDTH = 120


class DataError(Exception):
    """Data or a page is wrong; the message says where."""


def cell_text(cell: object, digits: int | None) -> str:
    """A cell as Markdown: numbers with `digits` digits behind the point (None: as they are), and commas."""
    if cell is None:
        return ""
    if isinstance(cell, list):
        number, mark = cell
        return cell_text(number, digits) + mark
    if isinstance(cell, str):
        return cell
    return f"{cell:,}" if digits is None else f"{cell:,.{digits}f}"


def provenance(measured: dict[str, str]) -> str:
    """The sentences above a table that say how its figures were measured, in lines of prose."""
    text = f"{measured['what']}. {measured['hardware']}; {measured['date']}"
    if "command" in measured:
        text += f"; `{measured['command']}`"
    return textwrap.fill(f"{text}.", width=PROSE_WIDTH, break_long_words=False, break_on_hyphens=False)


def check_table(table: dict, place: str) -> None:
    """Raises DataError if the table lacks a required entry, or a row does not fit its columns."""
    if unknown := set(table) - {"id", "measured", "columns", "rows"}:
        raise DataError(f"{place}: unknown fields {sorted(unknown)}")
    measured = table["measured"]
    if missing := [key for key in REQUIRED if not measured.get(key)]:
        raise DataError(f"{place}: measured lacks {missing}")
    if unknown := set(measured) - {*REQUIRED, *OPTIONAL}:
        raise DataError(f"{place}: measured has unknown fields {sorted(unknown)}")
    for number, row in enumerate(table["rows"]):
        if len(row) != len(table["columns"]):
            raise DataError(f"{place}, row {number}: {len(row)} cells for {len(table['columns'])} columns")


def table_text(table: dict) -> str:
    """The Markdown of a table, its provenance first."""
    columns = [c if isinstance(c, dict) else {"name": c} for c in table["columns"]]
    lines = [
        "| " + " | ".join(c["name"] for c in columns) + " |",
        "|" + " --- |" * len(columns),
    ]
    for row in table["rows"]:
        cells = [cell_text(cell, c.get("digits")) for cell, c in zip(row, columns, strict=True)]
        lines.append("| " + " | ".join(cells) + " |")
    return provenance(table["measured"]) + "\n\n" + "\n".join(lines) + "\n"


def read_tables(data: Path) -> dict[tuple[str, str], dict]:
    """All tables below the folder `data`, by (file name, id)."""
    tables = {}
    for path in sorted(data.glob("*.json")):
        for table in json.loads(path.read_text())["tables"]:
            key = (path.name, table["id"])
            if key in tables:
                raise DataError(f"{path.name}: two tables {table['id']}")
            check_table(table, f"{path.name}#{table['id']}")
            tables[key] = table
    return tables


def render(page: str, tables: dict[tuple[str, str], dict], name: str, used: set[tuple[str, str]]) -> str:
    """The text of a page with its tables made anew; adds to `used` what it shows."""
    if page.count("<!-- table:") != len(BLOCK.findall(page)):
        raise DataError(f"{name}: a table's mark without its end, or misspelt")

    def replaced(match: re.Match) -> str:
        key = (match["file"], match["id"])
        if key not in tables:
            raise DataError(f"{name}: no table {key[0]}#{key[1]}")
        used.add(key)
        return match["begin"] + table_text(tables[key]) + match["end"]

    return BLOCK.sub(replaced, page)


def differing_pages(root: Path) -> dict[Path, str]:
    """The pages of `root` that differ from what the data give, and their correct texts."""
    tables = read_tables(root / "data")
    used: set[tuple[str, str]] = set()
    differing = {}
    for path in sorted(root.glob("*.md")):
        page = path.read_text()
        text = render(page, tables, path.name, used)
        if text != page:
            differing[path] = text
    if unused := sorted(set(tables) - used):
        raise DataError(f"on no page: {', '.join('#'.join(key) for key in unused)}")
    return differing


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page differs")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder of the pages")
    options = parser.parse_args(arguments)
    try:
        differing = differing_pages(options.root)
    except DataError as error:
        print(f"benchmark_pages: {error}", file=sys.stderr)
        return 1
    for path, text in differing.items():
        if options.check:
            print(
                f"benchmark_pages: {path} differs from its data; run {Path(__file__).name}", file=sys.stderr
            )
        else:
            path.write_text(text)
            print(f"wrote {path}")
    return 1 if options.check and differing else 0


if __name__ == "__main__":
    sys.exit(main())
