"""Runs what an installed isobit must be able to do, with its own Python and nothing else.

    PYTHON -I tests/wheels/probe.py SCRATCH [--instruction_sets=portable,avx2] [--model=ID] [--bin=FOLDER]

It needs no checkout, no compiler and no network but loopback. With --model, the commands take that model from
the hub, which is where HF_ENDPOINT says. The services are the package's own, or those of --bin. The last line
is JSON: what was found, and digests of logprobs, which the caller compares between environments.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import isobit
from isobit import ComparatorClient, RolloutClient, ScorerClient

PATIENCE_S = 300
PROMPTS = ([5, 17, 3, 9], [2, 40, 11], [7])


def say(*command: str | Path, status: int = 0) -> str:
    """What a command prints; it must end with `status`."""
    words = [str(part) for part in command]
    result = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert result.returncode == status, (
        f"{words} ended with {result.returncode}:\n{result.stdout}{result.stderr}"
    )
    return result.stdout


@contextmanager
def service(binaries: Path, name: str, scratch: Path, *flags: str):
    """A service on a free port: its address. It must end by itself after SIGTERM, with status 0."""
    port_file, log = scratch / f"{name}.port", scratch / f"{name}.log"
    port_file.unlink(missing_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            [binaries / f"isobit-{name}", "--port=0", f"--port_file={port_file}", *flags],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while not port_file.exists():
            assert process.poll() is None, f"{name} ended with {process.returncode}:\n{log.read_text()}"
            assert time.monotonic() < deadline, f"{name} does not listen:\n{log.read_text()}"
            time.sleep(0.02)
        yield f"127.0.0.1:{int(port_file.read_text())}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, f"{name} ended with {process.returncode}:\n{log.read_text()}"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def check_services(binaries: Path, scratch: Path, instruction_set: str) -> str:
    """Samples, scores and compares: all bits must be equal. The digest of the logprobs."""
    place = [f"--model_root={scratch}", "--model=model", "--threads_per_rank=1", f"--isa={instruction_set}"]
    digest = hashlib.sha256()
    with ExitStack() as stack:
        start = partial(service, binaries)
        at = {name: stack.enter_context(start(name, scratch, *place)) for name in ("rollout", "scorer")}
        sides = [f"--{name}={at[name]}" for name in ("rollout", "scorer")]
        at["comparator"] = stack.enter_context(start("comparator", scratch, *sides))
        rollout = stack.enter_context(RolloutClient(at["rollout"]))
        scorer = stack.enter_context(ScorerClient(at["scorer"]))
        comparator = stack.enter_context(ComparatorClient(at["comparator"]))
        for client in (rollout, scorer, comparator):
            client.wait_until_serving(timeout=PATIENCE_S)
        for prompt in PROMPTS:
            (sample,) = rollout.generate(prompt, temperature=0.8, top_p=0.95, seed=11, max_tokens=24)
            (score,) = scorer.score([(prompt, sample.tokens.token_ids)], temperature=0.8, top_p=0.95)
            bits = sample.tokens.logprobs.tobytes()
            assert bits == score.tokens.logprobs.tobytes(), "the scorer's logprobs differ from the rollout's"
            digest.update(sample.tokens.token_ids.tobytes() + bits)
        compared = comparator.compare(PROMPTS, seed=11, max_tokens=24)
        assert compared.summary.verdict == "equal", compared
    return digest.hexdigest()


def check_command_line(model: str, scratch: Path) -> dict:
    """The commands that a newcomer types first."""
    isobit_command = Path(sys.executable).parent / "isobit"
    versions = json.loads(say(isobit_command, "version", "--json"))
    doctor = json.loads(say(isobit_command, "doctor", model, "--json"))
    pair = say(isobit_command, "pair", model, "--once", "--max_tokens=8")
    # Where it is ignored, as in a shell's background, the command would ignore it as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [
            isobit_command,
            "serve",
            model,
            "--port=0",
            "--grpc_port=0",
            "--json",
            f"--log_dir={scratch / 'serve'}",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        started = process.stdout.readline()
        assert started.startswith("{"), f"isobit serve ended with {process.wait(PATIENCE_S)}"
        with urllib.request.urlopen(f"{json.loads(started)['http']}/v1/models", timeout=PATIENCE_S) as answer:
            models = json.load(answer)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0, f"isobit serve ended with {process.returncode} after Ctrl-C"
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return {"version": versions, "doctor": doctor, "pair": pair, "models": models}


def import_seconds() -> float:
    """The best of several, as other work disturbs one."""
    program = "import time; began = time.perf_counter(); import isobit; print(time.perf_counter() - began)"
    return min(float(say(sys.executable, "-I", "-c", program)) for _ in range(7))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("scratch", type=Path)
    parser.add_argument("--instruction_sets", default="auto")
    parser.add_argument("--model")
    parser.add_argument("--bin", type=Path, default=Path(isobit.__file__).parent / "bin")
    arguments = parser.parse_args()
    assert os.geteuid() != 0, "expected an ordinary user"
    scratch = arguments.scratch.resolve()
    found = {
        "python": sys.version.split()[0],
        "compilers": [name for name in ("cc", "gcc", "c++", "clang", "nvcc") if shutil.which(name)],
        "version": importlib.metadata.version("isobit"),
        "import_s": import_seconds(),
        "binaries": {path.name: say(path, "--version").strip() for path in sorted(arguments.bin.iterdir())},
    }
    say(arguments.bin / "isobit-model", "make", "tiny-llama", scratch / "model", "--seed", "3")
    found["digests"] = {
        name: check_services(arguments.bin, scratch, name) for name in arguments.instruction_sets.split(",")
    }
    if arguments.model and importlib.util.find_spec("isobit.cli"):
        found["command_line"] = check_command_line(arguments.model, scratch)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
