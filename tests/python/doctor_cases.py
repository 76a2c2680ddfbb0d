"""What the tests of `isobit doctor` share: configs, machines that are not this one, the command."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

from isobit import doctor, machine

CONFIGS = Path(__file__).parent / "configs"
BIN_DIR = Path(os.environ["ISOBIT_BIN_DIR"])
PROGRAM = "import typer; from isobit.cli.doctor import doctor; typer.run(doctor)"
GB = 10**9
H200 = machine.Gpu("NVIDIA H200", "9.0", 150 * GB, 149 * GB, "580.159.04")
A100 = machine.Gpu("NVIDIA A100-SXM4-80GB", "8.0", 85 * GB, 84 * GB, "580.65.06")


def config(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def verdict_of(report: doctor.Report, name: str) -> doctor.Verdict:
    return next(verdict for verdict in report.verdicts if verdict.name == name)


@contextlib.contextmanager
def a_machine(*gpus: machine.Gpu, memory: tuple[int, int] = (500 * GB, 512 * GB)):
    with (
        mock.patch.object(machine, "gpus", lambda: list(gpus)),
        mock.patch.object(machine, "host_memory", lambda: memory),
    ):
        yield


def examine(name: str, *gpus: machine.Gpu, **options) -> doctor.Report:
    memory = options.pop("memory", (500 * GB, 512 * GB))
    with a_machine(*gpus, memory=memory):
        return doctor.examine(str(CONFIGS / f"{name}.json"), **options)


def write(directory: str, name: str, text: str | bytes) -> Path:
    path = Path(directory, name)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def run(*words: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *words],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )
