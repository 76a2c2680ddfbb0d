"""Measures the rollout service's generated tokens per second, alone and in company.

    .venv/bin/python bench/services/rollout_throughput.py [--concurrency 1 8 16] [--tp_size 4]

Starts isobit-rollout, sends that many requests at one time (a chat prompt, a fixed number of tokens, end of
sequence ignored), and prints aggregate tokens per second, the median of several rounds after a warm-up.
"""

import argparse
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from isobit import RolloutClient, Tokenizer
from isobit.launch import Services

ROOT = Path(__file__).resolve().parents[2]
PROMPT = "Explain in two sentences why the sky is blue."


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Tokens per second of the rollout service.")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m-instruct")
    parser.add_argument("--bin_dir", type=Path, default=ROOT / "build" / "release" / "bin")
    parser.add_argument("--numerics", default="tree")
    parser.add_argument("--tp_size", type=int, default=4)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument("--max_tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def tokens_per_second(client: RolloutClient, prompt: list[int], concurrency: int, max_tokens: int) -> float:
    """One round: all requests sent at once, until the last has finished."""

    def generate(seed: int) -> int:
        (sample,) = client.generate(prompt, seed=seed, max_tokens=max_tokens, ignore_eos=True)
        return len(sample.tokens.token_ids)

    with ThreadPoolExecutor(concurrency) as pool:
        started = time.perf_counter()
        tokens = sum(pool.map(generate, range(concurrency)))
        return tokens / (time.perf_counter() - started)


def main() -> None:
    arguments = parse()
    prompt = Tokenizer(arguments.model).encode_chat(PROMPT)
    flags = [
        f"--model_root={arguments.model.resolve().parent}",
        f"--model={arguments.model.name}",
        f"--numerics={arguments.numerics}",
        f"--tp_size={arguments.tp_size}",
    ]
    with tempfile.TemporaryDirectory() as logs, Services(arguments.bin_dir, Path(logs)) as services:
        rollout = services.start("isobit-rollout", "rollout", flags)
        services.wait_serving(rollout)
        with RolloutClient(rollout.target) as client:
            info = client.get_server_info()
            setting = f"{arguments.model.name}, TP {arguments.tp_size}, {arguments.numerics}"
            print(f"{setting}, {info.server.instruction_set}; prompt of {len(prompt)} tokens,")
            print(f"{arguments.max_tokens} generated each, median of {arguments.rounds} rounds")
            for concurrency in arguments.concurrency:
                rates = [
                    tokens_per_second(client, prompt, concurrency, arguments.max_tokens)
                    for _ in range(arguments.rounds + 1)
                ][1:]
                print(f"{concurrency:3d} at a time: {statistics.median(rates):7.1f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
