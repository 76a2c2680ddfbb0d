"""Tests of the gateway before a rollout that says what a test wants: texts, calls of tools, failures.

python tests/gateway/scripted_test.py
"""

import json
import math
import threading
import unittest
from collections.abc import Iterator

import grpc
from grpc_health.v1 import health_pb2
from scripted_rollout import CONTEXT_LENGTH, EOS, Refusal, ScriptedRollout

from isobit import Tokenizer
from isobit_tools.gateway_testing import GatewayTest

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
HELLO = {"messages": [{"role": "user", "content": "hello"}]}


class ScriptedTest(GatewayTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.tokenizer = Tokenizer(cls.model)

    def setUp(self):
        super().setUp()
        self.rollout = self.enterContext(ScriptedRollout(lambda request: [[1]]))
        self.gateway = self.start_gateway(self.rollout.target)

    def say(self, text: str, *, end: bool = True) -> list[int]:
        """Lets the rollout say `text`, a token at a time; returns the ids."""
        ids = self.tokenizer.encode(text).tolist() + ([EOS] if end else [])
        self.rollout.script = lambda request: [[token] for token in ids]
        return ids

    def events(self, path: str, body: dict) -> Iterator[dict]:
        """The events of an answer, which must end with [DONE]."""
        status, headers, text = self.gateway.request("POST", path, {**body, "stream": True})
        self.assertEqual(status, 200, text)
        self.assertTrue(headers["content-type"].startswith("text/event-stream"))
        lines = text.decode().split("\n\n")
        self.assertEqual(lines[-2:], ["data: [DONE]", ""])
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    def error(self, path: str, body, expected: int, **headers: str) -> tuple[dict, dict[str, str]]:
        """The `error` of an answer, and its headers."""
        status, found, text = self.gateway.request("POST", path, body, **headers)
        self.assertEqual(status, expected, text)
        error = json.loads(text)["error"]
        self.assertEqual(error["code"], expected)
        return error, found


class TextTest(ScriptedTest):
    def test_characters_of_several_tokens_come_whole(self):
        text = "a🙂é漢b"
        self.say(text)
        events = self.events("/v1/completions", {"prompt": "x", "max_tokens": 50})
        pieces = [event["choices"][0]["text"] for event in events]
        self.assertEqual("".join(pieces), text)
        self.assertNotIn("\ufffd", "".join(pieces))
        self.assertIn("🙂", pieces)
        whole = self.gateway.post("/v1/completions", {"prompt": "x", "max_tokens": 50})
        self.assertEqual(whole["choices"][0]["text"], text)

    def test_bytes_that_are_no_character(self):
        ids = self.tokenizer.encode("🙂").tolist()[:2]
        self.rollout.script = lambda request: [[token] for token in ids]
        body = {"prompt": "x", "max_tokens": 2, "logprobs": 0}
        events = self.events("/v1/completions", body)
        self.assertEqual([event["choices"][0]["text"] for event in events], ["", "", "\ufffd"])
        self.assertEqual(self.gateway.post("/v1/completions", body)["choices"][0]["text"], "\ufffd")

    def test_ends(self):
        ids = self.say("hi")
        body = {"prompt": "x", "max_tokens": 9, "return_token_ids": True, "skip_special_tokens": False}
        (choice,) = self.gateway.post("/v1/completions", body)["choices"]
        self.assertEqual(choice["token_ids"], ids)  # the token that ends is the last
        self.assertEqual(
            (choice["text"], choice["finish_reason"], choice["stop_reason"]), ("hi", "stop", None)
        )
        self.say("hi", end=False)
        stop = {"stop_token_ids": [ids[-2]], "ignore_eos": True}
        (choice,) = self.gateway.post("/v1/completions", body | stop)["choices"]
        self.assertEqual((choice["finish_reason"], choice["stop_reason"]), ("stop", ids[-2]))
        (choice,) = self.gateway.post("/v1/completions", body)["choices"]
        self.assertEqual((choice["finish_reason"], choice["stop_reason"]), ("length", None))

    def test_a_stop_string_ends_the_call(self):
        ids = self.tokenizer.encode("ab STOP").tolist()

        def script(request):
            yield from ([token] for token in ids)
            yield None  # until the test ends

        self.rollout.script = script
        body = {"prompt": "x", "max_tokens": 900, "stop": ["STOP", "other"], "return_token_ids": True}
        whole = self.gateway.post("/v1/completions", body)
        (choice,) = whole["choices"]
        self.assertEqual(
            (choice["text"], choice["finish_reason"], choice["stop_reason"]), ("ab ", "stop", "STOP")
        )
        self.assertEqual(choice["token_ids"], ids)
        self.assertEqual(whole["usage"]["completion_tokens"], len(ids))
        self.assertTrue(self.rollout.ended.wait(20))
        events = self.events("/v1/completions", body)
        self.assertEqual("".join(event["choices"][0]["text"] for event in events), "ab ")
        self.assertEqual(events[-1]["choices"][0]["stop_reason"], "STOP")
        self.assertEqual([i for event in events for i in event["choices"][0]["token_ids"]], ids)
        body["include_stop_str_in_output"] = True
        self.assertEqual(self.gateway.post("/v1/completions", body)["choices"][0]["text"], "ab STOP")


class ToolsTest(ScriptedTest):
    def test_calls(self):
        self.say(f"I call: {CALL}\n{CALL}")
        answer = self.gateway.post("/v1/chat/completions", HELLO | {"tools": TOOLS})
        (choice,) = answer["choices"]
        self.assertEqual(choice["finish_reason"], "tool_calls")
        self.assertEqual(choice["message"]["content"], "I call: ")
        self.assertEqual(len({call["id"] for call in choice["message"]["tool_calls"]}), 2)
        for call in choice["message"]["tool_calls"]:
            self.assertEqual(call["type"], "function")
            self.assertEqual(call["function"], {"name": "f", "arguments": '{"a": "é"}'})

    def test_calls_in_a_stream(self):
        ids = self.say(f"I call: {CALL}\n{CALL}")
        events = self.events("/v1/chat/completions", HELLO | {"tools": TOOLS, "return_token_ids": True})
        choices = [event["choices"][0] for event in events]
        self.assertEqual(choices[0]["delta"], {"role": "assistant", "content": ""})
        self.assertEqual("".join(c["delta"].get("content") or "" for c in choices).strip(), "I call:")
        calls = [call for c in choices for call in c["delta"].get("tool_calls", ())]
        self.assertEqual([call["index"] for call in calls], [0, 1])
        self.assertEqual(calls[0]["function"], {"name": "f", "arguments": '{"a": "é"}'})
        self.assertEqual(choices[-1]["finish_reason"], "tool_calls")
        self.assertEqual([token for c in choices for token in c.get("token_ids", ())], ids)

    def test_no_calls_are_read_unless_asked(self):
        self.say(CALL)
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            (choice,) = self.gateway.post("/v1/chat/completions", HELLO | more)["choices"]
            self.assertEqual(choice["message"], {"role": "assistant", "content": CALL})
            self.assertEqual(choice["finish_reason"], "stop")

    def test_the_template_gets_tools_and_calls(self):
        self.say("ok")
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]},
            {"role": "tool", "tool_call_id": "1", "content": "4"},
        ]  # fmt: skip
        template = "{{ messages[0].content }}|{{ messages[1].tool_calls[0].function.arguments.x }}<tool_call>"
        body = {"messages": messages, "tools": TOOLS, "chat_template": template}
        self.gateway.post("/v1/chat/completions", body)
        prompt = self.tokenizer.decode(self.rollout.requests[-1].prompt_token_ids)
        self.assertEqual(prompt, "a\nb|1<tool_call>")

    def test_refusals(self):
        for more, param in (
            ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
            ({"tools": TOOLS, "chat_template": "[TOOL_CALLS] {{ tools }}"}, "tools"),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                "messages[0].content[0].type",
            ),
            ({"messages": []}, "messages"),
            ({"messages": [{"content": "x"}]}, "messages[0].role"),
            ({"chat_template": "{{ raise_exception('no') }}"}, "messages"),
            ({"chat_template_kwargs": {"tools": []}}, "tools"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
            ({"prompt_logprobs": 1}, "prompt_logprobs"),
            ({"echo": True}, "echo"),
        ):
            error, _ = self.error("/v1/chat/completions", HELLO | more, 400)
            self.assertEqual(error["param"], param)
        self.assertEqual(self.rollout.requests, [])


