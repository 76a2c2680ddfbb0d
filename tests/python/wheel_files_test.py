"""Wheels with binaries: where python/platform_wheel.py puts what deploy/wheels/steps.sh hands it, and what
isobit_cuda says of missing libraries. The binaries are stand-ins; `make check-wheels` has the real ones.

python tests/python/wheel_files_test.py        (in an environment where `isobit_tools[test]` is installed)
"""

import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import tomllib
import unittest
import unittest.mock
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "python"
PACKAGES = {"isobit": PYTHON, "isobit_cuda": PYTHON / "cuda", "isobit_torch": PYTHON / "operators"}


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))["project"]


class WheelFilesTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        cls.checkout = cls.scratch / "checkout"
        left_out = shutil.ignore_patterns("*_pb2*", "*.egg-info", "__pycache__")
        for part in ("python", "proto"):
            shutil.copytree(ROOT / part, cls.checkout / part, ignore=left_out)
        shutil.copy(ROOT / "LICENSE", cls.checkout)

    def files(self) -> Path:
        """As steps.sh leaves them, of a package that has one program."""
        folder = Path(tempfile.mkdtemp(dir=self.scratch))
        for name, text in (
            ("files/bin/isobit-rollout", "a program"),
            ("licenses/bundled/grpc.txt", "a licence"),
            ("sboms/isobit.cdx.json", "{}"),
        ):
            (folder / name).parent.mkdir(parents=True)
            (folder / name).write_text(text)
        (folder / "files" / "bin" / "isobit-rollout").chmod(0o755)
        return folder

    def build(self, package: str, files: Path | None) -> subprocess.CompletedProcess:
        source = self.checkout / PACKAGES[package].relative_to(ROOT)
        environment = {name: value for name, value in os.environ.items() if name != "ISOBIT_WHEEL_FILES"}
        pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
        return subprocess.run(
            [*pip, f"--wheel-dir={self.scratch / package}", str(source)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            env=environment | ({"ISOBIT_WHEEL_FILES": str(files)} if files else {}),
        )

    def test_binaries_licences_and_parts_are_where_they_belong(self):
        for package in PACKAGES:
            with self.subTest(package):
                built = self.build(package, self.files())
                self.assertEqual(built.returncode, 0, built.stdout)
                (wheel,) = (self.scratch / package).glob("*.whl")
                version = project(PACKAGES[package])["version"]
                self.assertEqual(wheel.name, f"{package}-{version}-py3-none-linux_x86_64.whl")
                with zipfile.ZipFile(wheel) as archive:
                    about = f"{package}-{version}.dist-info"
                    self.assertIn("Root-Is-Purelib: false", archive.read(f"{about}/WHEEL").decode())
                    for name in ("licenses/LICENSE", "licenses/bundled/grpc.txt", "sboms/isobit.cdx.json"):
                        self.assertIn(f"{about}/{name}", archive.namelist())
                    program = archive.getinfo(f"{package}/bin/isobit-rollout")
                    self.assertTrue(program.external_attr >> 16 & stat.S_IXOTH, "it must be executable")

    def test_a_package_of_binaries_is_not_built_without(self):
        for package in ("isobit_cuda", "isobit_torch"):
            built = self.build(package, None)
            self.assertNotEqual(built.returncode, 0)
            self.assertIn(
                "holds binaries, which `make wheels` builds; ISOBIT_WHEEL_FILES is not set", built.stdout
            )

    def test_a_wrong_folder_is_named(self):
        built = self.build("isobit", self.scratch / "nowhere")
        self.assertNotEqual(built.returncode, 0)
        self.assertIn(f"expected a folder {self.scratch / 'nowhere' / 'files'}", built.stdout)

    def test_versions_agree(self):
        """CMake's version is that of each package, and the extras take that minor release alone."""
        version = re.search(r"project\(isobit VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())[1]
        for folder in PACKAGES.values():
            self.assertEqual(project(folder)["version"], version, folder)
        major, minor, _ = version.split(".")
        extras = project(PYTHON)["optional-dependencies"]
        for extra in ("cuda", "torch"):
            self.assertIn(f"isobit-{extra}>={version},<{major}.{int(minor) + 1}", extras[extra])


class CheckTest(unittest.TestCase):
    """isobit_cuda.check, with programs that a compiler makes here."""

    @classmethod
    def setUpClass(cls):
        sys.path.insert(0, str(PYTHON / "cuda"))
        cls.addClassCleanup(sys.path.remove, str(PYTHON / "cuda"))
        import isobit_cuda

        cls.module = isobit_cuda

    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.libraries = {
            name: self.folder / place
            for name, place in (("libfirst-stand-in.so.2", "nccl"), ("libsecond-stand-in.so.13", "cu13"))
        }
        for name, folder in self.libraries.items():
            folder.mkdir()
            self.compile("-shared", "-fPIC", "-o", folder / name, f"-Wl,-soname,{name}")
        run_path = ":".join(f"$ORIGIN/{folder.name}" for folder in self.libraries.values())
        self.program = self.folder / "isobit-rollout"
        linked = [folder / name for name, folder in self.libraries.items()]
        self.compile("-o", self.program, "-Wl,--no-as-needed", *linked, f"-Wl,-rpath,{run_path}")
        known = {name: (f"package-of-{name}>=1,<2", folder) for name, folder in self.libraries.items()}
        self.enterContext(unittest.mock.patch.object(self.module, "LIBRARIES", known))
        self.enterContext(unittest.mock.patch.dict(os.environ))
        os.environ.pop("LD_LIBRARY_PATH", None)

    def compile(self, *options: str | Path) -> None:
        command = ["cc", "-xc", "-", "-xnone", *map(str, options)]
        subprocess.run(command, input="int main(void) { return 0; }", text=True, check=True)

    def test_found_where_the_run_path_says(self):
        found = self.module.check(self.program)
        self.assertEqual(found, {name: folder / name for name, folder in self.libraries.items()})

    def test_a_missing_library_is_named_with_the_places(self):
        (self.libraries["libfirst-stand-in.so.2"] / "libfirst-stand-in.so.2").unlink()
        os.environ["LD_LIBRARY_PATH"] = "/no/such"
        with self.assertRaises(self.module.MissingLibraryError) as raised:
            self.module.check(self.program)
        self.assertEqual(
            str(raised.exception),
            f"isobit-rollout needs libfirst-stand-in.so.2, which is neither in {self.folder}/nccl "
            f"(without it), nor in LD_LIBRARY_PATH (/no/such), nor in the system's libraries: "
            f"pip install 'package-of-libfirst-stand-in.so.2>=1,<2'",
        )

    def test_found_by_the_environment(self):
        elsewhere = self.folder / "elsewhere"
        shutil.move(self.libraries["libsecond-stand-in.so.13"], elsewhere)
        os.environ["LD_LIBRARY_PATH"] = str(elsewhere)
        self.assertEqual(
            self.module.check(self.program)["libsecond-stand-in.so.13"],
            elsewhere / "libsecond-stand-in.so.13",
        )

    def test_what_is_no_program_is_named(self):
        self.program.write_text("no program")
        with self.assertRaisesRegex(
            self.module.MissingLibraryError, f"expected a program for Linux at {self.program}"
        ):
            self.module.check(self.program)


if __name__ == "__main__":
    unittest.main()
