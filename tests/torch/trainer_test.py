"""Whole runs of isobit-trainer beside the services: the weights after every step do not depend on the
rollout's ranks or on stops, and it sees a gap that is put in.

ISOBIT_TRAINER: the binary.
"""

import itertools
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Callable
from concurrent import futures
from contextlib import closing
from pathlib import Path

import grpc
import torch
from safetensors.torch import load_file, save_file
from support import same_bits

from isobit import RolloutClient
from isobit.launch import Setting, run_model_tool, start_comparator, wait_all_serving
from isobit.trainer_metrics import TrainerMetrics
from isobit.v1 import rollout_pb2_grpc
from isobit_tools.testing import BIN_DIR, ServiceTest, http_get, metric_values

TRAINER = os.environ["ISOBIT_TRAINER"]
TRAIN = Path(__file__).resolve().parents[2] / "python" / "examples" / "on_policy" / "train.py"
STEPS = 5
STOPPED_IN = 2  # the step after whose line a signal comes
# A pack for each sequence: with more than 12 packs, 4 lanes and 8 sum in different orders.
RECIPE = (
    "--lr=3e-3", "--weight_decay=0.01", "--prompts=5", "--samples=4", "--max_tokens=12", "--temperature=0.9",
    "--pack_tokens=24", "--lanes=4",
)  # fmt: skip


class PlantingRollout:
    """Stands before the rollout and passes every call on, but for one call of Generate, which `plant`
    answers, and one update of weights, which fails."""

    def __init__(self, target: str, planted_call: int, plant: Callable | None, failing_update: int = 0):
        """planted_call, failing_update: from 1. plant: (rollout's stub, request, context) -> responses."""
        self._stub = rollout_pb2_grpc.RolloutServiceStub(grpc.insecure_channel(target))
        self._calls = itertools.count(1)
        self._planted_call, self._plant = planted_call, plant
        self._updates, self._failing_update = itertools.count(1), failing_update
        self._server = grpc.server(futures.ThreadPoolExecutor(max_workers=32))
        rollout_pb2_grpc.add_RolloutServiceServicer_to_server(self, self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def __getattr__(self, name: str):
        return lambda request, _: getattr(self._stub, name)(request)

    def Generate(self, request, context):
        if next(self._calls) == self._planted_call:
            return self._plant(self._stub, request, context)
        return self._stub.Generate(request)

    def UpdateWeightsFromStream(self, request, context):
        if next(self._updates) == self._failing_update:
            context.abort(grpc.StatusCode.UNAVAILABLE, "planted")
        answer = self._stub.UpdateWeightsFromStream.future(request)
        context.send_initial_metadata(answer.initial_metadata())
        return answer.result()

    def stop(self) -> None:
        self._server.stop(None)


def refuse_once(_, __, context):
    """As a full queue does."""
    context.set_trailing_metadata((("retry-after-ms", "10"),))
    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "planted")


def flip_last_bit(stub, request, _):
    """Of the first logprob."""
    for i, response in enumerate(stub.Generate(request)):
        if i == 0:
            logprobs = response.chunk.tokens.logprobs
            (bits,) = struct.unpack("<I", struct.pack("<f", logprobs[0]))
            (logprobs[0],) = struct.unpack("<f", struct.pack("<I", bits ^ 1))
        yield response


