"""Tests of the gateway with classes of trainers that have no package: slime, miles, NeMo Gym.

ISOBIT_FRAMEWORK_SOURCES=DIRECTORY make test-frameworks

DIRECTORY has checkouts of them, as `slime`, `miles` and `Gym`; without one, its test skips, loudly.
sglang_paths_test.py replays what they send.
"""

import asyncio
import os
import sys
import types
import unittest
from pathlib import Path

from engines import EngineTest
from framework_stubs import pretend

PROMPT = [5, 6, 7, 8, 9]


class SourcesTest(EngineTest):
    checkout = ""

    def setUp(self):
        directory = Path(os.environ.get("ISOBIT_FRAMEWORK_SOURCES", "nowhere")) / self.checkout
        if not directory.is_dir():
            print(f"SKIPPED: {self.id()}: ISOBIT_FRAMEWORK_SOURCES has no {self.checkout}", file=sys.stderr)
            self.skipTest(f"no checkout of {self.checkout}")
        super().setUp()
        if str(directory) not in sys.path:
            sys.path.insert(0, str(directory))
            pretend(
                "fastapi", "gprof2dot", "hydra", "itsdangerous", "mlflow", "pydot", "ray",
                "requests_toolbelt", "sglang", "sglang_router", "wandb", "yappi",
            )  # fmt: skip

    def engine(self, kind: type):
        """An actor as slime and miles make them, for an engine that runs already."""
        engine = object.__new__(kind)
        engine.node_rank, engine.server_host, engine.server_port = 0, "127.0.0.1", self.gateway.port
        engine.args = types.SimpleNamespace(rollout_external=True)
        return engine

    def sample(self, post, **more) -> list[int]:
        """Tokens that come by the trainer's own `post`, with Score's bits."""

        async def run():
            sampling = {
                "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 16, "stop": None,
                "stop_token_ids": None, "skip_special_tokens": True, "no_stop_trim": True,
                "spaces_between_special_tokens": False, "sampling_seed": 7,
            }  # fmt: skip
            body = {"sampling_params": sampling, "return_logprob": True, "input_ids": PROMPT}
            return await post(f"{self.gateway.url}/generate", body)

        answer = asyncio.run(run())
        found = answer["meta_info"]["output_token_logprobs"]
        tokens = [entry[1] for entry in found]
        self.assertEqual(answer["text"], self.tokenizer.decode(tokens))
        self.assert_scored(PROMPT, tokens, [entry[0] for entry in found], temperature=1.0)
        self.assertEqual(answer["meta_info"]["weight_version"], more.get("label", "default"))
        return tokens


def posts(http_utils):
    """The module's post, with a client of this event loop."""

    async def post(url, body):
        import httpx

        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            http_utils._http_client = client
            return await http_utils.post(url, body)

    return post


class SlimeTest(SourcesTest):
    checkout = "slime"

    def test_rollout_and_weights(self):
        from slime.backends.sglang_utils.external import discover_external_engines
        from slime.backends.sglang_utils.server_control import abort_server_until_idle
        from slime.backends.sglang_utils.sglang_engine import SGLangEngine
        from slime.utils import http_utils

        (info,) = discover_external_engines([f"127.0.0.1:{self.gateway.port}"])
        self.assertEqual((info.worker_type, info.num_gpus), ("regular", 1))
        engine, post = self.engine(SGLangEngine), posts(http_utils)
        self.assertTrue(engine.health_generate())
        before = self.sample(post)
        engine.pause_generation()
        engine.flush_cache()
        engine.update_weights_from_disk(str(self.other), weight_version="1")
        engine.continue_generation()
        self.assertEqual(engine.get_weight_version(), "1")
        self.assertNotEqual(self.sample(post, label="1"), before)
        engine.release_memory_occupation()
        self.assertTrue(engine.health_generate())
        engine.resume_memory_occupation(tags=["weights"])
        engine.resume_memory_occupation(tags=["kv_cache", "cuda_graph"])
        self.sample(post, label="1")

        async def abort() -> None:
            import httpx

            async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
                http_utils._http_client = client
                await abort_server_until_idle(self.gateway.url)

        asyncio.run(abort())


class MilesTest(SourcesTest):
    checkout = "miles"

    def test_rollout_weights_and_rescoring(self):
        from miles.backends.sglang_utils.sglang_engine import SGLangEngine
        from miles.rollout.generate_utils import prefill_logprobs
        from miles.utils import http_utils

        engine, post = self.engine(SGLangEngine), posts(http_utils)
        before = self.sample(post)
        engine.pause_generation()
        engine.flush_cache()
        engine.update_weights_from_disk(str(self.other), weight_version="1")
        engine.continue_generation()
        self.assertEqual(engine.get_weight_version(), "1")
        after = self.sample(post, label="1")
        self.assertNotEqual(after, before)
        engine.update_weight_version("2")
        self.assertEqual(engine.get_weight_version(), "2")
        sample = types.SimpleNamespace(
            tokens=[*PROMPT, *after], response_length=len(after), adapter=None, multimodal_inputs=None
        )
        arguments = types.SimpleNamespace(lora_rank=0, lora_adapter_path=None, enable_lora=False)
        body = prefill_logprobs._build_prefill_scoring_payload(arguments, sample, {"top_p": 1.0})
        answer = self.gateway.post("/generate", body)
        values = prefill_logprobs._extract_response_logprobs(sample, answer["meta_info"])
        (score,) = self.scorer.score([(PROMPT, after)], logprob_mode="raw")
        self.assertEqual(values, score.tokens.logprobs.tolist())


class GymTest(SourcesTest):
    checkout = "Gym"

    def test_client(self):
        from nemo_gym import server_utils
        from nemo_gym.openai_utils import NeMoGymAsyncOpenAI

        client = NeMoGymAsyncOpenAI(base_url=f"{self.gateway.url}/v1", api_key="EMPTY")
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}

        async def run() -> None:
            session = server_utils.set_global_aiohttp_client(server_utils.GlobalAIOHTTPAsyncClientConfig())
            try:
                answer = await client.create_chat_completion(
                    **chat, logprobs=True, top_logprobs=0, return_tokens_as_token_ids=True,
                    return_token_ids=True, max_tokens=12, temperature=1.0, seed=3,
                )  # fmt: skip
                (choice,) = answer["choices"]
                entries = choice["logprobs"]["content"]
                tokens = [int(entry["token"].removeprefix("token_id:")) for entry in entries]
                self.assertEqual(tokens, choice["token_ids"])
                prompt = (await client.create_tokenize(**chat))["tokens"]
                self.assertEqual(prompt, answer["prompt_token_ids"])
                values = [entry["logprob"] for entry in entries]
                self.assert_scored(prompt, tokens, values, temperature=1.0)
                base = await client.create_completion(model="tiny", prompt="hello", max_tokens=4)
                self.assertEqual(len(base["choices"]), 1)
            finally:
                await session.close()

        asyncio.run(run())


if __name__ == "__main__":
    unittest.main()
