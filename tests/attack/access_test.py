"""Clients that leave the access file while their calls last: every long call of every service ends as a new
call would, nothing takes effect any more, and an audit line says so. Others go on."""

import contextlib
import http.client
import json
import os
import signal
import threading
import unittest
from pathlib import Path
from unittest import mock

import grpc
from guarded_services import ROLES, GuardedServicesTest, token_hash

from isobit import ComparatorClient, RolloutClient, ScorerClient
from isobit.errors import IsobitError
from isobit.v1 import comparator_pb2, comparator_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from isobit.weights import WeightSpec
from isobit_tools.bf16_files import bf16_tensors

REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
LIST_SERVICES = b"\x3a\x01*"
VLLM_GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
ENDED = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
LEAVES = (("authorization", "Bearer token-leaves"),)


class HeldBack:
    """Weights of which all but the first tensors wait for an event."""

    def __init__(self, tensors: dict, go_on: threading.Event):
        self.specs = [WeightSpec(name, "BF16", tensor.shape) for name, tensor in tensors.items()]
        self._tensors, self._go_on = tensors, go_on
        self.begun = threading.Event()

    def __iter__(self):
        for number, item in enumerate(self._tensors.items()):
            if number == 3:
                self.begun.set()
                self._go_on.wait(60)
            yield item


class Calls:
    """Calls in flight, each on a thread, and how each ends: a status, or what else is raised or returned."""

    def __init__(self):
        self.ends, self._threads = {}, []

    def start(self, name: str, work) -> None:
        def run():
            try:
                end = work()
            except IsobitError as error:
                end = error.code
            except grpc.RpcError as error:
                end = error.code()
            except Exception as error:
                end = type(error)
            self.ends[name] = end

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)