class TrainerTest(ServiceTest):
    @classmethod
    def make_model(cls) -> None:
        run_model_tool(BIN_DIR, "make", "tiny-qwen3", str(cls.model), "--seed", "3")

    def addresses(self, tp_size: int = 1) -> dict[str, str]:
        """New services, by kind."""
        self.setting = Setting("tree", tp_size, shards=1)
        rollout, scorer = self.launch("rollout"), self.launch("scorer")
        comparator = start_comparator(self.services, rollout, scorer, "comparator")
        trio = {"rollout": rollout, "scorer": scorer, "comparator": comparator}
        wait_all_serving(self.services, list(trio.values()))
        return {kind: service.target for kind, service in trio.items()}

    def flags(self, services: dict[str, str], folder: Path, *more: str) -> list[str]:
        targets = [f"--{kind}={target}" for kind, target in services.items()]
        return [*targets, f"--model={self.model}", f"--output={folder}", f"--steps={STEPS}", *RECIPE, *more]

    def run_to_end(self, command: list[str], status: int = 0) -> str:
        result = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            check=False,
        )  # fmt: skip
        self.assertEqual(result.returncode, status, result.stdout)
        return result.stdout

    def train(self, services: dict[str, str], folder: Path, *more: str, status: int = 0) -> str:
        return self.run_to_end([TRAINER, *self.flags(services, folder, *more)], status)

    def train_in_python(self, services: dict[str, str], folder: Path, *more: str) -> None:
        flags = self.flags(services, folder, "--device=cpu", *more)
        self.run_to_end([sys.executable, str(TRAIN), *flags])

    def train_until(self, number: signal.Signals, services: dict[str, str], folder: Path, *more: str) -> str:
        """Sends a signal after step STOPPED_IN of this call."""
        command = [TRAINER, *self.flags(services, folder, *more)]
        steps = 0

        def on_line(process: subprocess.Popen, line: str) -> None:
            nonlocal steps
            steps += line.startswith("step ")
            if line.startswith("step ") and steps == STOPPED_IN:
                process.send_signal(number)

        return self.follow(command, on_line, -number if number == signal.SIGKILL else 0)

    def follow(self, command: list[str], on_line: Callable, status: int) -> str:
        """Gives each line to `on_line`, with the process, as it comes. Returns all of them."""
        printed = []
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            for line in process.stdout:
                printed.append(line)
                on_line(process, line)
        text = "".join(printed)
        self.assertEqual(process.returncode, status, text)
        return text

    def folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.scratch)) / "run"

    def rows(self, folder: Path) -> list[dict]:
        """The metrics of each step, but for the seconds."""
        lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
        return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]

    def digests(self, folder: Path) -> list[str]:
        return [row["weights_digest"] for row in self.rows(folder)]

    def state(self, folder: Path) -> dict[str, torch.Tensor]:
        """Masters and moments at the end, of a run of isobit-trainer."""
        return load_file(folder / "checkpoints" / f"step-{STEPS:08}" / "state.safetensors")

    def served_digest(self, model: Path) -> str:
        """The digest of a model directory, as a service would report it."""
        found = re.search(r"\b[0-9a-f]{64}\b", run_model_tool(BIN_DIR, "inspect", str(model)))
        return found[0]

    def assert_same_state(self, ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
        self.assertGreater(len(ours), 20)
        self.assertEqual(ours.keys(), theirs.keys())
        self.assertEqual([name for name in ours if not same_bits(ours[name], theirs[name])], [])

    # INVARIANT: a run is a function of recipe and model; neither the rollout's ranks nor stops change a bit.
    def test_same_run(self):
        services = self.addresses(tp_size=2)
        ours, other, in_python = self.folder(), self.folder(), self.folder()
        said = self.train(services, ours)
        self.train(self.addresses(tp_size=1), other)
        rows = self.rows(ours)
        self.assertEqual(self.rows(other), rows)
        self.assert_same_state(self.state(other), self.state(ours))
        self.assertEqual([row["step"] for row in rows], list(range(1, STEPS + 1)))
        for row in rows:
            self.assertGreater(row["compared"], 100)
            self.assertEqual((row["unequal"], row["max_abs_dlogp"], row["kl"]), (0, 0.0, 0.0), row)
        self.assertEqual(len(set(self.digests(ours))), STEPS)
        self.train_in_python(services, in_python, "--steps=1")
        self.assertEqual(rows[0].keys(), self.rows(in_python)[0].keys())
        recipe, whole = (
            json.loads((folder / "recipe.json").read_text("utf-8")) for folder in (ours, in_python)
        )
        self.assertEqual(recipe, {name: whole[name] for name in recipe})  # also where no flag was given
        self.assertEqual(self.served_digest(ours / "model"), rows[-1]["weights_digest"])
        self.assertIn(f"weights after step {STEPS}: {rows[-1]['weights_digest']}", said)

        with self.subTest("stopped, killed, stopped"):
            folder = self.folder()
            self.assertIn(
                "--resume goes on", self.train_until(signal.SIGTERM, services, folder, "--save_every=1")
            )
            self.train_until(signal.SIGKILL, services, folder, "--save_every=1", "--resume")
            self.assertRegex(self.train(services, folder, "--resume"), r"goes on after step [2-4]\n")
            self.assertEqual(self.rows(folder), rows)
            self.assert_same_state(self.state(folder), self.state(ours))
        with self.subTest("control: another seed"):
            folder = self.folder()
            self.train(services, folder, "--seed=2", "--steps=2")
            self.assertTrue(set(self.digests(folder)).isdisjoint(self.digests(ours)))
            said = self.train(services, folder, "--seed=1", "--resume", status=1)
            self.assertIn("holds another run: seed was 2 and is 1", said)
            self.assertIn("holds a run: --resume goes on", self.train(services, ours, status=1))

        with self.subTest("another checkpoint"):
            state = self.state(ours)
            state["master.model.norm.weight"][0] += 1
            save_file(state, ours / "checkpoints" / f"step-{STEPS:08}" / "state.safetensors")
            said = self.train(services, ours, "--resume", f"--steps={STEPS + 1}", status=1)
            digest = rows[-1]["weights_digest"]
            self.assertIn(f"error: the checkpoint of step {STEPS} was saved with weights {digest}, but", said)

    def test_metrics(self):
        """At every step the page has the figures of metrics.jsonl, and the names of the Python trainer's."""
        services = self.addresses()
        folder = self.folder()
        command = [TRAINER, *self.flags(services, folder, "--metrics_port=0", "--steps=1000")]
        pages, url = [], ""

        def on_line(process: subprocess.Popen, line: str) -> None:
            nonlocal url
            if line.startswith("metrics at "):
                url = line.removeprefix("metrics at ").strip()
            if url and len(pages) < STEPS:
                pages.append(http_get(url))
            # The page may be ahead of the line, by figures of a step that has no row yet.
            elif line.startswith("step ") and int(line[5 : line.index("/")]) >= step_of(pages[-1]) + 2:
                process.send_signal(signal.SIGTERM)

        def step_of(page: str) -> int:
            return int(metric_values(page)["isobit_trainer_step"])

        self.follow(command, on_line, 0)
        self.assertEqual(len(pages), STEPS)
        self.assertGreater(step_of(pages[-1]), 1)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
        first = metric_values(pages[0])
        self.assertEqual(first["isobit_trainer_tokens_compared_total"], 0, "counters are there at once")
        for page in pages[1:]:
            values = metric_values(page)
            step = step_of(page)
            if step == 0:
                continue
            until = rows[:step]
            self.assertAlmostEqual(values["isobit_trainer_reward_mean"], until[-1]["reward"], places=12)
            compared = values["isobit_trainer_tokens_compared_total"]
            known = [sum(row["compared"] for row in rows[:n]) for n in (step, step + 1)]
            self.assertIn(compared, known)
            self.assertEqual(values["isobit_trainer_tokens_unequal_total"], 0)
            self.assertEqual(values["isobit_trainer_weight_sync_seconds_count"], step)
            for part in ("sample", "train", "compare", "sync"):
                seconds = sum(row["seconds"][part] for row in until)
                told = values[f'isobit_trainer_step_seconds_total{{part="{part}"}}']
                self.assertAlmostEqual(told, seconds, delta=1e-3 * seconds)
        in_python = TrainerMetrics()
        with closing(in_python):
            theirs = http_get(f"http://127.0.0.1:{in_python.serve(0)}/metrics")
        described = re.compile("^# (?:HELP|TYPE) .*$", re.M)
        self.assertEqual(sorted(described.findall(pages[-1])), sorted(described.findall(theirs)))
        with self.subTest("the port is taken"), socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            said = self.train(services, self.folder(), f"--metrics_port={port}", status=1)
            self.assertRegex(said, rf"error: .*{port}")

    def test_reinforce(self):
        """Without scorer and comparator, which change nothing."""
        services = self.addresses()
        alone = {"rollout": services["rollout"]}
        ours, other, grpo = self.folder(), self.folder(), self.folder()
        self.train(alone, ours, "--algorithm=reinforce", "--steps=2")
        self.train(services, other, "--algorithm=reinforce", "--steps=2")
        self.assertEqual(self.rows(ours), self.rows(other))
        self.train(alone, grpo, "--algorithm=grpo", "--steps=2")  # control
        self.assertTrue(set(self.digests(grpo)).isdisjoint(self.digests(ours)))

    def planted(self, services: dict[str, str], call: int, plant: Callable) -> dict[str, str]:
        """The services, with something before the rollout."""
        rollout = PlantingRollout(services["rollout"], call, plant)
        self.addCleanup(rollout.stop)
        return {**services, "rollout": rollout.target}

    def test_a_gap_is_seen(self):
        services = self.addresses()
        folder, whole = self.folder(), self.folder()
        second_step = 5 + 2
        said = self.train(self.planted(services, second_step, flip_last_bit), folder, status=1)
        self.assertRegex(
            said,
            r"error: step 2: of \d+ tokens, 1 have another logprob in the trainer than in the rollout, by up"
            r" to \S+e-\d+; the first is prompt [5-9], sample \d,"
            r" token \d+: rollout \S+ \(0x",
        )
        self.assertEqual(len(self.rows(folder)), 1)
        with self.subTest("goes on from the step before"):
            self.train(services, folder, "--resume", "--steps=3")
            self.train(services, whole, "--steps=3")
            self.assertEqual(self.rows(folder), self.rows(whole))
        with self.subTest("reported"):
            folder = self.folder()
            flipped = self.planted(services, 1, flip_last_bit)
            self.train(flipped, folder, "--on_gap=report", "--steps=2")
            self.assertEqual([row["unequal"] for row in self.rows(folder)], [1, 0])
            self.assertEqual(self.digests(folder), self.digests(whole)[:2])  # the trainer's logprobs count
        with self.subTest("other weights"):
            folder = self.folder()

            def change_weights(stub, request, _):
                with RolloutClient(services["rollout"]) as rollout:
                    rollout.update_weights_from_stream(load_file(self.model / "model.safetensors"))
                return stub.Generate(request)

            changed = self.planted(services, 2, change_weights)
            said = self.train(changed, folder, "--prompts=1", status=1)
            self.assertRegex(
                said, r"error: prompt 1, sample 0: expected token 0 of the present weights, (\d+), but"
            )
            self.assertEqual(len(self.rows(folder)), 1)

    def test_a_full_queue(self):
        """A call that it refuses comes again."""
        services = self.addresses()
        folder, whole = self.folder(), self.folder()
        self.train(self.planted(services, 2, refuse_once), folder, "--steps=1")
        self.train(services, whole, "--steps=1")
        self.assertEqual(self.rows(folder), self.rows(whole))
        with self.subTest("control: a refusal that says not when"):

            def refuse(_, __, context):
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "planted")

            said = self.train(self.planted(services, 2, refuse), self.folder(), "--steps=1", status=1)
            self.assertRegex(said, r"error: prompt [0-4]: planted")

    def test_a_rollout_that_dies(self):
        whole, folder = self.folder(), self.folder()
        first, second = self.launch("rollout"), self.launch("rollout")
        wait_all_serving(self.services, [first, second])
        command = [TRAINER, *self.flags({"rollout": first.target}, folder)]

        def on_line(_: subprocess.Popen, line: str) -> None:
            if line.startswith("step 2/"):
                first.process.kill()

        said = self.follow(command, on_line, 1)
        self.assertRegex(said, r"\nerror: (prompt \d+|sending weights to the rollout): ")
        said = self.train({"rollout": second.target}, folder, "--resume")
        self.assertRegex(said, r"goes on after step [2-4]\n")  # the step before is saved, whatever failed
        self.train({"rollout": second.target}, whole)
        self.assertEqual(self.rows(folder), self.rows(whole))

    def test_an_update_that_fails(self):
        """The step before it counts, and is saved."""
        services = self.addresses()
        folder, whole = self.folder(), self.folder()
        rollout = PlantingRollout(services["rollout"], 0, None, failing_update=3)  # after step 2
        self.addCleanup(rollout.stop)
        said = self.train({**services, "rollout": rollout.target}, folder, "--steps=3", status=1)
        self.assertRegex(said, r"\nerror: sending weights to the rollout: .*planted")
        said = self.train(services, folder, "--steps=3", "--resume")
        self.assertIn("goes on after step 2\n", said)
        self.train(services, whole, "--steps=3")
        self.assertEqual(self.digests(folder)[2:], self.digests(whole)[2:])

    def test_what_it_refuses(self):
        services = self.addresses()
        folder = self.folder()
        with self.subTest("another model"):
            other = self.scratch / "other"
            run_model_tool(BIN_DIR, "make", "tiny-llama", str(other), "--seed", "3")
            said = self.train(services, folder, f"--model={other}", status=1)
            self.assertRegex(said, r"error: rollout \S+: expected the fingerprint of the trainer's model")
        with self.subTest("other arithmetic"):
            self.setting = Setting("vanilla", tp_size=1, shards=1)
            rollout = self.start("rollout")
            said = self.train({"rollout": rollout.target}, folder, status=1)
            self.assertRegex(said, r"expected --numerics=tree, got NUMERICS_MODE_VANILLA")
        with self.subTest("flags"):
            self.assertIn(
                "--lanes is 3, expected a power of two", self.train(services, folder, "--lanes=3", status=2)
            )
            self.assertIn("--rollout must be given", self.train({}, folder, status=2))
        self.assertFalse(folder.exists())


if __name__ == "__main__":
    unittest.main()
