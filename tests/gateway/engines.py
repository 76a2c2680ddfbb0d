"""What the tests of vLLM's and SGLang's paths share: services, a gateway that changes weights, two models."""

import contextlib
import http.client
import itertools
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from isobit import RolloutClient, ScorerClient, Tokenizer
from isobit.weights import specs_of
from isobit_tools.bf16_files import bf16_tensors
from isobit_tools.gateway_testing import GatewayTest
from isobit_tools.services import run_model_tool
from isobit_tools.testing import BIN_DIR


def bits(values) -> list[int]:
    return np.asarray(values, np.float32).view(np.uint32).tolist()


class EngineTest(GatewayTest):
    """`other` is a directory with other weights of the model, below the services' --model_root."""

    @classmethod
    def make_model(cls) -> None:
        super().make_model()
        cls.tokenizer = Tokenizer(cls.model)

    @classmethod
    def write_model(cls, directory: Path, seed: int) -> None:
        """Weights of `seed`, of the model's config, in place of what `directory` has."""
        part = directory.with_name(f"{directory.name}.part")
        config = str(cls.model / "config.json")
        run_model_tool(BIN_DIR, "make", "--config", config, str(part), "--seed", str(seed))
        shutil.copy(cls.model / "generation_config.json", part)
        if directory.exists():
            shutil.rmtree(directory)
        part.rename(directory)

    def setUp(self):
        super().setUp()
        self.rollout, scorer = self.start("rollout"), self.start("scorer")
        self.gateway = self.start_gateway(self.rollout, scorer, f"--model_root={self.scratch}")
        self.scorer = self.enterContext(ScorerClient(scorer.target))
        self.other = self.log_dir / "other"
        self.write_model(self.other, seed=9)

    def version(self) -> int:
        """Of the weights that serve."""
        with RolloutClient(self.rollout.target) as rollout:
            return rollout.get_server_info().server.weight_version.id

    def assert_scored(self, prompt: list[int], token_ids: list[int], logprobs, **sampling) -> None:
        """The scorer gives `token_ids` these logprobs. Control: it does not, one temperature beside."""
        self.assertGreater(len(token_ids), 0)
        (score,) = self.scorer.score([(prompt, token_ids)], **sampling)
        self.assertEqual(bits(logprobs), bits(score.tokens.logprobs))
        other = sampling | {"temperature": sampling.get("temperature", 1.0) + 0.01}
        (score,) = self.scorer.score([(prompt, token_ids)], **other)
        self.assertNotEqual(bits(logprobs), bits(score.tokens.logprobs))

    def assert_refused(self, path: str, body: Any, status: int, text: str) -> dict[str, Any]:
        """The answer to `body`, twice the same, has `status`, and an error that says `text`."""
        found = [self.gateway.request("POST", path, body) for _ in range(2)]
        self.assertEqual(found[0][2], found[1][2])
        answer = json.loads(found[0][2])
        self.assertEqual((found[0][0], answer["error"]["code"]), (status, status), answer)
        self.assertIn(text, answer["error"]["message"])
        return answer

    @contextlib.contextmanager
    def connection(self) -> Iterator[http.client.HTTPConnection]:
        """One connection for several requests."""
        connection = http.client.HTTPConnection("127.0.0.1", self.gateway.port, timeout=60)
        connection.auto_open = False
        connection.connect()
        try:
            yield connection
        finally:
            connection.close()

    @contextlib.contextmanager
    def events(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        """The events that a POST is answered with, as they come."""
        with self.connection() as connection:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            self.assertEqual(answer.status, 200)
            yield self._events(answer)

    @contextlib.contextmanager
    def kept(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        """As `events`, of a request that has begun, and that a pause keeps: however slow the machine is, it
        is in flight."""
        while True:
            with self.events(path, body) as events:
                first = next(events)
                self.gateway.post("/pause?mode=keep")
                (load,) = self.gateway.get("/v1/loads")["loads"]
                if load["num_running_reqs"] + load["num_waiting_reqs"] > 0:
                    yield itertools.chain((first,), events)
                    return
            self.gateway.post("/resume")  # it had ended before the pause

    @contextlib.contextmanager
    def other_update(self) -> Iterator[None]:
        """While the block runs, the rollout has another weight update under way, which then fails."""
        begun, ends = threading.Event(), threading.Event()
        tensors = bf16_tensors(self.model)

        class Source:
            specs = specs_of(tensors)[0]

            def __iter__(self):
                begun.set()
                ends.wait(60)
                raise InterruptedError

        def update() -> None:
            with RolloutClient(self.rollout.target) as rollout, contextlib.suppress(InterruptedError):
                rollout.update_weights_from_stream(Source())

        thread = threading.Thread(target=update)
        thread.start()
        try:
            self.assertTrue(begun.wait(60))
            yield
        finally:
            ends.set()
            thread.join()

    def _events(self, answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        for line in answer:
            data = line.decode().removeprefix("data: ").strip()
            if data == "[DONE]":
                return
            if data:
                event = json.loads(data)
                self.assertNotIn("error", event)
                yield event
        self.fail("the events ended without [DONE]")

    def send_and_go(self, path: str, body: bytes) -> None:
        """Sends a POST and closes the connection without waiting for the answer."""
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.gateway.port)) as connection:
            connection.sendall(head.encode() + body)
