"""What an HTTP server costs by itself: isobit's gateway beside vLLM's API server. Engines compute nothing.

    python bench/services/http_servers.py [--requests 512] [--max_tokens 256] [--workers 1] [--rounds 5]
        [--vllm PYTHON [--vllm_path DIRS]] [--json FILE] [--quick]

The same completions, with token ids and logprobs, are asked of each server in turn, in every round: whole,
and streamed with one token an event. All requests are in flight at once. The engines (null_rollout.py and
null_vllm.py) answer from memory, both with the tokens and logprobs of null_tokens.py. Before the first round,
answers of each server are compared with them, bit for bit. --vllm names a Python that has vLLM; without it
isobit's gateway is measured alone.

    isobit       the gateway; the null rollout is behind gRPC, in a process of its own, and sends one token
                 a message
    isobit steps the same, but a sample has a token every --step_ms, and a message has the tokens that came
                 within the time that the gateway asks for, as a rollout's has
    vllm inside  vLLM's API server; an EngineClient in its process gives outputs that were made before
    vllm apart   vLLM's API server as it serves: its AsyncLLM, and its engine core with its scheduler in a
                 process of its own, over an executor that computes nothing

Compare the server's processor time, which other load on the machine changes little. It is that of the
server's processes alone; the engine's and the client's are told beside it. The client (http_load.py) is one
thread over raw sockets.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import http_load

from isobit.launch import run_model_tool
from isobit_tools.byte_tokenizer import write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
KINDS = ("whole", "stream")
_START_TIMEOUT_S = 600.0
_TICKS = os.sysconf("SC_CLK_TCK")
_PACKAGES = (
    "vllm", "torch", "transformers", "fastapi", "starlette", "uvicorn", "uvloop", "httptools", "pydantic",
    "msgspec", "grpcio",
)  # fmt: skip


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--bin_dir", type=Path, default=ROOT / "build/release/bin", metavar="DIR", help="isobit-model's")
    add("--requests", type=int, default=512, metavar="N", help="in flight at once")
    add("--max_tokens", type=int, default=256, metavar="N", help="of each")
    add("--workers", type=int, default=1, metavar="N", help="of the gateway and of `vllm inside`")
    add("--step_ms", type=float, default=10.0, metavar="S", help="of `isobit steps`")
    add("--rounds", type=int, default=5, metavar="N", help="after a small one to warm up")
    add("--vllm", metavar="PYTHON", help="a Python that has vLLM, which needs no GPU")
    add("--vllm_path", default="", metavar="DIRS", help="its PYTHONPATH, if vLLM lies elsewhere")
    add("--json", type=Path, metavar="FILE", help="write every figure here")
    add("--quick", action="store_true", help="little work")
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(requests=8, max_tokens=8, rounds=1)
    return parser.parse_args()


def processor_seconds(pids: Sequence[int]) -> float:
    """Of these processes, without their children."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(of[11]) + int(of[12]) for of in fields) / _TICKS


def with_children(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(other for child in children for other in with_children(int(child)))]


@dataclass
class Server:
    """One HTTP server that serves, and its engine."""

    name: str
    port: int
    servers: list[int]  # processes
    engines: list[int]

    def measure(self, requests: int, tokens: int, kind: str) -> dict[str, float]:
        before = processor_seconds(self.servers), processor_seconds(self.engines)
        load = http_load.ask(self.port, requests, tokens, kind == "stream")
        server = processor_seconds(self.servers) - before[0]
        engine = processor_seconds(self.engines) - before[1]
        count = requests * tokens
        return {
            "server_us_per_token": server / count * 1e6,
            "server_ms_per_request": server / requests * 1e3,
            "engine_us_per_token": engine / count * 1e6,
            "client_us_per_token": load.client_s / count * 1e6,
            "client_share": load.client_s / load.seconds,
            "tokens_per_s": count / load.seconds,
            "requests_per_s": requests / load.seconds,
            "bytes_per_token": sum(map(len, load.answers)) / count,
            "events_per_token": load.events / count,
        }


