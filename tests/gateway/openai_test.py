"""Tests of OpenAI's paths with OpenAI's own client, before a real rollout and a real scorer.

python tests/gateway/openai_test.py

Logprobs that came by HTTP must have the bits that the scorer's Score gives for the same tokens.
"""

import asyncio
import unittest

import numpy as np
import openai

from isobit import ScorerClient, Tokenizer
from isobit_tools.byte_tokenizer import EOS
from isobit_tools.gateway_testing import GatewayTest

SAMPLING = {"temperature": 0.75, "top_p": 0.9, "seed": 11}
MORE = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 3}
IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}


def bits(values) -> list[int]:
    return np.array(values, np.float32).view(np.uint32).tolist()


class OpenAiTest(GatewayTest):
    def setUp(self):
        super().setUp()
        trio = self.start("rollout"), self.start("scorer")
        self.gateway = self.start_gateway(*trio)
        self.scorer = self.enterContext(ScorerClient(trio[1].target))
        self.client = openai.OpenAI(base_url=f"{self.gateway.url}/v1", api_key="EMPTY", max_retries=0)
        self.addCleanup(self.client.close)
        self.tokenizer = Tokenizer(self.model)

    def assert_scored(self, prompt: list[int], token_ids: list[int], logprobs, **sampling):
        """The scorer gives `token_ids` these logprobs. Control: it does not, one temperature beside."""
        (score,) = self.scorer.score([(prompt, token_ids)], **sampling)
        self.assertEqual(bits(logprobs), bits(score.tokens.logprobs))
        other = sampling | {"temperature": sampling.get("temperature", 1.0) + 0.01}
        (score,) = self.scorer.score([(prompt, token_ids)], **other)
        self.assertNotEqual(bits(logprobs), bits(score.tokens.logprobs))


