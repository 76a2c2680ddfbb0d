"""Shared by the experiments of this folder: command line, services, model, checks and the JSON file.

An experiment is a program whose main() is `run(__doc__, add_flags, body, quick)`. `body` gets an Experiment,
puts its results into `result`, and checks with check() what must hold. If a check fails, the program exits
with 1 and keeps the services' logs. An experiment measures only through gRPC, as any client could.
"""

import argparse
import dataclasses
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command_line import parse
from google.protobuf.json_format import MessageToDict
from machine import gpu_names

from isobit.client import RolloutClient
from isobit.errors import IsobitError
from isobit.launch import (
    Service,
    ServiceError,
    Services,
    Setting,
    run_model_tool,
    start_comparator,
    start_rollout,
    start_scorer,
    stop_signals_as_exit,
    wait_all_serving,
)
from isobit.screen import Screen
from isobit.v1 import types_pb2

CONTRACT_MODE = "tree"
MODELS = "models"  # below the logs


@dataclass(frozen=True)
class Source:
    """A rollout: one that already runs at `target`, or one to be started."""

    numerics: str
    tp_size: int
    target: str = ""

    def __str__(self) -> str:
        return f"{self.numerics}, TP {self.tp_size}"


class Experiment:
    """One run of one experiment."""

    def __init__(self, arguments: argparse.Namespace, log_dir: Path):
        self.arguments = arguments
        self.screen = Screen()
        self.result: dict[str, Any] = {}
        self.rollout_pid: int | None = None  # of the latest that rollout() started
        self._log_dir = log_dir
        self._model: Path | None = None
        self._checks: list[tuple[bool, str]] = []
        self._services: dict[str, Any] = {}

    @property
    def failures(self) -> int:
        return sum(not passed for passed, _ in self._checks)

    def check(self, passed: bool, text: str) -> None:
        self._checks.append((bool(passed), text))

    @property
    def model(self) -> Path:
        """The model directory; one of random weights is made when first asked for."""
        if self._model is None:
            self._model = self.random_model(1) if self.arguments.shape else self.arguments.model.resolve()
        return self._model

    @property
    def text_model(self) -> Path | None:
        """The model directory if it has a tokenizer."""
        model = None if self.arguments.shape else self.arguments.model
        return model if model and (model / "tokenizer.json").is_file() else None

    def random_model(self, seed: int) -> Path:
        """A directory of --shape; seeds make different weights, also where the services draw them."""
        shape, dummy = self.arguments.shape, self.arguments.dummy_weights
        path = self._log_dir.resolve() / MODELS / f"{shape}-{'dummy-' if dummy else ''}{seed}"
        command = "config" if dummy else "make"
        # One of an earlier run under the same --log_dir is complete if it has a config, written last.
        if not (path / "config.json").is_file():
            with self.screen.progress(f"making {path.name}"):
                run_model_tool(self.arguments.bin_dir, command, shape, str(path), f"--seed={seed}")
        return path

    def sources(self, tp_sizes: Sequence[int]) -> list[Source]:
        """The rollouts named by --rollout, or one for each of --modes and `tp_sizes`."""
        if not self.arguments.rollout:
            return [Source(mode, tp_size) for mode in self.arguments.modes for tp_size in tp_sizes]
        found = []
        for target in self.arguments.rollout:
            with RolloutClient(target) as client:
                info = client.get_server_info()
                found.append(Source(numerics_name(info.server), info.tensor_parallel_size, target))
        return found

    @contextmanager
    def rollout(
        self, source: Source, *flags: str, variant: str = "", model: Path | None = None
    ) -> Iterator[RolloutClient]:
        """A client of `source`, which is started with `flags` and stopped if it does not run already.

        `variant` tells apart rollouts of one source that get different flags. `model`: another directory.
        """
        with ExitStack() as stack:
            target = source.target
            if not target:
                services = stack.enter_context(self.services())
                name = "-".join(("rollout", source.numerics, f"tp{source.tp_size}", *variant.split()))
                with self.screen.progress(f"starting {name}"):
                    rollout = self.start_rollout(services, source, name, *flags, model=model)
                    wait_all_serving(services, (rollout,))
                target, self.rollout_pid = rollout.target, rollout.process.pid
            client = stack.enter_context(RolloutClient(target))
            label = f"rollout, {source}, {variant}" if variant else f"rollout, {source}"
            self.note_info(label, client.get_server_info())
            yield client

    @contextmanager
    def services(self) -> Iterator[Services]:
        """Services that stop with the `with` statement; one that does not stop well fails the experiment."""
        with Services(
            self.arguments.bin_dir, self._log_dir, start_timeout_s=self.arguments.start_timeout_s
        ) as services:
            yield services
            services.stop()
            if services.bad_ends:
                self.check(False, "; ".join(services.bad_ends))

    def start_rollout(
        self, services: Services, source: Source, name: str, *flags: str, model: Path | None = None
    ) -> Service:
        setting = Setting(source.numerics, source.tp_size, shards=1)
        given = (*self._common_flags(), *flags, *self.arguments.rollout_flag)
        return start_rollout(services, setting, model or self.model, name, *given)

    def start_trio(
        self, services: Services, source: Source, shards: int, *rollout_flags: str
    ) -> tuple[Service, Service, Service]:
        """Rollout, scorer and the comparator between them, all serving."""
        name = f"{source.numerics}-tp{source.tp_size}"
        with self.screen.progress(f"starting rollout, scorer and comparator, {source}"):
            # The scorer takes memory of the same GPUs, at the same time.
            flags = ("--gpu_memory_fraction=0.5", *rollout_flags)
            rollout = self.start_rollout(services, source, f"rollout-{name}", *flags)
            given = (*self._common_flags(), *self.arguments.scorer_flag)
            setting = Setting(source.numerics, source.tp_size, shards)
            scorer = start_scorer(services, setting, self.model, f"scorer-{name}", *given)
            comparator = start_comparator(services, rollout, scorer, f"comparator-{name}")
            wait_all_serving(services, (rollout, scorer, comparator))
        return rollout, scorer, comparator

    def note_info(self, name: str, info) -> None:
        """Keeps a service's description for the JSON file."""
        self._services[name] = MessageToDict(info, preserving_proto_field_name=True)

    def report_checks(self) -> None:
        self.screen.line()
        for passed, text in self._checks:
            self.screen.line(f"  {'ok  ' if passed else 'FAIL'}  {text}")

    def as_json(self) -> dict[str, Any]:
        return {
            "experiment": Path(sys.argv[0]).stem,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "cpus": os.cpu_count(),
            "gpus": gpu_names(),
            "arguments": {name: _plain(value) for name, value in vars(self.arguments).items()},
            "services": self._services,
            "checks": [{"passed": passed, "text": text} for passed, text in self._checks],
            "result": self.result,
        }

    def _common_flags(self) -> Sequence[str]:
        load_format = "dummy" if self.arguments.dummy_weights else "auto"
        return (f"--backend={self.arguments.backend}", f"--load_format={load_format}")


