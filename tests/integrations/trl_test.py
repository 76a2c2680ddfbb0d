"""TRL's AsyncGRPOTrainer and GRPOTrainer train for real, on a CPU, with isobit's rollout. With a model that
patch_trainer has patched, the logprobs of TRL's loss have the bits of the rollout that drew them."""

import tempfile
import unittest
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from support import bits, skip, word_tokenizer

try:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from trl.experimental.async_grpo.packing import TreeRow
except ImportError as error:
    skip(error)

import isobit.torch as it
from isobit import RolloutClient, ScorerClient
from isobit.integrations.trl import RolloutFunction, RolloutWorker, WeightTransfer, log_gap
from isobit.integrations.trl_model import patch_trainer
from isobit.integrations.weights import SharedDirectory
from isobit.launch import Setting, run_model_tool
from isobit_tools.testing import BIN_DIR, ServiceTest

STEPS = 3
GENERATIONS = 4
PROMPTS = [" ".join(f"w{(7 * i + j) % 400 + 5:03}" for j in range(3 + i)) for i in range(6)]
COMMON = dict(
    max_steps=STEPS,
    per_device_train_batch_size=2 * GENERATIONS,
    num_generations=GENERATIONS,
    max_completion_length=12,
    learning_rate=3e-3,
    bf16=False,
    use_cpu=True,
    report_to=[],
    logging_steps=1,
    save_strategy="no",
    disable_tqdm=True,
)


def small_words(completion_ids, **_):
    """The share of tokens with small ids."""
    return [sum(i < 250 for i in ids) / len(ids) for ids in completion_ids]


class Seen:
    """Mixed into a trainer: what its loss compares, the rollout's logprobs and the model's own."""

    def __init__(self, *args, **kwargs):
        self.pairs = []
        super().__init__(*args, **kwargs)
        self.model.register_forward_hook(self._keep, with_kwargs=True)

    def _keep(self, _, __, kwargs, output):
        if kwargs.get("fused_lm_head"):
            self.log_probs = output.log_probs.detach()


class SeenAsync(Seen, AsyncGRPOTrainer):
    def __init__(self, *args, **kwargs):
        self.batches = []
        super().__init__(*args, **kwargs)

    def compute_loss(self, model, inputs, **kwargs):
        loss = super().compute_loss(model, inputs, **kwargs)
        self.batches.append(inputs)
        self.pairs.append(self.pair(inputs))
        return loss

    def pair(self, inputs):
        chosen = inputs["token_index"] >= 0
        return inputs["old_log_probs"][chosen], self.log_probs.flatten()[inputs["token_index"][chosen]]


