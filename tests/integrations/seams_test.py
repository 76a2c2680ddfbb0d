"""What the frameworks' seams do by themselves, beside a real rollout: requests that do not fit, requests
without a limit, full queues, resumed samples, rewards of every form, the steps of a trainer that starts anew.

It needs no framework: what one would hand over has the same interface here. NeMo-RL's seam needs torch, so
that its tests are in scorer_and_generate_test.py, as those of slime's bits.
"""

import asyncio
import functools
import importlib
import os
import queue
import subprocess
import sys
import tempfile
import threading
import types
import unittest
from enum import Enum
from pathlib import Path
from unittest import mock

import numpy as np
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers

from isobit import RolloutClient
from isobit.errors import InvalidArgumentError
from isobit.integrations import slime, trl
from isobit.integrations._context import NO_LIMIT
from isobit.integrations._rewards import Rewards
from isobit.integrations.weights import send_weights
from isobit.weights import checkpoint_name, digest_of
from isobit_tools.testing import ServiceTest

CONTEXT = 64
VOCABULARY = 499


def words(length: int, first: int = 5) -> str:
    return " ".join(f"w{first + i % 400:03}" for i in range(length))


class Words:
    """What RolloutWorker asks of a tokenizer of transformers: one word for each id."""

    def __call__(self, text):
        return {"input_ids": [int(word[1:]) for word in text.split()]}

    def batch_decode(self, ids, skip_special_tokens=True):
        return [" ".join(f"w{i:03}" for i in row) for row in ids]


def trl_args(**changes):
    options = {
        "repetition_penalty": 1.0,
        "generation_kwargs": None,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "max_completion_length": 8,
        "num_generations": 2,
        "chat_template_kwargs": None,
    }
    return types.SimpleNamespace(**options | changes)


def zero_rewards(completions, **_):
    return [0.0] * len(completions)