class CompletionsTest(OpenAiTest):
    def test_bits_are_the_scorers(self):
        answer = self.client.completions.create(
            model="tiny", prompt="hello there", max_tokens=24, n=3, logprobs=3, **SAMPLING,
            extra_body=IDS | MORE,
        )  # fmt: skip
        prompt = self.tokenizer.encode("hello there").tolist()
        self.assertEqual([choice.index for choice in answer.choices], [0, 1, 2])
        for choice in answer.choices:
            self.assertEqual(choice.prompt_token_ids, prompt)
            self.assertEqual(choice.logprobs.tokens, [f"token_id:{token}" for token in choice.token_ids])
            self.assert_scored(prompt, choice.token_ids, choice.logprobs.token_logprobs, **SAMPLING, **MORE)
            self.assertEqual(choice.text, self.tokenizer.decode(choice.token_ids))
            for name, value, top in zip(
                choice.logprobs.tokens,
                choice.logprobs.token_logprobs,
                choice.logprobs.top_logprobs,
                strict=True,
            ):
                self.assertEqual(next(iter(top.items())), (name, value))  # the drawn one first
                rest = list(top.values())[1:]
                self.assertEqual(rest, sorted(rest, reverse=True))
        self.assertEqual(answer.usage.completion_tokens, sum(len(c.token_ids) for c in answer.choices))
        self.assertEqual(answer.usage.prompt_tokens, len(prompt))

    def test_stream_equals_whole(self):
        options = dict(
            model="tiny", prompt=[5, 6, 7], max_tokens=40, n=2, logprobs=1, **SAMPLING, extra_body=IDS
        )
        whole = self.client.completions.create(**options)
        texts, ids, logprobs, reasons, usage = ["", ""], [[], []], [[], []], [None, None], None
        for event in self.client.completions.create(
            **options, stream=True, stream_options={"include_usage": True}
        ):
            usage = event.usage or usage
            for choice in event.choices:
                texts[choice.index] += choice.text
                ids[choice.index] += choice.token_ids
                if choice.logprobs:
                    logprobs[choice.index] += choice.logprobs.token_logprobs
                reasons[choice.index] = choice.finish_reason
        for choice in whole.choices:
            self.assertEqual(texts[choice.index], choice.text)
            self.assertEqual(ids[choice.index], choice.token_ids)
            self.assertEqual(bits(logprobs[choice.index]), bits(choice.logprobs.token_logprobs))
            self.assertEqual(reasons[choice.index], choice.finish_reason)
        self.assertEqual(usage.total_tokens, whole.usage.total_tokens)

    def test_lists_of_prompts(self):
        options = dict(model="tiny", max_tokens=6, n=2, **SAMPLING, extra_body=IDS)
        rows = [[5, 6, 7], [8, 9], [10]]
        answer = self.client.completions.create(prompt=rows, **options)
        self.assertEqual([choice.index for choice in answer.choices], list(range(6)))
        self.assertEqual(
            [c.prompt_token_ids for c in answer.choices], [row for row in rows for _ in range(2)]
        )
        for row, pair in zip(rows, zip(answer.choices[::2], answer.choices[1::2], strict=True), strict=True):
            alone = self.client.completions.create(prompt=row, **options)
            self.assertEqual([c.token_ids for c in pair], [c.token_ids for c in alone.choices])
        texts = self.client.completions.create(prompt=["hello", "you"], **options)
        by_ids = self.client.completions.create(
            prompt=[self.tokenizer.encode(text).tolist() for text in ("hello", "you")], **options
        )
        self.assertEqual([c.token_ids for c in texts.choices], [c.token_ids for c in by_ids.choices])
        found = [[] for _ in range(6)]
        for event in self.client.completions.create(prompt=rows, **options, stream=True):
            for choice in event.choices:
                found[choice.index] += choice.token_ids
        self.assertEqual(found, [c.token_ids for c in answer.choices])

    def test_prompt_logprobs_and_echo(self):
        prompt = self.tokenizer.encode("the end of it").tolist()
        (score,) = self.scorer.score([(prompt, [])], prompt_logprobs=True, logprobs=2)
        body = {"prompt": [prompt, prompt[:3]], "max_tokens": 1, "prompt_logprobs": 2, "temperature": 0.3}
        rows = self.gateway.post("/v1/completions", body)["choices"][0]["prompt_logprobs"]
        self.assertIsNone(rows[0])
        self.assertEqual([int(next(iter(row))) for row in rows[1:]], prompt[1:])  # its own token first
        self.assertEqual(
            bits([next(iter(row.values()))["logprob"] for row in rows[1:]]), bits(score.prompt.logprobs)
        )
        for row, top in zip(rows[1:], score.prompt.top, strict=True):
            by_rank = sorted(((entry["rank"], int(token)) for token, entry in row.items()))[:2]
            self.assertEqual(by_rank, [(1, int(top.token_ids[0])), (2, int(top.token_ids[1]))])
        echo = {"prompt": prompt, "max_tokens": 4, "echo": True, "logprobs": 1, "seed": 1}
        (choice,) = self.gateway.post("/v1/completions", echo)["choices"]
        self.assertTrue(choice["text"].startswith("the end of it"))
        logprobs = choice["logprobs"]["token_logprobs"]
        self.assertIsNone(logprobs[0])
        self.assertEqual(bits(logprobs[1 : len(prompt)]), bits(score.prompt.logprobs))
        self.assertEqual(len(logprobs), len(prompt) + 4)
        (scored,) = self.gateway.post("/v1/completions", echo | {"max_tokens": 0})["choices"]
        self.assertEqual(scored["logprobs"]["token_logprobs"], logprobs[: len(prompt)])
        self.assertEqual((scored["text"], scored["finish_reason"]), ("the end of it", "length"))

    def test_scorer_of_other_weights_is_an_error(self):
        other = self.model.with_name("other")
        if not other.is_dir():
            from isobit_tools.services import run_model_tool
            from isobit_tools.testing import BIN_DIR

            run_model_tool(
                BIN_DIR, "make", "--config", str(self.model / "config.json"), str(other), "--seed", "9"
            )
        rollout = self.start("rollout")
        scorer = self.start("scorer", f"--model={other.name}")
        gateway = self.start_gateway(rollout, scorer)
        status, headers, body = gateway.request(
            "POST", "/v1/completions", {"prompt": [1, 2], "prompt_logprobs": 0, "max_tokens": 1}
        )
        self.assertEqual((status, headers["x-should-retry"]), (409, "false"), body)
        self.assertIn(b"digest", body)

    def test_greedy_and_seeds(self):
        def ids(**options) -> list[int]:
            answer = self.client.completions.create(
                model="tiny", prompt=[5, 6], max_tokens=12, **options, extra_body=IDS
            )
            return answer.choices[0].token_ids

        self.assertEqual(ids(temperature=0), ids(temperature=0))
        self.assertEqual(ids(seed=3), ids(seed=3))
        self.assertNotEqual(ids(seed=3), ids(seed=4))


