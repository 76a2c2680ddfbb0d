"""Times a weight sync without a disk: from the trainer's call to the first token of the new weights.

    python3 tests/bench/weight_sync.py [--model DIR] [--tp_size 4] [--rounds 5] [--json FILE]

Each round changes the weights, sends them to a rollout by stream, and asks for one token, which must be of
the new version. Beside it: an update from a directory, which reads as many bytes from the page cache.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from experiment import CONTRACT_MODE, Experiment, Source, run

from isobit.client import RolloutClient
from isobit.weights import digest_of
from isobit_tools.bf16_files import bf16_tensors

QUICK = {"tp_size": 2, "rounds": 2}
PARTS = ("update", "stage", "switch", "first token")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tp_size", type=int, default=4, metavar="N", help="of the rollout")
    add("--rounds", type=int, default=5, metavar="N", help="updates of each kind")


def timed(client: RolloutClient, update: Callable) -> dict[str, float]:
    """The seconds of an update's parts; `first token` counts from the call."""
    start = time.monotonic()
    response = update()
    updated = time.monotonic() - start
    (sample,) = client.generate([1, 2, 3], max_tokens=1)
    first = time.monotonic() - start
    if sample.weight_version.id != response.current.id:
        raise ValueError(f"a token of {sample.weight_version}, expected {response.current}")
    return dict(zip(PARTS, (updated, response.stage_micros * 1e-6, response.switch_micros * 1e-6, first),
                    strict=True))  # fmt: skip


def body(experiment: Experiment) -> None:
    arguments = experiment.arguments
    tensors = bf16_tensors(experiment.model)
    changed = min(tensors.values(), key=lambda tensor: tensor.size)
    size = sum(tensor.nbytes for tensor in tensors.values())
    rows = []
    with experiment.rollout(Source(CONTRACT_MODE, arguments.tp_size)) as client:
        client.generate([1, 2, 3], max_tokens=1)
        ways = {
            "stream": lambda: client.update_weights_from_stream(tensors),
            "stream, no digest": lambda: client.update_weights_from_stream(tensors, expected_digest=""),
            "directory": lambda: client.update_weights(experiment.model.name),
        }
        digests = set()
        for way, update in ways.items():
            rounds = []
            for _ in range(arguments.rounds):
                changed ^= np.uint16(1)
                rounds.append(timed(client, update))
                digests.add(client.get_server_info().server.weight_version.digest)
            rows.append({"way": way, "rounds": rounds})
        changed ^= np.uint16(1)
        experiment.check(digest_of(tensors) in digests and len(digests) == 2, "the weights had two digests")
    experiment.result = {"bytes": size, "ways": rows}
    experiment.screen.line(f"\n{size * 1e-6:.0f} MB, seconds, median of {arguments.rounds}\n")
    cells = [
        (row["way"], *(f"{statistics.median(r[part] for r in row['rounds']):.2f}" for part in PARTS))
        for row in rows
    ]
    experiment.screen.table(("", *PARTS), cells)


if __name__ == "__main__":
    sys.exit(run(__doc__, add_flags, body, QUICK))
