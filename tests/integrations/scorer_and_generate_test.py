"""What every seam's weights go through, NeMo-RL's logprobs from the scorer, slime's generate and its hook for
weights, beside real services.

Neither framework is on PyPI. What it would hand over, a batch and a Sample, is its own class where it can be
imported, and else one of the same interface.
"""

import asyncio
import importlib
import sys
import types
import unittest
from collections import UserDict
from enum import Enum
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file
from support import bits, word_tokenizer

from isobit import RolloutClient, ScorerClient
from isobit.calls import score_request
from isobit.errors import FailedPreconditionError, IsobitError
from isobit.integrations import slime
from isobit.integrations.nemo_rl import ScorerPolicy
from isobit.integrations.weights import SharedDirectory, send_weights
from isobit.launch import Setting, run_model_tool
from isobit_tools.testing import BIN_DIR, ServiceTest

try:
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
except ImportError:

    class BatchedDataDict(UserDict):
        pass


try:
    from slime.utils.types import Sample
except ImportError:

    class Sample:
        """The part of slime's Sample that `generate` touches."""

        class Status(Enum):
            PENDING = "pending"
            COMPLETED = "completed"
            TRUNCATED = "truncated"
            ABORTED = "aborted"

        def __init__(self, prompt):
            self.prompt, self.tokens, self.response, self.response_length = prompt, [], "", 0
            self.multimodal_inputs, self.rollout_log_probs, self.weight_versions = None, None, []
            self.status = self.Status.PENDING

        def append_response_tokens(self, args, *, tokens, log_probs, trainable, meta_info, text):
            assert trainable and len(tokens) == len(log_probs)
            self.tokens = self.tokens + tokens
            self.response += text
            self.response_length += len(tokens)
            self.rollout_log_probs = (self.rollout_log_probs or []) + log_probs
            self.weight_versions.append(meta_info["weight_version"])
            ends = {"stop": "COMPLETED", "length": "TRUNCATED", "abort": "ABORTED"}
            self.status = self.Status[ends[meta_info["finish_reason"]["type"]]]


SAMPLING = {"temperature": 0.7, "top_p": 0.9}


class Policy:
    """A policy of NeMo-RL's, of which these tests only see that it is asked."""

    def __init__(self):
        self.asked = []

    def train(self, data):
        self.asked.append("train")
        return {"loss": data}

    def get_reference_policy_logprobs(self, data, micro_batch_size=None, timer=None):
        self.asked.append("reference")
        return "its own"

    def prepare_for_lp_inference(self):
        self.asked.append("prepare")


