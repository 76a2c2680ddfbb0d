"""Writes the synchronous clients from those of isobit.aio, so that each call is described once.

    python -m isobit_tools.sync_clients   # `make format` runs it, and formats the result

The two differ in a few words, by RULES. What differs in more is in modules that both have under one name:
isobit.channel and isobit.aio.channel, isobit.batches and isobit.aio.batches.
"""

import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "isobit"
NAMES = ("client.py", "comparator_client.py", "weight_transfer.py")
RULES = (
    (r"\bisobit\.aio\b", "isobit"),
    (r"\baio\.", ""),
    (r"\basync (?=def|for|with)", ""),
    (r"\bawait ", ""),
    (r"\bAsyncGenerator\[(.+), None\]", r"Iterator[\1]"),
    (r"\bAsyncGenerator\b", "Iterator"),
    (r"\bCoroutine\[Any, Any, (.+)\]: \.\.\.", r"\1: ..."),
    (r"\bIterable\[(\w+)\] \| AsyncIterable\[\1\]", r"Iterable[\1]"),
    (r"\bamap\(", "map("),
    (r"\bin_threads\((\w+)\)", r"\1"),
    # Docstrings.
    (r"\basyncio (?=client)", "synchronous "),
    (r"\basynchronous ", ""),
    (r", to be awaited\b", ""),
    (r'\n\n *Asyncio: [^\n]+(\n *(?="""))?', ""),  # a paragraph of one line, for asyncio alone
)


def synchronous(text: str, name: str) -> str:
    """Returns the synchronous module for the text of isobit/aio/`name`. Its imports are not sorted, and some
    are not needed."""
    for pattern, replacement in RULES:
        text = re.sub(pattern, replacement, text)
    return (
        f"# Made from aio/{name} by isobit_tools.sync_clients: change that, then run `make format`.\n{text}"
    )


def main() -> None:
    for name in NAMES:
        (PACKAGE / name).write_text(synchronous((PACKAGE / "aio" / name).read_text("utf-8"), name), "utf-8")


if __name__ == "__main__":
    main()
