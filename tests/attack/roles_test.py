"""Who may call what: every role on every method of every service, tokens, quotas, the admin port."""

import json
import subprocess
import sys
import threading
import time
import unittest
from concurrent.futures import ThreadPoolExecutor

import grpc
import http2
from guarded_services import ROLES, GuardedServicesTest, admin_target, token_hash

from isobit import ComparatorClient, RolloutClient, ScorerClient
from isobit.errors import IsobitError
from isobit.v1 import comparator_pb2, rollout_pb2, scorer_pb2

# Which role may call what. Written again here, since the table in C++ is under test.
ALLOWED = {
    "RolloutService/Generate": {"generate"},
    "RolloutService/Abort": {"generate", "admin"},
    "RolloutService/PauseGeneration": {"admin"},
    "RolloutService/ContinueGeneration": {"admin"},
    "RolloutService/Sleep": {"admin"},
    "RolloutService/WakeUp": {"admin"},
    "RolloutService/UpdateWeights": {"admin"},
    "RolloutService/UpdateWeightsFromStream": {"admin"},
    "RolloutService/InitWeightTransfer": {"admin"},
    "RolloutService/StartWeightTransfer": {"admin"},
    "RolloutService/ReceiveWeights": {"admin"},
    "RolloutService/FinishWeightTransfer": {"admin"},
    "RolloutService/ShutdownWeightTransfer": {"admin"},
    "RolloutService/GetServerInfo": {"watch", "admin"},
    "RolloutService/GetLoad": {"watch", "admin"},
    "RolloutService/Tap": {"compare"},
    "RolloutService/Probe": {"admin"},
    "ScorerService/Probe": {"admin"},
    "ScorerService/Score": {"score"},
    "ScorerService/UpdateWeights": {"admin"},
    "ScorerService/UpdateWeightsFromStream": {"admin"},
    "ScorerService/GetServerInfo": {"watch", "admin"},
    "ComparatorService/Compare": {"compare"},
    "ComparatorService/Record": {"compare"},
    "ComparatorService/Localise": {"admin"},
    "ComparatorService/Watch": {"watch", "admin"},
    "ComparatorService/GetServerInfo": {"watch", "admin"},
}
LOOK = {"watch", "admin"}
VLLM_SERVICE = "/vllm.grpc.engine.VllmEngine"
VLLM_ALLOWED = {
    "Generate": {"generate"},
    "Abort": {"generate", "admin"},
    "HealthCheck": {"generate"} | LOOK,
    "GetModelInfo": LOOK,
    "GetServerInfo": LOOK,
    "GetLoads": LOOK,
    "Embed": {"generate"} | LOOK,
    "GetTokenizer": {"generate"} | LOOK,
    "SubscribeKvEvents": {"generate"} | LOOK,
}
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
DENIED = {grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED}


def methods(module) -> list[tuple[str, str, bool]]:
    """Each service and method of a proto file, and whether it streams requests."""
    found = module.DESCRIPTOR.services_by_name.values()
    return [(s.name, m.name, m.client_streaming) for s in found for m in s.methods]


def code_of(channel: grpc.Channel, path: str, token: str | None) -> grpc.StatusCode:
    """The status of a call of `path` with an empty message, or with bytes that are no message."""
    metadata = [("authorization", f"Bearer {token}")] if token else []
    # Any stream: a unary method takes it for its one message.
    call = channel.stream_stream(path)(iter([b""]), metadata=metadata, timeout=2)
    try:
        next(call)  # one answer is enough
    except StopIteration:
        return grpc.StatusCode.OK
    except grpc.RpcError as error:
        return error.code()
    finally:
        call.cancel()
    return grpc.StatusCode.OK


def is_answered(target: str, path: str, request: bytes, headers: http2.Headers) -> bool:
    """Whether a call with exactly these headers gets a message: a refusal has none."""
    with http2.Connection(target) as connection:
        stream = connection.open(path, more=headers)
        connection.write(stream, http2.message(request))
        has_message = False
        while stream not in connection.ended:
            kind, _ = connection.read_frame()
            has_message |= kind == http2.DATA
        return has_message


