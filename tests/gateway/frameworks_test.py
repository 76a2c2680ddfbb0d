"""Tests of the gateway with the trainers' own client classes, from their packages.

make test-frameworks, which installs them (requirements-frameworks.txt)

Each generates, compares the logprobs' bits with Score's, changes the weights by the way that its trainer has,
and generates again. Without a package its test skips, loudly; with ISOBIT_REQUIRE_FRAMEWORKS it fails.
"""

import asyncio
import os
import sys
import types
import unittest

from engines import EngineTest
from framework_stubs import old_python, pretend, pretend_vllm
from transfer_stand_in import TransferStandIn, in_thread, raw, tensors_of, update_info

PROMPTS = [[5, 6, 7, 8, 9], [11, 12, 13]]


def needs(test: unittest.TestCase, load):
    """What `load` imports, or the test is skipped."""
    try:
        return load()
    except ImportError as error:
        if os.environ.get("ISOBIT_REQUIRE_FRAMEWORKS"):
            raise
        print(f"SKIPPED: {test.id()}: {error}", file=sys.stderr)
        raise unittest.SkipTest(str(error)) from error


class TransferTest(EngineTest):
    """The gateway's rollout has a stand-in for NCCL."""

    def setUp(self):
        super().setUp()
        self.stand_in = self.enterContext(TransferStandIn(self.rollout.target))
        self.gateway.stop()
        self.gateway = self.start_gateway(self.stand_in.target, None, f"--model_root={self.scratch}")

    def scorer_follows(self, directory) -> None:
        """A trainer that has a scorer sends it the weights, too: here, the same directory."""
        self.scorer.update_weights(str(directory.relative_to(self.scratch)))


