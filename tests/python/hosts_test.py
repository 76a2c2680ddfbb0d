"""The client installs beside the frameworks that call it, and replaces nothing of theirs.

    .venv/bin/python tests/python/hosts_test.py [HostsTest.test_transformers ...]        (`make test-hosts`)

For each framework pip first resolves it alone, then with the client: every package must keep its version.
transformers, TRL and verl are also installed into a fresh environment, then the client, and both are
imported; PyTorch comes from .venv-torch. It needs the package index, several GB of disk and minutes; without
the index it skips, and says so.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import unittest
import venv
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
TORCH = ROOT / ".venv-torch"
# PyTorch and its CUDA libraries: 5 GB, which environments share.
_OF_TORCH = ("torch", "nvidia-", "cuda-", "triton")


def run(*command: str | Path, **options) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        check=False,
        **options,
    )


def has_index() -> bool:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--retries=1", "--timeout=10"]
    with tempfile.TemporaryDirectory() as folder:
        return run(*pip, "--dest", folder, "jinja2").returncode == 0


@unittest.skipUnless(has_index(), "SKIPPED: NO TESTS RAN, as the package index cannot be reached")
class HostsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        left_out = shutil.ignore_patterns("*_pb2*", "*.egg-info", "__pycache__")
        for part in ("python", "proto"):
            shutil.copytree(ROOT / part, cls.scratch / "source" / part, ignore=left_out)
        pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", f"--wheel-dir={cls.scratch}"]
        built = run(*pip, cls.scratch / "source" / "python")
        assert built.returncode == 0, built.stdout
        (cls.wheel,) = cls.scratch.glob("*.whl")

    def check(self, result: subprocess.CompletedProcess) -> str:
        self.assertEqual(result.returncode, 0, f"{result.args}\n{result.stdout[-3000:]}")
        return result.stdout

    def resolved(self, *requirements: str | Path) -> dict[str, str]:
        """What pip would install into an empty environment: a version for each name."""
        report = Path(self.enterContext(tempfile.TemporaryDirectory())) / "report.json"
        pip = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed"]
        # No wheel exists of what omegaconf needs; without it pip takes an omegaconf of years ago.
        pip += ["--only-binary=:all:", "--no-binary=antlr4-python3-runtime"]
        self.check(run(*pip, "--report", report, *requirements))
        found = (item["metadata"] for item in json.loads(report.read_text())["install"])
        return {item["name"].lower(): item["version"] for item in found}

    def check_resolves(self, *framework: str) -> dict[str, str]:
        """The framework's own packages, which must be the same with the client."""
        alone = self.resolved(*framework)
        together = self.resolved(*framework, self.wheel)
        self.assertEqual({name: together.get(name) for name in alone}, alone)
        print(f"{' '.join(framework)}: {len(alone)} packages stay as they are; the client adds",
              sorted(set(together) - set(alone)))  # fmt: skip
        return alone

    def environment(self) -> Path:
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        venv.create(folder, with_pip=True)
        return folder / "bin" / "python"

    def installed(self, python: Path) -> dict[str, str]:
        program = (
            "import json; from importlib.metadata import distributions\n"
            "print(json.dumps({d.name.lower(): d.version for d in distributions()}))"
        )
        return json.loads(self.check(run(python, "-I", "-c", program)))

    def check_imports(self, packages: dict[str, str], program: str, *, torch: bool = False) -> None:
        """Installs these, then the client, and runs a program that imports both."""
        python = self.environment()
        wanted = [f"{n}=={v}" for n, v in packages.items() if not (torch and n.startswith(_OF_TORCH))]
        pip = [python, "-m", "pip", "install", "-q", "--no-compile"]
        self.check(run(*pip, "--no-deps", *wanted))
        before = self.installed(python)
        self.check(run(*pip, self.wheel))
        after = self.installed(python)
        self.assertEqual({name: after.get(name) for name in before}, before)
        if torch:
            (ours,) = (python.parents[1] / "lib").glob("python*/site-packages")
            (theirs,) = (TORCH / "lib").glob("python*/site-packages")
            (ours / "torch.pth").write_text(f"{theirs}\n")
        print(self.check(run(python, "-c", program)).strip().splitlines()[-1])

    def require_torch(self) -> None:
        if not (TORCH / ".installed").exists():
            self.skipTest("SKIPPED: no .venv-torch, which `make test-torch` makes")

    def test_transformers(self):
        packages = self.check_resolves("transformers==5.24.0")
        self.check_imports(
            packages,
            "import transformers, isobit; from isobit import Tokenizer; print(transformers.__version__)",
        )

    def test_trl(self):
        self.require_torch()
        packages = self.check_resolves("trl==1.16.0", "transformers==5.24.0")
        program = (
            "import trl, transformers, isobit.integrations.trl\n"
            "from trl import GRPOTrainer\n"
            "print(trl.__version__, transformers.__version__)"
        )
        self.check_imports(packages, program, torch=True)

    def test_verl(self):
        self.require_torch()
        # It imports the last two without requiring them.
        packages = self.check_resolves("verl==0.9.1", "cachetools", "fastapi")
        program = (
            "import google.rpc.status_pb2, ray, verl\n"
            "from verl.workers.rollout.replica import get_rollout_replica_class\n"
            "print(verl.__version__, get_rollout_replica_class('isobit'))"
        )
        self.check_imports(packages, program, torch=True)

    def test_vllm(self):
        self.check_resolves("vllm==0.33.0")

    def test_sglang(self):
        self.check_resolves("sglang==0.5.23")

    def check_client(self, *requirements: str) -> None:
        """The client's own tests, with these packages."""
        python = self.environment()
        pip = [python, "-m", "pip", "install", "-q", "--no-compile"]
        self.check(run(*pip, self.wheel, "grpcio-health-checking", *requirements))
        print({name: self.installed(python)[name] for name in ("protobuf", "grpcio", "numpy", "tokenizers")})
        for test in (
            "client_test",
            "asyncio_test",
            "connection_test",
            "tokenizer_test",
            "chat_template_test",
        ):
            self.check(run(python, ROOT / "tests" / "python" / f"{test}.py"))

    def test_the_oldest_of_its_ranges(self):
        project = tomllib.loads((ROOT / "python" / "pyproject.toml").read_text("utf-8"))["project"]
        oldest = {}
        for requirement in map(Requirement, project["dependencies"]):
            if requirement.marker is None or requirement.marker.evaluate():
                (least,) = (s.version for s in requirement.specifier if s.operator == ">=")
                oldest[requirement.name] = f"{requirement.name}=={least}"
        self.check_client(*oldest.values())

    def test_the_newest_of_its_ranges(self):
        self.check_client()


if __name__ == "__main__":
    unittest.main(verbosity=2)
