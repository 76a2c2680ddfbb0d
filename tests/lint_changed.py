"""Runs clang-tidy over the C++ files of a change, or of the whole repository, for at most some minutes.

    python tests/lint_changed.py build/release [--minutes 10] [--base REVISION]

On a branch it checks the files that differ from the merge base with origin/main (main, where there is no
origin), uncommitted changes included. A changed header is checked through a file that includes it. Where
HEAD is that base already, as in a clone of main, it checks all files, the last changed first: every clone
then checks the same ones, however the commits were merged.

What clang-tidy found clean is remembered below $XDG_CACHE_HOME/isobit/lint. The key is a hash of all that
decides: the file, each file of the repository and of the build that it includes, its compile command,
.clang-tidy, and the versions of clang-tidy and of the installed libraries. So a second run takes seconds,
and a run that ended early is continued by the next. Files for which no time was left are named.

The build directory says how each file is compiled; files that it does not compile (CUDA) are left out, and
so are the generated ones in it.
Exits with 1 if clang-tidy finds anything.
"""

import argparse
import concurrent.futures
import functools
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "isobit" / "lint"
KEPT_DAYS = 30
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


def output_of(*command: str) -> str:
    """What a command prints; nothing if it fails or does not exist."""
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return result.stdout


def base_of_head() -> str:
    """The commit from which HEAD's branch left main; empty if HEAD is on main."""
    head = output_of("git", "rev-parse", "HEAD").strip()
    for main in ("origin/main", "main"):
        if base := output_of("git", "merge-base", main, "HEAD").strip():
            return "" if base == head else base
    return ""


class Sources:
    """The files that a build directory compiles, and what decides whether clang-tidy likes them."""

    def __init__(self, build: Path):
        self.commands = {}  # by name from the root
        for entry in json.loads((build / "compile_commands.json").read_text()):
            path = (Path(entry["directory"]) / entry["file"]).resolve()
            if path.is_relative_to(build):  # generated
                continue
            self.commands[os.path.relpath(path, ROOT)] = shlex.split(entry["command"])
        tidy = output_of("clang-tidy", "--version")
        libraries = output_of("dpkg-query", "--show", "*-dev")
        self._common = f"{tidy}{libraries}{(ROOT / '.clang-tidy').read_text()}".encode()

    def includers(self, header: str) -> list[str]:
        """One compiled file that includes the header, the one of the same stem if there is such a file."""
        same = header.removesuffix(".h") + ".cc"
        if same in self.commands:
            return [same]
        return [name for name in sorted(self.commands) if ROOT / header in self._reached(name)][:1]

    def key(self, name: str) -> str:
        """A hash of all that decides the result for one file."""
        command = [part.replace(str(ROOT), "") for part in self.commands[name]]
        digest = hashlib.sha256(self._common + json.dumps(command).encode())
        for path in sorted(self._reached(name)):
            digest.update(_text_hash(path))
        return digest.hexdigest()

    @functools.cache  # noqa: B019 (lives as long as the program)
    def _reached(self, name: str) -> frozenset[Path]:
        """The file itself and those of the repository and of the build that it includes, directly or not."""
        given = re.findall(r"(?:-I|-isystem )(\S+)", " ".join(self.commands[name]))
        folders = tuple(Path(folder) for folder in given if folder.startswith(str(ROOT)))
        reached, waiting = set(), [ROOT / name]
        while waiting:
            path = waiting.pop()
            if path not in reached:
                reached.add(path)
                waiting += _included(path, folders)
        return frozenset(reached)


@functools.cache
def _included(path: Path, folders: tuple[Path, ...]) -> list[Path]:
    names = INCLUDE.findall(path.read_text("utf-8"))
    found = (next((folder / name for folder in folders if (folder / name).is_file()), None) for name in names)
    return [path for path in found if path]


@functools.cache
def _text_hash(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def files_of_diff(sources: Sources, base: str) -> list[str]:
    """The compiled files through which all C++ files that differ from `base` are checked."""
    names = output_of("git", "diff", "--name-only", "--diff-filter=d", base, "--", "*.cc", "*.h").split()
    found = [sources.includers(name) if name.endswith(".h") else [name] for name in names]
    return list(dict.fromkeys(name for some in found for name in some if name in sources.commands))


def files_by_change(sources: Sources) -> list[str]:
    """All compiled files, the last changed first."""
    names = output_of("git", "log", "--name-only", "--format=", "--", "*.cc").split()
    return [name for name in dict.fromkeys([*names, *sorted(sources.commands)]) if name in sources.commands]


def drop_old_results() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    for path in CACHE.iterdir():
        if path.stat().st_mtime < time.time() - KEPT_DAYS * 86400:
            path.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("build", type=Path, help="build directory with compile_commands.json")
    parser.add_argument("--minutes", type=float, default=10, help="start no file after so long")
    parser.add_argument("--base", help="check what differs from this revision")
    options = parser.parse_args()
    if shutil.which("clang-tidy") is None:
        sys.exit("lint: expected clang-tidy; `make deps` installs it")
    end = time.monotonic() + 60 * options.minutes
    sources = Sources(options.build.resolve())
    base = options.base or base_of_head()
    names = files_of_diff(sources, base) if base else files_by_change(sources)
    chosen = f"differ from {base[:12]}" if base else "in all, the last changed first"
    print(f"lint: {len(names)} files {chosen}")
    drop_old_results()

    def lint(name: str) -> tuple[str, str, str]:
        """The name, what became of it, and what clang-tidy printed."""
        result = CACHE / sources.key(name)
        if result.exists():
            result.touch()
            return name, "known", ""
        if time.monotonic() > end:
            return name, "left", ""
        command = ["clang-tidy", "--quiet", "-p", str(options.build.resolve()), name]
        tidy = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if tidy.returncode == 0:
            result.touch()
        return name, "bad" if tidy.returncode else "clean", f"{tidy.stdout}{tidy.stderr}"

    outcomes = {"known": [], "clean": [], "bad": [], "left": []}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, outcome, text in pool.map(lint, names):
            outcomes[outcome].append(name)
            if outcome == "bad":
                print(f"{name}:\n{text}", flush=True)
    if left := outcomes["left"]:
        print(f"lint: after {options.minutes:g} minutes {len(left)} files are NOT CHECKED: {' '.join(left)}")
    counts = {outcome: len(some) for outcome, some in outcomes.items()}
    text = "lint: {known} known to be clean, {clean} found clean, {bad} not clean, {left} not checked"
    print(text.format(**counts))
    return int(counts["bad"] > 0)


if __name__ == "__main__":
    sys.exit(main())
