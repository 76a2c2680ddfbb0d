"""What the wheels in dist/ hold and need, read off the files.

.venv/bin/python tests/wheels/contents_test.py [ContentsTest.NAME ...]    (make check-wheels)
"""

import email
import json
import re
import sys
import tempfile
import unittest
import zipfile
from pathlib import Path

from packaging.requirements import Requirement

sys.path.insert(0, str(Path(__file__).parent))
from support import DIST, ROOT, TOOLS, WheelTestCase, run, wheel_of

MAX_BYTES = 100_000_000
# What a wheel may need of the system: the list of manylinux, as far as services use it.
SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "ld-linux-x86-64.so.2"}
NVIDIA = {"libnccl.so.2", "libcublas.so.13"}
PYTORCH = {"libtorch_cpu.so", "libtorch_cuda.so", "libtorch.so", "libc10.so"}


class ContentsTest(WheelTestCase):
    """What the files say, without running them."""

    def packages(self) -> list[str]:
        """All that were built; isobit must be."""
        return [
            "isobit",
            *(name for name in ("isobit_cuda", "isobit_torch") if any(DIST.glob(f"{name}-*.whl"))),
        ]

    def metadata(self, wheel: Path, name: str) -> str:
        with zipfile.ZipFile(wheel) as archive:
            (found,) = (item for item in archive.namelist() if item.endswith(f".dist-info/{name}"))
            return archive.read(found).decode()

    def test_each_file_is_small_and_of_the_right_platform(self):
        for package in self.packages():
            wheel = wheel_of(package)
            print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
            self.assertLess(wheel.stat().st_size, MAX_BYTES, wheel.name)
            tags = email.message_from_string(self.metadata(wheel, "WHEEL")).get_all("Tag")
            self.assertEqual(tags, ["py3-none-manylinux_2_34_x86_64"], wheel.name)

    def test_auditwheel_accepts_it(self):
        """isobit's whole; of the others all but what NVIDIA's and PyTorch's own wheels bring."""
        for package in self.packages():
            shown = json.loads(self.check(run(TOOLS / "auditwheel", "show", "--json", wheel_of(package))))
            outside = set(shown["external_libs"])
            with self.subTest(package):
                self.assertEqual(shown["sym_tag"], "manylinux_2_34_x86_64")
                if package == "isobit":
                    self.assertEqual(shown["overall_tag"], "manylinux_2_34_x86_64")
                    self.assertEqual(outside, set())

    def test_binaries_need_no_library_outside_the_policy(self):
        allowed = {"isobit": set(), "isobit_cuda": NVIDIA, "isobit_torch": PYTORCH | {"libstdc++.so.6"}}
        seen = 0
        for package in self.packages():
            with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel_of(package)) as archive:
                inside = {Path(name).name for name in archive.namelist() if f"{package}.libs/" in name}
                for name in archive.namelist():
                    if archive.read(name)[:4] != b"\x7fELF":
                        continue
                    dynamic = self.check(run("readelf", "--dynamic", archive.extract(name, folder)))
                    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
                    self.assertLessEqual(needed, SYSTEM_LIBRARIES | allowed[package] | inside, name)
                    for path in re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", dynamic):
                        self.assertRegex(
                            path, r"^(\$ORIGIN(/[^:]*)?:?)+$", f"{name}: a path of the build machine"
                        )
                    sections = self.check(run("readelf", "--sections", "--wide", Path(folder) / name))
                    self.assertNotIn(".debug_info", sections, name)
                    self.assertNotIn(".symtab", sections, name)
                    seen += 1
        self.assertGreater(seen, 3)

    def test_binaries_replace_no_function_of_the_system(self):
        """Calls from everywhere in the process would come to the replacement, even its own."""
        of_system = set()
        for library in ("libc.so.6", "libm.so.6"):
            of_system |= self.functions(Path("/lib/x86_64-linux-gnu") / library)
        self.assertIn("hypot", of_system)
        for package in self.packages():
            with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel_of(package)) as archive:
                for name in archive.namelist():
                    if archive.read(name)[:4] == b"\x7fELF" and ".libs/" not in name:
                        found = self.functions(Path(archive.extract(name, folder)))
                        # Which glibc 2.34 does not have, so that nothing else of it calls it.
                        self.assertLessEqual(found & of_system, {"arc4random"}, name)

    def functions(self, binary: Path) -> set[str]:
        """The functions that others in the process can call."""
        lines = self.check(run("nm", "--dynamic", "--defined-only", str(binary))).splitlines()
        found = (line.split() for line in lines)
        return {words[-1].partition("@")[0] for words in found if words[-2] in ("T", "W", "i")}

    def test_holds_stubs_and_services(self):
        with zipfile.ZipFile(wheel_of("isobit")) as archive:
            names = set(archive.namelist())
        stubs = {
            f"isobit/v1/{path.stem}_pb2.py" for path in (ROOT / "proto" / "isobit" / "v1").glob("*.proto")
        }
        sources = {
            str(path.relative_to(ROOT / "python"))
            for path in (ROOT / "python" / "isobit").rglob("*.py")
            if "__pycache__" not in path.parts
        }
        services = {
            f"isobit/bin/isobit-{name}" for name in ("rollout", "scorer", "comparator", "model", "bench")
        }
        self.assertLessEqual(stubs | sources | services, names)
        self.assertEqual({n for n in names if n.endswith(".py") and n.startswith("isobit/")}, stubs | sources)

    def test_dependencies_are_ranges(self):
        for package in self.packages():
            metadata = email.message_from_string(self.metadata(wheel_of(package), "METADATA"))
            for requirement in map(Requirement, metadata.get_all("Requires-Dist") or []):
                operators = {specifier.operator for specifier in requirement.specifier}
                self.assertLessEqual(operators, {">=", "<"}, f"{package}: {requirement}")
                self.assertTrue(operators, f"{package}: {requirement} takes any version")

    def test_licences_and_parts_are_inside(self):
        """Each part of the SBOM has its licence's text, and the SBOM is valid CycloneDX."""
        expected = {"abseil", "brotli", "c-ares", "cpp-httplib", "gcc-12", "grpc", "openssl"}
        expected |= {"prometheus-cpp", "protobuf", "re2", "zlib"}
        for package in self.packages():
            with self.subTest(package), tempfile.TemporaryDirectory() as folder:
                with zipfile.ZipFile(wheel_of(package)) as archive:
                    archive.extractall(folder)
                (info,) = Path(folder).glob("*.dist-info")
                sbom = info / "sboms" / "isobit.cdx.json"
                self.check(run(TOOLS / "python", ROOT / "tests" / "wheels" / "validate_sbom.py", sbom))
                parts = {part["name"] for part in json.loads(sbom.read_text())["components"]}
                self.assertGreater(parts, {"abseil", "gcc-12", "openssl"})
                if package == "isobit":
                    self.assertGreaterEqual(parts, expected)
                texts = {path.name for path in (info / "licenses" / "bundled").iterdir()}
                for part in parts:
                    self.assertTrue(any(text.startswith(f"{part}.") for text in texts), part)
                self.assertIn("Apache License", (info / "licenses" / "LICENSE").read_text())


if __name__ == "__main__":
    unittest.main(verbosity=2)
