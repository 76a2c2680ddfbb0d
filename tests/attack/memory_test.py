"""How much memory clients can make a service take: by waiting requests, unread results, abandoned calls.

Memory is the process's resident set; each test prints it before and after.
"""

import contextlib
import json
import signal
import subprocess
import sys
import time
import unittest

import grpc
from attack_case import MIB, memory_of

from isobit import RolloutClient
from isobit.launch import run_model_tool
from isobit.v1 import rollout_pb2, rollout_pb2_grpc, scorer_pb2, scorer_pb2_grpc
from isobit_tools.testing import BIN_DIR, ServiceTest

VOCABULARY = 2048
SHORT = {"seed": 1, "max_tokens": 8, "ignore_eos": True}
# The client's own buffers stay small, so that what it does not read stays with the server.
NARROW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 14)]

# A client of its own process, which starts a stream and never reads from it.
READS_NOTHING = """
import sys, time, grpc
from isobit.v1 import rollout_pb2, rollout_pb2_grpc
channel = grpc.insecure_channel(sys.argv[1], eval(sys.argv[3]))
request = rollout_pb2.GenerateRequest.FromString(bytes.fromhex(sys.argv[2]))
stream = rollout_pb2_grpc.RolloutServiceStub(channel).Generate(request, timeout=300)
list(stream.initial_metadata())
print("started", flush=True)
time.sleep(300)
"""


def make_request(**sampling) -> rollout_pb2.GenerateRequest:
    request = rollout_pb2.GenerateRequest(prompt_token_ids=[1, 2, 3])
    for name, value in {**SHORT, **sampling}.items():
        setattr(request.sampling, name, value)
    return request


def make_heavy_request() -> rollout_pb2.GenerateRequest:
    """A valid request for as much as a short prompt can ask for."""
    request = make_request(n=128)
    request.sampling.stop_token_ids.extend(range(256))
    for token in range(1024):
        request.sampling.logit_bias[token] = 0.5
    return request


