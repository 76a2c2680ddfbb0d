"""What the tests of docs/quickstart.md share: they run the page's commands and code with only the ports
replaced. The model's id stays: it is found in a hub's cache that is made of models/."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "quickstart.md"
HERE = Path(__file__).parent
WEIGHTS = ROOT / "models" / "smollm2-135m-instruct"
# Long enough for a loaded machine: nothing waits for it to pass.
TIMEOUT_S = 1700


def section(heading: str) -> str:
    """The text below `## heading`."""
    (text,) = re.findall(
        rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    return text


def blocks(text: str, language: str) -> list[str]:
    """Its code blocks of a language; "" for those without one."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for name, block in found if name == language]


def pattern(shown: str) -> str:
    """What matches a block of output. Ports may be others, and numbers of tokens with at least two digits."""
    text = re.sub(r"127\\.0\\.0\\.1:\d+", r"127\\.0\\.0\\.1:(\\d+)", re.escape(shown))
    return re.sub(r"over\\ \d+\\ tokens", r"over\\ \\d{2,}\\ tokens", text)


class QuickstartTest(unittest.TestCase):
    """Serves the model as the page says; `run_code` runs code of the page beside it."""

    @classmethod
    def setUpClass(cls):
        if not (WEIGHTS / "config.json").exists():
            raise FileNotFoundError(f"{WEIGHTS} is not there: `make model` makes it")
        cls.scratch = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        (serve,) = [b for b in blocks(section("Install and serve"), "sh") if b.startswith("isobit serve ")]
        cls.serve = shlex.split(serve, comments=True)
        snapshot = cls.scratch / "hub" / f"models--{cls.serve[2].replace('/', '--')}" / "snapshots" / "c0ffee"
        shutil.copytree(WEIGHTS, snapshot)
        (refs := snapshot.parents[1] / "refs").mkdir()
        (refs / "main").write_text("c0ffee")
        cls.environment = {
            **os.environ,
            "HF_HUB_CACHE": str(cls.scratch / "hub"),
            "HF_HUB_OFFLINE": "1",
            "TRL_EXPERIMENTAL_SILENCE": "1",
        }
        cls.port = cls.start_serving()

    @classmethod
    def start_serving(cls) -> str:
        """Runs the page's `isobit serve` in the client's environment; the port of gRPC."""
        program, *words = cls.serve
        assert program == "isobit", cls.serve
        process = subprocess.Popen(
            [ROOT / ".venv/bin/python", "-m", "isobit", *words, "--port=0", "--grpc_port=0"],
            env={**cls.environment, "PYTHONPATH": str(ROOT / "python")},
            stdout=subprocess.PIPE,
            text=True,
        )
        cls.addClassCleanup(process.communicate)
        cls.addClassCleanup(process.terminate)
        (shown,) = blocks(section("Install and serve"), "")
        said = "".join(process.stdout.readline() for _ in shown.splitlines())
        if (found := re.fullmatch(pattern(shown), said)) is None:
            raise AssertionError(f"isobit serve printed {said!r}, but the page says {shown!r}")
        return found[2]

    def code(self, heading: str, **changes: str) -> str:
        """The page's code, with the port; `changes` are for controls, old and new text of each."""
        (code,) = blocks(section(heading), "python")
        for old, new in [("127.0.0.1:7001", f"127.0.0.1:{self.port}"), *changes.values()]:
            self.assertEqual(code.count(old), 1, old)
            code = code.replace(old, new)
        return code

    def run_code(self, code: str, **environment: str) -> str:
        """What the code prints."""
        run = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.scratch,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        self.assertEqual(run.returncode, 0, f"{run.stdout}\n{run.stderr}")
        return run.stdout

    def check_output(self, heading: str, printed: str) -> None:
        """The printed text ends as the page says."""
        (shown,) = blocks(section(heading), "")
        self.assertRegex(printed, pattern(shown) + r"\Z")
        print(f"{heading}: {printed[-len(shown) :]}")

    def gaps(self, printed: str) -> list[float]:
        return [float(gap) for gap in re.findall(r"^step \d: gap ([\d.e-]+)", printed, re.MULTILINE)]

    def check_version(self, requirement: str, file: str) -> None:
        """The page installs what the tests have."""
        self.assertIn(requirement, (HERE / file).read_text().splitlines())
        self.assertIn(requirement, shlex.split(blocks(section("Install and serve"), "sh")[0], comments=True))
