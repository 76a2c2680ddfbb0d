"""The vLLM face of a running rollout, called by a client built from its proto: the tokens and bits of
isobit.v1, aborts, refusals, and what a comparator sees of it."""

import importlib
import subprocess
import sys
import unittest
from pathlib import Path

import grpc
import numpy as np

from isobit import ComparatorClient, RolloutClient
from isobit.launch import Setting
from isobit_tools.testing import ServiceTest

PROTO = Path(__file__).resolve().parents[2] / "proto" / "vllm" / "grpc" / "engine" / "vllm_engine.proto"
PROMPT = [3, 14, 15, 92, 65]
# What Generate of isobit.v1 is called with. SamplingParams of the face has the same names, but for defaults.
REQUESTS = {
    "greedy": {"temperature": 0.0, "max_tokens": 24},
    "seeded": {"seed": 7, "max_tokens": 24},
    "filters": {"seed": 1, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "max_tokens": 24},
    "several": {"seed": 2, "n": 3, "max_tokens": 40},
    "penalties": {
        "seed": 3,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {5: 4.0, 6: -4.0},
        "max_tokens": 40,
    },
    "stops": {"seed": 4, "n": 4, "stop_token_ids": list(range(200)), "min_tokens": 3, "max_tokens": 40},
    "alternatives": {"seed": 5, "logprobs": 5, "n": 2, "max_tokens": 24},
}


def bits_of(token_ids, logprobs) -> list[tuple[int, bytes]]:
    """Pairs of an id and the bits of its logprob."""
    return [(int(i), np.float32(x).tobytes()) for i, x in zip(token_ids, logprobs, strict=True)]