class TrlTest(ServiceTest):
    def setUp(self):
        super().setUp()
        rollout = self.start("rollout", f"--max_context={CONTEXT}", "--max_waiting=4", "--max_running=2")
        self.rollout = self.enterContext(RolloutClient(rollout.target))
        module = types.SimpleNamespace(RolloutSample=lambda **fields: types.SimpleNamespace(**fields))
        stand_in = types.SimpleNamespace(async_rollout_worker=module)
        self.enterContext(mock.patch.object(trl, "_async_grpo", lambda: stand_in))

    def worker(self, prompts, rewards=zero_rewards, **changes):
        rows = [{"prompt": prompt} for prompt in prompts]
        worker = trl.RolloutWorker(self.rollout, Words(), rows, rewards, trl_args(**changes), groups_ahead=1)
        self.addCleanup(worker.stop)
        worker.start()
        return worker

    def next_sample(self, worker):
        while True:
            worker.check_health(60)
            try:
                return worker.rollout_buffer.get(timeout=0.1)
            except queue.Empty:
                continue

    def trainer(self, **changes):
        return types.SimpleNamespace(
            state=types.SimpleNamespace(global_step=0),
            args=trl_args(**changes),
            processing_class=Words(),
            accelerator=types.SimpleNamespace(num_processes=1, process_index=0),
        )

    def rollout_function(self):
        function = trl.RolloutFunction(self.rollout, None, seed=3)
        function._synced_step = 0
        return function

    def test_prompts_that_the_rollout_refuses_are_left_out(self):
        # Too long; nothing at all; a word that the model does not have; as long as the context.
        bad = [words(200), "", f"w{VOCABULARY + 100}", words(CONTEXT)]
        prompts = [words(3), *bad, words(CONTEXT - 4, first=9)]
        with self.assertLogs("isobit.integrations.trl", "WARNING") as logs:
            worker = self.worker(prompts)
            samples = [self.next_sample(worker) for _ in range(6)]
            worker.stop()
        self.assertEqual([sample.group_id for sample in samples], [0, 0, 5, 5, 6, 6])
        for sample in samples[2:4]:
            self.assertLessEqual(len(sample.input_ids), CONTEXT, "a completion ends with the context")
        self.assertGreaterEqual(len(logs.output), len(bad))
        self.assertIn(f"expected at most {CONTEXT - 1} tokens, which leave one", logs.output[0])

    def test_a_turn_of_refused_prompts_ends_the_worker(self):
        worker = self.worker([words(200), words(300)])
        self.wait_until(lambda: worker._error, "the worker did not end")
        self.assertIsInstance(worker._error, InvalidArgumentError)

    def test_what_is_wrong_for_all_prompts_ends_the_worker_at_once(self):
        worker = self.worker([words(3)] * 1000, top_p=2.0)
        self.wait_until(lambda: worker._error, "the worker did not end")
        self.assertIn("top_p", str(worker._error))

    def test_no_limit_is_the_context(self):
        self.assertEqual(trl.sampling_of(trl_args(max_completion_length=None))["max_tokens"], NO_LIMIT)
        prompts = [words(3, first) for first in range(5, 10)]
        drawn = self.rollout_function()(prompts, self.trainer(max_completion_length=None))
        longest = 0
        for seed, (ids, completion) in enumerate(
            zip(drawn["prompt_ids"], drawn["completion_ids"], strict=True), start=3
        ):
            (whole,) = self.rollout.generate(ids, seed=seed, max_tokens=CONTEXT - 3)
            self.assertEqual(completion, whole.tokens.token_ids.tolist())
            longest = max(longest, len(completion))
        self.assertGreater(longest, 16)

    def test_a_full_queue_is_tried_again(self):
        count = 48
        function = trl.RolloutFunction(self.rollout, None, max_concurrency=count)
        function._synced_step = 0
        drawn = function([words(3)] * count, self.trainer(max_completion_length=CONTEXT - 3))
        self.assertEqual(len(drawn["completion_ids"]), count)

    def test_a_trainer_learns_which_prompt_is_refused(self):
        with self.assertRaisesRegex(
            ValueError, rf"prompts\[1\]: .*expected at most {CONTEXT - 1} tokens.*got 200"
        ):
            self.rollout_function()([words(3), words(200)], self.trainer())

    def test_asynchronous_rewards(self):
        async def short(completions, **_):
            return [-float(len(text)) for text in completions]

        worker = self.worker([words(3)], [short, functools.partial(zero_rewards)])
        metrics = self.next_sample(worker).metrics
        self.assertEqual(set(metrics), {"reward", "reward_std", "rewards/short", "rewards/zero_rewards"})
        self.assertLess(metrics["rewards/short"], 0)

    def test_a_stopped_worker_does_not_wait_for_rewards(self):
        called = threading.Event()

        async def forever(**_):
            called.set()
            await asyncio.Event().wait()

        worker = self.worker([words(3)], forever)
        called.wait()
        worker.stop()
        self.assertIsNone(worker._error)


