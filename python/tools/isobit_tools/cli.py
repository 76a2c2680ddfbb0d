"""The command isobit: what an operator runs from a checkout.

isobit localise --comparator HOST:PORT --tokens 1,2,3
isobit audit run.jsonl --model models/my-model
isobit demo
"""

import difflib
import importlib
import sys
from importlib.metadata import version

_MODULES = {"localise": "isobit.localise", "audit": "isobit.audit.run", "demo": "isobit.demo"}
_COMMANDS = {
    "localise": "where a rollout and a scorer first compute different bits",
    "audit": "compute again what a rollout sampled, and compare bit by bit",
    "demo": "all three services on a small model, compared",
}


def main() -> int:
    arguments = sys.argv[1:]
    if arguments and arguments[0] in _COMMANDS:
        # The commands read sys.argv, and name themselves by it in --help.
        sys.argv = [f"isobit {arguments[0]}", *arguments[1:]]
        return importlib.import_module(_MODULES[arguments[0]]).main()
    width = max(map(len, _COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {what}" for name, what in _COMMANDS.items())
    text = f"usage: isobit COMMAND ...\n\n{commands}\n\n`isobit COMMAND --help` says more."
    if arguments in (["--help"], ["-h"]):
        print(text)
        return 0
    if arguments == ["--version"]:
        print(f"isobit {version('isobit')}")
        return 0
    if arguments and (near := difflib.get_close_matches(arguments[0].lstrip("-"), _COMMANDS, 1)):
        text = f"isobit: unknown command {arguments[0]}; did you mean {near[0]}?\n{text}"
    print(text, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
