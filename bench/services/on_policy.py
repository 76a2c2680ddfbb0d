"""Trains a model on-policy, by mode and seed: reward, KL of rollout to trainer, and a step's time by part.

    python3 bench/services/on_policy.py --backend=cuda --steps=200 --seeds 1 2 3 [--at_once 9] [--json FILE]

Each run is python/examples/on_policy/train.py with a rollout of its own: in `tree`; in `vanilla` as it is;
and in `vanilla` with importance weights of at most 2. With --twins the first seed's run in `tree` is made
again on the CPU, by several processes, with rollouts of other tensor-parallel sizes, stopped and resumed, and
on GPUs by every transport, and must have the same weights after every step; as a control, `vanilla` must not.
Runs at one time share the machine: for times let there be one. Needs PyTorch and isobit.torch
(docs/training.md); --train_flag hands flags to train.py.
"""

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from command_line import ROOT
from experiment import CONTRACT_MODE, Experiment, Source, run
from machine import gpu_names

TRAIN = ROOT / "python" / "examples" / "on_policy" / "train.py"
QUICK = {
    "steps": 2,
    "seeds": [1],
    "twins": True,
    "train_flag": ["--task=share", "--prompts=2", "--samples=2", "--max_tokens=8", "--lr=1e-3"],
}
KEPT = ("reward", "kl", "unequal", "compared", "max_abs_dlogp", "entropy", "grad_norm", "tokens", "seconds")


@dataclass(frozen=True)
class Training:
    """One run."""

    name: str
    numerics: str
    seed: int
    backend: str
    flags: tuple[str, ...] = ()
    processes: int = 1
    tp_size: int = 1  # of the rollout
    devices: str = ""  # of the rollout
    resumed: bool = False  # stopped after half the steps
    is_twin: bool = False

    @property
    def slug(self) -> str:
        return "-".join(f"{self.name} {self.seed}".replace(",", "").split())


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=int, default=200, metavar="N", help="optimizer steps of each run")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N", help="of the draw")
    add("--at_once", type=int, default=1, metavar="N", help="runs at one time")
    add("--twins", action="store_true", help="makes one run in tree in other ways, too")
    add(
        "--train_flag",
        action="append",
        default=[],
        metavar="FLAG",
        help="for train.py, such as --train_flag=--lr=1e-5; may be repeated",
    )


def trainings(arguments: argparse.Namespace) -> list[Training]:
    """The longest first, so that runs at one time end together."""
    found = twins(arguments) if arguments.twins else []
    for seed in arguments.seeds:
        found.append(Training("tree", CONTRACT_MODE, seed, arguments.backend))
        found.append(Training("vanilla", "vanilla", seed, arguments.backend))
        corrected = ("--correction=2.0",)
        found.append(Training("vanilla, corrected", "vanilla", seed, arguments.backend, corrected))
    return found


def twins(arguments: argparse.Namespace) -> list[Training]:
    """The ways to make the first seed's run that must not change a bit; what is large comes first."""

    def twin(name: str, backend: str, *flags: str, **way) -> Training:
        return Training(
            f"tree, {name}", CONTRACT_MODE, arguments.seeds[0], backend, flags, is_twin=True, **way
        )

    found = [
        twin("CPU, 4 processes, TP 4", "cpu", processes=4, tp_size=4),
        twin("CPU, 2 processes, TP 2, resumed", "cpu", processes=2, tp_size=2, resumed=True),
        twin("CPU, 1 process, TP 1", "cpu"),
    ]
    if arguments.backend == "cuda":
        found.append(twin("GPU, CUDA IPC, resumed", "cuda", "--transport=cuda_ipc", resumed=True))
        gpus = len(gpu_names())
        for n in (n for n in (4, 2) if n <= gpus):
            found += [
                twin(f"{n} GPUs, TP {n}, stream", "cuda", processes=n, tp_size=n),
                twin(f"{n} GPUs, TP {n}, CUDA IPC", "cuda", "--transport=cuda_ipc", processes=n, tp_size=n),
            ]
        if gpus > 1:
            found.append(twin("GPU, rollout on another, NCCL", "cuda", "--transport=nccl", devices="1"))
    control = Training("vanilla, CPU", "vanilla", arguments.seeds[0], "cpu", processes=2, tp_size=2)
    return [*found, control]


