"""What a process uses: CPU time and memory, from /proc, and memory of the GPUs, from nvidia-smi."""

import contextlib
import os
import subprocess
from collections.abc import Collection
from pathlib import Path

_MIB = 1 << 20


def gpu_names() -> list[str]:
    """One for each GPU; empty without nvidia-smi."""
    return _nvidia_smi("--query-gpu=name")


def device_memory_mib(pids: Collection[int]) -> float | None:
    """MiB that these processes use on all GPUs together; None if none of them has a GPU open.

    If the driver does not tell processes apart, the memory that all processes use.
    """
    if not any(map(_has_gpu_open, pids)):
        return None
    rows = [row.split(", ") for row in _nvidia_smi("--query-compute-apps=pid,used_memory")]
    own = [used for pid, used in rows if int(pid) in pids]
    if not own or not all(used.isdigit() for used in own):
        own = _nvidia_smi("--query-gpu=memory.used")
    return sum(map(float, own))


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process since it began, also within the system."""
    fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def host_memory_mib(pid: int) -> dict[str, float]:
    """Resident MiB of one process: `total`, and `own`, which is without mapped files.

    The page cache decides how much of a mapped checkpoint is resident; a leak shows in `own`.
    """
    fields = {}
    for line in Path(f"/proc/{pid}/status").read_text("utf-8").splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "RssAnon", "RssShmem"):
            fields[name] = int(value.split()[0]) * 1024 / _MIB
    return {"total": fields["VmRSS"], "own": fields["RssAnon"] + fields["RssShmem"]}


def _has_gpu_open(pid: int) -> bool:
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(entry).startswith("/dev/nvidia"):
                return True
    return False


def _nvidia_smi(query: str) -> list[str]:
    """The lines of nvidia-smi's answer; none without nvidia-smi."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return result.stdout.splitlines()
