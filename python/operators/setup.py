"""Build step of isobit-torch: puts the library into the package (../platform_wheel.py)."""

import sys
from pathlib import Path

from setuptools import setup

PACKAGE_ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(PACKAGE_ROOT.parent))
from platform_wheel import (  # noqa: E402
    BuildWithBinaries,
    PlatformDistribution,
    PlatformWheel,
    build_options,
    require_files,
)

require_files("isobit-torch")
setup(
    distclass=PlatformDistribution,
    cmdclass={"build_py": BuildWithBinaries, "bdist_wheel": PlatformWheel},
    options=build_options("python_operators"),
)