class RewardsTest(unittest.TestCase):
    """Every form of reward function that TRL's own worker takes, and rewards that are no finite numbers."""

    COMPLETIONS = ("a", "b", "c", "d")

    def score(self, *functions, row=None):
        rewards = Rewards(functions, threading.Event())
        with rewards.running():
            return rewards.score(row or {"prompt": "p"}, list(self.COMPLETIONS), [[1], [2], [3], [4]])

    def test_forms(self):
        values = [1.0, 2.0, 3.0, 4.0]
        loops = set()

        def plain(prompts, completions, completion_ids, level, by=1.0):
            self.assertEqual((prompts, completions, level), (["p"] * 4, list(self.COMPLETIONS), [7] * 4))
            return [by * value for value in values]

        async def awaited(completions, by=1.0, **_):
            loops.add(asyncio.get_running_loop())
            await asyncio.sleep(0)
            return [by * value for value in values]

        class Judge:
            async def __call__(self, completions, **_):
                loops.add(asyncio.get_running_loop())
                return np.array(values)

        class Checker:
            def __call__(self, completions, **_):
                return tuple(values)

        forms = {
            "plain": plain,
            "awaited": awaited,
            "Judge": Judge(),
            "Checker": Checker(),
        }
        partials = [functools.partial(plain, by=2.0), functools.partial(functools.partial(awaited), by=2.0)]
        # "completion" is no argument of a reward function, nor in TRL.
        row = {"prompt": "p", "level": 7, "completion": "x"}
        advantages, metrics = self.score(*forms.values(), *partials, row=row)
        self.assertEqual(metrics[3]["reward"], 4 * 4.0 + 2 * 8.0)
        self.assertLessEqual({f"rewards/{name}" for name in forms}, set(metrics[0]))
        self.assertTrue((np.diff(advantages) > 0).all())
        self.assertEqual(len(loops), 1, "asynchronous functions share one event loop")

    def test_rewards_that_are_not_finite(self):
        expected, _ = self.score(lambda **_: [1.0, 0.0, None, 0.5])
        for wrong in (float("inf"), -float("inf"), 1e39, -1e308):
            with self.subTest(wrong), self.assertLogs("isobit.integrations._rewards", "WARNING") as logs:

                def judge(wrong=wrong, **_):
                    return [1.0, 0.0, wrong, 0.5]

                advantages, metrics = self.score(judge)
                self.assertEqual(advantages.tolist(), expected.tolist())
                self.assertEqual(metrics[2]["rewards/judge"], wrong)
                self.assertTrue(np.isnan(metrics[2]["reward"]))
                self.assertIn("judge: 1 of the 4 rewards of a group are infinite", logs.output[0])
        with self.assertLogs("isobit.integrations._rewards", "WARNING"):
            advantages, _ = self.score(lambda **_: [float("inf")] * 4, zero_rewards)
        self.assertEqual(advantages.tolist(), [0.0] * 4)

    def test_what_are_no_rewards_is_named(self):
        async def few(**_):
            return [1.0]

        for function in (few, lambda **_: None, lambda **_: "1234", lambda **_: 1.0):
            with self.assertRaisesRegex(TypeError, "expected 4 rewards, got"):
                self.score(function)


class Sample:
    """The part of slime's Sample that `generate` touches."""

    class Status(Enum):
        PENDING, COMPLETED, TRUNCATED, ABORTED = range(4)

    def __init__(self, prompt: int, drawn: int = 0):
        self.prompt, self.response_length = "text", drawn
        self.tokens = [5] * (prompt + drawn)
        self.multimodal_inputs, self.status, self.added = None, Sample.Status.PENDING, []

    def append_response_tokens(self, args, *, tokens, meta_info, **_):
        self.added += tokens
        self.finish = meta_info["finish_reason"]["type"]


class SlimeTest(ServiceTest):
    def setUp(self):
        super().setUp()
        rollout = self.start("rollout", f"--max_context={CONTEXT}", "--max_waiting=4", "--max_running=2")
        folder = self.scratch / "tokenizer"
        folder.mkdir(exist_ok=True)
        raw = Tokenizer(models.WordLevel({f"w{i:03}": i for i in range(VOCABULARY)}, unk_token="w000"))
        raw.pre_tokenizer = pre_tokenizers.Whitespace()
        raw.save(str(folder / "tokenizer.json"))
        self.args = types.SimpleNamespace(hf_checkpoint=str(folder), isobit_rollout=rollout.target)

    def generate(self, *samples, **options):
        async def run():
            calls = [slime.generate(self.args, sample, options) for sample in samples]
            return await asyncio.gather(*calls)

        return asyncio.run(run())

    def test_no_limit_is_the_context(self):
        for options in ({}, {"max_new_tokens": None}, {"max_new_tokens": 1000}):
            with self.subTest(options):
                (sample,) = self.generate(Sample(4), ignore_eos=True, **options)
                self.assertEqual((len(sample.added), sample.finish), (CONTEXT - 4, "length"))

    def test_a_sample_without_room(self):
        (full,) = self.generate(Sample(4, drawn=CONTEXT - 4), max_new_tokens=1000)
        self.assertEqual((full.status, full.added), (Sample.Status.TRUNCATED, []))
        with self.assertRaisesRegex(ValueError, f"expected at most {CONTEXT - 1} tokens"):
            self.generate(Sample(CONTEXT), max_new_tokens=4)

    def test_limits_are_of_the_whole_response(self):
        for drawn, least, most in ((0, 20, 24), (10, 10, 14), (22, 0, 2)):
            with self.subTest(drawn=drawn):
                (sample,) = self.generate(
                    Sample(4, drawn), max_new_tokens=24, min_new_tokens=20, stop_token_ids=list(range(250))
                )
                self.assertLessEqual(least, len(sample.added))
                self.assertLessEqual(len(sample.added), most)
        (sample,) = self.generate(Sample(4, drawn=24), max_new_tokens=24, min_new_tokens=20)
        self.assertEqual((sample.status, sample.added), (Sample.Status.TRUNCATED, []))

    def test_a_full_queue_is_tried_again(self):
        samples = self.generate(*(Sample(4) for _ in range(48)), max_new_tokens=40, ignore_eos=True)
        self.assertEqual([len(sample.added) for sample in samples], [40] * 48)


