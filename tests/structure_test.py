"""Checks the structure: which folder may include and link which, how long a chain of includes may be, which
compiler flags never appear, and who may ask the wall clock.

The rules are the table "Folders and who may include whom" in docs/architecture/README.md. Includes and the
build's link lists must keep it. The table itself must have no cycle, and must not allow a lower folder to
include a higher one.
"""

import re
import tempfile
import unittest
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture" / "README.md"

SOURCE_SUFFIXES = {".h", ".cc", ".cu", ".cuh", ".inc"}
SOURCE_FOLDERS = ("proto", "common", "kernels", "rollout", "trainer_bridge", "tools", "bench")
GENERATED = ("isobit/v1/", "vllm/grpc/engine/")  # where protoc's headers are, as includes name them
BUILD_FILES = ("CMakeLists.txt", "CMakePresets.json", "*.cmake", "Makefile")

# The table's names of libraries: how their headers begin, and their targets.
LIBRARIES = {
    "gRPC": (r"grpc", r"gRPC::"),
    "protobuf": (r"google/protobuf/", r"protobuf::"),
    "OpenSSL": (r"openssl/", r"OpenSSL::"),
    "Prometheus": (r"prometheus/", r"PkgConfig::PROMETHEUS"),
    "HTTP": (r"httplib", r"PkgConfig::HTTPLIB"),
    "JSON": (r"nlohmann/", r"nlohmann_json::"),
    "Torch": (r"torch/|ATen/|c10/|caffe2/", r"torch|Torch::"),
    "cuBLAS": (r"cublas", r"CUDA::cublas"),
    "NCCL": (r"nccl", r"NCCL::"),
    "CUDA": (
        r"cuda|cu(dnn|rand|fft|sparse|solver|file|pti)|cub/|cutlass/|cute/|thrust/|nvml|nvtx|nvToolsExt"
        r"|cooperative_groups",
        r"CUDA::",
    ),
}

# What the table must never allow: folders that match the first pattern must not reach those that match the
# second, directly or through others.
NEVER_REACH = {
    "kernels know no RPC and no framework": (r"kernels\b", r"gRPC|protobuf|Torch|proto$|common/(access|rpc)"),
    "kernels know no caller": (r"kernels\b", r"rollout|trainer_bridge|tools|bench"),
    "common knows nothing above it": (r"common/", r"kernels|rollout|trainer_bridge|tools|bench"),
    "in common, only access, rpc and http know gRPC": (
        r"common/(?!(access|rpc|http)$)",
        r"gRPC|protobuf|proto$",
    ),
    "rollout knows no trainer": (r"rollout", r"trainer_bridge"),
    "the trainer knows no rollout": (r"trainer_bridge", r"rollout"),
    "the comparator holds no model": (r"trainer_bridge/comparator", r"kernels|trainer_bridge/scorer"),
    "no service needs Torch": (r"rollout|trainer_bridge/(scorer|comparator)|common/|proto", r"Torch"),
    "the trainer is a client": (r"trainer_bridge/trainer", r"trainer_bridge/(scorer|comparator)"),
    "a backend knows no model": (r"kernels/(cuda|cpu|oracle)\b", r"kernels/(blocks|model)|common/checkpoint"),
    "common CUDA code knows no architecture": (r"kernels/cuda/common/", r"kernels/cuda(?!/common/)"),
}
# The only folders that name CUDA's libraries themselves.
MAY_NAME_CUDA = r"kernels/(cuda|runtime)\b|common/(cuda|parallel)$|(tools|bench/kernels)$"