class TrlTest(TransferTest):
    """trl.generation.vllm_client.VLLMClient and trl.experimental.async_grpo's."""

    def setUp(self):
        super().setUp()
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

        def load():
            pretend_vllm(
                lambda info: TrlTest.current.join(info),
                lambda group, tensors: group.broadcast(raw(tensor) for tensor in tensors),
            )
            from accelerate import PartialState
            from trl.experimental.async_grpo import vllm_client as later
            from trl.experimental.async_grpo.weight_transfer import WeightTransferClient
            from trl.generation.vllm_client import VLLMClient

            PartialState()  # its logging asks for one
            return VLLMClient, later.VLLMClient, WeightTransferClient

        TrlTest.current = self.stand_in
        self.client_type, self.async_type, self.transfer_type = needs(self, load)

    def check(self, answer, **sampling) -> list[list[int]]:
        """Sampled logprobs have Score's bits; returns the completions."""
        for index, ids in enumerate(answer["completion_ids"]):
            prompt = PROMPTS[index * len(PROMPTS) // len(answer["completion_ids"])]
            drawn = [
                values[tokens.index(token)]
                for token, values, tokens in zip(
                    ids, answer["logprobs"][index], answer["logprob_token_ids"][index], strict=True
                )
            ]
            self.assert_scored(prompt, ids, drawn, **sampling)
        return answer["completion_ids"]

    def test_grpo(self):
        client = self.client_type(base_url=self.gateway.url, connection_timeout=10)
        options = dict(n=2, max_tokens=16, logprobs=2, generation_kwargs={"seed": 3})
        answer = client.generate(PROMPTS, **options)
        self.assertEqual(answer["prompt_ids"], PROMPTS)
        before = self.check(answer, temperature=1.0)
        client.init_communicator(device="cuda")
        tensors = tensors_of(self.other)
        info = update_info(tensors)
        metadata = list(zip(info["names"], info["dtype_names"], info["shapes"], strict=True))
        client.update_named_params(metadata, iter(tensors))
        client.reset_prefix_cache()
        self.scorer_follows(self.other)
        after = self.check(client.generate(PROMPTS, **options), temperature=1.0)
        self.assertNotEqual(before, after)
        with client.weight_update():  # one call a tensor
            for name, tensor in tensors_of(self.model):
                client.update_named_param(name, tensor)
        self.scorer_follows(self.model)
        self.assertEqual(self.check(client.generate(PROMPTS, **options), temperature=1.0), before)
        kinds = [type(request).__name__ for request in self.stand_in.requests]
        self.assertEqual(kinds[:4], [
            "InitWeightTransferRequest", "StartWeightTransferRequest", "ReceiveWeightsRequest",
            "FinishWeightTransferRequest",
        ])  # fmt: skip
        client.session.close()

    def test_chat(self):
        client = self.client_type(base_url=self.gateway.url, connection_timeout=10)
        answer = client.chat([[{"role": "user", "content": "hello"}]], max_tokens=8, logprobs=1)
        self.assertEqual(len(answer["completion_ids"][0]), len(answer["logprobs"][0]))
        self.assertGreater(len(answer["prompt_ids"][0]), 3)
        client.session.close()

    def test_async_grpo(self):
        client = self.async_type(self.gateway.url)
        tensors = tensors_of(self.other)
        transfer = self.transfer_type(client, update_info(tensors))
        transfer.init_weight_transfer()
        self.assertEqual(client.get_max_model_len(), 2048)
        self.assertIsNone(client.get_server_info()["lora_config"])
        body = {
            "model": "tiny", "prompt": PROMPTS[0], "max_tokens": 16, "temperature": 1.0, "top_p": 1.0,
            "top_k": 0,
            "repetition_penalty": 1.0, "n": 1, "return_token_ids": True, "logprobs": 0, "seed": 2**62 + 1,
        }  # fmt: skip
        before = self.gateway.post("/v1/completions", body)["choices"][0]
        self.assert_scored(
            PROMPTS[0], before["token_ids"], before["logprobs"]["token_logprobs"], temperature=1.0
        )
        client.pause()
        self.assertTrue(self.gateway.get("/is_paused")["is_paused"])
        transfer.send_weights(iter(tensors))
        client.resume()
        self.scorer_follows(self.other)
        after = self.gateway.post("/v1/completions", body)["choices"][0]
        self.assert_scored(
            PROMPTS[0], after["token_ids"], after["logprobs"]["token_logprobs"], temperature=1.0
        )
        self.assertNotEqual(before["token_ids"], after["token_ids"])
        with self.assertRaisesRegex(RuntimeError, "load_lora_adapter"):
            client.load_lora_adapter("a", "/a")


class SkyRlTest(TransferTest):
    """SkyRL's RemoteInferenceClient and SkyrlWeightSyncClient."""

    def setUp(self):
        super().setUp()

        def load():
            old_python()
            from skyrl.backends.skyrl_train.inference_servers import remote_inference_client as data
            from skyrl.backends.skyrl_train.weight_sync import control_plane as control

            return data, control

        self.data, self.control = needs(self, load)

    async def run_all(self) -> None:
        url = self.gateway.url
        client = self.data.RemoteInferenceClient(
            proxy_url=url, server_urls=[url], data_parallel_size=1, model_name="tiny",
            tokenizer=None,
        )  # fmt: skip
        sampling = {
            "min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True,
            "max_tokens": 16,
            "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, "stop": None,
            "seed": 4,
        }  # fmt: skip
        batch = {"prompt_token_ids": PROMPTS, "sampling_params": sampling, "session_ids": ["a", "b"]}
        before = await self.generate(client, batch)
        self.assertEqual(await client.get_world_size(), (1, 1))
        await asyncio.to_thread(self.send_weights, self.other)
        after = await self.generate(client, batch)
        self.assertNotEqual(before, after)
        await client.sleep(level=2)
        await client.wake_up(tags=["weights"])
        await asyncio.to_thread(self.send_weights, self.model)
        await client.wake_up(tags=["kv_cache"])
        await client.reset_prefix_cache()
        self.assertEqual(await self.generate(client, batch), before)
        await client.teardown()

    async def generate(self, client, batch) -> list[list[int]]:
        answer = await client.generate(batch)
        for prompt, ids, logprobs, text in zip(
            PROMPTS, answer["response_ids"], answer["response_logprobs"], answer["responses"], strict=True
        ):
            self.assert_scored(prompt, ids, logprobs, temperature=1.0, min_tokens=1)
            self.assertEqual(text, self.tokenizer.decode(ids, skip_special_tokens=False))
        return answer["response_ids"]

    def send_weights(self, directory) -> None:
        """As SkyRL's trainer does, with NCCL's stand-in."""
        control = self.control.SkyrlWeightSyncClient(
            [self.gateway.url], init_payload_fn=self.control.nccl_init_payloads
        )
        control.pause_generation()
        info = {
            "master_address": "127.0.0.1", "master_port": 50123, "rank_offset": 1, "world_size": 2,
            "packed": True,
            "packed_buffer_size_bytes": 1 << 20, "packed_num_buffers": 2,
        }  # fmt: skip
        groups = []
        thread = in_thread(lambda: groups.append(self.stand_in.join(info)))
        control.init_weight_transfer_engine(info)
        thread.join()
        tensors = tensors_of(directory)
        control.start_weight_update()
        thread = in_thread(lambda: groups[0].broadcast(raw(tensor) for _, tensor in tensors))
        control.update_weights(update_info(tensors))
        thread.join()
        control.finish_weight_update(weight_version="step-1")
        control.reset_prefix_cache()
        control.resume_generation()
        control.close()
        self.scorer_follows(directory)
        self.assertEqual(self.gateway.get("/weight_info"), {"weight_version": "step-1"})

    def test_all(self):
        asyncio.run(self.run_all())

    def test_refusals_reach_the_caller(self):
        control = self.control.SkyrlWeightSyncClient([self.gateway.url])
        with self.assertRaisesRegex(RuntimeError, "send all weights"):
            control.fetch_weights(1)
        with self.assertRaisesRegex(RuntimeError, "pickles"):
            control.update_weights({"ipc_handles_pickled": "gASV"})
        control.close()


class PrimeRlTest(EngineTest):
    """renderers' and verifiers' clients, which prime-rl's orchestrator generates with."""

    def update(self) -> None:
        """As its admin client, on a filesystem."""
        self.gateway.post("/pause?mode=keep&clear_cache=false")
        self.gateway.post("/update_weights", {"weight_dir": str(self.other)})
        self.gateway.post("/resume")

    def test_renderers(self):
        openai, generate = needs(self, _load_renderers)

        async def run() -> None:
            async with openai.AsyncOpenAI(base_url=f"{self.gateway.url}/v1", api_key="EMPTY") as client:
                found = []
                for _ in range(2):
                    result = await generate(
                        client=client, renderer=_Renderer(), messages=[], model="tiny", prompt_ids=PROMPTS[0],
                        sampling_params={"temperature": 1.0, "max_tokens": 16, "seed": 5, "top_k": -1},
                        cache_salt="0",
                    )  # fmt: skip
                    ids = result["completion_ids"]
                    self.assert_scored(PROMPTS[0], ids, result["completion_logprobs"], temperature=1.0)
                    found.append(ids)
                    await asyncio.to_thread(self.update)
                self.assertNotEqual(*found)

        asyncio.run(run())

    def test_verifiers(self):
        verifiers = needs(self, _load_verifiers)

        async def run() -> None:
            config = verifiers.Config(
                base_url=f"{self.gateway.url}/v1", api_key_var="EMPTY", renderer_model_name=str(self.model),
                renderer=verifiers.Renderer(),
            )  # fmt: skip
            client = verifiers.Client(config)
            found = []
            for _ in range(2):
                response = await client.get_response(
                    verifiers.Dialect(),
                    {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]},
                    verifiers.Sampling(temperature=1.0, max_tokens=16, seed=5),
                    session_id="rollout-1",
                )
                tokens = response.tokens
                self.assert_scored(
                    list(tokens.prompt_ids), list(tokens.completion_ids), tokens.completion_logprobs,
                    temperature=1.0,
                )  # fmt: skip
                found.append(list(tokens.completion_ids))
                await asyncio.to_thread(self.update)
            self.assertNotEqual(*found)

        os.environ["EMPTY"] = "EMPTY"
        asyncio.run(run())


