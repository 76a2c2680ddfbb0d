"""Command lines of the Python programs: argparse, with --version, and with a hint if a flag does not
exist."""

import argparse
import difflib
import sys
from collections.abc import Sequence
from importlib.metadata import version

# Names of other systems for our flags.
OTHER_NAMES = {
    "max_completion_length": "max_tokens",
    "max_new_tokens": "max_tokens",
    "model_name_or_path": "model",
    "model_path": "model",
    "num_generations": "samples",
    "learning_rate": "lr",
    "tensor_parallel_size": "tp_size",
    "tp": "tp_size",
}


class _Version(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        print(f"{parser.prog} {version('isobit')}")
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An argument parser. Flags are --with_underscores, as those of the services."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")

    def parse_args(self, args: Sequence[str] | None = None, namespace=None):
        """Like argparse's, but a flag that does not exist is reported before any other error."""
        words = list(sys.argv[1:] if args is None else args)
        for word in words[: words.index("--")] if "--" in words else words:
            self._check(word)
        return super().parse_args(words, namespace)

    def _check(self, word: str) -> None:
        if not word.startswith("--"):
            return
        flag = word.partition("=")[0]
        known = [name for name in self._option_string_actions if name.startswith("--")]
        if any(name.startswith(flag) for name in known):  # argparse takes abbreviations
            return
        plain = flag[2:].replace("-", "_").lower()
        meant = f"--{OTHER_NAMES.get(plain, plain)}"
        near = [meant] if meant in known else difflib.get_close_matches(meant, known, 1, 0.75)
        self.error(f"unknown flag {flag}" + "".join(f"; did you mean {name}?" for name in near))