class ChatTest(OpenAiTest):
    MESSAGES = ({"role": "user", "content": "tell me"},)

    def test_bits_are_the_scorers(self):
        answer = self.client.chat.completions.create(
            model="tiny", messages=self.MESSAGES, max_completion_tokens=20, n=2, logprobs=True,
            top_logprobs=2, **SAMPLING, extra_body=IDS,
        )  # fmt: skip
        prompt = self.tokenizer.encode_chat(list(self.MESSAGES)).tolist()
        self.assertEqual(answer.prompt_token_ids, prompt)
        for choice in answer.choices:
            entries = choice.logprobs.content
            self.assertEqual([entry.token for entry in entries], [f"token_id:{i}" for i in choice.token_ids])
            self.assertEqual([entry.token_id for entry in entries], choice.token_ids)
            self.assert_scored(prompt, choice.token_ids, [entry.logprob for entry in entries], **SAMPLING)
            for entry in entries:
                self.assertEqual(entry.top_logprobs[0].token_id, entry.token_id)
                self.assertLessEqual(len(entry.top_logprobs), 2)

    def test_tokens_as_text(self):
        answer = self.client.chat.completions.create(
            model="tiny", messages=self.MESSAGES, max_tokens=12, logprobs=True, seed=5,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
        (choice,) = answer.choices
        joined = b"".join(bytes(entry.bytes) for entry in choice.logprobs.content)
        self.assertEqual(joined.decode("utf-8", "replace"), choice.message.content)
        self.assertTrue(all(entry.top_logprobs == [] for entry in choice.logprobs.content))

    def test_stream_equals_whole(self):
        options = dict(
            model="tiny", messages=self.MESSAGES, max_tokens=30, logprobs=True, **SAMPLING, extra_body=IDS
        )
        whole = self.client.chat.completions.create(**options)
        text, ids, logprobs, reason = "", [], [], None
        for event in self.client.chat.completions.create(**options, stream=True):
            (choice,) = event.choices
            text += choice.delta.content or ""
            ids += getattr(choice, "token_ids", None) or []
            logprobs += [entry.logprob for entry in choice.logprobs.content] if choice.logprobs else []
            reason = choice.finish_reason
        self.assertEqual(text, whole.choices[0].message.content)
        self.assertEqual((ids, reason), (whole.choices[0].token_ids, whole.choices[0].finish_reason))
        self.assertEqual(bits(logprobs), bits([e.logprob for e in whole.choices[0].logprobs.content]))

    def test_models_and_errors(self):
        (card,) = self.client.models.list().data
        self.assertEqual((card.id, card.max_model_len), ("tiny", 2048))
        self.assertEqual(self.client.models.retrieve("tiny").id, "tiny")
        with self.assertRaises(openai.NotFoundError):
            self.client.chat.completions.create(model="other", messages=self.MESSAGES)
        with self.assertRaises(openai.BadRequestError) as caught:
            self.client.chat.completions.create(
                model="tiny", messages=self.MESSAGES, response_format={"type": "json_object"}
            )
        self.assertEqual(caught.exception.param, "response_format")

    def test_many_at_once(self):
        async def ask(client: openai.AsyncOpenAI, seed: int):
            return await client.chat.completions.create(
                model="tiny", messages=self.MESSAGES, max_tokens=4, seed=seed, extra_body=IDS
            )

        async def main() -> list[list[int]]:
            async with openai.AsyncOpenAI(
                base_url=f"{self.gateway.url}/v1", api_key="x", max_retries=9
            ) as client:
                answers = await asyncio.gather(*(ask(client, seed % 8) for seed in range(64)))
            return [answer.choices[0].token_ids for answer in answers]

        found = asyncio.run(main())
        for seed in range(8):
            self.assertEqual(len({tuple(ids) for ids in found[seed::8]}), 1)
        self.assertTrue(all(EOS not in ids[:-1] for ids in found))


if __name__ == "__main__":
    unittest.main()
