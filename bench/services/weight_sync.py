"""Times a weight sync without a disk: from the trainer's call to the first token of the new weights.

    python3 bench/services/weight_sync.py [--model DIR] [--tp_size 4] [--rounds 5] [--json FILE]
    python3 bench/services/weight_sync.py --backend=cuda --shape=qwen3-8b --dummy_weights --tp_size=1 \
        --trainer_dtype=float32 --rollout_flag=--gpu_memory_fraction=0.5 --trainer_devices=1 --transport=nccl

Each round changes the weights, sends them to a rollout by stream, and asks for one token, which must be of
the new version. Beside it: an update from a directory, which reads as many bytes from the page cache. With
--trainer_dtype the weights are those of a trainer of one process for each of --trainer_devices, under FSDP2
if there are several; --transport=cuda_ipc lets the rollout read them where they lie, nccl has the trainer
send them. That needs PyTorch and transformers, and for the digest's speed isobit.torch.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from experiment import CONTRACT_MODE, Experiment, Source, run

from isobit.client import RolloutClient
from isobit.weights import digest_of
from isobit_tools.bf16_files import bf16_tensors

QUICK = {"tp_size": 2, "rounds": 2}
TIMED = ("update", "stage", "switch", "first token")


def add_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tp_size", type=int, default=4, metavar="N", help="of the rollout")
    add("--rounds", type=int, default=5, metavar="N", help="updates of each kind")
    add("--trainer_dtype", choices=("float32", "bfloat16"), help="of a model on GPUs, with --backend=cuda")
    add(
        "--trainer_devices", type=int, nargs="+", default=[0], metavar="N", help="GPUs of the trainer's ranks"
    )
    add("--transport", choices=("cuda_ipc", "nccl"), default="cuda_ipc", help="of the trainer's weights")
    add("--one_allocation", action="store_true", help="lays the weights of each trainer's rank in one")


def timed(client: RolloutClient, update: Callable) -> dict[str, float]:
    """The seconds of an update's parts; `first token` counts from the call."""
    start = time.monotonic()
    response = update()
    updated = time.monotonic() - start
    (sample,) = client.generate([1, 2, 3], max_tokens=1)
    first = time.monotonic() - start
    if sample.weight_version.id != response.current.id:
        raise ValueError(f"a token of {sample.weight_version}, expected {response.current}")
    return dict(zip(TIMED, (updated, response.stage_micros * 1e-6, response.switch_micros * 1e-6, first),
                    strict=True))  # fmt: skip


def body(experiment: Experiment) -> None:
    if experiment.arguments.trainer_dtype:
        return trained(experiment)
    return streamed(experiment)


class Answered:
    """A client that keeps the answer to its last update."""

    def __init__(self, client: RolloutClient):
        self._client = client
        self.response = None

    def __getattr__(self, name: str):
        method = getattr(self._client, name)
        if not name.startswith("update_weights"):
            return method

        def update(*arguments, **named):
            self.response = method(*arguments, **named)
            return self.response

        return update


def train(rank: int, devices: list[int], model: Path, target: str, arguments, folder: str) -> None:
    """A trainer's rank: changes the weights and sends them, round by round. Rank 0 writes the seconds."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    import isobit.torch as it
    from isobit.torch_weights.ranks import told_by_all

    torch.cuda.set_device(devices[rank])
    config, dtype = AutoConfig.from_pretrained(model), getattr(torch, arguments.trainer_dtype)
    with torch.device("meta"):
        trained = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if arguments.one_allocation:
        # PyTorch keeps memory that is freed, and cuts the next tensors out of it. FSDP2 pads shards.
        values = sum(p.numel() for p in trained.parameters())
        torch.empty(int(1.02 * values / len(devices)), dtype=dtype, device="cuda")
    if len(devices) > 1:
        dist.init_process_group(
            "nccl",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=len(devices),
            device_id=torch.device("cuda", devices[rank]),
        )
        for layer in trained.model.layers:
            fully_shard(layer)
        fully_shard(trained).to_empty(device="cuda")
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter.to_local().uniform_(-0.02, 0.02)
    else:
        with torch.device("cuda"):
            trained = AutoModelForCausalLM.from_config(config, dtype=dtype)
    first = next(trained.parameters())
    client = Answered(RolloutClient(target)) if rank == 0 else None
    group = it.init_weights_update_group(client) if arguments.transport == "nccl" else None
    rounds = []
    for _ in range(arguments.rounds + 1):
        with torch.no_grad():
            getattr(first, "to_local", lambda: first)().view(-1)[0] += 1
        torch.cuda.synchronize()
        start = time.monotonic()
        digest = it.model_digest(trained)
        digested = time.monotonic() - start
        told_by_all(None)  # on the CPU: a barrier of NCCL would take time from the rollout's GPUs
        start = time.monotonic()
        it.update_weights(trained, client, transport=arguments.transport, group=group)
        updated = time.monotonic() - start
        if rank == 0:
            (sample,) = client.generate([1, 2, 3], max_tokens=1)
            seconds = (digested, updated, client.response.stage_micros * 1e-6,
                       client.response.switch_micros * 1e-6, time.monotonic() - start)  # fmt: skip
            if (sample.weight_version.id, sample.weight_version.digest) != (
                client.response.current.id,
                digest,
            ):
                raise ValueError(f"a token of {sample.weight_version}, expected those that were sent")
            rounds.append(dict(zip(("digest, alone", *TIMED), seconds, strict=True)))
    if rank == 0:
        torch.save(rounds, Path(folder) / "rounds.pt")
    if len(devices) > 1:
        dist.destroy_process_group()


def trained(experiment: Experiment) -> None:
    """Of a trainer on GPUs."""
    import torch
    import torch.multiprocessing as mp

    arguments = experiment.arguments
    devices = arguments.trainer_devices
    with (
        experiment.rollout(Source(CONTRACT_MODE, arguments.tp_size)) as client,
        tempfile.TemporaryDirectory() as folder,
    ):
        client.generate([1, 2, 3], max_tokens=1)
        values = client.get_server_info().server.model.num_parameters
        size = values * (4 if arguments.trainer_dtype == "float32" else 2)
        mp.start_processes(
            train, (devices, experiment.model, client.target, arguments, folder), nprocs=len(devices),
            start_method="spawn",
        )  # fmt: skip
        rounds = torch.load(Path(folder) / "rounds.pt")
    experiment.check(len(rounds) == arguments.rounds + 1, "all rounds")
    experiment.result = {"bytes": size, "ways": [{"way": arguments.transport, "rounds": rounds}]}
    experiment.screen.line(
        f"\n{size * 1e-9:.1f} GB of {arguments.trainer_dtype} on {len(devices)} GPUs to TP"
        f" {arguments.tp_size} by {arguments.transport}, seconds, of {arguments.rounds}\n"
    )
    measured = rounds[1:]  # the first opens the memory or joins the groups, and takes its own
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
        (row["way"], *(f"{statistics.median(r[part] for r in row['rounds']):.2f}" for part in TIMED))
        for row in rows
    ]
    experiment.screen.table(("", *TIMED), cells)


if __name__ == "__main__":
    sys.exit(run(__doc__, add_flags, body, QUICK))