class Array(np.ndarray):
    """As much of a torch tensor as the seams need."""

    def detach(self):
        return self

    cpu = detach


def arrays(**shapes):
    return {name: np.ones(shape, np.float32).view(Array) for name, shape in shapes.items()}


def zero_weights(model: Path) -> dict[str, Array]:
    """Tensors for the model in a directory."""
    found = {}
    with safe_open(str(model / "model.safetensors"), "np") as file:
        for name in file.keys():  # noqa: SIM118  no mapping
            found[name] = np.zeros(file.get_slice(name).get_shape(), np.float32).view(Array)
    return found


class NamesTest(unittest.TestCase):
    def test_wrappers_are_left_out(self):
        name = "model.layers.0.self_attn.q_proj.weight"
        for wrapped in (
            name,
            f"_orig_mod.{name}",
            f"module.{name}",
            f"module.module.{name}",
            f"module._orig_mod.{name}",
            f"_orig_mod.module.{name}",
            f"_fsdp_wrapped_module._orig_mod.{name}",
            f"_forward_module.{name}",
            "model.layers.0._orig_mod._checkpoint_wrapped_module._fsdp_wrapped_module.self_attn.q_proj.weight",
            "_fsdp_wrapped_module.model._fsdp_wrapped_module.layers.0.self_attn._orig_mod.q_proj.weight",
        ):
            self.assertEqual(checkpoint_name(wrapped), name)
        self.assertEqual(checkpoint_name("model.module.weight"), "model.module.weight")

    def test_services_get_the_names_of_a_checkpoint(self):
        sent = []
        client = types.SimpleNamespace(update_weights_from_stream=lambda named, **_: sent.append(named))
        send_weights([client], arrays(**{"module._orig_mod.a": 3, "b": (2, 3)}).items())
        self.assertEqual(list(sent[0]), ["a", "b"])
        with self.assertRaisesRegex(ValueError, r"_orig_mod\.a: expected one tensor of the name a, got two"):
            send_weights([client], arrays(**{"a": 3, "_orig_mod.a": 3}).items())
        self.assertEqual(digest_of(arrays(**{"_orig_mod.a": 3})), digest_of(arrays(a=3)))


class RepeatedTest(ServiceTest):
    def test_weights_may_be_sent_again_under_their_version(self):
        """As after a lost answer, or when another service has failed."""
        with RolloutClient(self.start("rollout").target) as client:
            weights = zero_weights(self.model)
            (first,) = send_weights([client], weights.items(), weight_version=5)
            (again,) = send_weights([client], weights.items(), weight_version=5)
            self.assertEqual((again.previous, again.current), (first.current, first.current))
            name, array = next(iter(weights.items()))
            with self.assertRaisesRegex(InvalidArgumentError, "weight_version"):
                send_weights([client], (weights | {name: array + 1}).items(), weight_version=5)
            self.assertEqual(client.get_server_info().server.weight_version, first.current)


async def as_async(items):
    for item in items:
        yield item


