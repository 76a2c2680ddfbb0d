"""Runs clang-tidy over the C++ files that the last commits changed, those of the newest commit first.

    python tests/lint_changed.py build/release [--commits 20] [--files 16]

The build directory says how each file is compiled; files that it does not compile (CUDA) are left out. Files
beyond the limit are only named. Exits with 1 if clang-tidy finds anything.
"""

import argparse
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def changed_files(commits: int) -> list[str]:
    """C++ files that the last commits changed and that are still there, the last changed first."""
    log = ["git", "log", "--name-only", "--format=", f"--max-count={commits}", "--", "*.cc"]
    names = subprocess.run(log, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()
    return [name for name in dict.fromkeys(names) if (ROOT / name).exists()]


def compiled_files(build: Path) -> set[str]:
    commands = json.loads((build / "compile_commands.json").read_text())
    files = (Path(command["directory"]) / command["file"] for command in commands)
    return {os.path.relpath(file.resolve(), ROOT) for file in files}


def lint(build: Path, name: str) -> tuple[str, subprocess.CompletedProcess]:
    command = ["clang-tidy", "--quiet", "-p", str(build), name]
    return name, subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("build", type=Path, help="build directory with compile_commands.json")
    parser.add_argument("--commits", type=int, default=20, help="how many commits to look back")
    parser.add_argument("--files", type=int, default=16, help="most files to check")
    options = parser.parse_args()
    if shutil.which("clang-tidy") is None:
        sys.exit("lint: expected clang-tidy; `make deps` installs it")
    build = options.build.resolve()
    compiled = compiled_files(build)
    changed = [name for name in changed_files(options.commits) if name in compiled]
    checked, left = changed[: options.files], changed[options.files :]
    print(f"clang-tidy over {len(checked)} files that the last {options.commits} commits changed")
    if left:
        print(f"left out, {len(left)} changed longer ago (`make lint` checks all): {' '.join(left)}")
    bad = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, result in pool.map(lambda name: lint(build, name), checked):
            if result.returncode != 0:
                bad += 1
                print(f"{name}:\n{result.stdout}{result.stderr}")
    print(f"{len(checked) - bad} files clean, {bad} not")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
