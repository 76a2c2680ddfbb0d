"""`isobit version`."""

import json
import platform
import subprocess

import typer

from isobit.cli.command import Command

_BINARIES = ("isobit-rollout", "isobit-scorer", "isobit-comparator", "isobit-model", "isobit-bench")


def version_text() -> str:
    """The version of the package."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("isobit")
    except PackageNotFoundError:
        return "(a checkout that is not installed)"


def version(as_json: bool = typer.Option(False, "--json", help="Print the result as JSON.")) -> None:
    """Show the versions of the package and of the services, and where the services are."""
    found = {
        "isobit": version_text(),
        "python": platform.python_version(),
        "binaries": {name: _binary(name) for name in _BINARIES},
    }
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(f"isobit {found['isobit']}, Python {found['python']}")
    for name, binary in found["binaries"].items():
        print(f"  {name:<18} {binary['version'] or '-':<8} {binary['path'] or 'not found'}")


def _binary(name: str) -> dict[str, str | None]:
    from isobit import binaries

    try:
        path = binaries.path(name)
    except binaries.BinaryNotFoundError:
        return {"version": None, "path": None}
    said = subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    words = said.stdout.split()
    return {"version": words[1] if len(words) > 1 else None, "path": str(path)}


def register(app: typer.Typer) -> None:
    app.command("version", cls=Command)(version)