class MemoryTest(ServiceTest):
    @classmethod
    def make_model(cls):
        run_model_tool(BIN_DIR, "config", "tiny-llama", str(cls.model), "--seed=3")
        config = cls.model / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "vocab_size": VOCABULARY}))

    def start_service(self, kind: str, *flags: str) -> None:
        self.service = self.start(kind, "--load_format=dummy", *flags)

    def start_rollout(self, *flags: str) -> None:
        self.start_service("rollout", "--kv_cache_mb=64", *flags)
        self.client = self.enterContext(RolloutClient(self.service.target))
        self.client.generate([1, 2, 3], **SHORT)  # the first step allocates memory that stays
        channel = self.enterContext(grpc.insecure_channel(self.service.target, NARROW))
        self.stub = rollout_pb2_grpc.RolloutServiceStub(channel)

    def memory(self) -> float:
        """MiB resident in the service."""
        return memory_of(self.service) / MIB

    def report(self, what: str, before: float) -> float:
        after = self.memory()
        print(
            f"{self.id().rpartition('.')[2]}: {what}: {before:.0f} MiB before, {after:.0f} MiB after",
            flush=True,
        )
        return after - before

    def is_free(self) -> bool:
        load = self.client.get_load()
        return load.num_used_pages == load.num_running_requests == load.num_waiting_requests == 0

    def ended(self, calls) -> list[grpc.Call]:
        return [call for call in calls if not call.is_active()]

    def queue(self, request: rollout_pb2.GenerateRequest, count: int) -> list[grpc.Call]:
        calls = []
        for _ in range(count):
            calls.append(self.stub.Generate(request, timeout=300))
        self.wait_until(
            lambda: self.client.get_load().num_waiting_requests + len(self.ended(calls)) >= count,
            "not queued",
            60,
        )
        return calls

    def test_a_queue_of_heavy_requests_stays_small(self):
        self.start_rollout()
        self.client.pause_generation("keep")
        before = self.memory()
        calls = self.queue(make_heavy_request(), 500)
        self.assertEqual(len(self.ended(calls)), 0)
        self.assertLess(self.report("500 heavy requests queue", before), 64)
        for call in calls:
            call.cancel()
        self.wait_until(self.is_free, "cancelled requests stay", 60)

    def test_the_queue_is_bounded_by_bytes(self):
        self.start_rollout("--max_requests_mb=8", "--max_client_share=0.5")
        self.client.pause_generation("keep")
        before = self.memory()
        calls = self.queue(make_heavy_request(), 500)
        refused = self.ended(calls)
        print(f"{len(refused)} of {len(calls)} refused", flush=True)
        self.assertGreater(len(refused), 300)
        self.assertLess(len(refused), 500)
        self.assertLess(self.report("500 heavy requests, 4 MiB of one client allowed", before), 48)
        for call in refused:
            self.assertEqual(call.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)
            self.assertIn("4194304 of one client", call.details())
            self.assertIn("retry-after-ms", dict(call.trailing_metadata()))
        for call in calls:
            call.cancel()
        self.wait_until(self.is_free, "cancelled requests stay", 60)
        self.client.continue_generation()
        self.client.generate([1, 2, 3], **SHORT)

    def test_unread_final_only_streams_are_bounded(self):
        self.start_rollout("--max_unread_mb=16", "--max_client_share=0.5")
        request = make_request(n=64, max_tokens=100, logprobs=64)
        request.final_only = True
        before = self.memory()
        self.client.pause_generation("keep")
        calls = self.queue(request, 12)
        self.client.continue_generation()
        self.wait_until(self.is_free, "the requests do not end", 240)
        grown = self.report("12 streams of 3.5 MiB each, 8 MiB of one client allowed", before)
        self.assertLess(grown, 40)
        self.client.generate([1, 2, 3], **SHORT)
        whole = 0
        for call in calls:
            try:
                whole += sum(response.HasField("complete") for response in call) == 64
            except grpc.RpcError as error:
                self.assertEqual(error.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)
                self.assertIn("nobody has read", error.details())
        print(f"{whole} of {len(calls)} streams were whole", flush=True)
        self.assertGreater(whole, 0)
        self.assertLess(whole, 12)

    def reads_nothing(self, request: rollout_pb2.GenerateRequest) -> subprocess.Popen:
        command = [
            sys.executable,
            "-c",
            READS_NOTHING,
            self.service.target,
            request.SerializeToString().hex(),
            repr(NARROW),
        ]
        client = self.enterContext(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        self.addCleanup(client.kill)
        self.assertEqual(client.stdout.readline(), "started\n")
        return client

    def test_stopped_clients_delay_nobody(self):
        self.start_rollout("--max_unread_mb=16")
        alone = self.seconds_of_a_call()
        before = self.memory()
        for _ in range(3):
            self.reads_nothing(make_request(n=64, max_tokens=100, logprobs=64)).send_signal(signal.SIGSTOP)
        self.wait_until(self.is_free, "the requests do not end", 240)
        beside = self.seconds_of_a_call()
        print(f"a call takes {alone:.3f} s alone, {beside:.3f} s beside stopped clients", flush=True)
        self.assertLess(beside, 10 * alone + 1)
        self.assertLess(self.report("3 stopped clients, 16 MiB allowed", before), 48)

    def test_unread_scores_are_bounded(self):
        self.start_service("scorer", "--shards=2", "--max_calls_mb=16", "--max_client_share=0.5")
        channel = self.enterContext(grpc.insecure_channel(self.service.target, NARROW))
        stub = scorer_pb2_grpc.ScorerServiceStub(channel)
        request = scorer_pb2.ScoreRequest(prompt_logprobs=True)
        request.sampling.logprobs = 64
        request.sequences.add(prompt_token_ids=range(1, 1800), completion_token_ids=[1, 2, 3])
        list(stub.Score(request, timeout=60))  # the first pass allocates memory that stays
        time.sleep(0.5)
        before = self.memory()
        calls = [stub.Score(request, timeout=300) for _ in range(30)]
        self.wait_until(lambda: len(self.ended(calls)) >= 24, "not refused", 60)
        time.sleep(2)
        self.assertLess(self.report("30 unread calls of 3 MiB each, 8 MiB of one client allowed", before), 32)
        for call in self.ended(calls):
            self.assertEqual(call.code(), grpc.StatusCode.RESOURCE_EXHAUSTED)
            self.assertIn("retry-after-ms", dict(call.trailing_metadata()))
        for call in calls:
            if call.is_active():
                self.assertEqual(len(list(call)), 1)

    def seconds_of_a_call(self) -> float:
        start = time.monotonic()
        self.client.generate([1, 2, 3], **SHORT)
        return time.monotonic() - start

    def test_clients_that_vanish_free_their_pages(self):
        self.start_rollout()
        for number, what, patience in ((signal.SIGKILL, "killed", 10), (signal.SIGSTOP, "stopped", 90)):
            with self.subTest(what):
                client = self.reads_nothing(make_request(n=8, max_tokens=1900))
                self.client.pause_generation("keep")
                self.assertGreater(self.client.get_load().num_used_pages, 0)
                start = time.monotonic()
                client.send_signal(number)
                self.wait_until(self.is_free, "pages stay taken", patience)
                print(f"{what}: pages free after {time.monotonic() - start:.1f} s", flush=True)
                self.client.continue_generation()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        unittest.main()
