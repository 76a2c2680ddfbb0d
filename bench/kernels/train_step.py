"""The time of a training step: isobit.torch beside the same model on PyTorch's own kernels.

    python3 bench/kernels/train_step.py [--layers 12] [--sequences 16] [--tokens 1024] [--json FILE]
    torchrun --nproc-per-node 2 bench/kernels/train_step.py ...

A step is the forward pass with activation checkpointing, the loss, the backward pass, clipping and AdamW, of
a Qwen3 of --shape with random weights. PyTorch's side is transformers' model with compiled layers, SDPA, the
loss by blocks of rows and the fused AdamW, in bf16 throughout; with --fp32_masters its parameters and sums
of gradients are fp32, as isobit's always are. Several processes share the model by FSDP2 on both sides. The
sides run one after the other, each twice; the ratio is that of the medians.
"""

import argparse
import gc
import itertools
import json
import os
import re
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

import isobit.torch as it

SHAPES = {
    "qwen3-8b": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 499, "tie_word_embeddings": True,
    },
}  # fmt: skip
QUICK = {"shape": "tiny", "layers": 2, "sequences": 4, "tokens": 32, "lanes": 4, "steps": 1, "warm_up": 0}
BLOCK_ROWS = 2048
# What a GPU kernel does in a step, by its name.
KINDS = {
    "matrix products": r"gemm|nvjet|cutlass|xmma|Linear|InputGradient|WeightGradient|Product",
    "attention": r"[Aa]ttention|flash|fmha|KeyGradient|QueryGradient|StoredGradient|Prefill",
    "between GPUs": r"nccl|AllReduce",
    "optimizer and clipping": r"[Aa]dam|SquareSums|multi_tensor",
    "logprobs and loss": r"LogProb|Loss|softmax|nll|Ranked|Entropy",
}


def make_model(args: argparse.Namespace, device: torch.device) -> Qwen3ForCausalLM:
    """In bf16, with activation checkpointing."""
    config = Qwen3Config(num_hidden_layers=args.layers, max_position_embeddings=40960, **SHAPES[args.shape],
                         attn_implementation="sdpa")  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


