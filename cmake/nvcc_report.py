#!/usr/bin/env python3
"""Runs a compile command of nvcc and keeps what the assembler says of it beside the object file.

CMake calls it as the launcher of the CUDA compiler: `nvcc_report.py [ccache] nvcc ... -o NAME.o`. The file
NAME.o.report then holds, for each kernel, registers, stack, spills and serialised wgmma (`ptxas -v`), and
last the processor time of the compilation; tests/kernels/cuda/resource_usage_test.py reads it. Everything
else that nvcc says goes on to stderr.
"""

import resource
import subprocess
import sys
from pathlib import Path

# Lines of ptxas that are no complaints: 'ptxas info : ...' and the indented ones that go with them.
REPORT_STARTS = ("ptxas info", "    ")


def main() -> int:
    command = sys.argv[1:]
    run = subprocess.run([*command, "-Xptxas=-v"], stderr=subprocess.PIPE, text=True)
    lines = run.stderr.splitlines(keepends=True)
    report = [line for line in lines if line.startswith(REPORT_STARTS)]
    sys.stderr.writelines(line for line in lines if not line.startswith(REPORT_STARTS))
    if run.returncode == 0 and "-o" in command:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds = f"processor time: {used.ru_utime + used.ru_stime:.1f} s\n"
        output = Path(command[command.index("-o") + 1])
        output.with_name(output.name + ".report").write_text("".join(report) + seconds, encoding="utf-8")
    return run.returncode


if __name__ == "__main__":
    sys.exit(main())