class VerlTest(ServiceTest):
    """verl's classes are stand-ins; make test-verl runs the real ones."""

    def setUp(self):
        super().setUp()
        registry = types.SimpleNamespace(register=lambda *_: lambda cls: cls)
        members = {
            "verl": {},
            "verl.workers": {},
            "verl.workers.rollout": {},
            "verl.checkpoint_engine": {},
            "verl.workers.rollout.replica": {
                "RolloutReplica": object,
                "RolloutReplicaRegistry": registry,
                "TokenOutput": lambda **fields: types.SimpleNamespace(**fields),
                "RolloutMode": None,
            },
            "verl.workers.rollout.base": {"BaseRollout": object, "_ROLLOUT_REGISTRY": {}},
            "verl.workers.rollout.utils": {"ensure_async_iterator": as_async},
            "verl.checkpoint_engine.base": {
                "CheckpointEngine": object,
                "CheckpointEngineRegistry": registry,
            },
            "ray": {"remote": lambda cls: cls},
        }
        modules = {}
        for name, content in members.items():
            modules[name] = types.ModuleType(name)
            modules[name].__dict__.update(content, __path__=[])
        self.enterContext(mock.patch.dict(sys.modules, modules))
        sys.modules.pop("isobit.integrations.verl", None)
        self.seam = importlib.import_module("isobit.integrations.verl")
        self.addCleanup(sys.modules.pop, "isobit.integrations.verl", None)

    def test_versions_of_steps(self):
        version_of, step_of = self.seam.version_of_step, self.seam.step_of_version
        present, seen = 1, []
        for step in (0, 0, 1, 2, 80, 80, 51, 52, 0, None, 53, 2**32 - 1, 0):
            version = version_of(step, present)
            self.assertGreater(version, present)
            seen.append(step_of(version))
            present = version
        self.assertEqual(seen, [0, 0, 1, 2, 80, 80, 51, 52, 0, 0, 53, 2**32 - 1, 0])
        self.assertEqual(version_of(7, 1), 7, "a step that grows is the version")
        for step in (-1, 2**32):
            with self.assertRaisesRegex(ValueError, f"global_steps: expected 0 to 4294967295, got {step}"):
                version_of(step, 1)

    def test_a_trainer_may_begin_repeat_and_go_back(self):
        target = self.start("rollout", f"--max_context={CONTEXT}").target
        engine = self.seam.CheckpointEngine(0, is_master=True, targets=[target])
        weights = zero_weights(self.model)
        server = self.seam.Server(
            types.SimpleNamespace(
                engine_kwargs={"isobit": {"targets": [target]}},
                prompt_length=1000,
                response_length=1000,
                max_model_len=None,
                repetition_penalty=1.0,
                ignore_eos=True,
                full_determinism=False,
                seed=0,
            ),
            0,
        )

        async def run():
            steps = []
            for step in (0, 0, 1, 80, 51, None):
                await engine.send_weights(weights.items(), global_steps=step)
                output = await server.generate([3, 17, 42], {"max_tokens": 4}, f"r{len(steps)}")
                fields = output.extra_fields
                self.assertEqual(fields["min_global_steps"], fields["max_global_steps"])
                steps.append((fields["global_steps"], fields["max_global_steps"]))
            whole = await server.generate([3, 17, 42], {}, "whole")
            return steps, len(whole.token_ids)

        steps, tokens = asyncio.run(run())
        self.assertEqual(steps, [(step, step) for step in (0, 0, 1, 80, 51, 51)])
        self.assertEqual(tokens, CONTEXT - 3, "the config's limits are above the rollout's context")


class PluginTest(unittest.TestCase):
    def test_a_plugin_that_cannot_be_imported_is_seen(self):
        """verl logs it at level debug alone."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "grpc.py").write_text("raise ImportError('grpc is broken on purpose')\n")
            program = (
                "import importlib, logging\n"
                "try:\n    importlib.import_module('isobit.integrations.verl')\n"
                "except Exception as error:\n    logging.getLogger('verl').debug('failed: %s', error)\n"
            )
            path = os.pathsep.join([folder, *sys.path])
            result = subprocess.run(
                [sys.executable, "-c", program],
                env=os.environ | {"PYTHONPATH": path},
                capture_output=True,
                text=True,
                check=True,
            )
        self.assertRegex(result.stderr, "isobit's plugin for verl cannot be imported.*broken on purpose")


if __name__ == "__main__":
    unittest.main()
