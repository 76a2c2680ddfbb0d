"""Tests of SGLang's paths, and AReaL's, with requests that trainers send, before a real rollout and scorer.

python tests/gateway/sglang_paths_test.py

docs/integrations.md names the trainers. Each class replays what one of them sends, byte for byte where the
bytes matter. frameworks_test.py has the trainers' own classes.
"""

import unittest
from typing import ClassVar

from engines import EngineTest, bits

PROMPT = [5, 6, 7, 8, 9]
KEEP = "/pause?mode=keep&clear_cache=false"


class SlimeTest(EngineTest):
    """slime with external engines and its disk transport."""

    SAMPLING: ClassVar = {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 24, "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": True, "no_stop_trim": True, "spaces_between_special_tokens": False,
        "sampling_seed": 7,
    }  # fmt: skip

    def generate(self, **more):
        body = {"sampling_params": self.SAMPLING | more, "return_logprob": True, "input_ids": PROMPT}
        answer = self.gateway.post("/generate", body, X_SMG_Routing_Key="session")
        meta = answer["meta_info"]
        tokens = [entry[1] for entry in meta["output_token_logprobs"]]
        self.assertEqual(tokens, answer["output_ids"])
        self.assertEqual(answer["text"], self.tokenizer.decode(tokens))
        return answer, tokens, [entry[0] for entry in meta["output_token_logprobs"]]

    def test_start(self):
        for path in ("/server_info", "/get_server_info"):
            info = self.gateway.get(path)
            self.assertEqual((info["tp_size"], info["pp_size"], info["enable_memory_saver"]), (1, 1, False))
            self.assertNotIn(info["disaggregation_mode"], ("prefill", "decode"))
        self.assertEqual(self.gateway.request("GET", "/health_generate")[0], 200)
        self.assertEqual(self.gateway.request("GET", "/flush_cache")[0], 200)

    def test_weights_from_disk(self):
        answer, before, logprobs = self.generate()
        self.assert_scored(PROMPT, before, logprobs, temperature=1.0)
        self.assertEqual(answer["meta_info"]["weight_version"], "default")
        for number, directory in (("1", self.other), ("2", self.model)):
            self.assertEqual(self.gateway.post("/pause_generation", {})["status"], "ok")
            # A monitor asks meanwhile, and ends an engine that does not answer with 200.
            self.assertEqual(self.gateway.request("GET", "/health_generate")[0], 200)
            self.assertEqual(self.gateway.request("GET", "/flush_cache")[0], 200)
            body = {"model_path": str(directory), "weight_version": number}
            self.assertTrue(self.gateway.post("/update_weights_from_disk", body)["success"])
            self.assertEqual(self.gateway.post("/continue_generation", {})["status"], "ok")
            self.assertEqual(self.gateway.get("/get_weight_version"), {"weight_version": number})
            self.assertEqual(self.gateway.get("/model_info")["weight_version"], number)
            answer, after, logprobs = self.generate()
            self.assertEqual(answer["meta_info"]["weight_version"], number)
            self.assertEqual(answer["meta_info"]["weight_versions"][0]["version"], number)
            self.assertEqual(after == before, number == "2")  # the first weights again
            self.assert_scored(PROMPT, after, logprobs, temperature=1.0)

    def test_events_repeat_what_came(self):
        body = {
            "sampling_params": self.SAMPLING | {"max_new_tokens": 400, "ignore_eos": True}, "stream": True,
            "return_logprob": True, "input_ids": PROMPT,
        }  # fmt: skip
        with self.events("/generate", body) as events:
            found = list(events)
        whole = self.gateway.post("/generate", body | {"stream": False})
        last = found[-1]
        self.assertEqual(last["output_ids"], whole["output_ids"])
        self.assertEqual(last["text"], whole["text"])
        for name in ("output_token_logprobs", "finish_reason", "completion_tokens"):
            self.assertEqual(last["meta_info"][name], whole["meta_info"][name])
        sizes = [len(event["output_ids"]) for event in found]
        self.assertEqual(sizes, sorted(sizes))
        self.assertLess(sum(sizes), 40 * 400)  # not the square of the length: 80,000
        for event in found[:-1]:
            self.assertIsNone(event["meta_info"]["finish_reason"])
            size = len(event["output_ids"])
            self.assertEqual(event["output_ids"], last["output_ids"][:size])
            self.assertEqual(
                event["meta_info"]["output_token_logprobs"], last["meta_info"]["output_token_logprobs"][:size]
            )

    def test_abort(self):
        with self.kept("/generate", {
            "input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True},
            "return_logprob": True, "stream": True,
        }) as events:  # fmt: skip
            status, _, text = self.gateway.request("POST", "/abort_request", {"abort_all": True})
            self.assertEqual((status, text), (200, b""))
            *_, last = events
        meta = last["meta_info"]
        self.assertEqual(meta["finish_reason"]["type"], "abort")
        self.assertEqual(len(meta["output_token_logprobs"]), meta["completion_tokens"])
        (load,) = self.gateway.get("/v1/loads?include=core")["loads"]
        self.assertEqual(load["num_running_reqs"] + load["num_waiting_reqs"], 0)

    def test_memory(self):
        _, before, _ = self.generate()
        status, _, text = self.gateway.request("POST", "/release_memory_occupation", {})
        self.assertEqual((status, text), (200, b"null"))
        self.assertTrue(self.gateway.get("/is_sleeping")["is_sleeping"])
        self.assertEqual(self.gateway.request("GET", "/health_generate")[0], 200)
        self.gateway.post("/resume_memory_occupation", {"tags": ["weights"]})
        self.assertTrue(self.gateway.get("/is_sleeping")["is_sleeping"])
        self.gateway.post("/resume_memory_occupation", {"tags": ["kv_cache", "cuda_graph"]})
        self.assertFalse(self.gateway.get("/is_sleeping")["is_sleeping"])
        self.assertEqual(self.generate()[1], before)

    def test_stops(self):
        _, tokens, _ = self.generate()
        stop = tokens[3]
        cut, ids, _ = self.generate(stop_token_ids=[stop])
        self.assertEqual(ids, tokens[: tokens.index(stop) + 1])  # the stop token is the last
        self.assertEqual(cut["meta_info"]["finish_reason"], {"type": "stop", "matched": stop})
        text = self.tokenizer.decode(tokens[4:6])
        if text and "\N{REPLACEMENT CHARACTER}" not in text:
            with_stop, _, _ = self.generate(stop=[text])
            self.assertEqual(with_stop["meta_info"]["finish_reason"], {"type": "stop", "matched": text})
            self.assertTrue(with_stop["text"].endswith(text))

    def test_refusals(self):
        ask = {"input_ids": PROMPT, "return_logprob": True}
        for path, body, status, text in (
            ("/generate", ask | {"sampling_params": {"custom_params": {"return_top_p_token_ids": True}}}, 400,
             "sampling_params.custom_params.return_top_p_token_ids"),
            ("/generate", ask | {"return_routed_experts": True}, 400, "return_routed_experts"),
            ("/generate", ask | {"sampling_params": {"json_schema": "{}"}}, 400,
             "sampling_params.json_schema"),
            ("/generate", ask | {"sampling_params": {"temprature": 1}}, 400, "did you mean temperature"),
            ("/generate", ask | {"sampling_params": {"sampling_seed": -2}}, 400,
             "sampling_params.sampling_seed"),
            ("/generate", ask | {"data_parallel_rank": 1}, 400, "data_parallel_rank"),
            ("/generate", ask | {"image_data": ["x"]}, 400, "image_data"),
            ("/generate", ask | {"top_logprobs_num": 100_000}, 400, "top_logprobs_num"),
            ("/generate", ask | {"text": "both"}, 400, "text and input_ids"),
            ("/generate", ask | {"input_ids": [5, 1 << 20]}, 400, "input_ids has token"),
            ("/generate", ask | {"input_ids": []}, 400, "input_ids"),
            ("/generate", ask | {"rid": ["a", "b"]}, 400, "rid"),
            ("/generate", ask | {"sampling_params": [{}, {}]}, 400, "sampling_params"),
            ("/generate", b"{", 400, "not JSON"),
            ("/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}, 400, "pickles"),
            ("/init_weights_update_group", {"backend": "nccl"}, 400, "process group"),
            ("/update_weights_from_distributed", {"names": []}, 400, "process group"),
            ("/begin_weight_update", {"selector": "all"}, 400, "process group"),
            ("/update_weights_from_disk", {"model_path": "x", "load_format": "flattened_bucket"}, 400,
             "load_form"),
            ("/update_weights_from_disk", {"model_path": "x", "wieght_version": "1"}, 400, "wieght_version"),
            ("/update_weights_from_disk", {}, 400, "model_path"),
            ("/pause_generation", {"mode": "keep"}, 400, "abort, retract or in_place"),
            ("/weights_checker", {"action": "snapshot"}, 404, "/model_info"),
            ("/pull_weights", {}, 404, "send all weights"),
        ):  # fmt: skip
            with self.subTest(path, body=body):
                answer = self.assert_refused(path, body, status, text)
                if path != "/generate":
                    self.assertIs(answer["success"], False)
                    self.assertEqual(answer["message"], answer["error"]["message"])


class MilesTest(EngineTest):
    """miles, where it differs from slime."""

    def test_rescoring(self):
        self.assertEqual(self.gateway.request("POST", "/flush_cache", {})[0], 200)
        rows = [PROMPT, [*PROMPT, 11, 12], [3, 4, 5]]
        body = {
            "input_ids": rows, "return_logprob": True, "logprob_start_len": 2,
            "sampling_params": {"temperature": 0, "max_new_tokens": 0, "top_p": 1.0},
        }  # fmt: skip
        answers = self.gateway.post("/generate", body)
        self.assertEqual(len(answers), 3)
        for row, answer in zip(rows, answers, strict=True):
            found = answer["meta_info"]["input_token_logprobs"]
            self.assertEqual([entry[1] for entry in found], row[2:])
            (score,) = self.scorer.score([(row[:2], row[2:])], logprob_mode="raw")
            self.assertEqual(bits([entry[0] for entry in found]), bits(score.tokens.logprobs))
            self.assertEqual((answer["output_ids"], answer["text"]), ([], ""))
            self.assertEqual(answer["meta_info"]["finish_reason"], {"type": "length", "length": 0})
        full = [5] * 2048  # a sequence as long as the context
        (answer,) = self.gateway.post("/generate", body | {"input_ids": [full]})
        self.assertEqual(len(answer["meta_info"]["input_token_logprobs"]), 2046)

    def test_retract(self):
        with self.kept("/generate", {
            "input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1500, "ignore_eos": True},
            "stream": True,
        }) as events:  # fmt: skip
            self.gateway.post("/pause_generation", {"mode": "retract"})
            self.assertEqual(self.gateway.request("GET", "/flush_cache")[0], 200)
            body = {
                "model_path": str(self.other),
                "weight_version": "1",
                "selector": "all",
                "flush_cache": False,
            }
            self.gateway.post("/update_weights_from_disk", body)
            self.gateway.post("/continue_generation", {})
            *_, last = events
        self.assertEqual(last["meta_info"]["finish_reason"]["type"], "length")
        self.assertEqual([span["version"] for span in last["meta_info"]["weight_versions"]], ["default", "1"])

    def test_label(self):
        body = {"new_version": "7", "abort_all_requests": False}
        self.assertTrue(self.gateway.post("/update_weight_version", body)["success"])
        self.assertEqual(self.gateway.get("/model_info")["weight_version"], "7")
        self.assertEqual(self.gateway.get("/weight_info"), {"weight_version": "7"})

    def test_list_with_several_samples(self):
        body = {
            "input_ids": [PROMPT, [3, 4]], "rid": "job", "return_logprob": True, "top_logprobs_num": 2,
            "sampling_params": [{"max_new_tokens": 3, "n": 2, "sampling_seed": 1}, {"max_new_tokens": 2,
            "n": 2}],
        }  # fmt: skip
        answers = self.gateway.post("/generate", body)
        self.assertEqual(
            [answer["meta_info"]["id"] for answer in answers], ["job_0", "job_0", "job_1", "job_1"]
        )
        self.assertEqual([len(answer["output_ids"]) for answer in answers], [3, 3, 2, 2])
        for answer in answers:
            for row in answer["meta_info"]["output_top_logprobs"]:
                self.assertEqual([entry[0] for entry in row], sorted((e[0] for e in row), reverse=True))
                self.assertEqual(len(row), 2)


class ArealTest(EngineTest):
    """AReaL's two backends."""

    def test_health_has_a_body(self):
        with self.connection() as connection:
            for _ in range(2):  # the second is garbage if the first one's body was left
                connection.request("GET", "/health", b"{}", {"Content-Type": "application/json"})
                answer = connection.getresponse()
                self.assertEqual((answer.status, answer.read()), (200, b""))

    def test_sglang(self):
        body = {
            "input_ids": PROMPT, "image_data": None,
            "sampling_params": {
                "top_p": 1.0, "top_k": 100000000, "max_new_tokens": 12, "temperature": 1.0,
                "stop_token_ids": [],
                "ignore_eos": False, "skip_special_tokens": True, "frequency_penalty": 0.0,
            },
            "return_logprob": True, "stream": False,
        }  # fmt: skip
        meta = self.gateway.post("/generate", body)["meta_info"]
        tokens = [entry[1] for entry in meta["output_token_logprobs"]]
        self.assert_scored(PROMPT, tokens, [e[0] for e in meta["output_token_logprobs"]], temperature=1.0)
        self.gateway.post("/pause_generation", {})
        body = {"model_path": str(self.other), "abort_all_requests": True}
        self.assertTrue(self.gateway.post("/update_weights_from_disk", body)["success"])
        self.gateway.post("/continue_generation", {})
        score = {
            "input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True, "logprob_start_len": len(PROMPT) - 2 - 1, "top_logprobs_num": 0,
            "stream": False,
        }  # fmt: skip
        found = self.gateway.post("/generate", score)["meta_info"]["input_token_logprobs"]
        values = [float(entry[0]) for entry in found]  # none is null
        (wanted,) = self.scorer.score([(PROMPT[:-2], PROMPT[-2:])], logprob_mode="raw")
        self.assertEqual(bits(values[-2:]), bits(wanted.tokens.logprobs))

    def test_vllm(self):
        body = {
            "top_p": 1.0, "top_k": 100000000, "max_tokens": 12, "temperature": 1.0, "stop_token_ids": [],
            "ignore_eos": False, "skip_special_tokens": True, "return_tokens_as_token_ids": True,
            "logprobs": 0,
            "use_beam_search": False, "stream": False, "prompt": PROMPT,
        }  # fmt: skip
        (choice,) = self.gateway.post("/v1/completions", body)["choices"]
        tokens = [int(name.split(":")[1]) for name in choice["logprobs"]["tokens"]]
        self.assert_scored(PROMPT, tokens, choice["logprobs"]["token_logprobs"], temperature=1.0)
        self.assertTrue(self.gateway.post("/areal_pause_generation", {})["success"])
        self.assertTrue(
            self.gateway.post("/areal_update_weights", {"model_path": str(self.other)})["success"]
        )
        self.assertTrue(self.gateway.post("/areal_continue_generation", {})["success"])
        (choice,) = self.gateway.post("/v1/completions", body)["choices"]
        tokens = [int(name.split(":")[1]) for name in choice["logprobs"]["tokens"]]
        self.assert_scored(PROMPT, tokens, choice["logprobs"]["token_logprobs"], temperature=1.0)
        self.assert_refused("/areal_update_weights_xccl", {}, 400, "process group")


if __name__ == "__main__":
    unittest.main()
