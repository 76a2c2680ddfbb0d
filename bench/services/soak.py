"""Mixed work on one trio of services for a given time, and what must hold afterwards.

    python3 bench/services/soak.py [--shape qwen3-8b] [--duration_s 600] [--update_every_s 30] [--json FILE]

Clients send random requests, some of which they cancel or abort, or which time out. A comparator compares
completions all the time, and some of its calls are cancelled. At intervals both sides update their weights:
with --shape from one of two directories to the other, else to the same again. At the end of each round
nothing is in flight.
The exit status is 0 only if no compared token was unequal, nothing stayed allocated, no process grew on host
or GPUs, no call failed in a way that it must not, and every service ended well.
"""

import argparse
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack

from background import BackgroundLoad
from disturbance import Comparing, disturb
from experiment import CONTRACT_MODE, Experiment, Source, run
from machine import device_memory_mib, host_memory_mib

from isobit import ComparatorClient, RolloutClient, ScorerClient

QUICK = {
    "tp_size": 4,
    "shards": 2,
    "duration_s": 6.0,
    "rounds": 3,
    "update_every_s": 0.7,
    "clients": 4,
    "max_tokens": 48,
}
DRAIN_TIMEOUT_S = 60.0
SERVICES = ("rollout", "scorer", "comparator")
IN_FLIGHT_MODES = ("abort", "wait", "recompute_kv")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tp_size", type=int, default=4, metavar="N", help="of the rollout")
    add("--shards", type=int, default=4, metavar="N", help="of the scorer")
    add("--duration_s", type=float, default=600, metavar="S", help="of all rounds together")
    add("--rounds", type=int, default=4, metavar="N", help="memory may not grow over the second half")
    add("--update_every_s", type=float, default=30, metavar="S", help="between two weight updates")
    add("--clients", type=int, default=32, metavar="N", help="that send random requests")
    add("--max_tokens", type=int, default=256, metavar="N", help="of each prompt and completion")
    add("--host_growth_mib", type=float, default=64, metavar="N", help="that a process may grow by")
    add("--device_growth_mib", type=float, default=4, metavar="N", help="likewise, times the GPUs in use")
    parser.set_defaults(modes=[CONTRACT_MODE])


class Soak:
    """The trio at work."""

    def __init__(self, experiment: Experiment, stack: ExitStack):
        arguments = experiment.arguments
        self._experiment = experiment
        source = Source(arguments.modes[0], arguments.tp_size)
        services = stack.enter_context(experiment.services())
        self._services = experiment.start_trio(services, source, arguments.shards)
        rollout, scorer, comparator = (service.target for service in self._services)
        self._rollout = stack.enter_context(RolloutClient(rollout))
        self._scorer = stack.enter_context(ScorerClient(scorer))
        self._comparator = stack.enter_context(ComparatorClient(comparator))
        info = self._comparator.get_server_info()
        experiment.note_info("comparator at the start", info)
        self._vocab_size = info.rollout.server.model.vocab_size
        self._comparing = Comparing(self._vocab_size, arguments.max_tokens)
        self._generator = random.Random(arguments.seed)
        models = [experiment.model, experiment.random_model(2)] if arguments.shape else [experiment.model]
        # The services have the first already.
        self._models = itertools.cycle([model.name for model in (*models[1:], models[0])])
        self._started = time.monotonic()
        self._next_update = self._started + arguments.update_every_s
        self.counts: Counter[str] = Counter()

    def work(self, seconds: float, seed: str) -> None:
        """One round: mixed work, with weight updates, until all of it has ended."""
        arguments = self._experiment.arguments
        end = time.monotonic() + seconds
        action = disturb(self._vocab_size, arguments.max_tokens)
        with (
            BackgroundLoad(RolloutClient, self._rollout.target, arguments.clients, action, seed) as clients,
            BackgroundLoad(ComparatorClient, self._comparator.target, 1, self._comparing, seed) as comparing,
        ):
            while (now := time.monotonic()) < end:
                if now >= self._next_update:
                    self._update()
                    self._next_update += arguments.update_every_s
                time.sleep(max(0.0, min(end, self._next_update) - time.monotonic()))
        self.counts += clients.counts + comparing.counts

    def _update(self) -> None:
        """Updates both sides' weights; comparisons in flight may fail because of it."""
        model, version = next(self._models), self._rollout.get_server_info().server.weight_version.id + 1
        mode = self._generator.choice(IN_FLIGHT_MODES)
        with self._comparing.while_weights_differ():
            first = self._rollout.update_weights(model, weight_version=version, in_flight=mode)
            self._scorer.update_weights(model, weight_version=version, expected_digest=first.current.digest)
        self.counts[f"updates, in flight: {mode}"] += 1

    def rest(self) -> dict:
        """Waits until nothing is in flight; returns what is in use then."""
        deadline = time.monotonic() + DRAIN_TIMEOUT_S
        while (taken := self._taken()) and time.monotonic() < deadline:
            time.sleep(0.05)
        for service in self._services:
            service.check_alive()
        return {
            "seconds": time.monotonic() - self._started,
            "left_taken": taken,
            "obstacle": self._comparator.get_server_info().obstacle,
            "host_mib": {
                name: host_memory_mib(service.process.pid)
                for name, service in zip(SERVICES, self._services, strict=True)
            },
            "device_mib": device_memory_mib([service.process.pid for service in self._services]),
        }

    def _taken(self) -> dict[str, int]:
        load, scorer = self._rollout.get_load(), self._scorer.get_server_info()
        taken = {
            "pages": load.num_used_pages,
            "running requests": load.num_running_requests,
            "waiting requests": load.num_waiting_requests,
            "full layers of the scorer": scorer.resident_full_layers,
        }
        return {name: count for name, count in taken.items() if count}

    def total(self):
        """The comparator's total since it started."""
        info = self._comparator.get_server_info()
        self._experiment.note_info("comparator at the end", info)
        return info.total


