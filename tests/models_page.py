"""Writes the tables of docs/models.md from supported_models.json, or checks that they are there.

python3 tests/models_page.py            rewrites the page
python3 tests/models_page.py --check    changes nothing; exits with 1 if the page differs
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
TABLE = ROOT / "python" / "isobit" / "supported_models.json"

BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def table_of(headers: list[str], rows: list[list[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def tables() -> dict[str, str]:
    rows = json.loads(TABLE.read_text("utf-8"))["families"]
    supported = [
        [row["family"], code(row["architectures"]), row["models"], row["refused"], row["since"]]
        for row in rows
        if row["supported"]
    ]
    refused = [
        [row["family"], code(row["architectures"]), row["why"]] for row in rows if not row["supported"]
    ]
    return {
        "supported": table_of(["family", "`architectures`", "models", "refused", "since"], supported),
        "refused": table_of(["family", "`architectures`", "why"], refused),
    }


def main() -> int:
    text = PAGE.read_text("utf-8")
    made = tables()
    if (found := [name for _, name, _ in BLOCK.findall(text)]) != list(made):
        print(
            f"{PAGE}: expected the tables {', '.join(made)}, found {', '.join(found) or 'none'}",
            file=sys.stderr,
        )
        return 1
    wanted = BLOCK.sub(lambda block: block[1] + made[block[2]] + block[3], text)
    if sys.argv[1:] == ["--check"]:
        if wanted != text:
            print(f"{PAGE} differs from {TABLE}: run python3 {__file__}", file=sys.stderr)
        return int(wanted != text)
    PAGE.write_text(wanted, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
