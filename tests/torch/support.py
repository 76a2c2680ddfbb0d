"""What the tests of isobit.torch share: comparisons of bits, processes that form a group, a small model of
the operators."""

import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from isobit.torch import Batch, Pass
from isobit.torch import functional as F

INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bit patterns."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype in INTEGERS:
        a, b = a.contiguous().view(INTEGERS[a.dtype]), b.contiguous().view(INTEGERS[b.dtype])
    return torch.equal(a, b)


def _run_rank(rank: int, world: int, folder: str, work: Callable, args: tuple, backend: str) -> None:
    torch.set_num_threads(1)
    result: Any
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank)
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
        result = work(rank, world, *args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        result = RuntimeError(f"rank {rank} of {world}:\n{traceback.format_exc()}")
    torch.save(result, Path(folder) / f"{rank}.pt")
    os._exit(0)  # what the parent had open is not the child's to close


def run_ranks(world: int, work: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Any]:
    """The results of work(rank, world, *args) on `world` processes, in rank order; with nccl each has a GPU.
    Raises what one raised."""
    with tempfile.TemporaryDirectory() as folder:
        context = mp.start_processes(
            _run_rank,
            (world, folder, work, args, backend),
            nprocs=world,
            join=False,
            start_method="fork" if backend == "gloo" else "spawn",
        )
        for process in context.processes:
            process.join()
        results = [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(world)]
    errors = [str(result) for result in results if isinstance(result, BaseException)]
    if errors:
        raise RuntimeError("\n".join(errors))  # all, as the others only see that one is gone
    return results


@dataclass(frozen=True)
class Shape:
    """Of the small model. Sizes are not multiples of 16 where the operators take any."""

    vocab: int = 83
    hidden: int = 40
    intermediate: int = 56
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    layers: int = 2


class Layer(nn.Module):
    """A decoder layer with biases and q and k norms, so that every operator occurs."""

    def __init__(self, s: Shape, random: Callable[..., nn.Parameter]):
        super().__init__()
        self.s = s
        q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
        self.input_norm, self.post_norm = random(s.hidden, mean=1.0), random(s.hidden, mean=1.0)
        self.q_norm, self.k_norm = random(s.head_dim, mean=1.0), random(s.head_dim, mean=1.0)
        self.q, self.k, self.v = random(q, s.hidden), random(kv, s.hidden), random(kv, s.hidden)
        self.q_bias, self.k_bias, self.v_bias = random(q), random(kv), random(kv)
        self.o, self.o_bias = random(s.hidden, q), random(s.hidden)
        self.gate, self.up = random(s.intermediate, s.hidden), random(s.intermediate, s.hidden)
        self.down = random(s.hidden, s.intermediate)
        angles = torch.arange(64)[:, None] * 10000.0 ** -torch.linspace(0, 1, s.head_dim // 2)[None]
        self.cosine, self.sine = angles.cos().float(), angles.sin().float()

    def forward(self, residual: Tensor, batch: Batch) -> Tensor:
        s, packs = self.s, batch.packs
        h = F.rms_norm(residual, self.input_norm, 1e-6, packs)
        h = F.linear(h, [self.q, self.k, self.v], [self.q_bias, self.k_bias, self.v_bias], packs)
        q, k, v = F.qkv(
            h, batch.positions, self.cosine, self.sine, self.q_norm, self.k_norm, 1e-6,
            s.heads, s.kv_heads, s.head_dim, packs,
        )  # fmt: skip
        h = F.attention(q, k, v, batch.cu_seqlens, batch.sequences, s.head_dim)
        unit = s.heads // s.kv_heads * s.head_dim
        residual = F.linear_add(h, self.o, self.o_bias, residual, unit, packs)
        h = F.rms_norm(residual, self.post_norm, 1e-6, packs)
        h = F.swiglu(F.linear(h, [self.gate, self.up], [], packs))
        return F.linear_add(h, self.down, None, residual, 16, packs)


class Model(nn.Module):
    """A small decoder. Parameters are bf16, or the same values in fp32, as masters under FSDP2."""

    def __init__(self, s: Shape = Shape(), dtype: torch.dtype = torch.bfloat16, seed: int = 1):  # noqa: B008
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int, mean: float = 0.0) -> nn.Parameter:
            values = torch.randn(shape, generator=generator) / max(shape) ** 0.5 + mean
            return nn.Parameter(values.to(torch.bfloat16).to(dtype))

        self.embedding = random(s.vocab, s.hidden)
        self.layers = nn.ModuleList(Layer(s, random) for _ in range(s.layers))
        self.norm = random(s.hidden, mean=1.0)
        self.head = random(s.vocab, s.hidden)

    def forward(self, batch: Batch, advantages: Tensor) -> Tensor:
        """The loss of the pass, fp32 []. advantages: fp32 [scored rows]."""
        residual = F.embedding(batch, self.embedding)
        for layer in self.layers:
            residual = layer(residual, batch)
        h = F.rms_norm(residual, self.norm, 1e-6, batch.packs)[batch.scored]
        scores = F.logprobs(h, self.head, batch.targets, packs=batch.scored_packs, block_rows=16)
        weights = torch.full_like(advantages, 1 / 64)
        return F.policy_loss(scores.logprobs, advantages, weights) + (scores.entropies * -0.01).sum()


def random_sequences(lengths: list[int], vocab: int, seed: int = 2) -> tuple[list[Tensor], list[Tensor]]:
    """Sequences of these lengths, and an advantage for each token that has a logprob."""
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(vocab, (n,), generator=generator) for n in lengths]
    return sequences, [torch.randn(n - 1, generator=generator) for n in lengths]


def batch_of(
    step: Pass, sequences: list[Tensor], advantages: list[Tensor], device: torch.device | str = "cpu"
) -> tuple[Batch, Tensor]:
    """The batch of a pass, and its advantages."""
    chosen = step.sequences()
    batch = Batch.of([sequences[i] for i in chosen], packs=step.pack_sizes(), device=device)
    return batch, torch.cat([torch.empty(0), *(advantages[i] for i in chosen)]).to(device)
