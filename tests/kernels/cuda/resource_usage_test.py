"""Checks that the compiled CUDA kernels are what their speed and their bits need.

From the reports that cmake/nvcc_report.py left beside the object files: no kernel spills, no wgmma is
serialised, no kernel's variables take the shared memory that launch.h counts on, and no kernel file takes
more than 90 s of one core to compile. From the machine code, if a disassembler is there (`pip install
'python/tools[disassembly]'`, or cuobjdump and nvdisasm on PATH): the tensor cores are reached through wgmma
where speed depends on it, and no approximation by the special function unit replaces a function of the
contract.
A table of every kernel goes to resource_usage.txt in the build directory.

    tests/kernels/cuda/resource_usage_test.py build/cuda
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import unittest
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
KERNELS = "kernels/cuda/"
MAX_SECONDS = 90.0
MAX_SHARED = 16 * 1024  # bytes of static variables: what launch.h leaves of the 48 KB limit

# Kernels that may spill, by a pattern of their names: how many bytes at most, and why.
MAY_SPILL = {
    r"^LinearGeneralKernel": (16, "takes what the fast schedules cannot, and is not meant to be fast"),
    r"^PrefillKernel<(64|256)": (32, "words of addresses, a few a tile of thousands of instructions"),
}

# Kernels that must multiply with wgmma: how their files' paths begin, and what their names contain.
NEEDS_WGMMA = {
    "sm90/linear/stream": "Stream",
    "sm90/linear/tile": "Tile",
    "sm90/linear/mapped": "MultiplyChains",
    "sm90/linear/input_gradient": "MultiplyChains",
    "sm90/linear/weight_gradient": "MultiplyChains",
    "sm90/attention/prefill": "Prefill",
    "sm90/attention/training": "Prefill",
    "sm90/attention/training_": "Gradient",
}

# Approximations by the special function unit. Reciprocal and reciprocal square root are not among them:
# correctly rounded division and square root start from these.
APPROXIMATION = re.compile(r"\bMUFU\.(EX2|LG2|SIN|COS|TANH|SQRT)\b")
# How a source could ask for an approximation, or for a reciprocal without its correction.
APPROXIMATE_SOURCE = re.compile(
    r"\.approx|\b(__expf|__exp10f|__logf|__log2f|__log10f|__powf|__sinf|__cosf|__fdividef|__frcp_r[nzud]"
    r"|__frsqrt_rn|h?rsqrtf?|rcp|exp2f?|expf?|logf?|log2f?|powf?|tanhf?|__tanhf|fdividef)\s*\("
)
# Files that may ask for one, and why.
MAY_APPROXIMATE = {
    "swiglu.cuh": "an estimate that an exact Newton step corrects; every bf16 gate is tested",
}
SERIALISED = re.compile(r"\(C75(?:0[89]|1\d|20)\)")


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel; sizes in bytes."""

    file: str
    name: str
    registers: int
    stack: int
    spills: int
    shared: int


@dataclass(frozen=True)
class Report:
    """What nvcc_report.py kept of one source file."""

    kernels: list[Kernel]
    serialised: list[str]
    seconds: float


def without_arguments(name: str) -> str:
    """A function's name without its argument list, which is the last pair of parentheses."""
    depth = 0
    for i in range(len(name) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(name[i], 0)
        if depth == 0:
            return name[:i] if name[i] == "(" else name
    return name


def demangle(names: list[str]) -> list[str]:
    """Readable names, without return types, argument lists and our namespaces."""
    run = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True)
    noise = re.compile(r"^void |isobit::cuda::|isobit::contract::|\(anonymous namespace\)::")
    return [noise.sub("", without_arguments(name)) for name in run.stdout.splitlines()]


def parse(file: str, text: str) -> Report:
    """Reads one report."""
    kernels = []
    blocks = text.split("Compiling entry function '")[1:]
    for block, name in zip(blocks, demangle([block.split("'")[0] for block in blocks]), strict=True):
        stack, stores, loads = map(
            int,
            re.search(
                r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", block
            ).groups(),
        )
        registers = int(re.search(r"Used (\d+) registers", block).group(1))
        shared = re.search(r"(\d+) bytes smem", block)
        kernels.append(
            Kernel(file, name, registers, stack, stores + loads, int(shared.group(1)) if shared else 0)
        )
    serialised = [line for line in text.splitlines() if SERIALISED.search(line)]
    seconds = re.search(r"processor time: ([\d.]+) s", text)
    return Report(kernels, serialised, float(seconds.group(1)))