class _Renderer:
    """What renderers' client asks of one when the prompt is tokens."""

    supports_tools = True
    supports_process_multimodal = False

    def get_stop_token_ids(self) -> list[int]:
        return [257]

    def parse_response(self, token_ids, **_):
        from renderers.base import ParsedResponse

        return ParsedResponse(content="")


def _load_renderers():
    import openai
    from renderers.client import generate

    return openai, generate


def _load_verifiers() -> types.SimpleNamespace:
    pretend("gepa", "math_verify", "openai_harmony", "prime_runs", "prime_tunnel")
    import renderers
    import verifiers.v1.types as kinds
    from verifiers.v1 import dialects
    from verifiers.v1.clients import train
    from verifiers.v1.configs import client

    return types.SimpleNamespace(
        Renderer=renderers.DefaultRendererConfig, Sampling=kinds.SamplingConfig, Dialect=dialects.ChatDialect,
        Client=train.TrainClient, Config=client.TrainClientConfig,
    )  # fmt: skip


class ArealTest(EngineTest):
    """areal.engine's two backends: requests and answers, sent as AReaL's HTTP client sends them."""

    def setUp(self):
        super().setUp()
        self.areal = needs(self, _load_areal)

    def send(self, request):
        if request.method == "GET":
            return self.gateway.request("GET", request.endpoint, request.payload)[0]
        return self.gateway.post(request.endpoint, request.payload)

    def check(self, backend) -> None:
        self.assertEqual(self.send(backend.get_health_check_request()), 200)
        config = self.areal.Generation(max_new_tokens=16, temperature=1.0)
        asked = self.areal.Request(input_ids=list(PROMPTS[0]), gconfig=config)
        found = []
        for directory in (self.other, None):
            answer = self.send(backend.build_generation_request(asked, False, 0))
            result = backend.parse_generation_response(answer)
            self.assert_scored(PROMPTS[0], result.output_tokens, result.output_logprobs, temperature=1.0)
            found.append(result.output_tokens)
            scored = self.send(backend.build_score_request(PROMPTS[0], 2, False, 0))
            values = backend.parse_score_response(scored, 2)
            (score,) = self.scorer.score([(PROMPTS[0][:-2], PROMPTS[0][-2:])], logprob_mode="raw")
            self.assertEqual([float(value) for value in score.tokens.logprobs], values)
            if directory is not None:
                self.send(backend.get_pause_request())
                meta = self.areal.Update(type="disk", path=str(directory))
                for request in backend.build_disk_weight_update_requests(meta).requests:
                    self.assertTrue(self.send(request)["success"])
                self.send(backend.get_resume_request())
        self.assertEqual(self.version(), 2)

    def test_sglang(self):
        self.check(self.areal.sglang())

    def test_vllm(self):
        self.check(self.areal.vllm())


def _load_areal() -> types.SimpleNamespace:
    pretend(
        "areal.infra", "areal.utils.perf_tracer", "areal.utils.stats_tracker", "flask", "numba", "ray",
        "torchdata",
    )  # fmt: skip
    from areal import api
    from areal.api import cli_args
    from areal.engine import sglang_remote, vllm_remote

    return types.SimpleNamespace(
        Request=api.ModelRequest, Update=api.WeightUpdateMeta, Generation=cli_args.GenerationHyperparameters,
        sglang=sglang_remote.SGLangBackend, vllm=vllm_remote.VLLMBackend,
    )  # fmt: skip


if __name__ == "__main__":
    unittest.main()