class Kept(WeightTransfer):
    """Keeps every version of the weights that it sends."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.versions = []

    def send_weights(self, iterator):
        weights = {name: tensor.clone() for name, tensor in iterator}
        self.versions.append(weights)
        super().send_weights(weights.items())


class SeenSync(Seen, GRPOTrainer):
    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        mask = inputs["completion_mask"].bool()
        own = self.log_probs[:, -mask.shape[1] :]
        self.pairs.append((inputs["sampling_per_token_logps"][mask], own[mask]))
        return loss


class TrlTest(ServiceTest):
    setting = Setting("tree", tp_size=2, shards=1)

    @classmethod
    def make_model(cls):
        run_model_tool(BIN_DIR, "make", "tiny-qwen3", str(cls.model), "--seed", "3")

    def setUp(self):
        super().setUp()
        torch.set_num_threads(1)
        self.output = Path(self.enterContext(tempfile.TemporaryDirectory()))
        services = self.launch("rollout"), self.launch("scorer")
        for service in services:
            self.services.wait_serving(service)
        self.rollout = self.enterContext(RolloutClient(services[0].target))
        self.scorer = self.enterContext(ScorerClient(services[1].target))
        self.weights = Kept(
            [self.rollout, self.scorer], directory=SharedDirectory(self.scratch, self.model.name)
        )

    def served(self) -> list[int]:
        return [c.get_server_info().server.weight_version.id for c in (self.rollout, self.scorer)]

    def check_pair(self, pair, what: str) -> None:
        rollout, own = pair
        self.assertGreater(rollout.numel(), 2 * GENERATIONS)
        self.assertEqual(bits(rollout), bits(own), what)

    def run_async(self, **changes):
        options = dict(dtype="bfloat16", token_budget=0, max_staleness=0, **COMMON) | changes
        args = AsyncGRPOConfig(self.output, **options)
        dataset = Dataset.from_dict({"prompt": PROMPTS})
        tokenizer = word_tokenizer()
        worker = RolloutWorker(self.rollout, tokenizer, dataset, small_words, args, groups_ahead=2)
        # TRL asks CUDA for the GPU's name, to log utilisation. Nothing else of this trainer needs a GPU.
        module = "trl.experimental.async_grpo.async_grpo_trainer"
        with mock.patch(f"{module}.get_peak_flops_per_device", return_value=None):
            trainer = SeenAsync(
                str(self.model),
                small_words,
                args,
                dataset,
                tokenizer,
                rollout_worker=worker,
                weight_transfer=self.weights,
            )
        patch_trainer(trainer)
        trainer.train()
        self.assertEqual(len(trainer.pairs), STEPS)
        return trainer

    def versions_of(self, trainer) -> list[list[list[int]]]:
        """For each step and sample, the versions of weights with which TRL's loss computes the rollout's
        bits. Version 0 is what step 0 trains."""
        self.assertEqual(len(self.weights.versions), STEPS + 1)
        found = []
        for step, inputs in enumerate(list(trainer.batches)):
            samples = inputs["segment_id"][inputs["token_index"] >= 0]
            equal = []  # [version][sample]
            for version in self.weights.versions[: step + 1]:
                trainer.model.load_state_dict(version, strict=False)
                trainer.compute_loss(trainer.model, inputs)
                same = torch.eq(*(x.view(torch.int32) for x in trainer.pairs[-1]))
                equal.append([bool(same[samples == sample].all()) for sample in samples.unique()])
            found.append(
                [[v for v, same in enumerate(column) if same] for column in zip(*equal, strict=True)]
            )
        return found

    def test_async_grpo(self):
        trainer = self.run_async()
        logs = [log for log in trainer.state.log_history if "kl" in log]
        # TRL takes a batch from the queue before it trains on the one before: all but the first were drawn
        # with the weights before the last step, even with max_staleness 0.
        self.assertEqual(self.versions_of(trainer), [2 * GENERATIONS * [[v]] for v in (0, 0, 1)])
        self.assertEqual((logs[0]["kl"], logs[0]["ratio"]), (0.0, 1.0))
        self.assertTrue(all("rewards/small_words" in log for log in logs))
        # One sync at the beginning, one after each step; the service's first weights have version 1.
        self.assertEqual(served := self.served(), [STEPS + 2] * 2)
        print(f"AsyncGRPO: kl {[log['kl'] for log in logs]}, versions {served}")

    def test_async_grpo_with_filters_and_token_budget(self):
        versions = self.versions_of(self.run_async(temperature=0.8, top_k=50, top_p=0.9, token_budget=200))
        self.assertTrue(all(found for step in versions for found in step), versions)
        # A token that is alone after the filters has the logprob 0 with other weights, too.
        self.assertTrue(any(len(found) < step + 1 for step, row in enumerate(versions) for found in row))

    def test_tokens_that_samples_share_count_in_each(self):
        """The logprobs of TRL's packed row, and their gradients, beside those of the same samples apart."""
        samples = [[5, 17, 300, 42, 7, 8], [5, 17, 300, 42, 9], [5, 17, 300, 42, 9, 11, 12]]
        row = TreeRow()
        for tokens in samples:
            mask = np.array([0, 0] + [1] * (len(tokens) - 2))
            row.add(
                {
                    "input_ids": np.array(tokens),
                    "completion_mask": mask,
                    "old_log_probs": np.zeros(len(tokens)),
                    "advantage": 1.0,
                    "group_id": 0,
                }
            )
        packed = row.pack()
        self.assertLess(packed["input_ids"].numel(), sum(map(len, samples)) - 4, "control: tokens are shared")
        args = GRPOConfig(self.output, **COMMON)
        trainer = GRPOTrainer(
            AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.bfloat16),
            small_words,
            args,
            Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=word_tokenizer(),
        )
        patch_trainer(trainer)
        model = trainer.model

        def gradients(logprobs):
            model.zero_grad()
            logprobs.sum().backward()
            return {name: p.grad.clone() for name, p in model.named_parameters()}

        rows = {name: packed[name][None] for name in ("input_ids", "position_ids", "shift_labels")}
        tree = {name: x for name, x in packed.items() if name.startswith(("tree_kv", "tree_cu"))}
        packed_logprobs = model(fused_lm_head=True, **rows, **tree).log_probs[0][packed["token_index"]]
        apart = it.logprobs(model, it.Batch.of(samples, prompt_lengths=[2] * 3)).logprobs
        self.assertEqual(bits(packed_logprobs.detach()), bits(apart.detach()))
        expected = gradients(apart)
        for name, gradient in gradients(packed_logprobs).items():
            error = (gradient - expected[name]).norm() / expected[name].norm()
            self.assertLess(error, 0.02, name)  # other sums, so other roundings to bf16

    def worker(self, prompts, rewards, tokenizer=None, **changes):
        args = AsyncGRPOConfig(self.output, dtype="bfloat16", **COMMON | changes)
        worker = RolloutWorker(self.rollout, tokenizer or word_tokenizer(), prompts, rewards, args)
        self.addCleanup(worker.stop)
        return worker

    def test_conversations_and_rewards_that_do_not_apply(self):
        seen = []

        def rewards(prompts, completions, completion_ids, level):
            seen.append((prompts, completions, level))
            return [None, 1.0, 2.0, 3.0]

        tokenizer = word_tokenizer()
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}w499"
        prompt = [{"role": "user", "content": "w005 w017"}]
        worker = self.worker([{"prompt": prompt, "level": 3}], rewards, tokenizer)
        worker.update_model_version(4)
        worker.start()
        samples = [worker.rollout_buffer.get(timeout=30) for _ in range(GENERATIONS)]
        worker.stop()
        # Groups are scored in any order, and queued in theirs.
        texts = [tokenizer.decode(s.input_ids[3:], skip_special_tokens=True) for s in samples]
        ((prompts, completions, level),) = [s for s in seen if [c[0]["content"] for c in s[1]] == texts]
        self.assertEqual((prompts, level), ([prompt] * GENERATIONS, [3] * GENERATIONS))
        self.assertEqual([c[0]["role"] for c in completions], ["assistant"] * GENERATIONS)
        self.assertEqual(samples[0].input_ids[:3].tolist(), tokenizer("w005 w017 w499")["input_ids"])
        spread = (2 / 3) ** 0.5
        self.assertEqual([round(s.advantage * spread, 6) for s in samples], [0, -1, 0, 1])
        self.assertEqual([s.model_version for s in samples], [4] * GENERATIONS)
        self.assertEqual(samples[0].completion_mask.tolist(), [0] * 3 + [1] * (len(samples[0].input_ids) - 3))

    def test_a_stopped_worker_ends_its_requests(self):
        worker = self.worker([{"prompt": PROMPTS[0]}], small_words, max_completion_length=400)
        worker.start()
        self.wait_until(lambda: self.rollout.get_load().num_running_requests, "nothing runs")
        worker.stop()
        self.assertEqual(self.rollout.get_load().num_running_requests, 0)
        self.assertIsNone(worker._error)

    def test_a_worker_that_fails_stops_the_trainer(self):
        def broken(completion_ids, **_):
            return [0.0]

        worker = self.worker([{"prompt": PROMPTS[0]}], broken)
        worker.start()
        self.wait_until(lambda: worker._error, "the worker did not fail")
        with self.assertRaisesRegex(RuntimeError, "has failed") as caught:
            worker.check_health(10)
        self.assertIn("broken: expected 4 rewards", str(caught.exception.__cause__))
        empty = self.worker([], small_words)
        empty.start()
        self.wait_until(lambda: empty._error, "the worker did not fail")
        self.assertIn("prompts: expected rows, got none", str(empty._error))

    def run_sync(self, patched: bool, **changes):
        args = GRPOConfig(self.output, **COMMON | changes)
        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.bfloat16)
        trainer = SeenSync(
            model,
            small_words,
            args,
            Dataset.from_dict({"prompt": PROMPTS}),
            processing_class=word_tokenizer(),
            rollout_func=RolloutFunction(self.rollout, self.weights),
        )
        (patch_trainer if patched else log_gap)(trainer)
        trainer.train()
        return trainer

    def check_logged_gaps(self, trainer) -> None:
        """The gaps that TRL's log has are those of the pairs."""
        logs = [log for log in trainer.state.log_history if "reward" in log]
        for log, (rollout, own) in zip(logs, trainer.pairs, strict=True):
            gaps = (rollout - own).abs()
            logged = [log[f"sampling/sampling_logp_difference/{name}"] for name in ("mean", "max")]
            self.assertEqual(logged, [gaps.mean().item(), gaps.max().item()])

    def test_grpo(self):
        trainer = self.run_sync(patched=True)
        self.assertEqual(len(trainer.pairs), STEPS)
        for step, pair in enumerate(trainer.pairs):
            self.check_pair(pair, f"step {step}")
        self.assertEqual(served := self.served(), [STEPS + 1] * 2)
        rewards = [log["reward"] for log in trainer.state.log_history if "reward" in log]
        self.assertEqual(len(rewards), STEPS)
        self.check_logged_gaps(trainer)
        print(f"GRPO: rewards {rewards}, versions {served}")

    def test_grpo_with_filters(self):
        trainer = self.run_sync(patched=True, temperature=0.8, top_k=50, top_p=0.9, min_p=0.01)
        self.assertEqual(len(trainer.pairs), STEPS)
        for step, pair in enumerate(trainer.pairs):
            self.check_pair(pair, f"step {step}")

    def test_control_trl_alone(self):
        """The same without patch_trainer: TRL's own operators, whose logprobs are not the rollout's."""
        trainer = self.run_sync(patched=False)
        self.assertEqual(len(trainer.pairs), STEPS)
        self.check_logged_gaps(trainer)
        rollout, own = (torch.cat(parts) for parts in zip(*trainer.pairs, strict=True))
        unequal = int((rollout.view(torch.int32) != own.view(torch.int32)).sum())
        print(
            f"TRL alone: {unequal} of {own.numel()} logprobs unequal, by up to {(rollout - own).abs().max()}"
        )
        self.assertGreater(unequal, own.numel() // 2)
        # The same policy all the same. The mean, as the largest gap of bf16 depends on the CPU.
        gap, other = ((rollout - theirs).abs().mean() for theirs in (own, own.roll(1)))
        self.assertLess(gap, 0.05)
        self.assertGreater(other, 10 * gap, "control: the logprobs of other tokens")

    def test_a_gap_that_is_no_number_is_logged_as_infinite(self):
        """TRL leaves NaN out of the means that it logs."""
        trainer = SimpleNamespace(
            model=SimpleNamespace(training=True),
            accelerator=SimpleNamespace(gather=lambda x: x),
            _metrics={"train": defaultdict(list)},
            _get_per_token_logps_and_entropies=lambda: (
                torch.tensor([[-1.0, float("nan"), -9.0]]),
                None,
                None,
            ),
            _compute_loss=lambda *_: trainer._get_per_token_logps_and_entropies() and 0.0,
        )
        log_gap(trainer)
        mask = torch.tensor([[1, 1, 0]])
        trainer._compute_loss(
            None, {"sampling_per_token_logps": torch.full((1, 3), -1.0), "completion_mask": mask}
        )
        logged = trainer._metrics["train"]
        self.assertEqual(logged["sampling/sampling_logp_difference/max"], [float("inf")])

    def test_what_the_loss_does_not_know_of_is_refused(self):
        with self.assertRaisesRegex(ValueError, "repetition_penalty: expected 1, got 1.1"):
            self.run_sync(patched=False, repetition_penalty=1.1)


if __name__ == "__main__":
    unittest.main()