class Torch(torch.nn.Module):
    """transformers on PyTorch's own kernels; as a module, its forward pass is the loss."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        super().__init__()
        self.model = make_model(args, device)
        layers = self.model.model.layers
        if not args.quick:
            for layer in layers:
                layer.compile()
        policy = MixedPrecisionPolicy()
        if args.fp32_masters:
            self.model.float()
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if dist.is_initialized():
            for module in (*layers, self):
                fully_shard(module, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=1e-5, fused=True)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.model.model(ids, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        targets = ids[:, 1:].flatten()
        blocks = zip(hidden.split(BLOCK_ROWS), targets.split(BLOCK_ROWS), strict=True)
        losses = [checkpoint(self._loss, *block, use_reentrant=False) for block in blocks]
        return torch.stack(losses).sum() / targets.numel()

    def _loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.model.lm_head(hidden).float()
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")

    def step(self, ids: torch.Tensor) -> None:
        self(ids).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Isobit:
    """The kernel set, by contract."""

    def __init__(self, args: argparse.Namespace, device: torch.device):
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.lanes = args.lanes // self.world
        self.model = it.patch(make_model(args, device))
        if dist.is_initialized():
            it.fully_shard(self.model.float())
        self.optimizer = it.AdamW(self.model.parameters(), lr=1e-5)

    def step(self, ids: torch.Tensor) -> None:
        batch = it.Batch.of(list(ids), packs=[len(ids) // self.lanes] * self.lanes, device=ids.device)
        logprobs = it.logprobs(self.model, batch).logprobs
        ones = torch.ones_like(logprobs)
        it.functional.policy_loss(logprobs, ones, ones / (ones.numel() * self.world)).backward()
        it.clip_grad_norm_(self.model.named_parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


SIDES = {"torch": Torch, "isobit": Isobit}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def shares(step, ids: torch.Tensor, longest: int) -> dict[str, float]:
    """Milliseconds of GPU kernels by part, in one step. Prints the `longest` kernels."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(ids)
        torch.cuda.synchronize()
    found = defaultdict(float)
    events = sorted(profile.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in events[:longest]:
        print(f"{event.self_device_time_total / 1e3:9.2f} ms {event.count:6}  {event.key[:150]}")
    for event in events:
        kind = next((kind for kind, names in KINDS.items() if re.search(names, event.key)), "rows and copies")
        found[kind] += event.self_device_time_total / 1e3
    return {kind: round(ms, 1) for kind, ms in sorted(found.items(), key=lambda item: -item[1])}


def measure(
    name: str, args: argparse.Namespace, device: torch.device, rank: int, world: int
) -> dict[str, Any]:
    """Milliseconds of args.steps steps, peak memory, and on a GPU the parts of a step."""
    side = SIDES[name](args, device)
    random = torch.Generator().manual_seed(rank)
    vocabulary = SHAPES[args.shape]["vocab_size"]
    ids = torch.randint(0, vocabulary, (args.sequences // world, args.tokens), generator=random).to(device)
    times = []
    for i in range(args.warm_up + args.steps):
        if dist.is_initialized():
            dist.barrier()
        wait(device)
        begin = time.perf_counter()
        side.step(ids)
        wait(device)
        if i >= args.warm_up:
            times.append(1e3 * (time.perf_counter() - begin))
    result = {"ms": [round(t, 1) for t in times]}
    if device.type == "cuda":
        result["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        result["parts, ms"] = shares(side.step, ids, args.kernels if rank == 0 else 0)
        del side
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return result


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=SHAPES, default="qwen3-8b")
    add("--layers", type=int, default=12, metavar="N")
    add("--sequences", type=int, default=16, metavar="N", help="of a step, on all GPUs together")
    add("--tokens", type=int, default=1024, metavar="N", help="of a sequence")
    add("--lanes", type=int, default=8, metavar="N", help="of isobit's plan: packs of sequences / lanes")
    add("--steps", type=int, default=5, metavar="N", help="that are measured, each time")
    add("--warm_up", type=int, default=3, metavar="N", help="steps before")
    add("--fp32_masters", action="store_true", help="torch's side too has fp32 parameters; needs torchrun")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--kernels", type=int, default=0, metavar="N", help="print the N kernels that take longest")
    add("--json", type=Path, metavar="FILE", help="write every figure here")
    add("--quick", action="store_true", help="a tiny model and one step, on the CPU too")
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(**QUICK)
        args = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    if args.sequences % args.lanes or args.lanes % world:
        parser.error(f"expected --sequences as a multiple of --lanes, and --lanes of {world} processes")
    if args.fp32_masters and "RANK" not in os.environ:
        parser.error("--fp32_masters needs torchrun (--nproc-per-node 1 will do)")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU: --quick --device cpu runs a tiny model")
    return args


def main() -> None:
    args = parse()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = torch.device(
        args.device, int(os.environ.get("LOCAL_RANK", 0)) if args.device == "cuda" else None
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    results = []
    for name in (*SIDES, *SIDES):
        results.append({"side": name, **measure(name, args, device, rank, world)})
        if rank == 0:
            print(json.dumps(results[-1]), flush=True)
    medians = {
        name: statistics.median(itertools.chain(*(r["ms"] for r in results if r["side"] == name)))
        for name in SIDES
    }
    ratio = round(medians["isobit"] / medians["torch"], 3)
    if rank == 0:
        print(f"isobit {medians['isobit']:.1f} ms, torch {medians['torch']:.1f} ms: {ratio}")
        if args.json:
            settings = {name: str(value) for name, value in vars(args).items()}
            report = {"settings": settings, "gpus": world, "ratio": ratio, "results": results}
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