# Each lets a compiler change the bits of a result.
BIT_CHANGING_FLAGS = re.compile(
    r"-ffast-math|-Ofast|use_fast_math|-funsafe-math|-fassociative-math|-freciprocal-math|-ffinite-math-only"
    r"|-fno-signed-zeros|-ffp-contract=(fast|on)|-ftz=true|-prec-(div|sqrt)=false"
    r"|-mrecip|-mdaz-ftz|fp\s+contract\s*\(\s*(fast|on)|FP_CONTRACT\s+ON|float_control|fast-math\""
)
# For times that people read, and those of files. A deadline by it would end with a step of the clock.
WALL_CLOCK = re.compile(r"\bsystem_clock\b|\babsl::Now\(|\bGetCurrentTimeNanos\(|\bCLOCK_REALTIME\b")
MAY_ASK_THE_WALL_CLOCK = {
    "common/access/audit_log.cc",
    "common/base/file_stamp.cc",
    "common/base/log.cc",
    "rollout/service/vllm_service.cc",
    "trainer_bridge/comparator/history.cc",
    "trainer_bridge/comparator/history.h",
    "trainer_bridge/comparator/page_event.cc",
}
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
# Folders of programs that share no flags with the services, so that theirs count apart.
SEPARATE_PROGRAMS = ("tools/", "bench/", "trainer_bridge/trainer/")
TABLE = "## Folders and who may include whom"
FLAG = re.compile(r"\bABSL_FLAG\((?:[^,<]|<[^>]*(?:<[^>]*>)?>)+,\s*(\w+)")
LINKS = re.compile(r"\b(isobit_library|isobit_binary|target_link_libraries)\s*\(([^()]*)\)")

# How many rooms (folders and single files directly inside a folder) one chain of includes may pass.
LONGEST_CHAIN = {"rollout": 8, "kernels/cuda": 5}
# LLM-42's scheme is in one folder; of the product's other files, these alone may name it.
SCHEME = re.compile(r"fast.?path|llm.?42", re.IGNORECASE)
SCHEME_FOLDER = "rollout/guesses/fast_path/"
PRODUCT = ("common", "kernels", "rollout", "trainer_bridge", "python/isobit")
MAY_NAME_THE_SCHEME = [
    "rollout/guesses/CMakeLists.txt",
    "rollout/guesses/drafters.cc",
    "rollout/service/rollout_settings.cc",
]

Table = dict[str, set[str]]


def read_table(text: str) -> Table:
    """What each folder may include: folders and LIBRARIES, from the page's table."""
    rows = {}
    for line in text.split(TABLE)[1].split("\n## ")[0].splitlines():
        if line.startswith("| `"):
            folder, _, allowed = (cell.strip() for cell in line.strip("|").split(" | "))
            rows[folder.strip("` ")] = [item.strip("` ") for item in allowed.split(",") if item.strip()]
    table = {}
    for folder, allowed in rows.items():
        table[folder] = set()
        for item in allowed:
            below = [row for row in rows if item.endswith("/*") and row.startswith(item[:-1])]
            if not below and item not in rows and item not in LIBRARIES and item != "-":
                raise ValueError(f"{folder} may include {item}, which is neither a row nor a library")
            table[folder].update(below or [item])
        table[folder].discard("-")
    return table


def table_breaches(table: Table) -> list[str]:
    """One line for each thing that the table allows and must never allow."""
    try:
        order = list(TopologicalSorter(table).static_order())
    except CycleError as error:
        return [f"a circle: {' -> '.join(error.args[1])}"]
    reach: Table = {}
    for folder in order:  # whom it includes comes first
        reach[folder] = set().union(*({other} | reach[other] for other in table.get(folder, ())))
    breaches = []
    for rule, (inside, never) in NEVER_REACH.items():
        for folder in filter(re.compile(inside).match, table):
            breaches += [
                f"{folder} reaches {other}: {rule}" for other in reach[folder] if re.match(never, other)
            ]
    for folder, allowed in table.items():
        if allowed & {"CUDA", "cuBLAS", "NCCL"} and not re.match(MAY_NAME_CUDA, folder):
            breaches.append(f"{folder} names CUDA")
    return sorted(breaches)


def folder_of(path: str) -> str:
    """The row that a file belongs to: its folder; files that protoc generates belong to proto."""
    return "proto" if path.startswith(("proto/", *GENERATED)) else path.rpartition("/")[0]


def library_of(name: str, kind: int) -> str | None:
    """The library of a header (kind 0) or a target (1)."""
    return next((library for library, names in LIBRARIES.items() if re.match(names[kind], name)), None)


def sources(root: Path) -> list[Path]:
    found = [path for folder in SOURCE_FOLDERS for path in (root / folder).rglob("*")]
    return sorted(path for path in found if path.suffix in SOURCE_SUFFIXES)