class RequestsTest(ScriptedTest):
    def test_what_the_rollout_is_asked(self):
        body = {
            "prompt": [1, 2], "max_tokens": 7, "temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125,
            "n": 1, "seed": 2**63, "repetition_penalty": 1.5, "presence_penalty": 0.5,
            "frequency_penalty": -0.5, "min_tokens": 1, "stop_token_ids": [9], "ignore_eos": True,
            "logit_bias": {"5": -1.0}, "logprobs": 2,
        }  # fmt: skip
        self.gateway.post("/v1/completions", body, x_request_id="mine")
        request = self.rollout.requests[-1]
        self.assertEqual(request.request_id, "mine")
        sampling = request.sampling
        self.assertEqual(list(request.prompt_token_ids), [1, 2])
        for name in body.keys() - {"prompt", "stop_token_ids", "logit_bias"}:
            self.assertEqual(getattr(sampling, name), body[name], name)
        self.assertEqual((list(sampling.stop_token_ids), dict(sampling.logit_bias)), ([9], {5: -1.0}))

    def test_many_streams_come_in_larger_pieces(self):
        body = {"prompt": [[1]] * 30, "max_tokens": 1}
        self.rollout.script = lambda request: [None, [1]] if len(self.rollout.requests) <= 30 else [[1]]
        threading.Thread(
            target=lambda: self.wait_until(lambda: len(self.rollout.requests) == 30, "not all have come")
            or self.rollout.may_go_on.set()
        ).start()
        self.events("/v1/completions", body)
        asked = sorted(request.chunk_interval_ms for request in self.rollout.requests)
        self.assertEqual(asked, [count // 5 for count in range(1, 31)])
        self.events("/v1/completions", {"prompt": [1], "max_tokens": 1})
        self.assertEqual(self.rollout.requests[-1].chunk_interval_ms, 0)

    def test_defaults(self):
        self.gateway.post("/v1/completions", {"prompt": [1], "max_tokens": None, "seed": -1})
        self.assertEqual(self.rollout.requests[-1].sampling.max_tokens, 16)
        self.assertFalse(self.rollout.requests[-1].sampling.HasField("seed"))
        self.gateway.post("/v1/chat/completions", HELLO)
        request = self.rollout.requests[-1]
        self.assertEqual(request.sampling.max_tokens, CONTEXT_LENGTH - len(request.prompt_token_ids))
        self.gateway.post("/v1/chat/completions", HELLO | {"max_completion_tokens": 5})
        self.assertEqual(self.rollout.requests[-1].sampling.max_tokens, 5)
        self.gateway.post("/v1/chat/completions", {"input_ids": [4, 5], "messages": []})
        self.assertEqual(list(self.rollout.requests[-1].prompt_token_ids), [4, 5])

    def test_refusals_name_the_field_and_reach_nobody(self):
        for more, param in (
            ({"max_tokenz": 1}, "max_tokenz"),
            ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
            ({"guided_json": {}}, "guided_json"),
            ({"suffix": "x"}, "suffix"),
            ({"bad_words": ["x"]}, "bad_words"),
            ({"logprobs": -1}, "logprobs"),
            ({"logprobs": 21}, "logprobs"),
            ({"prompt_logprobs": 100}, "prompt_logprobs"),
            ({"prompt_logprobs": 1}, "prompt_logprobs"),
            ({"echo": True, "logprobs": 1}, "echo with logprobs"),
            ({"temperature": "hot"}, "temperature"),
            ({"prompt": []}, "prompt"),
            ({"prompt": [[1], "x", 3]}, "prompt[2]"),
            ({"prompt": [1, 1.5]}, "prompt"),
            ({"prompt": [499]}, "prompt"),
            ({"prompt": [[1], [-1]]}, "prompt[1]"),
            ({"prompt": [1] * CONTEXT_LENGTH}, "prompt"),
            ({"prompt": {"prompt_embeds": "x"}}, "prompt"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"request_id": "a b"}, "request_id"),
            ({"request_id": "x" * 129}, "request_id"),
            ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
            ({"prompt": None}, "prompt"),
        ):
            error, _ = self.error("/v1/completions", {"prompt": [1]} | more, 400)
            self.assertEqual((error["param"], error["type"]), (param, "BadRequestError"))
        error, _ = self.error("/v1/completions", {"prompt": [1] * CONTEXT_LENGTH}, 400)
        self.assertIn("context length", error["message"])
        self.error("/v1/completions", {}, 400)
        self.error("/v1/completions", {"prompt": [1], "model": "other"}, 404)
        self.assertEqual(self.rollout.requests, [])

    def test_harmless_fields_pass(self):
        self.gateway.post("/v1/completions", {
            "prompt": [1], "use_beam_search": False, "best_of": 1, "user": "x", "cache_salt": "3",
            "stop": None, "stop_token_ids": [], "skip_special_tokens": True,
            "spaces_between_special_tokens": False,
            "structured_outputs": None, "top_k": 100000000, "priority": 0, "stream": False,
        })  # fmt: skip
        self.assertEqual(self.rollout.requests[-1].sampling.top_k, 100000000)

    def test_long_answers_come_in_pieces(self):
        self.rollout.script = lambda request: [[5] * 1000] * 4
        body = {"prompt": [[1], [2]], "max_tokens": 4000, "logprobs": 0, "return_token_ids": True}
        status, headers, text = self.gateway.request("POST", "/v1/completions", body)
        self.assertEqual((status, headers.get("transfer-encoding")), (200, "chunked"))
        answer = json.loads(text)
        self.assertEqual([len(choice["token_ids"]) for choice in answer["choices"]], [4000, 4000])
        self.assertEqual(answer["usage"]["completion_tokens"], 8000)
        _, headers, text = self.gateway.request(
            "POST", "/v1/completions", body | {"prompt": [1], "logprobs": None}
        )
        self.assertEqual(int(headers["content-length"]), len(text))  # a short one

    def test_prompts_of_a_list_wait_for_a_full_queue(self):
        refusal = Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", retry_after_ms="1")
        seen = set()

        def script(request):
            prompt = request.prompt_token_ids[0]
            if prompt in (2, 3) and prompt not in seen:
                seen.add(prompt)
                return [refusal]
            return [[prompt]]

        self.rollout.script = script
        answer = self.gateway.post("/v1/completions", {"prompt": [[1], [2], [3]], "return_token_ids": True})
        self.assertEqual([choice["token_ids"] for choice in answer["choices"]], [[1], [2], [3]])
        seen.clear()
        events = self.events("/v1/completions", {"prompt": [[1], [2]], "return_token_ids": True})
        self.assertEqual(sorted(i for e in events for i in e["choices"][0]["token_ids"]), [1, 2])
        self.assertEqual(seen, {2})

    def test_tokenize_takes_the_body_of_a_chat(self):
        answer = self.gateway.post("/tokenize", HELLO | {"tools": TOOLS, "temperature": 1.0, "model": "tiny"})
        self.assertEqual(answer["count"], len(answer["tokens"]))
        self.gateway.post("/v1/chat/completions", HELLO | {"tools": TOOLS})
        self.assertEqual(list(self.rollout.requests[-1].prompt_token_ids), answer["tokens"])
        prompt = self.gateway.post("/detokenize", {"tokens": answer["tokens"]})["prompt"]
        self.assertTrue(prompt.endswith("<|im_start|>assistant\n"))


class FailuresTest(ScriptedTest):
    def fail(self, error: Refusal | None, expected: int) -> tuple[dict, dict[str, str]]:
        self.rollout.script = lambda request: [error]
        self.error("/v1/completions", {"prompt": [1], "stream": True}, expected)
        return self.error("/v1/completions", {"prompt": [1]}, expected)

    def test_statuses(self):
        code = grpc.StatusCode
        error, _ = self.fail(Refusal(code.INVALID_ARGUMENT, "temperature: expected"), 400)
        self.assertIn("temperature: expected", error["message"])
        _, headers = self.fail(Refusal(code.RESOURCE_EXHAUSTED, "full", retry_after_ms="1500"), 429)
        self.assertEqual((headers["retry-after"], headers["retry-after-ms"]), ("2", "1500"))
        _, headers = self.fail(Refusal(code.RESOURCE_EXHAUSTED, "too large"), 413)
        self.assertNotIn("retry-after", headers)
        _, headers = self.fail(Refusal(code.ALREADY_EXISTS, "in flight"), 409)
        self.assertEqual(headers["x-should-retry"], "false")
        _, headers = self.fail(Refusal(code.UNAVAILABLE, "draining"), 503)
        self.assertIn("retry-after", headers)
        _, headers = self.fail(Refusal(code.INTERNAL, "not finite"), 500)
        self.assertEqual(headers["x-should-retry"], "false")
        self.fail(Refusal(code.UNAUTHENTICATED, "who"), 401)
        self.fail(Refusal(code.PERMISSION_DENIED, "no"), 403)

    def test_a_failure_within_a_stream_is_an_event(self):
        self.rollout.script = lambda request: [[1], Refusal(grpc.StatusCode.INTERNAL, "broken")]
        events = self.events("/v1/completions", {"prompt": [1]})
        self.assertEqual(events[0]["choices"][0]["finish_reason"], None)
        self.assertEqual(events[-1]["error"]["message"], "broken")
        self.assertEqual(events[-1]["error"]["code"], 500)

    def test_no_logprob_is_ever_not_finite(self):
        for value in (math.nan, -math.inf):
            self.rollout.logprob = value
            self.error("/v1/completions", {"prompt": [1], "logprobs": 0}, 500)
            chat = HELLO | {"logprobs": True}
            self.error("/v1/chat/completions", chat, 500)
            self.assertIn("error", self.events("/v1/chat/completions", chat)[-1])

    def test_a_prompt_that_fails_ends_the_others(self):
        def script(request):
            if request.prompt_token_ids[0] == 2:
                yield Refusal(grpc.StatusCode.INVALID_ARGUMENT, "the second")
            yield None

        self.rollout.script = script
        error, _ = self.error("/v1/completions", {"prompt": [[1], [2], [3]]}, 400)
        self.assertEqual(error["message"], "the second")
        self.assertTrue(self.rollout.ended.wait(20))
        error, _ = self.error("/v1/completions", {"prompt": [[1], [2], [3]], "stream": True}, 400)
        self.assertEqual(error["message"], "the second")

    def test_health(self):
        self.assertEqual(self.gateway.request("GET", "/health")[0], 200)
        self.assertEqual(self.gateway.request("GET", "/health", b"{}")[0], 200)  # with a body
        self.rollout.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        status, _, body = self.gateway.request("GET", "/health")
        self.assertEqual((status, body), (503, b""))
        self.rollout.info_error = Refusal(grpc.StatusCode.UNAVAILABLE, "loading")
        status, headers, _ = self.gateway.request("GET", "/v1/models")
        self.assertEqual(status, 503)
        self.assertIn("retry-after", headers)
        self.error("/v1/completions", {"prompt": [1]}, 503)
        self.rollout.info_error = None
        self.assertEqual(self.gateway.get("/v1/models")["data"][0]["max_model_len"], CONTEXT_LENGTH)

    def test_a_rollout_that_does_not_know_the_gateway(self):
        self.rollout.info_error = Refusal(grpc.StatusCode.PERMISSION_DENIED, "needs watch")
        error, _ = self.error("/v1/completions", {"prompt": [1]}, 503)
        self.assertIn("--upstream_token_file", error["message"])

    def test_unknown_paths_and_methods(self):
        for method, path, expected in (("POST", "/v1/embeddings", 404), ("GET", "/v1/completions", 405)):
            status, _, body = self.gateway.request(method, path)
            self.assertEqual(status, expected)
            self.assertEqual(json.loads(body)["error"]["code"], expected)

    def test_server_info_tells_of_nccl_where_it_is(self):
        for backend, wanted in (("cpu/avx512", None), ("cuda/NVIDIA H200", {"backend": "nccl"})):
            self.rollout.backend = backend
            info = self.gateway.get("/server_info?config_format=json")
            self.assertEqual(info["vllm_config"]["weight_transfer_config"], wanted)
            self.assertEqual(info["isobit"]["backend"], backend)

    def test_metrics(self):
        self.gateway.post("/v1/completions", {"prompt": [1, 2]})
        text = self.gateway.request("GET", "/metrics")[2].decode()
        for line in (
            'vllm:num_requests_running{model_name="tiny"} 3',
            'vllm:kv_cache_usage_perc{model_name="tiny"} 0.25',
            'isobit_gateway_requests_total{path="/v1/completions",status="200"} 1',
            "isobit_gateway_prompt_tokens_total 2",
            "isobit_gateway_completion_tokens_total 1",
        ):
            self.assertIn(line, text.splitlines())


if __name__ == "__main__":
    unittest.main()
