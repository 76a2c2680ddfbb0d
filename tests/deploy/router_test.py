"""Rollouts behind a router made for vLLM: smg finds them by their vLLM face and spreads chats over them, with
the tokens and bits of isobit.v1. And the face's proto against the public one."""

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import unittest
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
from google.protobuf import descriptor_pb2
from tokenizers import Tokenizer, models, pre_tokenizers

from isobit import RolloutClient
from isobit.launch import Setting
from isobit_tools.testing import ServiceTest, http_get, http_url, metric_values

ROUTERS = Path(sys.executable).parent.parent / "routers"  # of `make .venv/.routers`
PROTO = Path(__file__).resolve().parents[2] / "proto" / "vllm" / "grpc" / "engine" / "vllm_engine.proto"
PUBLIC_PROTO = ROUTERS / "smg_grpc_proto" / "proto" / "vllm_engine.proto"
CHAT = {"max_completion_tokens": 24, "temperature": 0.9, "ignore_eos": True}
DRAW = {"max_tokens": 24, "temperature": 0.9, "ignore_eos": True}
WITHOUT = "no router: `make .venv/.routers` installs it"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RouterTest(ServiceTest):
    setting = Setting("tree", tp_size=1, shards=1)

    @classmethod
    def make_model(cls) -> None:
        super().make_model()
        # Words t0 to t498 are the ids, and a chat is its words.
        tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(499)}, unk_token="t2"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(cls.model / "tokenizer.json"))
        template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
        (cls.model / "tokenizer_config.json").write_text(json.dumps(config))

    def start_router(self, rollouts) -> str:
        """Starts smg before these rollouts. Its address."""
        port = free_port()
        command = [
            sys.executable, "-m", "smg", "launch", "--host=127.0.0.1", f"--port={port}",
            "--policy=round_robin", "--prometheus-host=127.0.0.1", f"--prometheus-port={free_port()}",
            "--worker-urls",
        ]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(ROUTERS), "HF_HUB_OFFLINE": "1"}
        with (self.log_dir / "smg.txt").open("w") as log:
            process = subprocess.Popen(
                [*command, *(f"grpc://{rollout.target}" for rollout in rollouts)],
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment,
            )  # fmt: skip
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        router = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            with contextlib.suppress(OSError):
                workers = json.loads(http_get(f"{router}/workers"))["workers"]
                return [worker["status"] for worker in workers] == ["ready"] * len(rollouts)
            return False

        self.wait_until(ready, "smg has found the rollouts", timeout=60)
        return router

    def chat(self, router: str, **arguments):
        """The open answer of a chat with the prompt t3 t14 t15."""
        body = {
            "model": "model",
            "messages": [{"role": "user", "content": "t3 t14 t15"}],
            **CHAT,
            **arguments,
        }
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(
            f"{router}/v1/chat/completions", json.dumps(body).encode(), headers=headers
        )
        return urllib.request.urlopen(request, timeout=60)

    def bits(self, router: str, seed: int) -> list:
        """Of two samples: ids, and the bits of logprobs and of two alternatives."""
        with self.chat(router, seed=seed, n=2, logprobs=True, top_logprobs=2) as answer:
            choices = json.loads(answer.read())["choices"]
        found = []
        for choice in sorted(choices, key=lambda choice: choice["index"]):
            tokens = choice["logprobs"]["content"]
            self.assertEqual(choice["message"]["content"], " ".join(token["token"] for token in tokens))
            found.append([[self.pair(token), *map(self.pair, token["top_logprobs"])] for token in tokens])
        return found

    @staticmethod
    def pair(token: dict) -> tuple[int, bytes]:
        # JSON has the shortest decimal that is this float32 and no other.
        return int(token["token"].removeprefix("t")), np.float32(token["logprob"]).tobytes()

    @staticmethod
    def own_bits(client: RolloutClient, seed: int) -> list:
        """As `bits`, by isobit.v1."""

        def pairs(tokens) -> list:
            return [(int(i), x.tobytes()) for i, x in zip(tokens.token_ids, tokens.logprobs, strict=True)]

        return [
            [[own, *pairs(top)] for own, top in zip(pairs(s.tokens), s.tokens.top, strict=True)]
            for s in client.generate([3, 14, 15], seed=seed, n=2, logprobs=2, **DRAW)
        ]

    def test_a_fleet_behind_smg(self):
        if not (ROUTERS / "smg").is_dir():
            self.skipTest(WITHOUT)
        rollouts = [self.start("rollout", "--vllm_face", "--metrics_port=0") for _ in range(2)]
        clients = [self.enterContext(RolloutClient(rollout.target)) for rollout in rollouts]
        expected = [self.own_bits(clients[0], seed) for seed in range(11)]
        before = [self.num_tokens(rollout) for rollout in rollouts]
        router = self.start_router(rollouts)
        for seed in range(10):
            self.assertEqual(self.bits(router, seed), expected[seed])
        self.assertNotEqual(self.bits(router, 9), expected[10], "control: another seed")
        shares = [self.num_tokens(rollout) - old for rollout, old in zip(rollouts, before, strict=True)]
        self.assertEqual(sum(shares), 11 * 2 * 24)
        self.assertGreater(min(shares), 0, "both rollouts have work")
        self.check_stream(router, clients)
        for refused, field in (({"stop": ["t4"]}, "stop"), ({"max_completion_tokens": 3000}, "max_tokens")):
            with self.assertRaises(urllib.error.HTTPError) as raised, self.chat(router, **refused):
                pass
            self.assertEqual(raised.exception.code, 400)
            self.assertIn(f"sampling_params.{field}", raised.exception.read().decode())
        # One is lost: the other gives the same bits.
        rollouts[0].process.kill()
        rollouts[0].process.wait()
        for seed in range(6):
            self.assertEqual(self.bits(router, seed), expected[seed])

    def check_stream(self, router: str, clients: list[RolloutClient]) -> None:
        words, usage = [], None
        arguments = {"seed": 3, "stream": True, "stream_options": {"include_usage": True}}
        with self.chat(router, **arguments) as answer:
            for event in self.events(answer):
                usage = event.get("usage") or usage
                words += [choice["delta"].get("content") or "" for choice in event["choices"]]
        (sample,) = clients[0].generate([3, 14, 15], seed=3, **DRAW)
        self.assertEqual("".join(words), " ".join(f"t{i}" for i in sample.tokens.token_ids))
        self.assertEqual((usage["prompt_tokens"], usage["completion_tokens"]), (3, 24))
        # A client that goes: its request ends on the rollout, too.
        with self.chat(router, stream=True, max_completion_tokens=2000) as answer:
            next(self.events(answer))
        self.wait_until(
            lambda: all(client.get_load().num_running_requests == 0 for client in clients),
            "the request of a client that has gone has ended",
        )

    @staticmethod
    def events(answer: http.client.HTTPResponse):
        """The events of a stream, but for its last line."""
        for line in answer:
            text = line.decode().strip().removeprefix("data: ")
            if text and text != "[DONE]":
                yield json.loads(text)

    @staticmethod
    def num_tokens(rollout) -> float:
        return metric_values(http_get(http_url(rollout, "metrics")))["isobit_tokens_generated_total"]

    def test_the_proto_is_a_part_of_the_public_one(self):
        if not PUBLIC_PROTO.is_file():
            self.skipTest(WITHOUT)
        ours, public = self.descriptors(PROTO), self.descriptors(PUBLIC_PROTO)
        self.assertEqual(self.differences(ours, public), [])
        # Controls: a number, a type, a name and the kind of a method.
        for old, new in (
            ("bool stream = 5;", "bool stream = 15;"),
            ("uint32 top_k = 3;", "int32 top_k = 3;"),
            ("bool ignore_eos = 14;", "bool ignore_eoss = 14;"),
            ("returns (stream GenerateResponse)", "returns (GenerateResponse)"),
        ):
            changed = self.log_dir / PROTO.name
            changed.write_text(PROTO.read_text().replace(old, new))
            self.assertEqual(len(self.differences(self.descriptors(changed), public)), 1, old)

    def descriptors(self, proto: Path) -> descriptor_pb2.FileDescriptorProto:
        out = self.log_dir / "descriptors"
        command = [
            sys.executable,
            "-m",
            "grpc_tools.protoc",
            f"-I{proto.parent}",
            f"--descriptor_set_out={out}",
        ]
        subprocess.run([*command, proto.name], check=True)
        return descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file[0]

    @staticmethod
    def differences(ours, public) -> list[str]:
        """What of `ours` the public proto has otherwise. NotServed stands for any message."""
        found = [] if ours.package == public.package else ["package"]
        theirs = {message.name: {f.number: f for f in message.field} for message in public.message_type}
        kinds = ("name", "type", "label", "proto3_optional")
        for message in ours.message_type:
            if message.name == "NotServed":
                continue
            for field in message.field:
                other = theirs.get(message.name, {}).get(field.number)
                same = other is not None and all(
                    getattr(field, kind) == getattr(other, kind) for kind in kinds
                )
                same = same and (field.type_name in (other.type_name, f".{ours.package}.NotServed"))
                if not same:
                    found.append(f"{message.name}.{field.name}")
        streams = ("client_streaming", "server_streaming")
        methods = {method.name: method for method in public.service[0].method}
        for method in ours.service[0].method:
            other = methods.get(method.name)
            if other is None or any(getattr(method, kind) != getattr(other, kind) for kind in streams):
                found.append(method.name)
        return found


if __name__ == "__main__":
    unittest.main()
