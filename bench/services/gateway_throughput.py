"""What HTTP costs: throughput through the gateway beside gRPC, and the gateway's processor time.

    python bench/services/gateway_throughput.py [--shape tiny-llama] [--requests 512] [--max_tokens 256]
        [--workers 1] [--clients 1] [--rounds 3] [--flags=--backend=cuda] [--json FILE] [--quick]

All requests are in flight at once. Each way is measured in turn, in every round: by gRPC and by HTTP
(/v1/completions with ids and logprobs), whole and streamed. Client, gateway and rollout share the machine:
where it has few cores, a way's tokens/s are those of the slowest. So the gateway's own cost is told, too: its
processor time for a request and for a token, from which follows what one worker can carry; and the clients'.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from isobit import aio
from isobit_tools.byte_tokenizer import write_tokenizer
from isobit_tools.services import Services, run_model_tool

ROOT = Path(__file__).resolve().parents[2]
PROMPT_TOKENS = 16
_TICKS = os.sysconf("SC_CLK_TCK")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--bin_dir", type=Path, default=ROOT / "build/release/bin", metavar="DIR", help="the services")
    add("--shape", default="tiny-llama", help="of isobit-model; its vocabulary has 458 tokens at least")
    add("--requests", type=int, default=512, metavar="N", help="in flight at once")
    add("--max_tokens", type=int, default=256, metavar="N", help="of each")
    add("--workers", type=int, default=1, metavar="N", help="of the gateway")
    add("--clients", type=int, default=1, metavar="N", help="processes that share the requests")
    add("--rounds", type=int, default=3, metavar="N", help="after a small one to warm up")
    add("--flags", default="", help="of the rollout: --flags=--backend=cuda")
    add("--json", type=Path, metavar="FILE", help="write every figure here")
    add("--quick", action="store_true", help="little work, on any machine")
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(requests=8, max_tokens=8, rounds=1)
    return parser.parse_args()


def prompt(number: int) -> list[int]:
    return [1 + (number * 7 + i * i) % 400 for i in range(PROMPT_TOKENS)]


def processor_seconds(pid: int) -> float:
    """Of a process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS + sum(map(processor_seconds, map(int, children)))


async def by_grpc(client: aio.RolloutClient, number: int, tokens: int, stream: bool) -> int:
    options = {"max_tokens": tokens, "seed": number, "ignore_eos": True}
    if not stream:
        (sample,) = await client.generate(prompt(number), **options)
        return len(sample.tokens.token_ids)
    count = 0
    async for event in client.generate(prompt(number), stream=True, **options):
        count += len(event.tokens.token_ids) if type(event).__name__ == "Chunk" else 0
    return count


