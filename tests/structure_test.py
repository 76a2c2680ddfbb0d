"""Holds the walls between the folders: who may include whom, and which compiler flags never appear."""

import re
import tempfile
import unittest
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SOURCE_SUFFIXES = {".h", ".cc", ".cu", ".cuh", ".inc"}
SOURCE_FOLDERS = ("common", "kernels", "rollout", "trainer_bridge", "tools")
BUILD_FILES = ("CMakeLists.txt", "CMakePresets.json", "*.cmake", "Makefile")

GRPC_OR_PROTO = r"grpc|google/protobuf/|.*\.pb\.h"
TORCH = r"torch/|ATen/|c10/|caffe2/"
CUDA = (
    r"cuda|cu(blas|dnn|rand|fft|sparse|solver|file|pti)|cub/|cutlass/|cute/|thrust/|nccl|nvml|nvtx|nvToolsExt"
)


@dataclass(frozen=True)
class Wall:
    """Files under `inside`, but not under `unless`, include nothing that matches `forbidden`."""

    inside: tuple[str, ...]
    forbidden: str
    unless: tuple[str, ...] = ()


WALLS = {
    "kernels know no RPC and no framework": Wall(("kernels/",), f"{GRPC_OR_PROTO}|{TORCH}"),
    "kernels stand on common alone": Wall(("kernels/",), r"(rollout|trainer_bridge|tools|tests|common/rpc)/"),
    "common knows nothing above it": Wall(("common/",), r"(kernels|rollout|trainer_bridge|tools|tests)/"),
    "in common, only rpc speaks gRPC": Wall(("common/",), GRPC_OR_PROTO, unless=("common/rpc/",)),
    "rollout knows no trainer": Wall(("rollout/",), r"trainer_bridge/"),
    "the trainer knows no rollout": Wall(("trainer_bridge/",), r"rollout/"),
    "the comparator holds no model": Wall(
        ("trainer_bridge/comparator/",), r"kernels/|trainer_bridge/(scorer|torch)/"
    ),
    "CUDA stays in kernels, communicators and benches": Wall(
        tuple(f"{folder}/" for folder in SOURCE_FOLDERS),
        CUDA,
        unless=("kernels/", "common/parallel/", "tools/bench_"),
    ),
    "Torch stays in its bridge": Wall(
        tuple(f"{folder}/" for folder in SOURCE_FOLDERS), TORCH, unless=("trainer_bridge/torch/",)
    ),
}

# Each lets a compiler change the bits of a result.
BIT_CHANGING_FLAGS = re.compile(
    r"-ffast-math|-Ofast|use_fast_math|-funsafe-math|-fassociative-math|-freciprocal-math|-ffinite-math-only"
    r"|-fno-signed-zeros|-ffp-contract=(fast|on)|-ftz=true|-prec-(div|sqrt)=false"
    r"|-mrecip|-mdaz-ftz|fp\s+contract\s*\(\s*(fast|on)|FP_CONTRACT\s+ON|float_control|fast-math\""
)
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


def sources(root: Path) -> list[Path]:
    found = [path for folder in SOURCE_FOLDERS for path in (root / folder).rglob("*")]
    return sorted(path for path in found if path.suffix in SOURCE_SUFFIXES)


def wall_breaches(root: Path) -> list[str]:
    """One line for each include that crosses a wall."""
    breaches = []
    for path in sources(root):
        name = path.relative_to(root).as_posix()
        for included in INCLUDE.findall(path.read_text("utf-8")):
            breaches += [
                f"{name} includes {included}: {rule}"
                for rule, wall in WALLS.items()
                if name.startswith(wall.inside)
                and not (wall.unless and name.startswith(wall.unless))
                and re.match(wall.forbidden, included)
            ]
    return breaches


def flag_breaches(root: Path) -> list[str]:
    """One line for each flag, in a build file or a source, that lets results change."""
    folders = (*SOURCE_FOLDERS, "cmake", "proto", "tests")
    files = [path for folder in folders for pattern in BUILD_FILES for path in (root / folder).rglob(pattern)]
    files += [path for pattern in BUILD_FILES for path in root.glob(pattern)]
    breaches = []
    for path in sorted(files) + sources(root):
        name = path.relative_to(root).as_posix()
        for line in path.read_text("utf-8").splitlines():
            if found := BIT_CHANGING_FLAGS.search(line):
                breaches.append(f"{name} has {found.group()}")
    return breaches