class Processes:
    """Processes that end with the `with` statement, and their logs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._running: list[tuple[str, subprocess.Popen]] = []

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        for _, process in reversed(self._running):
            process.terminate()
        for _, process in reversed(self._running):
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def start(
        self, name: str, command: list[str], environment: dict[str, str] | None = None
    ) -> subprocess.Popen:
        with (self.folder / f"{name}.log").open("w") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        self._running.append((name, process))
        return process

    def wait_file(self, file: Path) -> str:
        """Its content, once it is there."""
        self._wait(file.is_file, f"{file.name} is not there")
        return file.read_text()

    def wait_healthy(self, name: str, port: int) -> None:
        self._wait(lambda: http_load.is_healthy(port), f"{name} is not healthy")

    def _wait(self, ready, what: str) -> None:
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not ready():
            for name, process in self._running:
                if process.poll() is not None:
                    text = (self.folder / f"{name}.log").read_text()
                    raise RuntimeError(f"{name} has ended:\n{text[-6000:]}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what} after {_START_TIMEOUT_S:g} s; logs in {self.folder}")
            time.sleep(0.1)


def make_model(folder: Path, bin_dir: Path) -> Path:
    """A directory with a config and a tokenizer, and no weights."""
    model = folder / http_load.MODEL
    run_model_tool(bin_dir, "config", "tiny-llama", str(model), "--seed", "1")
    write_tokenizer(model)
    return model


def start_isobit(processes: Processes, model: Path, workers: int, step_ms: float = 0.0) -> Server:
    name = "isobit steps" if step_ms else "isobit"
    port_file = processes.folder / f"{name} rollout.port"
    command = [sys.executable, str(HERE / "null_rollout.py"), f"--port_file={port_file}"]
    rollout = processes.start(f"{name} rollout", [*command, f"--step_ms={step_ms}"])
    target = f"127.0.0.1:{processes.wait_file(port_file)}"
    port_file = processes.folder / f"{name} gateway.port"
    command = [sys.executable, "-m", "isobit.gateway", f"--rollout={target}", f"--model={model}"]
    command += ["--port=0", f"--port_file={port_file}", f"--workers={workers}"]
    gateway = processes.start(f"{name} gateway", command)
    port = int(processes.wait_file(port_file))
    processes.wait_healthy(f"{name} gateway", port)
    return Server(name, port, with_children(gateway.pid), [rollout.pid])


def start_vllm(
    processes: Processes, model: Path, arguments: argparse.Namespace, engine: str, workers: int
) -> Server:
    port_file = processes.folder / f"vllm_{engine}.port"
    command = [arguments.vllm, str(HERE / "null_vllm.py"), f"--model={model}", f"--port_file={port_file}"]
    command += [f"--engine={engine}", f"--workers={workers}", f"--requests={arguments.requests}"]
    process = processes.start(f"vllm_{engine}", command, vllm_environment(arguments))
    told = json.loads(processes.wait_file(port_file))
    processes.wait_healthy(f"vllm {engine}", told["port"])
    engines = sorted({*with_children(process.pid)} - {*told["servers"]})
    return Server(f"vllm {engine}", told["port"], told["servers"], engines)


def vllm_environment(arguments: argparse.Namespace) -> dict[str, str]:
    own = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    path = os.pathsep.join(filter(None, (arguments.vllm_path, str(HERE))))
    return {**os.environ, **own, "PYTHONPATH": path}


def versions(python: str, environment: dict[str, str] | None) -> dict[str, str]:
    program = (
        "import importlib.metadata as m, json, platform, sys\n"
        "found = {'python': platform.python_version()}\n"
        "for name in sys.argv[1:]:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    command = [python, "-c", program, *_PACKAGES]
    return json.loads(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout)


def measure(servers: list[Server], arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """The figures of each server and kind, one a round. Servers take turns, and who begins changes."""
    found: dict[str, list[dict[str, float]]] = {
        f"{one.name}, {kind}": [] for kind in KINDS for one in servers
    }
    for server in servers:
        for kind in KINDS:
            load = http_load.ask(
                server.port, min(8, arguments.requests), arguments.max_tokens, kind == "stream"
            )
            http_load.check_answers(load, arguments.max_tokens, kind == "stream")
            server.measure(arguments.requests, max(1, arguments.max_tokens // 8), kind)
    for number in range(arguments.rounds):
        order = servers[number % len(servers) :] + servers[: number % len(servers)]
        for kind in KINDS:
            for server in order:
                one = server.measure(arguments.requests, arguments.max_tokens, kind)
                found[f"{server.name}, {kind}"].append(one)
                print(f"round {number + 1}: {server.name}, {kind}: {one['server_us_per_token']:.1f} us/token")
    return found


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def show(found: dict[str, list[dict[str, float]]]) -> None:
    print(
        f"\n{'':20} {'server':>9} {'server':>11} {'engine':>9} {'client':>9} {'client':>7}\n"
        f"{'':20} {'us/token':>9} {'ms/request':>11} {'us/token':>9} {'us/token':>9} {'share':>7}"
        f" {'tokens/s':>10} {'requests/s':>11} {'events/token':>13}"
    )
    for way, rounds in found.items():
        of = medians(rounds)
        print(
            f"{way:20} {of['server_us_per_token']:9.1f} {of['server_ms_per_request']:11.2f}"
            f" {of['engine_us_per_token']:9.1f} {of['client_us_per_token']:9.1f} {of['client_share']:7.2f}"
            f" {of['tokens_per_s']:10.0f} {of['requests_per_s']:11.1f} {of['events_per_token']:13.3f}"
        )
    for way in found:
        name, _, kind = way.partition(", ")
        if name.startswith("vllm"):
            pairs = zip(found[f"isobit, {kind}"], found[way], strict=True)
            ratio = statistics.median(
                one["server_us_per_token"] / other["server_us_per_token"] for one, other in pairs
            )
            print(f"{kind}: isobit's gateway takes {ratio:.3f} of the processor time of {name}")


def main() -> None:
    arguments = parse_arguments()
    told = {"isobit": versions(sys.executable, None)}
    with tempfile.TemporaryDirectory() as scratch, Processes(Path(scratch).resolve()) as processes:
        model = make_model(processes.folder, arguments.bin_dir)
        servers = [start_isobit(processes, model, arguments.workers)]
        servers.append(start_isobit(processes, model, arguments.workers, arguments.step_ms))
        if arguments.vllm:
            told["vllm"] = versions(arguments.vllm, vllm_environment(arguments))
            servers.append(start_vllm(processes, model, arguments, "inside", arguments.workers))
            servers.append(start_vllm(processes, model, arguments, "apart", 1))
        found = measure(servers, arguments)
    show(found)
    if arguments.json is not None:
        names = ("requests", "max_tokens", "workers", "step_ms")
        settings = {name: getattr(arguments, name) for name in names}
        result = {"settings": settings, "versions": told, "rounds": found}
        arguments.json.write_text(json.dumps({"result": result}, indent=1))


if __name__ == "__main__":
    main()
