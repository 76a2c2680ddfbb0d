"""What TLS costs: one stream's latency, and throughput at many streams, beside plain text.

    python3 bench/services/tls_overhead.py [--shape smollm2-135m] [--streams 64] [--rounds 5] [--json FILE]

Two rollouts of the same random weights serve at once, one in plain text, one over TLS with client
certificates and roles. Rounds alternate between them, so that other load on the machine affects both. A ratio
is the median of the rounds' ratios of seconds, TLS to plain text. Streams are read token by token.
`calibration` compares plain text with itself, to show the noise.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from isobit import RolloutClient
from isobit.launch import Services, run_model_tool

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests/attack"))
from certificates import Authority  # noqa: E402

PROMPT = list(range(1, 5))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--bin_dir", type=Path, default=ROOT / "build/release/bin", metavar="DIR", help="the services")
    add("--shape", default="smollm2-135m", help="of isobit-model")
    add("--streams", type=int, default=64, metavar="N", help="throughput: at one time")
    add("--max_tokens", type=int, default=32, metavar="N", help="of each stream")
    add("--rounds", type=int, default=5, metavar="N", help="after one to warm up")
    add("--flags", default="", help="of both rollouts, such as '--backend=cuda --gpu_memory_fraction=0.4'")
    add("--json", type=Path, metavar="FILE", help="write every figure here")
    add("--quick", action="store_true", help="a tiny model and little work, on any machine")
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(shape="tiny-llama", streams=8, max_tokens=8, rounds=2)
    return parser.parse_args()


def start_rollout(
    services: Services, model: Path, name: str, flags: list[str], security: dict
) -> RolloutClient:
    own = [f"--model_root={model.parent}", f"--model={model.name}", "--load_format=dummy", "--tp_size=1"]
    service = services.start("isobit-rollout", name, [*own, *flags])
    services.wait_listening(service)
    client = RolloutClient(service.target, **security)
    client.wait_until_serving(300)
    return client


def start_both(services: Services, folder: Path, arguments: argparse.Namespace) -> dict[str, RolloutClient]:
    model = folder / "model"
    run_model_tool(arguments.bin_dir, "config", arguments.shape, str(model), "--seed", "1")
    authority = Authority(folder, "ca")
    server, own = authority.sign_server(), authority.sign("bench")
    access = folder / "access.json"
    entry = {"name": "bench", "roles": ["generate"], "certificates": ["bench"]}
    access.write_text(json.dumps({"clients": [entry]}))
    flags = [f"--tls_cert={server.cert}", f"--tls_key={server.key}", f"--tls_client_ca={authority.cert}"]
    security = {"tls_ca": authority.cert, "tls_cert": own.cert, "tls_key": own.key}
    both = arguments.flags.split()
    return {
        "plain": start_rollout(services, model, "plain", both, {}),
        "tls": start_rollout(services, model, "tls", [*both, *flags, f"--access_file={access}"], security),
    }


def read_stream(client: RolloutClient, seed: int, max_tokens: int) -> tuple[float, float]:
    """Seconds until the first token, and until the last."""
    start = time.perf_counter()
    first = 0.0
    for _ in client.generate(PROMPT, stream=True, seed=seed, max_tokens=max_tokens, ignore_eos=True):
        first = first or time.perf_counter() - start
    return first, time.perf_counter() - start


def measure(client: RolloutClient, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of each load."""
    first, whole = read_stream(client, 1, arguments.max_tokens)
    start = time.perf_counter()
    with ThreadPoolExecutor(arguments.streams) as pool:
        list(pool.map(lambda seed: read_stream(client, seed, arguments.max_tokens), range(arguments.streams)))
    seconds = time.perf_counter() - start
    return {"first_token": first, "one_stream": whole, "all_streams": seconds}


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as scratch, Services(arguments.bin_dir, Path(scratch)) as services:
        clients = start_both(services, Path(scratch).resolve(), arguments)
        rounds = []
        for index in range(arguments.rounds + 1):
            # The order alternates; plain text runs twice, to tell noise from cost.
            order = ("plain", "tls", "plain again") if index % 2 else ("plain again", "tls", "plain")
            rounds.append({name: measure(clients[name.split()[0]], arguments) for name in order})
        for client in clients.values():
            client.close()
    report(rounds[1:], arguments)


def report(rounds: list[dict[str, dict[str, float]]], arguments: argparse.Namespace) -> None:
    tokens = arguments.streams * arguments.max_tokens
    for load in ("first_token", "one_stream", "all_streams"):
        # Plain text runs before and after TLS: the mean of the two cancels a drift.
        base = [(r["plain"][load] + r["plain again"][load]) / 2 for r in rounds]
        ratios = [r["tls"][load] / b for r, b in zip(rounds, base, strict=True)]
        noise = [r["plain again"][load] / r["plain"][load] for r in rounds]
        seconds = statistics.median(base)
        line = f"{load:12} plain {seconds:8.4f} s, TLS to plain {statistics.median(ratios):.3f}"
        line += f" ({min(ratios):.3f} to {max(ratios):.3f}), calibration {statistics.median(noise):.3f}"
        line += f" ({min(noise):.3f} to {max(noise):.3f})"
        if load == "all_streams":
            line += f", {tokens / seconds:.0f} tokens/s"
        print(line)
    if arguments.json:
        arguments.json.write_text(json.dumps({"arguments": vars(arguments), "result": rounds}, default=str))


if __name__ == "__main__":
    main()
