"""What the tests of wheels share: where things are, and how commands run in an almost empty environment."""

import os
import subprocess
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DIST, BUILD = ROOT / "dist", ROOT / "build"
TOOLS = BUILD / "wheel-tools" / "bin"
STEPS = ROOT / "deploy" / "wheels" / "steps.sh"
SYSTEM_PYTHON = "/usr/bin/python3"  # an ordinary user may run it, and the bare root has the same


def run(*command: str | Path, **options) -> subprocess.CompletedProcess:
    words = [str(word) for word in command]
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8"} | options.pop("env", {})
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith("PIP_") or "proxy" in name.lower()
    }
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        env=kept | environment,
        stdin=subprocess.DEVNULL,
        **options,
    )


def wheel_of(package: str) -> Path:
    found = sorted(DIST.glob(f"{package}-*.whl"))
    if len(found) != 1:
        raise AssertionError(
            f"expected one wheel of {package} in {DIST}, got {found}; `make wheels` builds them"
        )
    return found[0]


class WheelTestCase(unittest.TestCase):
    maxDiff = None

    def check(self, result: subprocess.CompletedProcess) -> str:
        self.assertEqual(
            result.returncode, 0, f"{result.args}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
        )
        return result.stdout
