"""What taps cost the rollout: its CPU time for a token with a reader of a share of the samples, beside none.

    ISOBIT_BIN_DIR=build/release/bin python bench/services/shadow_cost.py [--shape smollm2-135m] [--rounds 5]

A round takes every fraction in turn, so that a change of the machine hits all alike. The reader only
reads: scoring is another process's work.
"""

import argparse
import os
import statistics
import tempfile
import threading
from pathlib import Path

import grpc
from machine import cpu_seconds

from isobit import RolloutClient
from isobit.launch import Services, Setting, run_model_tool, start_rollout
from isobit.v1 import rollout_pb2, rollout_pb2_grpc

FRACTIONS = (0.0, 0.01, 0.1, 1.0)


class Reader:
    """Reads a tap on a thread of its own, as long as the `with` statement lasts."""

    def __init__(self, stub, fraction: float):
        self.samples = 0
        self._call = stub.Tap(rollout_pb2.TapRequest(fraction=fraction)) if fraction > 0 else None

    def __enter__(self):
        if self._call is not None:
            self._thread = threading.Thread(target=self._read)
            self._thread.start()
        return self

    def _read(self):
        try:
            for _ in self._call:
                self.samples += 1
        except grpc.RpcError:
            pass  # cancelled

    def __exit__(self, *_):
        if self._call is not None:
            self._call.cancel()
            self._thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", default="smollm2-135m", help="as isobit-model names it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=4, help="of a fraction in a round")
    parser.add_argument("--n", type=int, default=16, help="samples of a request")
    parser.add_argument("--max_tokens", type=int, default=32)
    options = parser.parse_args()
    bin_dir = Path(os.environ["ISOBIT_BIN_DIR"])
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder).resolve() / "model"
        run_model_tool(bin_dir, "config", options.shape, str(model), "--seed", "1")
        with Services(bin_dir, Path(folder)) as services:
            setting = Setting("tree", tp_size=1, shards=1)
            rollout = start_rollout(services, setting, model, "rollout", "--load_format=dummy")
            services.wait_serving(rollout)
            times = {fraction: [] for fraction in FRACTIONS}
            tokens = options.requests * options.n * options.max_tokens
            with grpc.insecure_channel(rollout.target) as channel, RolloutClient(rollout.target) as client:
                stub = rollout_pb2_grpc.RolloutServiceStub(channel)
                for i in range(options.rounds + 1):
                    for fraction in FRACTIONS:
                        with Reader(stub, fraction):
                            before = cpu_seconds(rollout.process.pid)
                            for j in range(options.requests):
                                client.generate(
                                    list(range(1, 33)), n=options.n, max_tokens=options.max_tokens,
                                    seed=j, ignore_eos=True, timeout=600,
                                )  # fmt: skip
                            spent = cpu_seconds(rollout.process.pid) - before
                        if i > 0:  # the first round warms up
                            times[fraction].append(spent)
    none = times[0.0]
    print(f"{options.shape}, {options.n} samples a request, {tokens} tokens a cell, {options.rounds} rounds")
    for fraction in FRACTIONS:
        ratios = [a / b for a, b in zip(times[fraction], none, strict=True)]
        cost = 1e6 * statistics.median(times[fraction]) / tokens
        print(
            f"fraction {fraction:<5g} {cost:10.2f} us CPU a token, ratio to none: median "
            f"{statistics.median(ratios):.4f}, {min(ratios):.4f} to {max(ratios):.4f}"
        )


if __name__ == "__main__":
    main()