class RepositoryTest(unittest.TestCase):
    def test_no_include_crosses_a_wall(self):
        self.assertGreater(len(sources(ROOT)), 50)
        self.assertEqual(wall_breaches(ROOT), [])

    def test_no_flag_lets_results_change(self):
        self.assertEqual(flag_breaches(ROOT), [])


class ControlTest(unittest.TestCase):
    """Every rule finds what it is there to find."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = Path(scratch.name)

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def test_breaches_are_found(self):
        cases = [
            ("kernels/cpu/a.cc", "<grpcpp/server.h>", "kernels know no RPC and no framework"),
            ("kernels/cpu/a.cc", '"proto/isobit/v1/types.pb.h"', "kernels know no RPC and no framework"),
            ("kernels/model/a.h", "<torch/torch.h>", "kernels know no RPC and no framework"),
            ("kernels/model/a.h", '"common/rpc/limits.h"', "kernels stand on common alone"),
            ("common/base/a.h", '"kernels/ops.h"', "common knows nothing above it"),
            ("common/base/a.h", "<grpcpp/server.h>", "in common, only rpc speaks gRPC"),
            ("rollout/engine/a.cc", '"trainer_bridge/scorer/scorer.h"', "rollout knows no trainer"),
            ("trainer_bridge/scorer/a.cc", '"rollout/engine/engine.h"', "the trainer knows no rollout"),
            ("trainer_bridge/comparator/a.cc", '"kernels/ops.h"', "the comparator holds no model"),
            ("rollout/engine/a.cc", "<cuda_runtime.h>", "CUDA stays in kernels, communicators and benches"),
            ("tools/a.cc", "<nccl.h>", "CUDA stays in kernels, communicators and benches"),
            ("rollout/engine/a.cc", "<ATen/ATen.h>", "Torch stays in its bridge"),
        ]
        self.assertEqual({rule for _, _, rule in cases}, WALLS.keys())
        for name, included, rule in cases:
            with self.subTest(rule=rule, included=included):
                self.write(name, f"// A file.\n  # include {included}\n")
                self.assertIn(f"{name} includes {included[1:-1]}: {rule}", wall_breaches(self.root))
                (self.root / name).unlink()

    def test_what_is_allowed_is_let_through(self):
        self.write("kernels/cuda/a.cu", "#include <cuda_runtime.h>\n")
        self.write("common/parallel/nccl_group.cc", "#include <nccl.h>\n")
        self.write("tools/bench_harness.cc", "#include <cuda_runtime_api.h>\n")
        self.write("common/rpc/channel.h", "#include <grpcpp/channel.h>\n")
        self.write("trainer_bridge/torch/ops.cc", '#include <torch/library.h>\n#include "kernels/ops.h"\n')
        self.write("CMakeLists.txt", "add_compile_options(-ffp-contract=off -fno-fast-math)\n")
        self.assertEqual(wall_breaches(self.root) + flag_breaches(self.root), [])

    def test_flags_are_found(self):
        cases = {
            "CMakeLists.txt": "add_compile_options(-O3 -ffast-math)",
            "kernels/cuda/CMakeLists.txt": "target_compile_options(k PRIVATE --use_fast_math)",
            "tools/CMakeLists.txt": "add_compile_options(-ffp-contract=fast)",
            "CMakePresets.json": '{ "CMAKE_CXX_FLAGS": "-Ofast" }',
            "kernels/cpu/a.cc": '__attribute__((optimize("fast-math")))',
            "kernels/cpu/b.cc": "#pragma STDC FP_CONTRACT ON",
        }
        for name, text in cases.items():
            with self.subTest(file=name):
                self.write(name, text + "\n")
                self.assertEqual(len(flag_breaches(self.root)), 1)
                (self.root / name).unlink()


if __name__ == "__main__":
    unittest.main()