def body(experiment: Experiment) -> None:
    arguments = experiment.arguments
    with ExitStack() as stack:
        soak = Soak(experiment, stack)
        rests = []
        for index in range(arguments.rounds):
            with experiment.screen.progress(f"round {index + 1} of {arguments.rounds}"):
                soak.work(arguments.duration_s / arguments.rounds, f"{arguments.seed}/{index}")
                rests.append(soak.rest())
        total = soak.total()
    experiment.result = {"rests": rests, "counts": soak.counts}
    report(experiment, rests, soak.counts)
    check(experiment, rests, soak.counts, total)


def report(experiment: Experiment, rests: Sequence[dict], counts: Counter[str]) -> None:
    line, table = experiment.screen.line, experiment.screen.table
    line("\nMemory with nothing in flight, in MiB (a process's own, mapped files left out)\n")
    cells = [
        (
            f"{rest['seconds']:.0f} s",
            *(f"{rest['host_mib'][name]['own']:.1f}" for name in SERVICES),
            "-" if rest["device_mib"] is None else f"{rest['device_mib']:.0f}",
        )
        for rest in rests
    ]
    table(("after", *SERVICES, "all GPUs"), cells)
    line("\nDone\n")
    table(("what", "times"), [(name, str(count)) for name, count in sorted(counts.items())])


def check(experiment: Experiment, rests: Sequence[dict], counts: Counter[str], total) -> None:
    arguments = experiment.arguments
    statistics = total.statistics
    experiment.check(
        statistics.num_unequal == 0 and statistics.num_tokens > 0,
        f"{statistics.num_tokens} tokens compared, {statistics.num_unequal} unequal",
    )
    updates = sum(count for name, count in counts.items() if name.startswith("updates"))
    experiment.check(updates > 0, f"{updates} weight updates on both sides")
    taken = [rest["left_taken"] for rest in rests]
    experiment.check(not any(taken), f"left taken after the rounds: {taken if any(taken) else 'nothing'}")
    obstacles = {rest["obstacle"] for rest in rests} - {""}
    experiment.check(not obstacles, f"sides at rest: {'; '.join(obstacles) or 'of equal weights'}")
    # What is used late for the first time, such as a kernel that CUDA then loads, is no leak: memory may
    # grow in the first half of the rounds.
    settled = rests[(len(rests) - 1) // 2 :]
    for name in SERVICES:
        growth = settled[-1]["host_mib"][name]["own"] - settled[0]["host_mib"][name]["own"]
        experiment.check(
            growth <= arguments.host_growth_mib,
            f"{name}: {growth:+.1f} MiB of host memory over the second half of the rounds",
        )
    device = [rest["device_mib"] for rest in settled if rest["device_mib"] is not None]
    if device:
        growth = device[-1] - device[0]
        # The driver hands memory out by 2 MiB for each process and GPU.
        allowed = arguments.device_growth_mib * max(arguments.tp_size, arguments.shards)
        experiment.check(
            growth <= allowed, f"GPUs: {growth:+.0f} MiB of device memory over the second half of the rounds"
        )


if __name__ == "__main__":
    sys.exit(run(__doc__, add_flags, body, QUICK))
