"""The hardware of this machine: NVIDIA GPUs, from nvidia-smi, and host memory. CUDA is not loaded."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

MIN_DRIVER = 580  # the first driver that runs CUDA 13

_FIELDS = "name,compute_cap,memory.total,memory.free,driver_version"
_TIMEOUT_S = 10.0
_MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU as nvidia-smi describes it."""

    name: str
    compute_capability: str
    total_bytes: int
    free_bytes: int
    driver: str

    @property
    def is_hopper(self) -> bool:
        """Whether the kernels run on it: compute capability 9.0."""
        return self.compute_capability == "9.0"


class NvidiaSmiError(Exception):
    """nvidia-smi exists, but does not answer as expected; the message has its output."""


def gpus() -> list[Gpu]:
    """Returns the GPUs that a service would see, as far as CUDA_VISIBLE_DEVICES lists numbers. Without a
    driver there are none.

    Raises:
      NvidiaSmiError: nvidia-smi does not answer as expected.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return []
    if (program := shutil.which("nvidia-smi")) is None:
        return []
    command = [program, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise NvidiaSmiError(f"nvidia-smi did not answer within {_TIMEOUT_S:.0f} s") from error
    except OSError as error:
        raise NvidiaSmiError(f"nvidia-smi: {error}") from error
    said = (run.stdout + run.stderr).strip()
    if "No devices were found" in said:
        return []
    if run.returncode != 0:
        raise NvidiaSmiError(
            f"nvidia-smi: {said.splitlines()[0] if said else f'exit status {run.returncode}'}"
        )
    found = [_parse(line) for line in run.stdout.splitlines() if line.strip()]
    return _visible(found, visible)


def host_memory() -> tuple[int, int]:
    """Returns the bytes of memory that are free for a new process, and of all memory, both within the
    cgroup's limit. (0, 0) if the kernel does not report them."""
    fields = {}
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, value = line.partition(":")
            fields[name] = int(value.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        return 0, 0
    free, total = fields.get("MemAvailable", 0), fields.get("MemTotal", 0)
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    if limit is not None and limit < total:
        total = limit
        # The cgroup's use includes cached pages of files, which the kernel can free.
        free = min(free, limit - max(0, (used or 0) - _cgroup_files()))
    return max(free, 0), total


def _parse(line: str) -> Gpu:
    parts = [part.strip() for part in line.rsplit(",", _FIELDS.count(","))]
    if len(parts) <= _FIELDS.count(","):
        raise NvidiaSmiError(f"nvidia-smi: expected {_FIELDS}, got {line!r}")
    name, capability, total, free, driver = parts
    return Gpu(name, capability, _mib(total), _mib(free), driver)


def _mib(text: str) -> int:
    """Returns bytes. 0 if nvidia-smi does not know, such as [N/A] for a card that shares the host's
    memory."""
    return int(text) * _MIB if text.isdecimal() else 0


def _visible(found: list[Gpu], visible: str | None) -> list[Gpu]:
    if visible is None:
        return found
    chosen = []
    for word in visible.split(","):
        if not word.strip().isdecimal():  # a UUID, for which nvidia-smi is not asked
            return found
        if int(word) >= len(found):  # as in CUDA, the list ends at the first GPU that does not exist
            break
        chosen.append(found[int(word)])
    return chosen


def _cgroup(name: str) -> int | None:
    try:
        text = Path("/sys/fs/cgroup", name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _cgroup_files() -> int:
    try:
        for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines():
            if line.startswith("inactive_file "):
                return int(line.split()[1])
    except (OSError, ValueError, IndexError):
        pass
    return 0
