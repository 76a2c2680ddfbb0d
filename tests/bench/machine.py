"""What this machine says of memory: of a process, by /proc, and of the GPUs, by nvidia-smi."""

import subprocess
from collections.abc import Sequence
from pathlib import Path

_MIB = 1 << 20


def gpu_names() -> list[str]:
    """One for each GPU; empty without nvidia-smi."""
    return _nvidia_smi("name")


def device_memory_mib() -> float | None:
    """In use on all GPUs together, by whomever; None without one."""
    used = _nvidia_smi("memory.used")
    return sum(float(value) for value in used) if used else None


def host_memory_mib(pid: int) -> dict[str, float]:
    """Resident memory of one process: `total`, and `own`, which leaves mapped files out.

    A mapped checkpoint comes and goes with the page cache; what a process leaks is its own.
    """
    fields = {}
    for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "RssAnon", "RssShmem"):
            fields[name] = int(value.split()[0]) * 1024 / _MIB
    return {"total": fields["VmRSS"], "own": fields["RssAnon"] + fields["RssShmem"]}


def _nvidia_smi(column: str) -> Sequence[str]:
    command = ["nvidia-smi", f"--query-gpu={column}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return result.stdout.split("\n")[:-1]