class SeamsTest(ServiceTest):
    setting = Setting("tree", tp_size=2, shards=2)

    @classmethod
    def make_model(cls):
        run_model_tool(BIN_DIR, "make", "tiny-qwen3", str(cls.model), "--seed", "3")
        run_model_tool(BIN_DIR, "make", "tiny-qwen3", str(cls.scratch / "weight_v000001"), "--seed", "4")
        word_tokenizer().save_pretrained(cls.scratch / "tokenizer")

    def setUp(self):
        super().setUp()
        services = self.launch("rollout"), self.launch("scorer"), self.launch("scorer")
        for service in services:
            self.services.wait_serving(service)
        self.target = services[0].target
        self.scorer_target = services[1].target
        self.rollout = self.enterContext(RolloutClient(self.target))
        self.scorer, self.reference = (self.enterContext(ScorerClient(s.target)) for s in services[1:])
        self.policy = Policy()

    def versions(self) -> list[tuple[int, str]]:
        found = [c.get_server_info().server.weight_version for c in (self.rollout, self.scorer)]
        return [(version.id, version.digest) for version in found]

    def test_weights_go_to_all_services_or_none_changes(self):
        before = self.versions()
        files = sorted(self.scratch.iterdir())
        directory = SharedDirectory(self.scratch, self.model.name)
        tensors = load_file(self.scratch / "weight_v000001" / "model.safetensors")
        clients = [self.rollout, self.scorer]

        wrong = tensors | {"model.norm.weight": tensors["model.norm.weight"][:-1]}
        with self.assertRaisesRegex(IsobitError, "model.norm.weight"):
            send_weights(clients, wrong.items(), directory=directory)
        with self.assertRaisesRegex(ValueError, "expected the tensors of a model, got none"):
            send_weights(clients, iter(()), directory=directory)
        self.assertEqual(self.versions(), before)

        send_weights(clients, iter(tensors.items()), directory=directory, weight_version=5)
        self.assertEqual(sorted(self.scratch.iterdir()), files, "what was written is gone")
        (rollout, scorer), (old, _) = self.versions(), before
        self.assertEqual(rollout, scorer)
        self.assertEqual(rollout[0], 5)
        self.assertNotEqual(rollout[1], old[1], "control: other weights")
        self.reference.update_weights("weight_v000001")
        self.assertEqual(self.reference.get_server_info().server.weight_version.digest, rollout[1])

    def test_weights_of_wrapped_modules_have_the_names_of_a_checkpoint(self):
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 2))
        expected = sorted(model.state_dict())
        model[0] = checkpoint_wrapper(model[0])
        model[1] = torch.compile(model[1])
        for wrapped in (model, torch.compile(model), torch.nn.DataParallel(model)):
            self.assertNotEqual(sorted(wrapped.state_dict()), expected, "control")
            for tensors in (wrapped.named_parameters(), wrapped.state_dict().items()):
                sent = {}
                client = types.SimpleNamespace(
                    update_weights_from_stream=lambda named, into=sent, **_: into.update(named)
                )
                send_weights([client], tensors)
                self.assertEqual(sorted(sent), expected)

    def test_a_framework_that_is_missing_is_named(self):
        with (
            mock.patch.dict(sys.modules, {"verl": None, "verl.workers.rollout.replica": None}),
            self.assertRaisesRegex(ImportError, "pip install 'verl==0.9.1'"),
        ):
            importlib.import_module("isobit.integrations.verl")

    def batch(self):
        """Sampled sequences as NeMo-RL has them, padded behind, and the logprobs of those drawn."""
        prompts = [[5, 17, 300], [42], [7, 8, 9, 10, 11, 12]]
        rows, drawn = [], []
        for seed, prompt in enumerate(prompts):
            (sample,) = self.rollout.generate(prompt, seed=seed, max_tokens=5 + seed, **SAMPLING)
            rows.append(torch.tensor(prompt + sample.tokens.token_ids.tolist()))
            drawn.append((len(prompt), sample.tokens.logprobs))
        rows.append(torch.tensor([99]))
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        return BatchedDataDict({"input_ids": ids, "input_lengths": lengths}), drawn

    def test_nemo_rl_logprobs_are_the_rollouts(self):
        data, drawn = self.batch()
        policy = ScorerPolicy(self.policy, self.scorer, sampling=SAMPLING)
        out = policy.get_logprobs(data)
        self.assertIsInstance(out, BatchedDataDict)
        logprobs = out["logprobs"]
        self.assertEqual((logprobs.shape, logprobs.dtype), (data["input_ids"].shape, torch.float32))
        for row, (prompt, values) in zip(logprobs, drawn, strict=False):
            self.assertEqual(bits(row[prompt : prompt + len(values)]), bits(values))
            self.assertTrue((row[1:prompt] < 0).all(), "prompt tokens have logprobs, too")
            self.assertEqual((row[0], row[prompt + len(values) :].abs().sum()), (0, 0))
        self.assertEqual(logprobs[3].abs().sum(), 0, "a sequence of one token")
        plain = ScorerPolicy(self.policy, self.scorer).get_logprobs(data)["logprobs"]
        self.assertNotEqual(bits(plain[0]), bits(logprobs[0]), "control: drawn otherwise")

    def test_nemo_rl_reference_and_weights(self):
        data, _ = self.batch()
        policy = ScorerPolicy(self.policy, self.scorer, reference=self.reference)
        before = policy.get_logprobs(data)["logprobs"]
        self.scorer.update_weights("weight_v000001", weight_version=8)
        reference = policy.get_reference_policy_logprobs(data, micro_batch_size=2)["reference_logprobs"]
        self.assertEqual(bits(reference), bits(before), "the reference keeps its weights")
        policy.weight_version = 8
        self.assertNotEqual(
            bits(policy.get_logprobs(data)["logprobs"]), bits(before), "control: other weights"
        )
        policy.weight_version = 9
        with self.assertRaises(FailedPreconditionError):
            policy.get_logprobs(data)
        data["input_lengths"][1] = 100
        with self.assertRaisesRegex(ValueError, r"input_lengths\[1\]: expected 1 to \d+, got 100"):
            policy.get_logprobs(data)

    def test_nemo_rl_refuses_what_depends_on_where_a_completion_begins(self):
        for options in (
            {"presence_penalty": 0.5},
            {"frequency_penalty": -1},
            {"min_tokens": 2},
            {"min_new_tokens": 2},
        ):
            with self.assertRaisesRegex(
                ValueError, "sampling: .*: expected 0, got .*where completions begin"
            ):
                ScorerPolicy(self.policy, self.scorer, sampling=options)
        with self.assertRaisesRegex(TypeError, "no sampling parameter is called vllm_cfg"):
            ScorerPolicy(self.policy, self.scorer, sampling={"vllm_cfg": 1})
        # What does not depend on it has the rollout's bits.
        prompt = [7, 9, 7, 11, 9]
        for options in (
            {"repetition_penalty": 1.3},
            {"logit_bias": {7: 3.0}},
            {"presence_penalty": 0.0, "min_tokens": 0},
        ):
            (sample,) = self.rollout.generate(prompt, max_tokens=12, seed=5, **options)
            ids = torch.tensor([prompt + sample.tokens.token_ids.tolist()])
            data = BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor([ids.shape[1]])})
            logprobs = ScorerPolicy(self.policy, self.scorer, sampling=options).get_logprobs(data)["logprobs"]
            self.assertEqual(bits(logprobs[0, len(prompt) :]), bits(sample.tokens.logprobs))

    def test_nemo_rl_cuts_batches_into_requests_that_a_service_takes(self):
        sizes, scored = [], []

        class Scorer:
            def score(self, sequences, *, weight_version=None, **sampling):
                request = score_request(sequences, "processed", False, False, weight_version, sampling)
                sizes.append(request.ByteSize())
                scored.extend(prompt[0] for prompt, _ in sequences)
                return [
                    types.SimpleNamespace(
                        tokens=types.SimpleNamespace(logprobs=np.full(len(c), p[0], np.float32))
                    )
                    for p, c in sequences
                ]

        for count, length in ((256, 24_000), (3, 2_000_000), (1000, 3)):
            ids = torch.full((count, length), 150_000)
            ids[:, 0] = torch.arange(count)
            data = BatchedDataDict({"input_ids": ids, "input_lengths": torch.full((count,), length)})
            sizes.clear(), scored.clear()
            logprobs = ScorerPolicy(self.policy, Scorer()).get_logprobs(data)["logprobs"]
            self.assertEqual(scored, list(range(count)))
            self.assertTrue((logprobs[:, 1:] == torch.arange(count)[:, None]).all())
            self.assertLess(max(sizes), 16 << 20)
            self.assertGreater(len(sizes), 1, "control: cut")

    def test_nemo_rl_leaves_all_else_to_the_policy(self):
        alone = ScorerPolicy(self.policy, self.scorer)
        self.assertEqual(alone.train(3), {"loss": 3})
        self.assertEqual(alone.get_reference_policy_logprobs(None), "its own")
        alone.prepare_for_lp_inference()
        ScorerPolicy(self.policy, self.scorer, reference=self.reference).prepare_for_lp_inference()
        self.assertEqual(self.policy.asked, ["train", "reference", "prepare"])
        with self.assertRaises(AttributeError):
            _ = alone.no_such_method

    def slime_args(self, **changes):
        options = {
            "isobit_rollout": self.target,
            "isobit_others": [self.scorer_target],
            "hf_checkpoint": str(self.scratch / "tokenizer"),
            "use_rollout_routing_replay": False,
        }
        return types.SimpleNamespace(**options | changes)

    def generate(self, sample, **changes):
        sampling = {
            "temperature": 0.7,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": 9,
            "stop": None,
            "stop_token_ids": None,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
            "sampling_seed": 4,
            "ignore_eos": True,
        }
        return asyncio.run(slime.generate(self.slime_args(), sample, sampling | changes))

    def check_slime(self, sample, tokens: int) -> list[int]:
        self.assertEqual((sample.status, sample.response_length), (Sample.Status.TRUNCATED, tokens))
        prompt, completion = sample.tokens[:3], sample.tokens[3:]
        self.assertEqual(prompt, [5, 17, 300])
        self.assertEqual(sample.response, " ".join(f"w{i:03}" for i in completion))
        (score,) = self.scorer.score([(prompt, completion)], temperature=0.7)
        self.assertEqual(bits(sample.rollout_log_probs), bits(score.tokens.logprobs))
        return bits(sample.rollout_log_probs)

    def test_slime_generates_and_goes_on(self):
        sample = self.generate(Sample(prompt="w005 w017 w300"))
        self.check_slime(sample, 9)
        self.assertEqual(sample.weight_versions, ["1"])
        part = self.generate(Sample(prompt="w005 w017 w300"), max_new_tokens=4)
        self.assertEqual(part.tokens, sample.tokens[:7])
        whole = self.generate(part)
        self.assertEqual((whole.tokens, whole.weight_versions), (sample.tokens, ["1", "1"]))
        self.assertEqual(bits(whole.rollout_log_probs), bits(sample.rollout_log_probs))
        self.assertEqual(self.generate(whole).response_length, 9, "nothing is left to draw")

    def test_slime_updates_weights(self):
        old = self.check_slime(self.generate(Sample(prompt="w005 w017 w300")), 9)
        slime.update_weights(self.slime_args(), "/elsewhere/weight_v000001", [])
        new = self.generate(Sample(prompt="w005 w017 w300"))
        self.assertNotEqual(self.check_slime(new, 9), old, "control: other weights")
        self.assertEqual(new.weight_versions, ["2"])

    def test_slime_refuses_what_isobit_has_not(self):
        for changes, expected in (
            ({"top_p": 0.9}, "top_p=0.9: isobit has none other than 1.0"),
            ({"stop": ["x"]}, r"stop=\['x'\]"),
            ({"custom_params": {"return_top_p_token_ids": True}}, "custom_params"),
        ):
            with self.assertRaisesRegex(ValueError, expected):
                self.generate(Sample(prompt="w005"), **changes)
        with self.assertRaisesRegex(TypeError, "expected text, got list"):
            self.generate(Sample(prompt=[{"role": "user", "content": "w5"}]))


if __name__ == "__main__":
    unittest.main()
