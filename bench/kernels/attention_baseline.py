"""Measures PyTorch's scaled_dot_product_attention on a GPU: the baseline of `isobit-bench attention`.

    python3 bench/kernels/attention_baseline.py --json baseline.json
    build/cuda/bin/isobit-bench attention --baseline baseline.json

Runs the cases of isobit-bench (bench/kernels/attention.cc) with contiguous keys and values and each backend
that takes them (cuDNN, FlashAttention), by replaying a CUDA graph, and writes the fastest backend's median.
"""

import argparse
import json
import statistics
from dataclasses import asdict, dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention": SDPBackend.FLASH_ATTENTION}
L2_SWEEP_BYTES = 192 << 20  # keys and values of several sets, so that each call finds them cold


@dataclass(frozen=True)
class Case:
    """`batch` sequences of `rows` queries after `past` positions; rows is 1 or past is 0."""

    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    rows: int
    past: int


CASES = [
    *(Case(32, 8, 128, batch, 1, past) for batch, past in ((64, 4095), (64, 32767), (1, 4095), (1, 32767))),
    *(Case(32, 8, 128, batch, 1, past) for batch, past in ((1, 131071), (8, 8191), (256, 1023))),
    *(Case(*heads, 64, 1, 4095) for heads in ((8, 2, 128), (64, 8, 128), (16, 8, 128))),
    *(Case(*heads, 64, 1, 4095) for heads in ((32, 8, 64), (32, 8, 96), (16, 4, 256))),
    Case(4, 1, 128, 64, 1, 32767),
    *(Case(32, 8, 128, batch, rows, 0) for batch, rows in ((1, 2048), (1, 8192), (1, 32768), (8, 2048))),
    *(Case(*heads, 1, 8192, 0) for heads in ((8, 2, 128), (64, 8, 128), (16, 8, 128))),
    *(Case(*heads, 1, 8192, 0) for heads in ((32, 8, 64), (32, 8, 96), (16, 4, 256))),
]


def microseconds(case: Case, backend: SDPBackend, rounds: int) -> float:
    """Median over rounds of one call's time; raises RuntimeError if the backend refuses the case."""
    length = case.past + case.rows
    kv_bytes = 4 * case.batch * length * case.kv_heads * case.head_dim
    sets = max(1, min(32, 1 + L2_SWEEP_BYTES // kv_bytes))
    shape = (case.batch, case.kv_heads, length, case.head_dim)
    query = torch.randn(case.batch, case.heads, case.rows, case.head_dim, dtype=torch.bfloat16, device="cuda")
    caches = [
        tuple(torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)) for _ in range(sets)
    ]

    def run() -> None:
        for key, value in caches:
            scaled_dot_product_attention(query, key, value, is_causal=case.rows > 1, enable_gqa=True)

    with torch.no_grad(), sdpa_kernel(backend):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    replays = 1
    for _ in range(rounds + 2):  # the first two warm up and set the number of replays
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / replays)
        replays = max(1, min(1000, int(2000 / times[-1])))
    return statistics.median(times[2:]) / sets


def main() -> None:
    parser = argparse.ArgumentParser(description="PyTorch's attention, for isobit-bench --baseline.")
    parser.add_argument("--json", required=True, help="file to write")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    versions = f"PyTorch {torch.__version__} SDPA, cuDNN {torch.backends.cudnn.version()}"
    print(f"{torch.cuda.get_device_name()}, {versions}")
    results = []
    for case in CASES:
        times = {}
        for name, backend in BACKENDS.items():
            try:
                times[name] = microseconds(case, backend, arguments.rounds)
            except RuntimeError as error:
                print(f"{name} refuses {case}: {str(error).splitlines()[0]}")
        if not times:
            continue
        fastest = min(times, key=times.get)
        results.append({**asdict(case), "us": times[fastest], "backend": fastest, "all": times})
        print(case, {name: round(time, 2) for name, time in times.items()}, flush=True)
    with open(arguments.json, "w", encoding="utf-8") as file:
        json.dump({"baseline": versions, "cases": results}, file, indent=1)


if __name__ == "__main__":
    main()
