"""Build step of the package: generates the protobuf and gRPC stubs of isobit.v1 from ../proto."""

import sys
from pathlib import Path

from setuptools import setup

PACKAGE_ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(PACKAGE_ROOT))  # a build in isolation has no such entry
from platform_wheel import (  # noqa: E402
    BuildWithBinaries,
    PlatformDistribution,
    PlatformWheel,
    build_options,
)

PROTO_ROOT = PACKAGE_ROOT.parent / "proto"


class BuildWithStubs(BuildWithBinaries):
    """Writes the stubs beside the sources that are built: into the checkout for an editable install."""

    def run(self):
        super().run()
        from grpc_tools import protoc

        protos = sorted(str(path) for path in PROTO_ROOT.glob("isobit/v1/*.proto"))
        if not protos:
            raise RuntimeError(f"no proto files under {PROTO_ROOT}: install from a checkout of isobit")
        output = PACKAGE_ROOT if self.editable_mode else Path(self.build_lib)
        options = [f"--{kind}_out={output}" for kind in ("python", "pyi", "grpc_python")]
        if protoc.main(["protoc", f"-I{PROTO_ROOT}", *options, *protos]) != 0:
            raise RuntimeError("protoc failed; see its message above")


# The build directory stays out of the package's folder, where the root .gitignore covers it.
setup(
    distclass=PlatformDistribution,
    cmdclass={"build_py": BuildWithStubs, "bdist_wheel": PlatformWheel},
    options=build_options("python"),
)
