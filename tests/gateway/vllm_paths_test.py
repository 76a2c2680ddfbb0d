"""Tests of vLLM's paths with the requests that trainers send, before a real rollout and scorer.

python tests/gateway/vllm_paths_test.py

docs/integrations.md names the trainers. Each class replays what one of them sends, byte for byte where the
bytes matter. frameworks_test.py has the trainers' own classes.
"""

import json
import threading
import unittest
from typing import ClassVar

from engines import EngineTest, bits

from isobit_tools.testing import metric_values

PROMPT = [5, 6, 7, 8, 9]
KEEP = "/pause?mode=keep&clear_cache=false"


class PrimeRlTest(EngineTest):
    """prime-rl's orchestrator: renderers' requests on tokens, and updates from its filesystem transport."""

    SAMPLING: ClassVar = {
        "temperature": 1.0, "top_p": 1.0, "max_tokens": 24, "top_k": -1, "min_p": 0.0,
        "return_token_ids": True,
        "logprobs": 1, "stop_token_ids": [257], "skip_special_tokens": False,
    }  # fmt: skip

    def generate(self, **more):
        body = {
            "model": "tiny", "token_ids": PROMPT, "sampling_params": self.SAMPLING | more, "cache_salt": "3",
        }  # fmt: skip
        answer = self.gateway.post("/inference/v1/generate", body, X_Session_ID="rollout-1")
        (choice,) = answer["choices"]
        entries = choice["logprobs"]["content"]
        self.assertEqual(
            [entry["token"] for entry in entries], [f"token_id:{i}" for i in choice["token_ids"]]
        )
        self.assertEqual([entry["token_id"] for entry in entries], choice["token_ids"])
        for entry in entries:  # the drawn token first, as vLLM's order is
            self.assertEqual(entry["top_logprobs"][0], {k: entry[k] for k in entry if k != "top_logprobs"})
            self.assertLessEqual(len(entry["top_logprobs"]), 2)
        return choice, [entry["logprob"] for entry in entries]

    def test_weights_change_under_a_pause(self):
        before, logprobs = self.generate(seed=3)
        self.assert_scored(PROMPT, before["token_ids"], logprobs, temperature=1.0)
        self.assertEqual(self.gateway.post(KEEP), {"status": "paused"})
        self.gateway.post("/update_weights", {"weight_dir": str(self.other)})
        self.assertEqual(self.gateway.post("/resume"), {"status": "resumed"})
        after, logprobs = self.generate(seed=3)
        self.assertNotEqual(before["token_ids"], after["token_ids"])
        self.assert_scored(PROMPT, after["token_ids"], logprobs, temperature=1.0)  # the scorer has them, too
        self.assertEqual(
            [choice["weight_versions"][0]["version"] for choice in (before, after)], ["default", "2"]
        )

    def test_labels_of_versions(self):
        """What a client calls its weights is told by every path, not the rollout's own number."""
        label = "step-7"
        self.gateway.post("/update_weights", {"weight_dir": str(self.other), "weight_version": label})
        wanted = [{"version": label, "start": 0, "end": 6}]
        ask = {"max_tokens": 6, "ignore_eos": True, "return_weight_versions": True}
        chat = ask | {"messages": [{"role": "user", "content": "hello"}]}
        for path, body in (("/v1/completions", ask | {"prompt": PROMPT}), ("/v1/chat/completions", chat)):
            with self.subTest(path):
                (choice,) = self.gateway.post(path, body)["choices"]
                self.assertEqual(choice["weight_versions"], wanted)
                with self.events(path, body | {"stream": True}) as events:
                    choices = [choice for event in events for choice in event["choices"]]
                spans = [span for choice in choices for span in choice.get("weight_versions", ())]
                self.assertEqual({span["version"] for span in spans}, {label})
                places = [place for span in spans for place in range(span["start"], span["end"])]
                self.assertEqual(places, list(range(6)))  # of the sample, not of the event
        (choice,) = self.gateway.post("/v1/chat/completions", chat | {"return_meta_info": True})["choices"]
        self.assertEqual(choice["meta_info"]["weight_version"], label)

    def test_a_rank_that_nobody_has_counted_is_null(self):
        body = {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 0}
        (choice,) = self.gateway.post("/v1/completions", body)["choices"]
        self.assertEqual([len(row) for row in choice["prompt_logprobs"][1:]], [1] * (len(PROMPT) - 1))
        for row in choice["prompt_logprobs"][1:]:
            self.assertEqual([entry["rank"] for entry in row.values()], [None])
        chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "logprobs": True}
        ask = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 4, "logprobs": 0}}
        for path, body in (("/v1/chat/completions", chat), ("/inference/v1/generate", ask)):
            (choice,) = self.gateway.post(path, body)["choices"]
            self.assertEqual({entry["rank"] for entry in choice["logprobs"]["content"]}, {None}, path)

    def test_scoring(self):
        body = {
            "model": "tiny", "token_ids": PROMPT,
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1},
        }  # fmt: skip
        rows = self.gateway.post("/inference/v1/generate", body)["prompt_logprobs"]
        self.assertIsNone(rows[0])
        own = [next(iter(row.items())) for row in rows[1:]]  # as the trainer reads it: the first one
        self.assertEqual([int(token) for token, _ in own], PROMPT[1:])
        (score,) = self.scorer.score([(PROMPT, [])], prompt_logprobs=True)
        self.assertEqual(bits([entry["logprob"] for _, entry in own]), bits(score.prompt.logprobs))

    def test_no_limit_is_the_context(self):
        body = {"token_ids": PROMPT, "sampling_params": {"logprobs": 0, "ignore_eos": True}}
        (choice,) = self.gateway.post("/inference/v1/generate", body)["choices"]
        self.assertEqual(len(choice["token_ids"]), 2048 - len(PROMPT))
        self.assertEqual(choice["finish_reason"], "length")
        body["sampling_params"] |= {"max_tokens": 100_000, "seed": 1}  # more than there is
        (choice,) = self.gateway.post("/inference/v1/generate", body)["choices"]
        self.assertEqual(len(choice["token_ids"]), 2048 - len(PROMPT))

    def test_a_kept_request_goes_on_under_new_weights(self):
        with self.kept("/inference/v1/generate", {
            "token_ids": PROMPT, "stream": True,
            "sampling_params": {"max_tokens": 1500, "logprobs": 0, "ignore_eos": True, "temperature": 1.0},
        }) as events:  # fmt: skip
            self.gateway.post("/update_weights", {"weight_dir": str(self.other)})
            self.gateway.post("/resume")
            choices = [event["choices"][0] for event in events]
        self.assertEqual(choices[-1]["finish_reason"], "length")
        tokens = [token for choice in choices for token in choice["token_ids"]]
        self.assertEqual(len(tokens), 1500)
        spans = [span for choice in choices for span in choice.get("weight_versions", ())]
        self.assertEqual((spans[0]["start"], spans[-1]["end"]), (0, 1500))
        self.assertEqual(list(dict.fromkeys(span["version"] for span in spans)), ["default", "2"])

    def test_an_update_again_is_a_success(self):
        answers = [self.gateway.post("/update_weights", {"weight_dir": str(self.other)}) for _ in range(3)]
        self.assertEqual([answer["weight_version"] for answer in answers], ["2", "2", "2"])
        self.write_model(self.other, seed=10)  # other files in the same directory
        self.assertEqual(
            self.gateway.post("/update_weights", {"weight_dir": str(self.other)})["weight_version"], "3"
        )
        self.gateway.post("/update_weights", {"weight_dir": str(self.model)})
        self.assertEqual(
            self.gateway.post("/update_weights", {"weight_dir": str(self.other)})["weight_version"], "5"
        )

    def test_updates_at_once_are_one(self):
        answers = []

        def update() -> None:
            answers.append(self.gateway.post("/update_weights", {"weight_dir": str(self.other)}))

        threads = [threading.Thread(target=update) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual([answer["weight_version"] for answer in answers], ["2"] * 4)
        self.assertEqual(self.version(), 2)

    def test_an_update_outlives_its_client(self):
        """A client that gives up and asks again finds its update done, or joins it."""
        path, body = "/update_weights", {"weight_dir": str(self.other)}
        with self.other_update():
            self.send_and_go(path, json.dumps(body).encode())
            self.wait_until(lambda: self.count(path, 499) == 1, "its client's end goes unseen")
            self.assertEqual(self.version(), 1)
        self.wait_until(lambda: self.version() == 2, "the update ended with its client", timeout=60.0)
        self.assertEqual(self.gateway.post(path, body)["weight_version"], "2")
        self.assertEqual(self.version(), 2)

    def count(self, path: str, status: int) -> float:
        """Requests that the gateway has ended with `status`."""
        text = self.gateway.request("GET", "/metrics")[2].decode()
        name = f'isobit_gateway_requests_total{{path="{path}",status="{status}"}}'
        return metric_values(text).get(name, 0.0)

    def test_directories(self):
        name = self.other.relative_to(self.scratch)
        relative = self.gateway.post("/update_weights", {"weight_dir": str(name)})
        absolute = self.gateway.post("/update_weights", {"weight_dir": f"{self.scratch}/./x/../{name}/"})
        self.assertEqual((relative["weight_version"], absolute["weight_version"]), ("2", "2"))
        link = self.scratch / f"link-{self.id()}"
        link.symlink_to(self.scratch)
        through = self.gateway.post("/update_weights", {"weight_dir": str(link / name)})
        self.assertEqual(through["weight_version"], "2")
        for directory, status, text in (
            ("/etc", 400, "weight_dir is /etc, expected a directory below --model_root"),
            (f"{self.scratch}/../x", 400, "expected a directory below --model_root"),
            ("../x", 400, "model_path"),
            (str(self.scratch / "nothing"), 404, "nothing"),
            ("", 400, "weight_dir: expected"),
            (None, 400, "filesystem"),
            (7, 400, "weight_dir: expected"),
        ):
            with self.subTest(directory):
                self.assert_refused("/update_weights", {"weight_dir": directory}, status, text)
        self.assertEqual(self.version(), 2)


class SkyRlTest(EngineTest):
    """SkyRL's RemoteInferenceClient."""

    def test_generate(self):
        body = {
            "sampling_params": {
                "min_tokens": 1, "skip_special_tokens": True, "include_stop_str_in_output": True,
                "max_tokens": 8,
                "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1, "stop": None,
            },
            "model": "tiny", "token_ids": PROMPT,
        }  # fmt: skip
        (choice,) = self.gateway.post("/inference/v1/generate", body)["choices"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        self.assert_scored(PROMPT, choice["token_ids"], logprobs, temperature=1.0, min_tokens=1)

    def test_several_samples(self):
        body = {
            "token_ids": PROMPT, "model": "tiny",
            "sampling_params": {
                "n": 3, "logprobs": 0, "output_kind": 2, "prompt_logprobs": 0, "seed": 5, "stop": [],
                "stop_token_ids": [3], "max_tokens": 6,
            },
        }  # fmt: skip
        answer = self.gateway.post("/inference/v1/generate", body)
        self.assertEqual([choice["index"] for choice in answer["choices"]], [0, 1, 2])
        self.assertEqual(len({tuple(choice["token_ids"]) for choice in answer["choices"]}), 3)
        for entry in answer["choices"][0]["logprobs"]["content"]:
            self.assertEqual(len(entry["top_logprobs"]), 1)
        self.assertEqual([len(row) for row in answer["prompt_logprobs"][1:]], [1] * 4)

    def test_control(self):
        """Bodies of GET, bodies of no JSON type, and answers whose length is said."""
        with self.connection() as connection:
            for method, path, body, wanted in (
                ("GET", "/get_world_size", b"{}", {"world_size": 1}),
                ("POST", KEEP, b"", {"status": "paused"}),
                ("GET", "/is_paused", None, {"is_paused": True}),
                ("POST", "/resume", b"", {"status": "resumed"}),
                ("POST", "/sleep?level=2", b"", {"status": "sleeping", "level": 2}),
                ("GET", "/is_sleeping", None, {"is_sleeping": True}),
                ("POST", "/wake_up?tags=weights", b"", {"status": "sleeping", "tags": ["weights"]}),
                ("GET", "/is_sleeping", None, {"is_sleeping": True}),
                ("POST", "/wake_up?tags=kv_cache", b"", {"status": "awake", "tags": ["kv_cache"]}),
                ("GET", "/is_sleeping", None, {"is_sleeping": False}),
                ("POST", "/reset_prefix_cache", b'{"reset_running_requests": true}', {"success": True}),
            ):
                connection.request(method, path, body, {"Content-Type": "application/octet-stream"})
                answer = connection.getresponse()
                self.assertEqual((answer.status, json.loads(answer.read())), (200, wanted), path)
                self.assertIsNotNone(answer.getheader("Content-Length"), path)
                self.assertEqual(answer.getheader("Content-Type"), "application/json")

    def test_weights_come_while_asleep(self):
        body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 8, "seed": 4}}
        before = self.gateway.post("/inference/v1/generate", body)["choices"][0]["token_ids"]
        self.gateway.post("/sleep?level=2")
        self.gateway.post("/wake_up?tags=weights")
        self.gateway.post("/update_weights", {"weight_dir": str(self.other)})
        self.gateway.post("/wake_up?tags=kv_cache")
        after = self.gateway.post("/inference/v1/generate", body)["choices"][0]["token_ids"]
        self.assertNotEqual(before, after)

    def test_transfer_without_a_group(self):
        """What the rollout says of weights by broadcast comes through, as no 5xx, which trainers repeat."""
        tensor = {"names": ["a"], "dtype_names": ["bfloat16"], "shapes": [[1]]}
        for path, body in (
            ("/start_weight_update", {"is_checkpoint_format": True}),
            ("/update_weights", {"update_info": tensor}),
            ("/update_weights", {"update_info": [tensor]}),
            ("/finish_weight_update", b""),
        ):
            with self.subTest(path):
                self.assert_refused(path, body, 409, "first")
        answer = self.gateway.post("/shutdown_weight_transfer_engine")
        self.assertEqual(answer, {"message": "Weight transfer shut down"})
        for path, body, text in (
            ("/start_weight_update", {"is_checkpoint_format": False}, "is_checkpoint_format"),
            ("/init_weight_transfer_engine", {}, "init_info"),
            ("/init_weight_transfer_engine", {"init_info": {"master_port": "x"}}, "init_info.master_port"),
            ("/init_weight_transfer_engine", {"init_info": {"backend": "x"}}, "init_info.backend"),
            ("/update_weights", {"update_info": tensor | {"shapes": []}}, "as many names"),
            ("/update_weights", {"update_info": tensor | {"dtype_names": ["int8"]}}, "a is int8"),
            ("/update_weights", {"update_info": {"ipc_handles_pickled": "gASV"}}, "pickles"),
            ("/update_weights", {}, "weight_dir"),
        ):
            with self.subTest(path, body=body):
                self.assert_refused(path, body, 400, text)

    def test_refused_fields(self):
        ask = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}
        for more, text in (
            ({"logprobs": -1}, "sampling_params.logprobs"),
            ({"prompt_logprobs": 100_000}, "sampling_params.prompt_logprobs"),
            ({"structured_outputs": {"regex": "a"}}, "sampling_params.structured_outputs"),
            ({"bad_words": ["a"]}, "sampling_params.bad_words"),
            ({"allowed_token_ids": [1]}, "sampling_params.allowed_token_ids"),
            ({"guided_json": {}}, "sampling_params.guided_json"),
            ({"temprature": 1.0}, "did you mean temperature"),
            ({"seed": -2}, "sampling_params.seed"),
        ):
            with self.subTest(text):
                body = ask | {"sampling_params": ask["sampling_params"] | more}
                self.assert_refused("/inference/v1/generate", body, 400, text)
        for more, status, text in (
            ({"features": {"mm_hashes": {}}}, 400, "features"),
            ({"kv_transfer_params": {}}, 400, "kv_transfer_params"),
            ({"output_mode": "text"}, 400, "output_mode"),
            ({"priority": 1}, 400, "priority"),
            ({"model": "another"}, 404, "another"),
            ({"token_ids": [5, 100_000]}, 400, "token_ids has token 100000"),
            ({"token_ids": []}, 400, "token_ids"),
            ({"request_id": "a b"}, 400, "request_id"),
        ):
            with self.subTest(text):
                self.assert_refused("/inference/v1/generate", ask | more, status, text)
        status, _, text = self.gateway.request(
            "POST", "/inference/v1/generate", ask, X_data_parallel_rank="1"
        )
        self.assertEqual((status, b"rank 0" in text), (400, True))

    def test_refusals(self):
        for path, body, status, text in (
            ("/collective_rpc", {"method": "skyrl_sleep_for_weight_sync", "kwargs": {}}, 400, "skyrl_sleep"),
            ("/skyrl/v1/load_lora_adapter", {"lora_name": "a"}, 404, "LoRA"),
            ("/v1/load_lora_adapter", {"lora_name": "a"}, 404, "LoRA"),
            ("/skyrl/v1/generate", {}, 404, "routing"),
            ("/fetch_weights", {"target_version": 1}, 400, "send all weights"),
            ("/pause?mode=in_place", None, 400, "mode is 'in_place', expected one of abort, wait, keep"),
            ("/sleep?level=9", None, 400, "level is '9'"),
            ("/wake_up?tags=graphs", None, 400, "graphs"),
            ("/init_broadcaster", {"host": "a"}, 404, "filesystem"),
            ("/load_lora_adapter", {}, 400, "LoRA"),
        ):
            with self.subTest(path):
                self.assert_refused(path, body, status, text)


if __name__ == "__main__":
    unittest.main()