def train(experiment: Experiment, training: Training, folder: Path) -> list[dict]:
    """The metrics of each step."""
    arguments = experiment.arguments
    source = Source(training.numerics, training.tp_size)
    with experiment.services() as services:
        # Later flags win.
        rollout = experiment.start_rollout(
            services, source, f"rollout-{training.slug}", f"--backend={training.backend}",
            *([f"--devices={training.devices}"] if training.devices else []),
        )  # fmt: skip
        services.wait_serving(rollout)
        output = folder / training.slug
        command = [
            sys.executable,
            *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={training.processes}"),
            str(TRAIN),
            f"--rollout={rollout.target}",
            f"--model={experiment.model}",
            f"--output={output}",
            f"--save_every={arguments.steps}",
            f"--device={training.backend}",
            f"--numerics={training.numerics}",
            *arguments.train_flag,
            f"--seed={training.seed}",
            *training.flags,
        ]
        half = [[f"--steps={arguments.steps // 2}"]] if training.resumed else []
        last = [f"--steps={arguments.steps}", *(["--resume"] if training.resumed else [])]
        for some in (*half, last):
            result = subprocess.run(
                [*command, *some], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
            )
            if result.returncode:
                end = "\n".join((result.stdout + result.stderr).splitlines()[-15:])
                raise ValueError(f"{training.name}, seed {training.seed}: train.py failed:\n{end}")
    lines = (output / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def parts(steps: list[dict]) -> dict[str, float]:
    """Median seconds of each part of a step; the first step warms up."""
    names = steps[0]["seconds"]
    return {name: statistics.median(step["seconds"][name] for step in steps[1:] or steps) for name in names}


def row(training: Training, steps: list[dict]) -> dict:
    compared = sum(step["compared"] for step in steps)
    tenth = max(len(steps) // 10, 1)
    return {
        "run": training.name,
        "seed": training.seed,
        "tokens": compared,
        "unequal": sum(step["unequal"] for step in steps),
        "kl": sum(step["kl"] * step["compared"] for step in steps) / compared,
        "max_abs_dlogp": max(step["max_abs_dlogp"] for step in steps),
        "reward_first": statistics.fmean(step["reward"] for step in steps[:tenth]),
        "reward_last": statistics.fmean(step["reward"] for step in steps[-tenth:]),
        "parts": parts(steps),
        "digests": [step["weights_digest"] for step in steps],
        "steps": [{name: step[name] for name in KEPT} for step in steps],
    }


def body(experiment: Experiment) -> None:
    arguments = experiment.arguments
    folder = experiment.model.parent / "runs" if arguments.shape else Path(arguments.log_dir or ".") / "runs"
    runs = trainings(arguments)
    with ThreadPoolExecutor(arguments.at_once) as pool:
        rows = [
            row(training, steps)
            for training, steps in zip(
                runs, pool.map(lambda training: train(experiment, training, folder), runs), strict=True
            )
        ]
    for found in rows:
        said = f"{found['run']}, seed {found['seed']}: {found['unequal']} of {found['tokens']} tokens unequal"
        is_tree = found["run"].startswith("tree")
        experiment.check((found["unequal"] == 0 and found["kl"] == 0) == is_tree, said)
    if arguments.twins:
        by_name = {found["run"]: found["digests"] for found in reversed(rows)}  # the first seed's
        for training in (training for training in runs if training.is_twin):
            equal = sum(a == b for a, b in zip(by_name[training.name], by_name["tree"], strict=True))
            experiment.check(
                equal == arguments.steps, f"{training.name}: {equal} of {arguments.steps} digests are tree's"
            )
        experiment.check(
            by_name["vanilla, CPU"][-1] != by_name["vanilla"][-1], "control: vanilla has other weights"
        )
    experiment.result = {"runs": rows}
    experiment.screen.line("\nseconds of a step by part are medians\n")
    names = list(rows[0]["parts"])
    experiment.screen.table(
        ("run", "seed", "tokens", "unequal", "KL", "max |dlogp|", "reward", *names),
        [
            (
                found["run"],
                *(str(found[name]) for name in ("seed", "tokens", "unequal")),
                f"{found['kl']:.2e}",
                f"{found['max_abs_dlogp']:.2e}",
                f"{found['reward_first']:.3f} to {found['reward_last']:.3f}",
                *(f"{found['parts'][name]:.2f}" for name in names),
            )
            for found in rows
        ],
    )


if __name__ == "__main__":
    sys.exit(run(__doc__, add_flags, body, QUICK))