def objects(build: Path) -> dict[str, Path]:
    """The object file of every CUDA source of the kernels, by the source's name."""
    found = {}
    for entry in json.loads((build / "compile_commands.json").read_text("utf-8")):
        source = os.path.relpath(entry["file"], ROOT)
        command = shlex.split(entry["command"])
        output = command[command.index("-o") + 1]
        # Another target compiles some of the sources for other architectures (CMakeLists.txt).
        if output.startswith(KERNELS) and source.endswith(".cu"):
            found[source.removeprefix(KERNELS)] = build / output
    return found


def disassembler() -> dict[str, str] | None:
    """The environment in which cuobjdump and nvdisasm are on PATH; None: they are not installed."""
    bundled = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"
    path = f"{bundled}{os.pathsep}{os.environ['PATH']}"
    found = all(shutil.which(tool, path=path) for tool in ("cuobjdump", "nvdisasm"))
    return {**os.environ, "PATH": path} if found else None


def machine_code(path: Path, environment: dict[str, str]) -> list[tuple[str, str]]:
    """The readable name and the disassembly of each kernel of an object file."""
    run = subprocess.run(
        ["cuobjdump", "--dump-sass", path], env=environment, capture_output=True, text=True, check=True
    )
    blocks = run.stdout.split("Function : ")[1:]
    return list(zip(demangle([block.split(None, 1)[0] for block in blocks]), blocks, strict=True))


def allowed_spills(kernel: str) -> int:
    """The bytes that a kernel of this name may spill."""
    return max((size for pattern, (size, _) in MAY_SPILL.items() if re.search(pattern, kernel)), default=0)


