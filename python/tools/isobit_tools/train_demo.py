"""Trains a model on-policy with isobit and, for comparison, in mode vanilla. Shows reward and gap of both.

    python -m isobit_tools.train_demo   (from the root of a built checkout; `make train-demo` builds it first)

Each run has its own services and trains the same model on the same prompts with
python/examples/on_policy/train.py. In `tree`, no logprob of any step may differ between sampler and trainer,
and a second run at another tensor-parallel size and number of processes must have the same weights after
every step. In `vanilla`, logprobs must differ. The exit status is 0 only if all of this is so. Flags that are
not listed below are passed to train.py.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from isobit.command_line import Parser
from isobit.errors import IsobitError
from isobit.launch import (
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
from isobit.screen import Progress, Screen

ROOT = Path(__file__).resolve().parents[3]
TRAIN = ROOT / "python" / "examples" / "on_policy" / "train.py"
# The reward must rise by at least this much.
RISE = 0.1
# torchrun gives its processes 30 s to save and to end.
_STOP_TIMEOUT_S = 40.0
_STEP = re.compile(r"step (\d+)/\d+  (reward \S+  unequal \d+ of \d+  KL \S+)")


class TrainError(Exception):
    """A run of train.py failed; the message has the end of its output."""


@dataclass
class Run:
    """One run: a row of the table, and perhaps a line of the picture."""

    name: str
    setting: Setting
    processes: int
    flags: tuple[str, ...] = ()
    drawn: bool = True  # whether it is in the picture
    steps: list[dict] = field(default_factory=list)  # the lines of metrics.jsonl
    seconds: float = 0.0

    @property
    def compared(self) -> int:
        return sum(step["compared"] for step in self.steps)

    @property
    def unequal(self) -> int:
        return sum(step["unequal"] for step in self.steps)

    @property
    def kl(self) -> float:
        """The mean over all tokens."""
        return sum(float(step["kl"]) * step["compared"] for step in self.steps) / max(self.compared, 1)

    @property
    def max_abs_dlogp(self) -> float:
        return max(float(step["max_abs_dlogp"]) for step in self.steps)

    def reward(self, end: slice) -> float:
        rewards = [step["reward"] for step in self.steps[end]]
        return sum(rewards) / len(rewards)

    @property
    def rewards(self) -> tuple[float, float]:
        """The mean rewards of the first and of the last tenth of the steps."""
        tenth = max(len(self.steps) // 10, 1)
        return self.reward(slice(tenth)), self.reward(slice(-tenth, None))


def runs_of(tp_size: int, processes: int, shards: int) -> list[Run]:
    vanilla = Setting("vanilla", tp_size, shards)
    return [
        Run("tree", Setting("tree", tp_size, shards), processes),
        Run("tree, other cut", Setting("tree", 1, 1), 1, drawn=False),
        Run("vanilla", vanilla, processes, ("--numerics=vanilla",)),
        Run("vanilla, corrected", vanilla, processes, ("--numerics=vanilla", "--correction=2.0")),
    ]


class TrainDemo:
    """All runs. `failures` counts the checks that failed."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        train_flags: Sequence[str],
        screen: Screen,
        log_dir: Path,
        model: Path,
    ):
        self._arguments = arguments
        self._train_flags = train_flags
        self._screen = screen
        self._log_dir = log_dir
        self._model = model
        self._runs = runs_of(arguments.tp_size, arguments.processes, arguments.shards)
        self._checks: list[tuple[bool, str]] = []

    @property
    def failures(self) -> int:
        return sum(not passed for passed, _ in self._checks)

    def run(self) -> None:
        for run in self._runs:
            self._train(run)
        self._check_all()
        self._report()

    def _train(self, run: Run) -> None:
        setting = run.setting
        self._screen.line(
            f"\n{run.name}: rollout at TP {setting.tp_size}, scorer on {setting.shards} shards, trainer of"
            f" {run.processes} processes"
        )
        name = re.sub(r"\W+", "-", run.name)
        start = time.monotonic()
        with Services(self._arguments.bin_dir, self._log_dir) as services:
            rollout = start_rollout(services, setting, self._model, f"{name}-rollout")
            scorer = start_scorer(services, setting, self._model, f"{name}-scorer")
            comparator = start_comparator(services, rollout, scorer, f"{name}-comparator")
            wait_all_serving(services, (rollout, scorer, comparator))
            output = self._log_dir / name
            flags = [
                f"--rollout={rollout.target}",
                f"--scorer={scorer.target}",
                f"--comparator={comparator.target}",
                f"--model={self._model}",
                f"--steps={self._arguments.steps}",
                f"--output={output}",
                "--device=cpu",
            ]
            self._torchrun(run, name, [*flags, *self._train_flags, *run.flags])
            services.stop()
        run.seconds = time.monotonic() - start
        run.steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text("utf-8").splitlines()]
        self._check(
            not services.bad_ends,
            "; ".join(services.bad_ends) or f"{run.name}: every service ended with status 0",
        )

    def _torchrun(self, run: Run, name: str, flags: Sequence[str]) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={run.processes}", str(TRAIN), *flags]
        paths = [str(ROOT / "python"), os.environ.get("PYTHONPATH", "")]
        log = self._log_dir / f"{name}.log"
        with (
            log.open("w") as file,
            self._screen.progress(f"  {run.name}", self._arguments.steps) as progress,
            subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # Ctrl-C reaches only this process, which then stops all in order
            ) as process,
        ):
            try:
                for line in process.stdout:
                    file.write(line)
                    self._show(line, progress)
            except BaseException:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(_STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode != 0:
            tail = "\n".join(f"    {line}" for line in log.read_text("utf-8").splitlines()[-15:])
            raise TrainError(f"{run.name}: train.py ended with status {process.returncode}. {log}:\n{tail}")

    def _show(self, line: str, progress: Progress) -> None:
        """Shows some of the steps' lines, and the progress of all steps."""
        if found := _STEP.match(line):
            progress.done, progress.note = int(found[1]), found[2]
            if progress.done % max(self._arguments.steps // 5, 1) == 0:
                self._screen.line(f"  {line.rstrip()}")

    def _check(self, passed: bool, text: str) -> None:
        self._checks.append((passed, text))

    def _check_all(self) -> None:
        tree, other, *vanillas = self._runs
        for run in (tree, other):
            text = (
                f"{run.name}: {run.compared} tokens of {len(run.steps)} steps compared, {run.unequal} unequal"
            )
            self._check(run.unequal == 0 and run.compared > 0 and run.kl == 0, text)
        if self._arguments.model is None:  # with the random model it is certain what is learned
            first, last = tree.rewards
            self._check(last > first + RISE, f"tree: the reward rose from {first:.3f} to {last:.3f}")
        digests = [[step["weights_digest"] for step in run.steps] for run in (tree, other)]
        self._check(
            digests[0] == digests[1] and len(digests[0]) == self._arguments.steps,
            f"tree: both cuts end with the weights {digests[0][-1][:16]}, {digests[1][-1][:16]}, and had the"
            " same at every step",
        )
        for run in vanillas:
            text = f"{run.name}: {run.unequal} of {run.compared} tokens unequal; this mode must show a gap"
            self._check(run.unequal > 0, text)

    def _report(self) -> None:
        self._screen.line("\nResult\n")
        header = ("mode", "TP", "processes", "steps", "tokens", "unequal", "max |dlogp|", "KL", "reward", "s")
        self._screen.table(
            header,
            [
                (
                    run.name,
                    *map(
                        str, (run.setting.tp_size, run.processes, len(run.steps), run.compared, run.unequal)
                    ),
                    *(_number(value) for value in (run.max_abs_dlogp, run.kl)),
                    "{:.3f} to {:.3f}".format(*run.rewards),
                    f"{run.seconds:.0f}",
                )
                for run in self._runs
            ],
        )
        picture = self._log_dir / "on_policy.png"
        draw([run for run in self._runs if run.drawn], f"{self._model.name}, CPU", picture)
        self._screen.line(
            "\n  unequal: tokens whose logprob has other bits in the trainer than in the rollout; KL: of"
            f"\n  rollout to trainer (k3), the mean over tokens. The picture: {picture}\n"
        )
        for passed, text in self._checks:
            self._screen.line(f"  {'ok  ' if passed else 'FAIL'}  {text}")


def draw(runs: Sequence[Run], title: str, path: Path) -> None:
    """Draws reward and KL over steps, one line for each run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    rewards, kls = figure.subplots(1, 2)
    styles = ("-", "--", ":")
    for run, style in zip(runs, styles, strict=True):
        steps = [step["step"] for step in run.steps]
        rewards.plot(steps, [step["reward"] for step in run.steps], style, label=run.name)
        kls.plot(steps, [step["kl"] for step in run.steps], style, label=run.name)
    kls.set_yscale("symlog", linthresh=1e-6)  # an axis that includes 0
    kls.set_ylim(bottom=-2e-7)
    for axes, name in ((rewards, "mean reward"), (kls, "KL(rollout || trainer), nats a token")):
        axes.set_xlabel("step")
        axes.set_title(name, fontsize="medium")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(title, fontsize="medium")
    FigureCanvasAgg(figure).print_png(path)


def _number(value: float) -> str:
    """Formats a number; only an exact zero gives "0"."""
    return "0" if value == 0 else f"{value:.2e}"


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = Parser(
        prog="python -m isobit_tools.train_demo",
        description="Trains a model on-policy in `tree` and in `vanilla`. Other flags go to train.py.",
    )
    add = parser.add_argument
    add("--model", type=Path, help="a Hugging Face directory (default: a random model of 3 layers)")
    add("--steps", type=int, default=32, help="optimizer steps of each run (default: %(default)s)")
    add("--processes", type=int, default=2, help="processes of the trainer (default: %(default)s)")
    add("--tp_size", type=int, default=4, help="tensor-parallel size of the rollout (default: %(default)s)")
    add("--shards", type=int, default=2, help="shards of the scorer (default: %(default)s)")
    add(
        "--bin_dir",
        type=Path,
        default=Path("build/release/bin"),
        help="the folder of the services (default: %(default)s)",
    )
    add(
        "--log_dir",
        type=Path,
        help="a new folder for logs, metrics and picture (default: logs/train-demo-TIME)",
    )
    return parser.parse_known_args(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    arguments, train_flags = _parse(argv)
    screen = Screen()
    log_dir = (arguments.log_dir or Path(time.strftime("logs/train-demo-%Y%m%d-%H%M%S"))).absolute()
    start = time.monotonic()
    try:
        with stop_signals_as_exit():
            log_dir.mkdir(parents=True)
            if arguments.model:
                model = arguments.model.resolve()
            else:
                model = log_dir / "random-model"
                run_model_tool(arguments.bin_dir, "make", "tiny-qwen3", str(model), "--seed", "1")
                train_flags = ["--max_tokens=24", "--lr=1e-3", *train_flags]
            screen.line(f"{model.name}: logs, metrics and picture in {log_dir}")
            demo = TrainDemo(arguments, train_flags, screen, log_dir, model)
            demo.run()
            screen.line(f"\n{time.monotonic() - start:.0f} s in total; {demo.failures} checks failed")
            return 1 if demo.failures else 0
    except (ServiceError, TrainError, IsobitError, OSError, ValueError) as error:
        screen.line(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        screen.line("\ninterrupted; the trainer and the services were stopped")
        return 130


if __name__ == "__main__":
    sys.exit(main())