class RolesTest(GuardedServicesTest):
    def test_every_role_on_every_method(self):
        access = self.write_access()
        known = {f"{s}/{m}" for f in (rollout_pb2, scorer_pb2, comparator_pb2) for s, m, _ in methods(f)}
        self.assertEqual(known, ALLOWED.keys())
        started = (
            (self.start("rollout", access), rollout_pb2),
            (self.start("scorer", access), scorer_pb2),
            (self.start("comparator", access), comparator_pb2),
        )
        for service, module in started:
            with grpc.insecure_channel(service.target) as channel:
                for name, method, _ in methods(module):
                    self.check_method(channel, f"/isobit.v1.{name}/{method}", ALLOWED[f"{name}/{method}"])
                self.check_method(channel, REFLECTION, {"watch", "admin"})
                self.check_method(channel, "/isobit.v1.RolloutService/NoSuchMethod", set())
                health = code_of(channel, "/grpc.health.v1.Health/Check", None)
                self.assertEqual(health, grpc.StatusCode.OK, "health is open to all")

    def test_every_role_on_the_vllm_face(self):
        service = self.start("rollout", self.write_access(), "--vllm_face")
        with grpc.insecure_channel(service.target) as channel:
            for method, allowed in VLLM_ALLOWED.items():
                self.check_method(channel, f"{VLLM_SERVICE}/{method}", allowed)
            self.check_method(channel, f"{VLLM_SERVICE}/NoSuchMethod", set())

    def test_the_vllm_face_has_the_same_gate(self):
        """Quotas are of both faces together; an abort ends a client's own requests; an admin's is audited."""
        access = self.write_access(
            {"name": "other", "roles": ["generate"], "token_sha256": [token_hash("token-other")]}
        )
        audit = self.log_dir / "audit"
        service = self.start(
            "rollout", access, "--vllm_face", "--max_client_requests=1", f"--audit_log={audit}"
        )
        owner = self.enterContext(RolloutClient(service.target, token="token-generate"))
        admin = self.enterContext(RolloutClient(service.target, token="token-admin"))
        channel = self.enterContext(grpc.insecure_channel(service.target))
        admin.pause_generation("keep")  # so that no request ends before it is aborted

        def face(method: str, role: str, message: bytes) -> grpc.Call:
            metadata = [("authorization", f"Bearer token-{role}")]
            return channel.unary_stream(f"{VLLM_SERVICE}/{method}")(message, metadata=metadata, timeout=30)

        abort_mine = b"\x0a\x04mine"  # request_ids: "mine"
        generate = b"\x12\x03\x12\x01\x05\x22\x02\x40\x04"  # tokenized.input_ids: 5, max_tokens: 4
        for who, num_left in (("other", 1), ("generate", 0), ("admin", 0)):
            with ThreadPoolExecutor(1) as pool:
                generating = pool.submit(
                    owner.generate, [1, 2, 3], request_id="mine", max_tokens=4, timeout=30
                )
                self.wait_for_waiting_requests(admin, 1)
                with self.assertRaises(grpc.RpcError) as raised:
                    next(face("Generate", "generate", generate))
                self.assertIn("this client: 1 of 1 requests", raised.exception.details())
                self.assertIn("retry-after-ms", dict(raised.exception.trailing_metadata()))
                list(face("Abort", who, abort_mine))
                self.wait_for_waiting_requests(admin, num_left)
                admin.abort_all()
                self.assertEqual(generating.result()[0].finish_reason, "abort")
        lines = [json.loads(line) for line in audit.read_text().splitlines()]
        (line,) = [line for line in lines if line["method"].startswith(VLLM_SERVICE)]
        self.assertEqual((line["client"], line["method"]), ("the-admin", f"{VLLM_SERVICE}/Abort"))
        self.assertIn("mine", line["arguments"])

    def check_method(self, channel: grpc.Channel, path: str, allowed: set[str]) -> None:
        for role in ROLES:
            with self.subTest(path=path, role=role):
                code = code_of(channel, path, f"token-{role}")
                if role in allowed:
                    self.assertNotIn(code, DENIED)
                else:
                    self.assertEqual(code, grpc.StatusCode.PERMISSION_DENIED)
        for token in (None, "token-", "wrong"):
            self.assertEqual(code_of(channel, path, token), grpc.StatusCode.UNAUTHENTICATED, path)

    def test_abort_reaches_own_requests_alone(self):
        access = self.write_access(
            {"name": "other", "roles": ["generate"], "token_sha256": [token_hash("token-other")]}
        )
        target = self.start("rollout", access).target
        owner = self.enterContext(RolloutClient(target, token="token-generate"))
        other = self.enterContext(RolloutClient(target, token="token-other"))
        admin = self.enterContext(RolloutClient(target, token="token-admin"))
        admin.pause_generation("keep")  # so that no request ends before it is aborted
        for who, ended in ((other, []), (owner, ["mine"]), (admin, ["mine"])):
            with ThreadPoolExecutor(1) as pool:
                generating = pool.submit(owner.generate, [1, 2, 3], request_id="mine", max_tokens=4)
                self.wait_for_waiting_requests(admin, 1)
                self.assertEqual(who.abort("mine"), ended)
                self.wait_for_waiting_requests(admin, 1 - len(ended))
                admin.abort_all()
                (sample,) = generating.result()
                self.assertEqual(sample.finish_reason, "abort")
        with self.assertRaises(IsobitError) as raised:
            other.abort_all()
        self.assertEqual(raised.exception.code, grpc.StatusCode.PERMISSION_DENIED)
        self.assertIn("lacks the role admin", raised.exception.details)

    def wait_for_waiting_requests(self, client: RolloutClient, count: int) -> None:
        deadline = time.monotonic() + 30
        while client.get_load().num_waiting_requests != count:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)

    def test_admin_methods_are_at_the_admin_port_alone(self):
        audit = self.log_dir / "audit"
        service = self.start("rollout", self.write_access(), "--admin_port=0", f"--audit_log={audit}")
        main = self.enterContext(RolloutClient(service.target, token="token-admin"))
        admin = self.enterContext(RolloutClient(admin_target(service), token="token-admin"))
        for call in (main.pause_generation, main.continue_generation, main.abort_all):
            with self.assertRaisesRegex(IsobitError, "admin port"):
                call()
        admin.pause_generation()
        admin.continue_generation()
        self.assertEqual(admin.abort_all(), [])
        self.assertEqual(admin.abort("nobody's"), [])
        worker = self.enterContext(RolloutClient(admin_target(service), token="token-generate"))
        with self.assertRaisesRegex(IsobitError, "PERMISSION_DENIED"):
            worker.generate([1], max_tokens=1)
        for target in (service.target, admin_target(service)):
            with grpc.insecure_channel(target) as channel:
                self.assertEqual(code_of(channel, REFLECTION, "token-admin"), grpc.StatusCode.OK)
                health = code_of(channel, "/grpc.health.v1.Health/Check", None)
                self.assertEqual(health, grpc.StatusCode.OK)
        lines = [json.loads(line) for line in audit.read_text().splitlines()]
        done = [line["method"].rpartition("/")[2] for line in lines if line["outcome"] == "OK"]
        self.assertEqual(done, ["PauseGeneration", "ContinueGeneration", "Abort", "Abort"])
        self.assertTrue(all(line["client"] == "the-admin" for line in lines), lines)

    def test_no_header_makes_the_port(self):
        """The port decides, whatever a client calls itself: libraries for gRPC always send a user-agent."""
        service = self.start("rollout", "--admin_port=0")
        main, admin = service.target, admin_target(service)
        generate = rollout_pb2.GenerateRequest()
        generate.prompt_token_ids.append(1)
        generate.sampling.max_tokens = 1
        calls = (
            ("Abort", rollout_pb2.AbortRequest(all=True), {admin}),
            ("ContinueGeneration", rollout_pb2.ContinueGenerationRequest(), {admin}),
            ("GetLoad", rollout_pb2.GetLoadRequest(), {main, admin}),
            ("Generate", generate, {main}),
        )
        for agents in ((), ("",), ("grpc-c++/1.51.1",), ("a", "b"), ("", "")):
            headers = tuple(("user-agent", agent) for agent in agents)
            for method, request, ports in calls:
                for target in (main, admin):
                    with self.subTest(agents=agents, method=method, at_admin_port=target == admin):
                        path = f"/isobit.v1.RolloutService/{method}"
                        answered = is_answered(target, path, request.SerializeToString(), headers)
                        self.assertEqual(answered, target in ports)

    def test_a_client_over_its_quota_is_told_when_to_come_back(self):
        access = self.write_access(
            {"name": "other", "roles": ["generate"], "token_sha256": [token_hash("token-other")]}
        )
        target = self.start("rollout", access, "--max_client_requests=2", "--max_total_requests=3").target
        greedy = self.enterContext(RolloutClient(target, token="token-generate", wait_if_full=False))
        other = self.enterContext(RolloutClient(target, token="token-other"))
        admin = self.enterContext(RolloutClient(target, token="token-admin"))
        admin.pause_generation("keep")  # so that no request ends by itself
        with ThreadPoolExecutor(3) as pool:
            held = [pool.submit(greedy.generate, [1], max_tokens=1) for _ in range(2)]
            self.wait_for_waiting_requests(admin, 2)
            with self.assertRaisesRegex(IsobitError, "this client: 2 of 2 requests") as raised:
                greedy.generate([1], max_tokens=1)
            self.assertEqual(raised.exception.retry_after_ms, 1000)
            held.append(pool.submit(other.generate, [1], max_tokens=1))
            self.wait_for_waiting_requests(admin, 3)  # another client has room
            admin.continue_generation()
            self.assertEqual([len(generated.result()) for generated in held], [1, 1, 1])
        self.assert_soon(lambda: greedy.generate([1], max_tokens=1))

    def assert_soon(self, call) -> None:
        deadline = time.monotonic() + 10
        while True:
            try:
                return call()
            except IsobitError:
                self.assertLess(time.monotonic(), deadline)
                time.sleep(0.02)

    def test_each_kind_of_quota_counts(self):
        client = self.enterContext(ScorerClient(self.start("scorer", "--max_client_tokens=20").target))
        client.score([([1, 2], [3, 4])])
        with self.assertRaisesRegex(IsobitError, "takes 42 tokens, expected at most 20") as raised:
            client.score([([1, 2], [3] * 40)])
        self.assertIsNone(raised.exception.retry_after_ms)
        comparator = self.start("comparator", "--max_client_streams=2")
        watched = self.enterContext(ComparatorClient(comparator.target))
        held = [watched.watch(interval_ms=10) for _ in range(2)]
        for updates in held:
            next(updates)
        with self.assertRaisesRegex(IsobitError, "2 of 2 streams"):
            next(watched.watch())

    def test_a_comparator_calls_with_its_own_token(self):
        access = self.write_access(
            {
                "name": "comparator",
                "roles": ["generate", "score", "watch"],
                "token_sha256": [token_hash("token-comparator")],
            }
        )
        rollout, scorer = self.start("rollout", access), self.start("scorer", access)
        upstreams = [f"--rollout={rollout.target}", f"--scorer={scorer.target}"]
        token = self.log_dir / "comparator.token"
        token.write_text("token-generate\n")
        service = self.start("comparator", *upstreams, f"--upstream_token_file={token}")
        client = self.enterContext(ComparatorClient(service.target))
        with self.assertRaisesRegex(IsobitError, "lacks the role watch or admin"):
            client.compare([[1, 2]], max_tokens=4, seed=1)
        token.write_text("token-comparator\n")  # taken up without a restart
        time.sleep(0.2)
        self.assertEqual(client.compare([[1, 2]], max_tokens=4, seed=1).summary.verdict, "equal")

    def test_the_token_command_makes_what_the_file_takes(self):
        path = self.log_dir / "new.token"
        command = [sys.executable, "-m", "isobit.token", "trainer", "watch", "--token_file", str(path)]
        entry = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        token = path.read_text().strip()
        self.assertNotIn(token, entry)
        self.assertEqual(path.stat().st_mode & 0o777, 0o600)
        target = self.start("comparator", self.write_access(json.loads(entry))).target
        with ComparatorClient(target, token_file=path) as client:
            client.get_server_info()
        again = subprocess.run(command, capture_output=True, text=True, check=False)
        self.assertIn("File exists", again.stderr)

    def test_an_access_file_changes_under_load(self):
        target = self.start("comparator", self.write_access()).target
        path = self.log_dir / "access.json"
        good = path.read_text()
        client = self.enterContext(ComparatorClient(target, token="token-watch"))
        stop = threading.Event()
        outcomes = set()

        def call() -> None:
            while not stop.is_set():
                try:
                    client.get_server_info()
                    outcomes.add("OK")
                except IsobitError as error:
                    outcomes.add(error.code.name)

        thread = threading.Thread(target=call)
        thread.start()
        try:
            for text in (good[:50], "", "{}", "\0" * 100, good):
                path.write_text(text)
                time.sleep(0.15)
            self.assertEqual(outcomes, {"OK"}, "a broken file leaves the old one in force")
            path.write_text('{"clients": []}')
            time.sleep(0.3)
            self.assertEqual(outcomes, {"OK", "UNAUTHENTICATED"})
        finally:
            stop.set()
            thread.join()


if __name__ == "__main__":
    unittest.main()