async def by_http(port: int, number: int, tokens: int, stream: bool) -> int:
    """The raw protocol, so that the client costs little. Returns the tokens that the usage says."""
    body = json.dumps({
        "prompt": prompt(number), "max_tokens": tokens, "seed": number, "ignore_eos": True, "logprobs": 0,
        "return_token_ids": True, "return_tokens_as_token_ids": True, "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }).encode()  # fmt: skip
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
        writer.write(head.encode() + b"connection: close\r\n\r\n" + body)
        answer = bytearray()
        while piece := await reader.read(1 << 18):
            answer += piece
    finally:
        writer.close()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"the gateway answered {bytes(answer[:500])!r}")
    return int(answer.rpartition(b'"completion_tokens":')[2].split(b",")[0])


async def _ask(way: str, target: str, port: int, numbers: range, tokens: int) -> list[int]:
    stream = way.endswith("stream")
    if way.startswith("http"):
        return await asyncio.gather(*(by_http(port, number, tokens, stream) for number in numbers))
    async with aio.RolloutClient(target) as client:
        return await asyncio.gather(*(by_grpc(client, number, tokens, stream) for number in numbers))


def ask(*arguments) -> tuple[list[int], float]:
    """What a client's process does: the tokens of each answer, and its own processor time in seconds."""
    before = time.process_time()
    counts = asyncio.run(_ask(*arguments))
    return counts, time.process_time() - before


WAYS = ("grpc whole", "http whole", "grpc stream", "http stream")


class Bench:
    """One rollout and one gateway before it."""

    def __init__(self, services: Services, folder: Path, arguments: argparse.Namespace):
        self._arguments = arguments
        model = folder / "model"
        run_model_tool(arguments.bin_dir, "config", arguments.shape, str(model), "--seed", "1")
        write_tokenizer(model)
        flags = [f"--model_root={folder}", "--model=model", "--load_format=dummy", "--tp_size=1"]
        flags += [f"--max_waiting={arguments.requests}", *arguments.flags.split()]
        self._rollout = services.start("isobit-rollout", "rollout", flags)
        services.wait_serving(self._rollout)
        self._port_file = folder / "gateway.port"
        self._log = (folder / "gateway.log").open("w")
        command = [sys.executable, "-m", "isobit.gateway", f"--rollout={self._rollout.target}"]
        command += [f"--model={model}", "--port=0", f"--port_file={self._port_file}"]
        self.gateway = subprocess.Popen(
            [*command, f"--workers={arguments.workers}"], stdout=self._log, stderr=self._log
        )

    def stop(self) -> None:
        self.gateway.terminate()
        self.gateway.wait()
        self._log.close()

    def wait(self) -> int:
        """The gateway's port, once it answers."""
        while not self._port_file.is_file():
            if self.gateway.poll() is not None:
                raise RuntimeError(f"the gateway has ended: {Path(self._log.name).read_text()}")
            time.sleep(0.05)
        return int(self._port_file.read_text())

    def measure(
        self, clients: ProcessPoolExecutor, way: str, port: int, requests: int, tokens: int
    ) -> dict[str, float]:
        before = processor_seconds(self.gateway.pid), processor_seconds(self._rollout.process.pid)
        shares = [range(i, requests, self._arguments.clients) for i in range(self._arguments.clients)]
        start = time.perf_counter()
        asked = [clients.submit(ask, way, self._rollout.target, port, share, tokens) for share in shares]
        answers = [future.result() for future in asked]
        seconds = time.perf_counter() - start
        counts = [count for counts, _ in answers for count in counts]
        assert counts == [tokens] * requests, counts
        gateway = processor_seconds(self.gateway.pid) - before[0]
        return {
            "tokens_per_s": requests * tokens / seconds,
            "requests_per_s": requests / seconds,
            "gateway_us_per_token": gateway / (requests * tokens) * 1e6,
            "gateway_ms_per_request": gateway / requests * 1e3,
            "gateway_cpu_s": gateway,
            "rollout_cpu_s": processor_seconds(self._rollout.process.pid) - before[1],
            "client_cpu_s": sum(spent for _, spent in answers),
            "seconds": seconds,
        }

    def run(self) -> dict[str, list[dict[str, float]]]:
        """The figures of each way, one a round."""
        arguments, port = self._arguments, self.wait()
        found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        with ProcessPoolExecutor(arguments.clients, multiprocessing.get_context("spawn")) as clients:
            for way in WAYS:  # the processes begin, and everything is used once
                self.measure(clients, way, port, max(8, arguments.clients), 4)
            for _ in range(arguments.rounds):
                for way in WAYS:
                    figures = self.measure(clients, way, port, arguments.requests, arguments.max_tokens)
                    found[way].append(figures)
        return found


def show(found: dict[str, list[dict[str, float]]]) -> None:
    print(
        f"{'way':12} {'tokens/s':>10} {'requests/s':>11} {'gateway us/token':>17} {'ms/request':>11}"
        f" {'cores: client':>14} {'gateway':>8} {'rollout':>8}"
    )
    for way, rounds in found.items():
        middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
        print(
            f"{way:12} {middle['tokens_per_s']:10.0f} {middle['requests_per_s']:11.1f}"
            f" {middle['gateway_us_per_token']:17.1f} {middle['gateway_ms_per_request']:11.2f}"
            f" {middle['client_cpu_s'] / middle['seconds']:14.2f}"
            f" {middle['gateway_cpu_s'] / middle['seconds']:8.2f}"
            f" {middle['rollout_cpu_s'] / middle['seconds']:8.2f}"
        )
    for kind in ("whole", "stream"):
        ratios = [
            http["tokens_per_s"] / grpc["tokens_per_s"]
            for http, grpc in zip(found[f"http {kind}"], found[f"grpc {kind}"], strict=True)
        ]
        print(f"{kind}: HTTP has {statistics.median(ratios):.3f} of gRPC's tokens/s, in {len(ratios)} rounds")


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        with Services(arguments.bin_dir, folder) as services:
            bench = Bench(services, folder, arguments)
            try:
                found = bench.run()
            finally:
                bench.stop()
    show(found)
    if arguments.json is not None:
        names = ("shape", "requests", "max_tokens", "workers", "clients", "flags")
        result = {"settings": {name: getattr(arguments, name) for name in names}, "rounds": found}
        arguments.json.write_text(json.dumps({"result": result}, indent=1))


if __name__ == "__main__":
    main()