class ResourceUsageTest(unittest.TestCase):
    build = Path(os.environ.get("ISOBIT_BIN_DIR", ROOT / "build" / "cuda" / "bin")).parent

    @classmethod
    def setUpClass(cls):
        cls.objects = objects(cls.build)
        missing = [
            source
            for source, path in cls.objects.items()
            if not path.with_name(path.name + ".report").is_file()
        ]
        if missing:
            raise AssertionError(f"no report of {missing}: build the preset 'cuda' first")
        cls.reports = {
            source: parse(source, path.with_name(path.name + ".report").read_text("utf-8"))
            for source, path in sorted(cls.objects.items())
        }
        lines = [f"{'file':32} {'registers':>9} {'stack':>6} {'spills':>6} {'shared':>6}  kernel"]
        for source, report in cls.reports.items():
            lines += [
                f"{source:32} {k.registers:9} {k.stack:6} {k.spills:6} {k.shared:6}  {k.name}"
                for k in report.kernels
            ]
            lines.append(f"{source:32} compiled in {report.seconds:.1f} s")
        (cls.build / "resource_usage.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def test_there_are_kernels(self):
        kernels = [kernel for report in self.reports.values() for kernel in report.kernels]
        self.assertGreater(len(kernels), 10)
        print(f"{len(kernels)} kernels in {len(self.reports)} files: {self.build / 'resource_usage.txt'}")

    def test_no_kernel_spills(self):
        spilling = [
            f"{kernel.file}: {kernel.name}: {kernel.spills} bytes"
            for report in self.reports.values()
            for kernel in report.kernels
            if kernel.spills > allowed_spills(kernel.name)
        ]
        self.assertEqual(spilling, [])

    def test_variables_leave_shared_memory(self):
        large = [k for report in self.reports.values() for k in report.kernels if k.shared > MAX_SHARED]
        self.assertEqual(large, [])
        self.assertTrue(any(k.shared > 0 for report in self.reports.values() for k in report.kernels))

    def test_no_wgmma_is_serialised(self):
        self.assertEqual([line for report in self.reports.values() for line in report.serialised], [])

    def test_each_file_compiles_in_time(self):
        slow = {
            source: report.seconds for source, report in self.reports.items() if report.seconds > MAX_SECONDS
        }
        self.assertEqual(slow, {})

    def test_no_source_asks_for_an_approximation(self):
        breaches = []
        sources = [*(ROOT / KERNELS).rglob("*.cu*"), *(ROOT / "kernels" / "contract").glob("*.h")]
        for path in sorted(path for path in sources if path.name not in MAY_APPROXIMATE):
            for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
                if APPROXIMATE_SOURCE.search(line.split("//")[0]):
                    breaches.append(f"{path.name}:{number}: {line.strip()}")
        self.assertEqual(breaches, [])

    def test_machine_code(self):
        environment = disassembler()
        if environment is None:
            self.skipTest("SKIPPED: no cuobjdump and nvdisasm; pip install 'python/tools[disassembly]'")
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            codes = pool.map(lambda path: machine_code(path, environment), self.objects.values())
        kernels = 0
        with_wgmma = set()
        for source, code in zip(self.objects, codes, strict=True):
            for name, instructions in code:
                kernels += 1
                needed = [
                    file for file, kernel in NEEDS_WGMMA.items() if re.match(file, source) and kernel in name
                ]
                with_wgmma.update(needed)
                with self.subTest(file=source, kernel=name):
                    self.assertEqual(sorted(set(APPROXIMATION.findall(instructions))), [])
                    if needed:
                        self.assertIn("HGMMA", instructions)
        self.assertEqual(with_wgmma, NEEDS_WGMMA.keys())
        self.assertEqual(kernels, sum(len(report.kernels) for report in self.reports.values()))


class ControlTest(unittest.TestCase):
    """Every rule finds the fault that it is for."""

    REPORT = """ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serial
ptxas info    : Compiling entry function '_ZN6isobit4cuda6KernelILNS_7LeafSumE0ELi8EEEvPf' for 'sm_90a'
ptxas info    : Function properties for _ZN6isobit4cuda6KernelILNS_7LeafSumE0ELi8EEEvPf
    16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 4128 bytes smem
processor time: 91.5 s
"""

    def test_a_report_is_read(self):
        report = parse("kernel.cu", self.REPORT)
        self.assertEqual(
            report.kernels, [Kernel("kernel.cu", "Kernel<(isobit::LeafSum)0, 8>", 168, 16, 12, 4128)]
        )
        self.assertEqual(len(report.serialised), 1)
        self.assertEqual(report.seconds, 91.5)

    def test_spills_are_judged_by_the_kernel(self):
        self.assertEqual(allowed_spills("LinearGeneralKernel<float>"), 16)
        self.assertEqual(allowed_spills("DecodeKernel<64>"), 0)

    def test_approximations_are_found(self):
        for text in ("MUFU.EX2 R1, R2 ;", "@P0 MUFU.LG2 R1, R2"):
            self.assertTrue(APPROXIMATION.search(text))
        for text in ("MUFU.RCP R1, R2 ;", "MUFU.RSQ R1, R2 ;", "FFMA R1, R2, R3, R4"):
            self.assertFalse(APPROXIMATION.search(text))
        for text in ("ex2.approx.ftz.f32", "__expf(x)", "y = rsqrtf(x);", "exp2f (x)", "__frcp_rn(x)"):
            self.assertTrue(APPROXIMATE_SOURCE.search(text))
        for text in ("contract::Exp2(x)", "Log(x)", "__fsqrt_rn(x)", "Exp(x)"):
            self.assertFalse(APPROXIMATE_SOURCE.search(text))

    def test_approximations_are_found_in_machine_code(self):
        environment = disassembler()
        nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
        if environment is None or nvcc is None:
            self.skipTest("SKIPPED: no nvcc, or no cuobjdump and nvdisasm")
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "a.cu"
            source.write_text("__global__ void Kernel(float* x) { *x = __expf(*x); }\n")
            command = [
                nvcc,
                "-gencode=arch=compute_90a,code=sm_90a",
                "-c",
                source,
                "-o",
                source.with_suffix(".o"),
            ]
            subprocess.run(command, check=True)
            ((name, code),) = machine_code(source.with_suffix(".o"), environment)
        self.assertEqual(name, "Kernel")
        self.assertTrue(APPROXIMATION.search(code))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        ResourceUsageTest.build = Path(sys.argv.pop(1)).resolve()
    unittest.main()