def numerics_name(info: types_pb2.ServerInfo) -> str:
    return types_pb2.NumericsMode.Name(info.numerics_mode).removeprefix("NUMERICS_MODE_").lower()


def run(
    doc: str,
    add_flags: Callable[[argparse.ArgumentParser], None],
    body: Callable[[Experiment], None],
    quick: Mapping[str, Any],
) -> int:
    """Runs the whole program. `quick`: the defaults with --quick."""
    arguments = parse(doc, add_flags, quick)
    log_dir = arguments.log_dir or Path(tempfile.mkdtemp(prefix="isobit-experiment-"))
    log_dir.mkdir(parents=True, exist_ok=True)
    experiment = Experiment(arguments, log_dir)
    started = time.monotonic()
    ended_well = False
    try:
        with stop_signals_as_exit():
            body(experiment)
            experiment.report_checks()
            if arguments.json:
                text = json.dumps(experiment.as_json(), indent=1, default=_plain)
                arguments.json.write_text(text + "\n", "utf-8")
            ended_well = experiment.failures == 0
    except (ServiceError, IsobitError, OSError, ValueError) as error:
        experiment.screen.line(f"error: {error}")
    except KeyboardInterrupt:
        experiment.screen.line("interrupted; the services are stopped")
        return 130
    finally:
        keep = arguments.log_dir or not ended_well
        if not arguments.log_dir:
            shutil.rmtree(log_dir / MODELS if keep else log_dir, ignore_errors=True)
        logs = f"; logs in {log_dir}" if keep else ""
        seconds = time.monotonic() - started
        experiment.screen.line(f"\n{seconds:.0f} s, {experiment.failures} checks failed{logs}")
    return 0 if ended_well else 1


def _plain(value: Any) -> Any:
    """`value` in types that json can write."""
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return value
