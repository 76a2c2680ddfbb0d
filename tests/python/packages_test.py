"""Tests of what each Python package contains and imports: users of the client install only the client.

python tests/python/packages_test.py        (in an environment where `isobit_tools[test]` is installed)
"""

import ast
import email
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import unittest
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

import isobit

ROOT = Path(__file__).resolve().parents[2]
CLIENT = ROOT / "python" / "isobit"
TOOLS = ROOT / "python" / "tools" / "isobit_tools"
STUBS = {"_pb2.py", "_pb2.pyi", "_pb2_grpc.py"}
# How the stubs name the version that they are made for, and refuse older ones.
STUBS_ARE_FOR = {
    "protobuf": r"# Protobuf Python Version: ([\d.]+)",
    "grpcio": r"GRPC_GENERATED_VERSION = '([\d.]+)'",
}


def requirements_of(metadata: str) -> list[str]:
    """What a wheel's METADATA requires."""
    return email.message_from_string(metadata).get_all("Requires-Dist")


def imported_packages(source: str) -> set[str]:
    """The top-level packages that a module imports anywhere, also in its functions; not its own by a dot."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def undeclared_imports(package: Path, project: Path, own: str = "") -> list[str]:
    """One line for each import from neither Python, the package `own` nor a dependency of `project`.

    `own` is by default the name of the folder `package`.
    """
    own = own or package.name
    dependencies = tomllib.loads(project.read_text("utf-8"))["project"]["dependencies"]
    declared = {re.split(r"[=<>~! \[]", dependency)[0].lower() for dependency in dependencies}
    distributions = packages_distributions()
    return [
        f"{path.name} imports {name}"
        for path in sorted(package.glob("*.py"))
        for name in sorted(imported_packages(path.read_text("utf-8")) - sys.stdlib_module_names)
        if name != own and not declared & {x.lower() for x in distributions.get(name, ())}
    ]


class WheelTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        scratch = cls.enterClassContext(tempfile.TemporaryDirectory())
        checkout = Path(scratch) / "checkout"
        # Without what earlier builds left, and without writing to the checkout.
        left_out = shutil.ignore_patterns("*_pb2*", "*.egg-info", "__pycache__")
        shutil.copytree(ROOT / "python", checkout / "python", ignore=left_out)
        shutil.copytree(ROOT / "proto", checkout / "proto")
        pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
        result = subprocess.run(
            [*pip, "--no-index", f"--wheel-dir={scratch}", str(checkout / "python")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout
        (wheel,) = Path(scratch).glob("*.whl")
        cls.wheel = cls.enterClassContext(zipfile.ZipFile(wheel))

    def test_the_wheel_holds_every_module_and_nothing_else(self):
        files = {name for name in self.wheel.namelist() if ".dist-info/" not in name}
        protos = {path.stem for path in (ROOT / "proto" / "isobit" / "v1").glob("*.proto")}
        expected = {path.relative_to(CLIENT.parent).as_posix() for path in CLIENT.rglob("*.py")}
        expected = {name for name in expected if "_pb2" not in name} | {"isobit/py.typed"}
        expected |= {path.relative_to(CLIENT.parent).as_posix() for path in CLIENT.rglob("*.json")}
        expected |= {f"isobit/v1/{proto}{stub}" for proto in protos for stub in STUBS}
        self.assertEqual(files, expected)

    def test_it_replaces_nothing_of_its_host(self):
        """Requirements are ranges, and the stubs run with the oldest protobuf and gRPC of them."""
        (metadata,) = (name for name in self.wheel.namelist() if name.endswith(".dist-info/METADATA"))
        required = [
            requirement
            for requirement in map(Requirement, requirements_of(self.wheel.read(metadata).decode()))
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        ]
        self.assertGreater(len(required), 4)
        for requirement in required:
            for specifier in requirement.specifier:
                self.assertIn(specifier.operator, (">=", "<"), requirement)
        stubs = "\n".join(self.wheel.read(name).decode() for name in self.wheel.namelist() if "_pb2" in name)
        for package, pattern in STUBS_ARE_FOR.items():
            made_for = set(re.findall(pattern, stubs))
            self.assertTrue(made_for, package)
            oldest = max(
                Version(s.version)
                for requirement in required
                if requirement.name == package
                for s in requirement.specifier
                if s.operator == ">="
            )
            self.assertEqual({Version(version) for version in made_for}, {oldest}, package)


class ImportsTest(unittest.TestCase):
    def test_every_name_of_the_package_is_there(self):
        for name in isobit.__all__:
            self.assertEqual(getattr(isobit, name).__name__, name)
        self.assertEqual(isobit.errors.IsobitError, isobit.IsobitError)
        with self.assertRaisesRegex(AttributeError, "has no attribute 'RolloutClients'"):
            _ = isobit.RolloutClients

    def test_the_client_imports_what_it_declares_and_no_tools(self):
        project = ROOT / "python" / "pyproject.toml"
        self.assertEqual(
            undeclared_imports(CLIENT, project),
            [
                "binaries.py imports isobit_cuda",
                "recording.py imports pyarrow",
                "trainer_metrics.py imports prometheus_client",
            ],
            "those of extras",
        )
        for package in ("aio", "audit", "cli", "gateway"):
            self.assertEqual(undeclared_imports(CLIENT / package, project, "isobit"), [], package)
        self.assertEqual(
            undeclared_imports(CLIENT / "torch_weights", project, "isobit"),
            [
                f"{name}.py imports torch"
                for name in ("digest", "held", "parameters", "ranks", "senders", "slices", "update")
            ],
        )
        self.assertEqual(
            undeclared_imports(CLIENT / "convert", project, "isobit"),
            [
                "bounded_gguf.py imports gguf",
                "gguf.py imports gguf",
                "gguf.py imports safetensors",
            ],
        )

    def test_the_tools_import_what_they_declare(self):
        # That demo runs in the environment of PyTorch, which tests/torch/requirements.txt pins.
        self.assertEqual(
            undeclared_imports(TOOLS, ROOT / "python" / "tools" / "pyproject.toml"),
            ["train_demo.py imports matplotlib"],
        )

    def test_what_is_not_declared_is_found(self):
        cases = {
            "import isobit_tools.testing": "isobit_tools",
            "from isobit_tools import testing": "isobit_tools",
            "def f():\n    from isobit_tools.testing import BIN_DIR": "isobit_tools",
            "import numpy, gguf": "gguf",
            "import nobody_knows": "nobody_knows",
        }
        with tempfile.TemporaryDirectory() as scratch:
            package = Path(scratch) / "isobit"
            package.mkdir()
            for source, found in cases.items():
                with self.subTest(source):
                    (package / "client.py").write_text(f"import json\nfrom isobit import errors\n{source}\n")
                    breaches = undeclared_imports(package, ROOT / "python" / "pyproject.toml")
                    self.assertEqual(breaches, [f"client.py imports {found}"])


if __name__ == "__main__":
    unittest.main()