class AccessTest(GuardedServicesTest):
    def allow(self, *names: str, roles=ROLES) -> str:
        """An access file with these clients; the last one has `roles`, the others all."""
        clients = [
            {
                "name": name,
                "roles": list(roles if name == names[-1] else ROLES),
                "token_sha256": [token_hash(f"token-{name}")],
            }
            for name in names
        ]
        path = self.log_dir / "access.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"clients": clients}))
        new.replace(path)
        return f"--access_file={path}"

    def start_trio(self):
        self.stays = {"token": "token-stays"}
        access = self.allow("stays", "leaves")
        secret = self.log_dir / "stays.token"
        secret.write_text("token-stays")
        self.audits = {kind: self.log_dir / f"{kind}.audit" for kind in ("rollout", "scorer")}
        for path in self.audits.values():
            path.unlink(missing_ok=True)  # of an earlier trio
        rollout = self.start(
            "rollout", access, "--vllm_face", f"--audit_log={self.audits['rollout']}", **self.stays
        )
        scorer = self.start("scorer", access, f"--audit_log={self.audits['scorer']}", **self.stays)
        comparator = self.start(
            "comparator", access, f"--rollout={rollout.target}", f"--scorer={scorer.target}",
            f"--upstream_token_file={secret}", "--http_port=0", **self.stays,
        )  # fmt: skip
        return rollout, scorer, comparator

    def stub(self, kind, service):
        return kind(self.enterContext(grpc.insecure_channel(service.target)))

    def audit_lines(self, kind: str) -> list[dict]:
        path = self.audits[kind]
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def drain(self, calls: Calls, name: str, begun: threading.Event, answers) -> None:
        """Reads a stream to its end; `begun` is set at its first answer."""

        def read():
            for _ in answers:
                begun.set()

        calls.start(name, read)

    def test_every_long_call_ends(self):
        for what, remaining in (
            ("removed", {"names": ("stays",)}),
            ("roles shrink", {"names": ("stays", "leaves"), "roles": ["score"]}),
        ):
            with self.subTest(what):
                self.check_long_calls(remaining.pop("names"), **remaining)

    def check_long_calls(self, names, **remaining):
        rollout, scorer, comparator = self.start_trio()
        own = self.enterContext(RolloutClient(rollout.target, **self.stays))
        own_scorer = self.enterContext(ScorerClient(scorer.target, **self.stays))
        (sample,) = own.generate([1, 2], max_tokens=2, ignore_eos=True)
        (score,) = own_scorer.score([([1, 2], sample.tokens.token_ids)])
        before = [c.get_server_info().server.weight_version for c in (own, own_scorer)]
        own.pause_generation("keep")  # so that no request ends by itself

        calls, go_on, leaves = Calls(), threading.Event(), {"token": "token-leaves"}
        rollouts, scorers = RolloutClient(rollout.target, **leaves), ScorerClient(scorer.target, **leaves)
        comparators = ComparatorClient(comparator.target, **leaves)
        for client in (rollouts, scorers, comparators):
            self.enterContext(client)
        tensors = bf16_tensors(self.model)
        streams = {kind: HeldBack(tensors, go_on) for kind in ("rollout", "scorer")}

        def pairs():
            yield sample, score
            go_on.wait(60)
            yield sample, score

        calls.start("Generate", lambda: rollouts.generate([1, 2, 3], max_tokens=2, ignore_eos=True))
        calls.start("Compare", lambda: comparators.compare([[1, 2, 3]], max_tokens=2, ignore_eos=True))
        calls.start("Record", lambda: comparators.record(pairs()))
        for kind, client in (("rollout", rollouts), ("scorer", scorers)):
            calls.start(f"{kind} weights", lambda c=client, k=kind: c.update_weights_from_stream(streams[k]))
        watch = self.stub(comparator_pb2_grpc.ComparatorServiceStub, comparator).Watch(
            comparator_pb2.WatchRequest(interval_ms=50), metadata=LEAVES
        )
        watched = threading.Event()
        self.drain(calls, "Watch", watched, watch)
        tap = self.stub(rollout_pb2_grpc.RolloutServiceStub, rollout).Tap(
            rollout_pb2.TapRequest(fraction=1), metadata=LEAVES
        )
        self.drain(calls, "Tap", threading.Event(), tap)
        channel = self.enterContext(grpc.insecure_channel(rollout.target))
        vllm = channel.unary_stream(VLLM_GENERATE)(b"\x12\x03\x12\x01\x05\x22\x02\x40\x04", metadata=LEAVES)
        self.drain(calls, "vLLM Generate", threading.Event(), vllm)
        looked = threading.Event()
        reflection = channel.stream_stream(REFLECTION)(self.once_and_wait(go_on), metadata=LEAVES)
        self.drain(calls, "reflection", looked, reflection)
        events = threading.Event()
        calls.start("/events", lambda: self.read_events(comparator, events))
        for begun in (watched, looked, events, *(stream.begun for stream in streams.values())):
            self.assertTrue(begun.wait(30))
        self.wait_until(lambda: own.get_load().num_waiting_requests == 3, "the three that generate")

        kept = Calls()
        kept.start("Generate", lambda: own.generate([1, 2, 3], max_tokens=2, ignore_eos=True))
        self.wait_until(lambda: own.get_load().num_waiting_requests == 4, "the one that stays")
        self.allow(*names, **remaining)
        own.get_server_info()  # for a client that stays all goes on
        streaming = {"Generate", "Compare", "Watch", "Tap", "vLLM Generate", "reflection", "/events"}
        self.wait_until(lambda: streaming <= calls.ends.keys(), "they go on", timeout=30)
        for kind in ("rollout", "scorer"):
            self.wait_until(
                lambda kind=kind: any(line["client"] == "leaves" for line in self.audit_lines(kind)),
                "no audit line",
                timeout=30,
            )
        go_on.set()
        calls.join()
        self.assertEqual(calls.ends.pop("/events"), "ended")
        self.assertEqual(
            calls.ends.keys(), streaming - {"/events"} | {"Record", "rollout weights", "scorer weights"}
        )
        self.assertLessEqual(set(calls.ends.values()), ENDED, calls.ends)
        for kind in ("rollout", "scorer"):
            (line,) = [line for line in self.audit_lines(kind) if line["client"] == "leaves"]
            self.assertIn("UpdateWeightsFromStream", line["method"])
            self.assertIn(line["outcome"], {code.name for code in ENDED})
        after = [c.get_server_info().server.weight_version for c in (own, own_scorer)]
        self.assertEqual(after, before)
        self.wait_until(lambda: own.get_load().num_waiting_requests == 1, "the service goes on for nobody")
        own.continue_generation()
        kept.join()
        self.assertIsInstance(kept.ends["Generate"], list)

    @staticmethod
    def once_and_wait(go_on: threading.Event):
        yield LIST_SERVICES
        go_on.wait(60)

    @staticmethod
    def read_events(comparator, begun: threading.Event) -> str:
        port = int(Path(f"{comparator.port_file}.http").read_text())
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/events", headers={"Authorization": "Bearer token-leaves"})
        answer = connection.getresponse()
        with contextlib.suppress(http.client.IncompleteRead):
            while answer.read1(65536):
                begun.set()
        return "ended"

    def test_a_switch_is_asked_about_once_more(self):
        """A client that leaves last of all: its weights are there, and only the switch is left."""
        failpoints = self.log_dir / "failpoints"
        self.enterContext(mock.patch.dict(os.environ, ISOBIT_FAILPOINTS=str(failpoints)))
        stays, leaves = {"token": "token-stays"}, {"token": "token-leaves"}
        tensors = bf16_tensors(self.model)
        for kind, client_type in (("rollout", RolloutClient), ("scorer", ScorerClient)):
            for way in ("directory", "stream"):
                with self.subTest(service=kind, way=way):
                    failpoints.write_text("")
                    service = self.start(kind, self.allow("stays", "leaves"), **stays)
                    own = self.enterContext(client_type(service.target, **stays))
                    client = self.enterContext(client_type(service.target, **leaves))
                    before = own.get_server_info().server.weight_version
                    failpoints.write_text("weights.verified stop\n")
                    calls = Calls()
                    if way == "directory":
                        calls.start("update", lambda c=client: c.update_weights("model"))
                    else:
                        calls.start("update", lambda c=client: c.update_weights_from_stream(tensors))
                    stat = Path(f"/proc/{service.process.pid}/stat")
                    self.wait_until(
                        lambda stat=stat: stat.read_text().rsplit(")", 1)[1].split()[0] == "T",
                        "it does not come to the switch",
                    )
                    self.allow("stays")
                    failpoints.write_text("")
                    service.process.send_signal(signal.SIGCONT)
                    calls.join()
                    self.assertEqual(calls.ends["update"], grpc.StatusCode.UNAUTHENTICATED)
                    self.assertEqual(own.get_server_info().server.weight_version, before)


if __name__ == "__main__":
    unittest.main()