class VllmFaceTest(ServiceTest):
    setting = Setting("tree", tp_size=2, shards=1)

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        out = cls.scratch / "stubs"
        out.mkdir()
        command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO.parent}", f"--python_out={out}"]
        subprocess.run([*command, f"--grpc_python_out={out}", PROTO.name], check=True)
        sys.path.insert(0, str(out))
        cls.addClassCleanup(sys.path.remove, str(out))
        cls.pb = importlib.import_module("vllm_engine_pb2")
        cls.stubs = importlib.import_module("vllm_engine_pb2_grpc")

    def connect(self, *flags: str):
        """Starts a rollout. Its face's stub and a client of isobit.v1."""
        self.rollout = self.start("rollout", "--vllm_face", *flags)
        channel = self.enterContext(grpc.insecure_channel(self.rollout.target))
        client = self.enterContext(RolloutClient(self.rollout.target))
        return self.stubs.VllmEngineStub(channel), client

    def request(self, prompt=PROMPT, stream=False, request_id="", **sampling):
        return self.pb.GenerateRequest(
            request_id=request_id,
            tokenized={"input_ids": prompt, "original_text": "as people read it"},
            sampling_params={"logprobs": 0, "skip_special_tokens": True, **sampling},
            stream=stream,
        )

    def ask(self, stub, **request) -> dict[int, tuple]:
        """By sample: tokens and bits; alternatives, by position; the end. Checks the form of the answer."""
        parts, ends, last = {}, {}, {}
        for response in stub.Generate(self.request(**request), timeout=120):
            kind = response.WhichOneof("response")
            message = getattr(response, kind)
            ids = list(message.token_ids if kind == "chunk" else message.output_ids)
            self.assertEqual(message.completion_tokens, len(ids))
            self.assertEqual(list(message.output_logprobs.token_ids), ids)
            self.assertEqual(message.prompt_tokens, len(request.get("prompt", PROMPT)))
            self.assertNotIn(message.index, ends, "nothing after the end of a sample")
            if kind == "chunk":
                self.assertLessEqual(len(ids), 1024)
                parts.setdefault(message.index, []).append(message)
                last[message.index] = ids
            else:
                ends[message.index] = message
        if request.get("stream"):
            self.assertEqual(last, {i: list(end.output_ids) for i, end in ends.items()})
        else:
            self.assertEqual(parts, {})
            parts = {index: [end] for index, end in ends.items()}
        answers = {}
        for index, end in ends.items():
            logprobs = [part.output_logprobs for part in parts[index]]
            top = [bits_of(t.token_ids, t.values) for part in logprobs for t in part.top_logprobs]
            ids = [i for part in logprobs for i in part.token_ids]
            answers[index] = (bits_of(ids, [x for p in logprobs for x in p.token_logprobs]), top, end)
        return answers

    def assert_same(self, answers: dict[int, tuple], samples) -> None:
        """Fails unless the face's answers are the samples of isobit.v1 in every bit."""
        self.assertEqual(sorted(answers), [sample.index for sample in samples])
        for sample in samples:
            tokens, top, end = answers[sample.index]
            self.assertEqual(tokens, bits_of(sample.tokens.token_ids, sample.tokens.logprobs))
            self.assertEqual(top, [bits_of(t.token_ids, t.logprobs) for t in sample.tokens.top])
            self.assertEqual(end.finish_reason, sample.finish_reason)
            stop = end.matched_token_id if end.WhichOneof("matched_stop") else None
            self.assertEqual(stop, sample.stop_token_id)

    def test_the_bits_of_isobit_v1(self):
        stub, client = self.connect()
        reasons = set()
        for name, sampling in REQUESTS.items():
            samples = client.generate(PROMPT, **sampling)
            reasons.update(sample.finish_reason for sample in samples)
            for stream in (False, True):
                with self.subTest(name=name, stream=stream):
                    answers = self.ask(stub, stream=stream, **sampling)
                    self.assert_same(answers, samples)
        self.assertEqual(reasons, {"stop", "length"}, "the requests have both ends")
        # Controls: another seed, and one bit of one logprob.
        samples = client.generate(PROMPT, seed=8, max_tokens=24)
        with self.assertRaises(AssertionError):
            self.assert_same(self.ask(stub, seed=7, max_tokens=24), samples)
        logprobs = samples[0].tokens.logprobs
        logprobs[11] = np.nextafter(logprobs[11], np.float32(0))
        with self.assertRaises(AssertionError):
            self.assert_same(self.ask(stub, seed=8, max_tokens=24), samples)

    def test_a_sample_of_more_than_a_chunk_is_joined(self):
        stub, client = self.connect()
        prompt = [i % 499 for i in range(600)]
        (sample,) = client.generate(prompt, seed=1, max_tokens=2048 - 600, ignore_eos=True)
        self.assertEqual(len(sample.tokens.token_ids), 1448)
        for stream in (False, True):
            # Without max_tokens: what the context has room for.
            answers = self.ask(stub, prompt=prompt, stream=stream, seed=1, ignore_eos=True)
            self.assert_same(answers, [sample])

    def test_logprobs_come_where_asked(self):
        stub, _ = self.connect()
        request = self.request(max_tokens=4)
        request.sampling_params.ClearField("logprobs")
        (response,) = stub.Generate(request, timeout=60)
        self.assertFalse(response.complete.HasField("output_logprobs"))
        self.assertEqual(len(response.complete.output_ids), 4)

    def test_abort(self):
        stub, client = self.connect()
        (whole,) = client.generate(PROMPT, seed=9, max_tokens=2000, ignore_eos=True)
        request = self.request(stream=True, request_id="r", seed=9, max_tokens=2000, ignore_eos=True)
        tokens, end = [], None
        for response in stub.Generate(request, timeout=120):
            if response.HasField("complete"):
                end = response.complete
                continue
            if not tokens:
                with self.assertRaises(grpc.RpcError) as raised:
                    list(stub.Generate(request, timeout=60))
                self.assertEqual(raised.exception.code(), grpc.StatusCode.ALREADY_EXISTS)
                self.assertEqual(stub.GetServerInfo(self.pb.GetServerInfoRequest()).active_requests, 1)
                self.assertEqual(stub.GetLoads(self.pb.GetLoadsRequest()).loads[0].num_running_reqs, 1)
                stub.Abort(self.pb.AbortRequest(request_ids=["other", "r"]), timeout=60)
            tokens += bits_of(response.chunk.token_ids, response.chunk.output_logprobs.token_logprobs)
        self.assertEqual(end.finish_reason, "abort")
        self.assertLess(len(tokens), 2000)
        expected = bits_of(whole.tokens.token_ids, whole.tokens.logprobs)
        self.assertEqual(tokens, expected[: len(tokens)])
        self.assertEqual(client.get_load().num_running_requests, 0)

    def test_what_is_not_served_is_refused_by_name(self):
        stub, _ = self.connect()
        for sampling, field in (
            ({"stop": ["x"]}, "sampling_params.stop"),
            ({"regex": "x"}, "sampling_params.regex"),
            ({"choice": {}}, "sampling_params.choice"),
            ({"prompt_logprobs": 1}, "sampling_params.prompt_logprobs"),
            ({"truncate_prompt_tokens": 1}, "sampling_params.truncate_prompt_tokens"),
            ({"logprobs": -1}, "sampling_params.logprobs"),
            ({"logprobs": 65}, "sampling_params.logprobs"),
            ({"top_p": 2.0}, "sampling_params.top_p"),
            ({"max_tokens": 3000}, "sampling_params.max_tokens"),
            ({"stop_token_ids": [499]}, "sampling_params.stop_token_ids"),
        ):
            self.assert_refused(stub, self.request(**sampling), field)
        request = self.request()
        request.kv_transfer_params_json = "{}"
        self.assert_refused(stub, request, "kv_transfer_params_json")
        request = self.request()
        request.mm_inputs.SetInParent()
        self.assert_refused(stub, request, "mm_inputs")
        self.assert_refused(stub, self.pb.GenerateRequest(text="hello"), "text")
        self.assert_refused(stub, self.pb.GenerateRequest(), "tokenized.input_ids")
        self.assert_refused(stub, self.request(prompt=[499]), "tokenized.input_ids[0]")
        # Field 11 of a later version of the message.
        later = self.pb.GenerateRequest.FromString(self.request().SerializeToString() + b"\x5a\x00")
        self.assert_refused(stub, later, "field number 11")
        for call in (stub.Embed, stub.GetTokenizer, stub.SubscribeKvEvents):
            with self.assertRaises(grpc.RpcError) as raised:
                answer = call(self.pb.NotServed(), timeout=60)
                list(answer)
            self.assertEqual(raised.exception.code(), grpc.StatusCode.UNIMPLEMENTED)
            self.assertIn(":", raised.exception.details())

    def assert_refused(self, stub, request, field: str) -> None:
        with self.subTest(field=field):
            with self.assertRaises(grpc.RpcError) as raised:
                list(stub.Generate(request, timeout=60))
            self.assertEqual(raised.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
            self.assertIn(field, raised.exception.details())

    def test_what_it_says_of_itself(self):
        stub, client = self.connect("--vllm_tokenizer=/models/elsewhere")
        info, own = client.get_server_info(), stub.GetModelInfo(self.pb.GetModelInfoRequest())
        self.assertEqual(own.model_path, str(self.model))
        self.assertEqual(own.served_model_name, "model")
        self.assertEqual(own.tokenizer_path, "/models/elsewhere")
        self.assertEqual((own.model_type, list(own.architectures)), ("llama", ["LlamaForCausalLM"]))
        self.assertEqual((own.vocab_size, own.max_context_length), (499, 2048))
        self.assertEqual(list(own.eos_token_ids), [1])
        self.assertTrue(stub.HealthCheck(self.pb.HealthCheckRequest()).healthy)
        (load,) = stub.GetLoads(self.pb.GetLoadsRequest(include=["core"])).loads
        self.assertEqual(load.max_total_num_tokens, info.num_pages * info.page_size)
        client.pause_generation()
        self.assertTrue(stub.GetServerInfo(self.pb.GetServerInfoRequest()).is_paused)

    def test_it_is_off_unless_asked_for(self):
        rollout = self.start("rollout")
        stub = self.stubs.VllmEngineStub(self.enterContext(grpc.insecure_channel(rollout.target)))
        with self.assertRaises(grpc.RpcError) as raised:
            stub.HealthCheck(self.pb.HealthCheckRequest(), timeout=60)
        self.assertEqual(raised.exception.code(), grpc.StatusCode.UNIMPLEMENTED)

    def test_a_comparator_sees_what_comes_through_it(self):
        stub, _ = self.connect()
        targets = [f"--rollout={self.rollout.target}", f"--scorer={self.start('scorer').target}"]
        comparator = self.start("comparator", *targets, "--shadow_fraction=1")
        compared = self.enterContext(ComparatorClient(comparator.target))

        def total():
            self.ask(stub, seed=1, n=2, max_tokens=30, ignore_eos=True)
            return compared.get_server_info().total.statistics

        self.wait_until(lambda: total().num_tokens >= 60, "samples of the face have been compared")
        self.assertEqual(total().num_unequal, 0)


if __name__ == "__main__":
    unittest.main()
