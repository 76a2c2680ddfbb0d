"""Times a weight sync without a disk: from the trainer's call to the first token of the new weights.

    python3 tests/bench/weight_sync.py [--model DIR] [--tp_size 4] [--rounds 5] [--json FILE]
    python3 tests/bench/weight_sync.py --backend=cuda --trainer_dtype=float32 --tp_size=1 --shape=qwen3-8b \
        --dummy_weights --rollout_flag=--gpu_memory_fraction=0.5

Each round changes the weights, sends them to a rollout by stream, and asks for one token, which must be of
the new version. Beside it: an update from a directory, which reads as many bytes from the page cache. With
--trainer_dtype the weights are those of a trainer's model on the rollout's GPU, which reads them there (CUDA
IPC); that needs PyTorch and transformers, and for the digest's speed isobit.torch.
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
    add("--trainer_dtype", choices=("float32", "bfloat16"), help="of a model on the GPU of --backend=cuda")


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
    if experiment.arguments.trainer_dtype:
        return colocated(experiment)
    return streamed(experiment)


def colocated(experiment: Experiment) -> None:
    """A trainer's model on the GPU that the rollout computes on."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import isobit.torch as it

    arguments = experiment.arguments
    with experiment.rollout(Source(CONTRACT_MODE, arguments.tp_size)) as client:
        client.generate([1, 2, 3], max_tokens=1)
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(experiment.model), dtype=getattr(torch, arguments.trainer_dtype)
            )
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        rounds = []
        for _ in range(arguments.rounds + 1):
            with torch.no_grad():
                next(model.parameters()).view(-1)[0] += 1
            torch.cuda.synchronize()
            start = time.monotonic()
            digest = it.model_digest(model)
            digested = time.monotonic() - start
            held = it.held_weights(model)
            listed = time.monotonic() - start - digested
            parts = timed(
                client, lambda h=held, d=digest: client.update_weights_from_tensor(h, expected_digest=d)
            )
            parts = {"digest": digested, "list": listed, **parts}
            parts["first token"] += digested + listed
            rounds.append(parts)
            experiment.check(client.get_server_info().server.weight_version.digest == digest, "one digest")
    experiment.result = {"bytes": size, "ways": [{"way": "cuda_ipc", "rounds": rounds}]}
    experiment.screen.line(
        f"\n{size * 1e-9:.1f} GB of {arguments.trainer_dtype}, seconds, of {arguments.rounds}\n"
    )
    measured = rounds[1:]  # the first opens the memory, and takes its own
    cells = [
        (part, *(f"{of([r[part] for r in measured]):.3f}" for of in (min, statistics.median, max)),
         f"{rounds[0][part]:.3f}")
        for part in rounds[0]
    ]  # fmt: skip
    experiment.screen.table(("", "min", "median", "max", "first"), cells)


def streamed(experiment: Experiment) -> None:
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
