"""What the wheels with binaries share: setup.py of isobit, cuda/ (isobit-cuda), operators/ (isobit-torch).

ISOBIT_WHEEL_FILES names a folder that deploy/wheels/steps.sh fills: `files` goes into the package, `licenses`
and `sboms` beside its metadata. Without it, isobit's wheel is Python alone, as in a checkout.
"""

import os
import shutil
from pathlib import Path

from setuptools import Distribution
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parents[1]
# auditwheel then names the oldest glibc.
PLATFORM = "linux_x86_64"


def wheel_files() -> Path | None:
    named = os.environ.get("ISOBIT_WHEEL_FILES")
    if not named:
        return None
    folder = Path(named)
    if not (folder / "files").is_dir():
        raise RuntimeError(f"expected a folder {folder / 'files'}, as ISOBIT_WHEEL_FILES is {named}")
    return folder


def build_options(name: str) -> dict:
    """Where setuptools builds: build/NAME of the checkout; for a wheel with binaries where nothing was, as it
    packs what an earlier build left."""
    folder = wheel_files()
    return {"build": {"build_base": str(folder / "build" if folder else ROOT / "build" / name)}}


class PlatformDistribution(Distribution):
    """Its files go where a platform's own do, if it has binaries."""

    def has_ext_modules(self):
        return wheel_files() is not None


class BuildWithBinaries(build_py):
    """Copies the binaries into the package."""

    def run(self):
        super().run()
        if (folder := wheel_files()) and not self.editable_mode:
            (package,) = {name.split(".")[0] for name in self.packages}
            shutil.copytree(folder / "files", Path(self.build_lib) / package, dirs_exist_ok=True)


class PlatformWheel(bdist_wheel):
    """A wheel for any Python 3, and for one platform if it has binaries."""

    def finalize_options(self):
        super().finalize_options()
        self.root_is_pure = wheel_files() is None

    def get_tag(self):
        return super().get_tag() if self.root_is_pure else ("py3", "none", PLATFORM)

    def egg2dist(self, egginfo_path, distinfo_path):
        super().egg2dist(egginfo_path, distinfo_path)
        licenses = Path(distinfo_path) / "licenses"
        licenses.mkdir(exist_ok=True)
        if (license := ROOT / "LICENSE").exists():  # not so in a copy of python/ and proto/ alone
            shutil.copy(license, licenses)
        if folder := wheel_files():
            for part in ("licenses", "sboms"):
                shutil.copytree(folder / part, Path(distinfo_path) / part, dirs_exist_ok=True)


def require_files(package: str) -> None:
    """For packages that are nothing without binaries."""
    if wheel_files() is None:
        raise RuntimeError(
            f"{package} holds binaries, which `make wheels` builds; ISOBIT_WHEEL_FILES is not set"
        )