def include_breaches(root: Path, table: Table) -> list[str]:
    """One line for each include that the table does not allow, and each folder that it lacks."""
    breaches = []
    for path in sources(root):
        name = path.relative_to(root).as_posix()
        folder = folder_of(name)
        if folder not in table:
            breaches.append(f"{name}: the table has no row for its folder")
            continue
        for included in INCLUDE.findall(path.read_text("utf-8")):
            ours = included.startswith((*(f"{top}/" for top in SOURCE_FOLDERS), "tests/", *GENERATED))
            target = folder_of(included) if ours else library_of(included, 0)
            if target not in (None, folder) and target not in table[folder]:
                breaches.append(f"{name} includes {included}")
    return breaches


def included_files(root: Path) -> Table:
    """The files of the project that each source includes."""
    ours = tuple(f"{top}/" for top in SOURCE_FOLDERS)
    return {
        path.relative_to(root).as_posix(): {
            included for included in INCLUDE.findall(path.read_text("utf-8")) if included.startswith(ours)
        }
        for path in sources(root)
    }


def circle_in(graph: Table) -> list[str]:
    """One line, if some path through the graph leads back to its beginning."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"a circle: {' -> '.join(reversed(error.args[1]))}"]
    return []


def upward_includes(root: Path, table: Table) -> list[str]:
    """One line for each include of a folder further down in the table: it lists folders from low to high."""
    floor = {folder: number for number, folder in enumerate(table)}
    return [
        f"{name} includes {included}"
        for name, all_included in included_files(root).items()
        for included in sorted(all_included)
        if floor.get(folder_of(included), 0) > floor.get(folder_of(name), len(floor))
    ]


def longest_chain(root: Path, top: str) -> list[str]:
    """The rooms of the longest chain of includes inside the folder `top`, from high to low."""

    def room_of(name: str) -> str:
        return name.removeprefix(f"{top}/").partition("/")[0].partition(".")[0]

    rooms: Table = {}
    for name, included in included_files(root).items():
        if name.startswith(f"{top}/"):
            inside = {room_of(other) for other in included if other.startswith(f"{top}/")}
            rooms.setdefault(room_of(name), set()).update(inside - {room_of(name)})
    if circle := circle_in(rooms):
        raise ValueError(circle[0])
    chains: dict[str, list[str]] = {}
    for room in TopologicalSorter(rooms).static_order():
        below = max((chains[other] for other in rooms.get(room, ())), key=len, default=[])
        chains[room] = [room, *below]
    return max(chains.values(), key=len, default=[])


def files_that_name_the_scheme(root: Path) -> list[str]:
    paths = [path for top in PRODUCT for path in (root / top).rglob("*")]
    return sorted(
        name
        for path in paths
        if path.suffix in {*SOURCE_SUFFIXES, ".py"} or path.name == "CMakeLists.txt"
        if not (name := path.relative_to(root).as_posix()).startswith(SCHEME_FOLDER)
        if SCHEME.search(path.read_text("utf-8"))
    )


def link_breaches(root: Path, table: Table) -> list[str]:
    """One line for each target that links a library that its folder may not include."""
    owner, links = {}, []
    for path in sorted(path for top in SOURCE_FOLDERS for path in (root / top).rglob("CMakeLists.txt")):
        folder = folder_of(path.relative_to(root).as_posix())
        for call, text in LINKS.findall(re.sub("#.*", "", path.read_text("utf-8"))):
            words = text.split()
            target = words[0] if call == "target_link_libraries" else words[words.index("NAME") + 1]
            if call != "target_link_libraries":
                owner[target] = folder
                words = words[words.index("DEPS") :] if "DEPS" in words else []
            links += [(folder, target, word) for word in words[1:]]
    return [
        f"{target}, of {folder}, links {linked}"
        for folder, target, linked in links
        if (to := owner.get(linked) or library_of(linked, 1)) not in (None, folder)
        and to not in table[folder]
    ]


def twice_declared(root: Path) -> list[str]:
    """One line for each flag that two files declare, outside of SEPARATE_PROGRAMS."""
    declared: dict[str, str] = {}
    breaches = []
    for path in sources(root):
        name = path.relative_to(root).as_posix()
        for flag in FLAG.findall(path.read_text("utf-8")) if not name.startswith(SEPARATE_PROGRAMS) else ():
            if (other := declared.setdefault(flag, name)) != name:
                breaches.append(f"--{flag}: {other} and {name}")
    return breaches


def flag_breaches(root: Path) -> list[str]:
    """One line for each flag, in a build file or a source, that lets results change."""
    folders = (*SOURCE_FOLDERS, "cmake", "tests")
    files = [path for folder in folders for pattern in BUILD_FILES for path in (root / folder).rglob(pattern)]
    files += [path for pattern in BUILD_FILES for path in root.glob(pattern)]
    breaches = []
    for path in sorted(files) + sources(root):
        name = path.relative_to(root).as_posix()
        for line in path.read_text("utf-8").splitlines():
            if found := BIT_CHANGING_FLAGS.search(line):
                breaches.append(f"{name} has {found.group()}")
    return breaches


def wall_clock_breaches(root: Path) -> list[str]:
    """One line for each source that asks the wall clock and is not known to."""
    return [
        f"{name} has {found.group()}"
        for path in sources(root)
        if (name := path.relative_to(root).as_posix()) not in MAY_ASK_THE_WALL_CLOCK
        and (found := WALL_CLOCK.search(path.read_text("utf-8")))
    ]


class RepositoryTest(unittest.TestCase):
    def setUp(self):
        self.table = read_table(PAGE.read_text("utf-8"))

    def test_the_table_allows_no_circle_and_no_arrow_up(self):
        self.assertEqual(table_breaches(self.table), [])
        self.assertEqual([folder for folder in self.table if not (ROOT / folder).is_dir()], [])

    def test_no_include_crosses_a_wall(self):
        self.assertGreater(len(sources(ROOT)), 50)
        self.assertEqual(include_breaches(ROOT, self.table), [])

    def test_no_include_runs_upward_or_in_a_circle(self):
        self.assertEqual(upward_includes(ROOT, self.table), [])
        self.assertEqual(circle_in(included_files(ROOT)), [])

    def test_chains_of_includes_are_short(self):
        for top, most in LONGEST_CHAIN.items():
            chain = longest_chain(ROOT, top)
            print(f"the longest chain of includes inside {top}/: {' -> '.join(chain)}")
            self.assertLessEqual(len(chain), most, chain)
            self.assertGreater(len(chain), 1)

    def test_few_files_name_the_scheme_of_another_engine(self):
        self.assertEqual(files_that_name_the_scheme(ROOT), MAY_NAME_THE_SCHEME)

    def test_no_link_list_crosses_a_wall(self):
        self.assertEqual(link_breaches(ROOT, self.table), [])

    def test_no_flag_lets_results_change(self):
        self.assertEqual(flag_breaches(ROOT), [])

    def test_no_flag_is_declared_twice(self):
        self.assertEqual(twice_declared(ROOT), [])

    def test_no_deadline_is_by_the_wall_clock(self):
        self.assertEqual(wall_clock_breaches(ROOT), [])


class ControlTest(unittest.TestCase):
    """Every rule finds a violation of it."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.root = Path(scratch.name)
        self.table = read_table(PAGE.read_text("utf-8"))

    def write(self, name: str, text: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def test_includes_are_found(self):
        cases = [
            ("kernels/cpu/a.cc", "<grpcpp/server.h>"),
            ("kernels/cpu/a.cc", '"isobit/v1/types.pb.h"'),
            ("kernels/model/a.h", "<torch/torch.h>"),
            ("kernels/model/a.h", '"common/rpc/limits.h"'),
            ("kernels/model/a.h", '"tests/support/a.h"'),
            ("kernels/cuda/common/device/a.cuh", '"kernels/cuda/sm90/linear/layout.h"'),
            ("kernels/cuda/sm90/linear/a.cu", '"kernels/cuda/common/rows/rows.h"'),
            ("kernels/cuda/sm90/linear/a.cu", '"kernels/cuda/cuda_backend.h"'),
            ("kernels/cuda/sm90/linear/a.cu", "<cublas_v2.h>"),
            ("kernels/cuda/common/rows/a.cu", '"kernels/cuda/sm90/collective/all_reduce.h"'),
            ("kernels/cuda/sm90/attention/a.cu", '"kernels/model/weights.h"'),
            ("common/base/a.h", '"kernels/backend.h"'),
            ("rollout/engine/a.cc", '"trainer_bridge/scorer/scorer.h"'),
            ("rollout/engine/a.cc", "<cuda_runtime.h>"),
            ("common/config/a.cc", "<prometheus/counter.h>"),
            ("trainer_bridge/comparator/a.cc", '"kernels/backend.h"'),
        ]
        for name, included in cases:
            with self.subTest(file=name, included=included):
                self.write(name, f"// A file.\n  # include {included}\n")
                self.assertEqual(
                    include_breaches(self.root, self.table), [f"{name} includes {included[1:-1]}"]
                )
                (self.root / name).unlink()
        self.write("kernels/fpga/a.cc", "")
        self.assertEqual(len(include_breaches(self.root, self.table)), 1)

    def test_what_is_allowed_is_let_through(self):
        self.write(
            "kernels/cuda/sm90/linear/a.cu",
            '#include <cuda.h>\n#include "kernels/cuda/common/device/launch.h"\n',
        )
        self.write("kernels/cuda/sm90/collective/a.cc", '#include "kernels/cuda/common/rows/rows.h"\n')
        self.write("common/parallel/nccl_group.cc", "#include <nccl.h>\n")
        self.write("common/rpc/channel.h", '#include <grpcpp/channel.h>\n#include "isobit/v1/a.pb.h"\n')
        self.write("kernels/cuda/sm90/linear/CMakeLists.txt", "isobit_library(NAME b DEPS a absl::status)\n")
        self.write("kernels/cuda/common/device/CMakeLists.txt", "isobit_library(NAME a SRCS a.cc)\n")
        self.write("CMakeLists.txt", "add_compile_options(-ffp-contract=off -fno-fast-math)\n")
        self.assertEqual(include_breaches(self.root, self.table), [])
        self.assertEqual(link_breaches(self.root, self.table) + flag_breaches(self.root), [])

    def test_upward_includes_and_circles_are_found(self):
        self.write("rollout/schedule/a.h", '#include "rollout/guesses/b.h"\n')
        self.write("rollout/guesses/b.h", '#include "rollout/schedule/c.h"\n')
        self.write("rollout/schedule/c.h", "")
        self.assertEqual(
            upward_includes(self.root, self.table), ["rollout/schedule/a.h includes rollout/guesses/b.h"]
        )
        self.assertEqual(circle_in(included_files(self.root)), [], "of folders, not of files")
        with self.assertRaisesRegex(ValueError, "a circle: "):
            longest_chain(self.root, "rollout")
        self.write("rollout/schedule/c.h", '#include "rollout/schedule/a.h"\n')
        self.assertEqual(len(circle_in(included_files(self.root))), 1)

    def test_long_chains_are_found(self):
        most = LONGEST_CHAIN["rollout"]
        for i in range(most):
            self.write(f"rollout/room{i}/a.h", f'#include "rollout/room{i + 1}/a.h"\n')
        self.assertEqual(len(longest_chain(self.root, "rollout")), most + 1)
        self.write(f"rollout/room{most - 1}/a.h", "")
        self.write("rollout/single.h", '#include "rollout/room0/a.h"\n')
        self.write("rollout/single.cc", '#include "rollout/single.h"\n')
        self.assertEqual(longest_chain(self.root, "rollout")[0], "single")
        self.assertEqual(len(longest_chain(self.root, "rollout")), most + 1)

    def test_names_of_the_scheme_are_found(self):
        self.write(SCHEME_FOLDER + "a.h", "class FastPath;\n")
        self.write("rollout/guesses/a.h", "// Faster on its path.\n")
        self.assertEqual(files_that_name_the_scheme(self.root), [])
        for name in ("rollout/schedule/a.h", "kernels/runtime/a.cc", "python/isobit/a.py"):
            self.write(name, "# The fast path.\n")
        self.assertEqual(len(files_that_name_the_scheme(self.root)), 3)

    def test_links_are_found(self):
        self.write(
            "kernels/cuda/common/rows/CMakeLists.txt", "isobit_library(NAME rows SRCS a.cu DEPS base)\n"
        )
        self.write(
            "kernels/cuda/sm90/linear/CMakeLists.txt",
            "isobit_library(NAME linear SRCS a.cu\n DEPS rows CUDA::cudart)  # ours\n"
            "target_link_libraries(linear PRIVATE CUDA::cublas)\n",
        )
        self.assertEqual(
            link_breaches(self.root, self.table),
            [
                "linear, of kernels/cuda/sm90/linear, links rows",
                "linear, of kernels/cuda/sm90/linear, links CUDA::cublas",
            ],
        )

    def test_tables_are_judged(self):
        cases = {
            "kernels know no RPC and no framework": ("kernels/contract", "gRPC"),
            "kernels know no caller": ("kernels/oracle", "tools"),
            "common knows nothing above it": ("common/base", "kernels/oracle"),
            "in common, only access, rpc and http know gRPC": ("common/config", "gRPC"),
            "rollout knows no trainer": ("rollout/service", "trainer_bridge/comparator"),
            "the trainer knows no rollout": ("trainer_bridge/scorer", "rollout/engine"),
            "the comparator holds no model": ("trainer_bridge/comparator", "kernels"),
            "no service needs Torch": ("trainer_bridge/scorer", "Torch"),
            "the trainer is a client": ("trainer_bridge/trainer", "trainer_bridge/scorer"),
            "a backend knows no model": ("kernels/cuda/common/rows", "kernels/model"),
            "common CUDA code knows no architecture": (
                "kernels/cuda/common/rows",
                "kernels/cuda/sm90/linear",
            ),
        }
        self.assertEqual(cases.keys(), NEVER_REACH.keys())
        for rule, (folder, allowed) in cases.items():
            with self.subTest(rule=rule):
                table = {**self.table, folder: self.table[folder] | {allowed}}
                if rule == "kernels know no caller":
                    table["tools"] = set()  # otherwise there is a cycle, which would be reported instead
                if rule == "common knows nothing above it":
                    table["kernels/oracle"] = set()
                self.assertIn(f"{folder} reaches {allowed}: {rule}", table_breaches(table))
        circle = {**self.table, "kernels/cuda/common/rows": {"kernels/cuda/common/collective"}}
        self.assertIn("a circle: ", table_breaches(circle)[0])
        self.assertEqual(
            table_breaches({**self.table, "rollout/engine": {"CUDA"}}), ["rollout/engine names CUDA"]
        )

    def test_the_table_is_read(self):
        page = f"{TABLE}\n| folder | holds | may include |\n| --- | --- | --- |\n{{}}\n## Next\n"
        rows = "| `a` | one, two | - |\n| `a/b` | b | `a`, CUDA |\n| `c` | all | `a/*` |"
        self.assertEqual(read_table(page.format(rows)), {"a": set(), "a/b": {"a", "CUDA"}, "c": {"a/b"}})
        with self.assertRaisesRegex(ValueError, "neither a row nor a library"):
            read_table(page.format("| `a` | one | `d` |"))

    def test_flags_that_are_declared_twice_are_found(self):
        self.write(
            "rollout/engine/a.cc",
            'ABSL_FLAG(int, port, 0, "A port.");\nABSL_FLAG(bool, own, true, "Own.");\n',
        )
        self.write("tools/a.cc", 'ABSL_FLAG(int, port, 0, "A tool\'s.");\n')
        self.assertEqual(twice_declared(self.root), [])
        self.write(
            "kernels/a.cc",
            'ABSL_FLAG(\n    std::optional<std::vector<int>>, own, {},\n    "Own.");\n'
            'ABSL_FLAG(std::optional<int64_t>, port,\n          1, "A port, 0 to 65535.");\n',
        )
        self.assertEqual(
            twice_declared(self.root),
            ["--port: kernels/a.cc and rollout/engine/a.cc", "--own: kernels/a.cc and rollout/engine/a.cc"],
        )

    def test_wall_clocks_are_found(self):
        for asks in ("std::chrono::system_clock::now()", "absl::Now()", "absl::GetCurrentTimeNanos()"):
            with self.subTest(asks=asks):
                self.write("rollout/engine/a.cc", f"const auto deadline = {asks} + kTimeout;\n")
                self.write("trainer_bridge/comparator/history.cc", f"const auto now = {asks};\n")
                self.assertEqual(len(wall_clock_breaches(self.root)), 1)

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
