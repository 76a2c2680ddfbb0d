"""The pieces of python/examples/on_policy: advantages, staleness, prompts, rewards, the gap, the correction,
what ranks tell each other, the run's folder."""

import contextlib
import io
import json
import math
import os
import re
import signal
import sys
import tempfile
import types
import unittest
from pathlib import Path

import numpy as np
import ranks
import torch
import train
from completions import Completion, advantages, mean, staleness
from gap import Gap
from learner import Recipe, Terms
from run_folder import RunFolder
from support import run_ranks
from tasks import Arithmetic, Share, load_task
from vanilla import loss

import isobit.torch as it

PAGE = Path(__file__).resolve().parents[2] / "docs" / "on_policy.md"
MODEL = Path(os.environ.get("ISOBIT_MODEL", ""))


def completion(logprobs: list[float], steps: list[int] | None = None, number: int = 0) -> Completion:
    count = len(logprobs)
    return Completion(
        number=number,
        index=0,
        prompt=[1, 2],
        tokens=np.arange(count, dtype=np.int32),
        logprobs=np.array(logprobs, np.float32),
        steps=np.array(steps or [0] * count, np.int64),
        reward=1.0,
    )


class CompletionsTest(unittest.TestCase):
    def test_advantages_are_relative_to_the_group(self):
        self.assertEqual(
            advantages([1, 0, 0, 0, 5, 7, 5, 7], 4, False), [0.75] + [-0.25] * 3 + [-1, 1, -1, 1]
        )

    def test_grpo_divides_by_the_deviation(self):
        self.assertEqual(advantages([3, 5, 3, 5, 2, 2, 2, 2], 4, True), [-1, 1, -1, 1, 0, 0, 0, 0])
        values = advantages([0.1, 0.7, 0.4, 0.2], 4, True)
        self.assertAlmostEqual(math.fsum(values), 0)
        self.assertAlmostEqual(math.fsum(v * v for v in values), 4)

    # INVARIANT: equal rewards teach nothing, also where their mean is another number.
    def test_equal_rewards_are_zero(self):
        self.assertNotEqual(mean([0.1] * 3), 0.1, "control")
        for by_deviation in (False, True):
            self.assertEqual(advantages([0.1] * 3, 3, by_deviation), [0.0] * 3)

    def test_other_rewards_are_refused(self):
        with self.assertRaisesRegex(ValueError, "groups of 2, got 3"):
            advantages([1, 2, 3], 2, True)

    # INVARIANT: one such reward makes no group of NaN, or of 0.
    def test_a_reward_that_is_not_finite_is_named(self):
        for bad in (math.nan, math.inf, -math.inf, 1e200, -1e39):
            for by_deviation in (False, True):
                with self.assertRaisesRegex(
                    ValueError,
                    r"rewards\[3\] \(group 1, sample 1\): expected a finite number below 2\^127, got"
                    f" {bad}".replace("+", "[+]"),
                ):
                    advantages([1, 0, 0.5, bad], 2, by_deviation)

    def test_staleness_counts_steps_token_by_token(self):
        batch = [completion([0, 0, 0], [4, 4, 5]), completion([0], [3])]
        self.assertEqual(staleness(batch, 5).tolist(), [1, 1, 0, 2])
        with self.assertRaisesRegex(ValueError, "up to step 4, got some of step 5"):
            staleness(batch, 4)

    def test_json_keeps_every_bit(self):
        values = np.array([0x80000000, 0x00000001, 0xBDCCCCCD, 0x7F7FFFFF], np.uint32).view(np.float32)
        before = completion(values.tolist(), [3, 3, 4, 4], number=9)
        after = Completion.from_json(json.loads(json.dumps(before.to_json())))
        self.assertEqual(after.logprobs.tobytes(), values.tobytes())
        self.assertEqual(after.to_json(), before.to_json())
        self.assertEqual((after.tokens.dtype, after.steps.dtype), (np.int32, np.int64))


class TasksTest(unittest.TestCase):
    def setUp(self):
        self.model = Path(self.enterContext(tempfile.TemporaryDirectory()))
        (self.model / "config.json").write_text('{"vocab_size": 400}')

    def test_a_prompt_depends_on_its_number_alone(self):
        first, again = load_task("share", self.model), Share(self.model)
        prompts = [first.prompt(number) for number in range(50)]
        self.assertEqual([again.prompt(number) for number in reversed(range(50))], prompts[::-1])
        self.assertEqual(len(set(map(tuple, prompts))), 50)
        self.assertEqual(len({Arithmetic.summands(number) for number in range(400)}), 81)

    def test_share_counts_the_first_quarter(self):
        self.assertEqual(Share(self.model).reward(0, [0, 99, 100, 399]), 0.5)

    @unittest.skipUnless((MODEL / "tokenizer.json").is_file(), "needs SmolLM2: make model")
    def test_arithmetic_judges_the_last_number(self):
        task = load_task("arithmetic", MODEL)
        a, b = task.summands(3)
        encode = task._tokenizer.encode
        self.assertIn(f"Compute {a} + {b}.", task._tokenizer.decode(task.prompt(3)))
        cases = {f"{a} + {b} = {a + b}.": 1, f"{a + b}, not {a + b + 1}": 0, "no": 0, f"1{a + b}": 0}
        for answer, reward in cases.items():
            self.assertEqual(task.reward(3, encode(answer)), reward, answer)

    @unittest.skipUnless((MODEL / "tokenizer.json").is_file(), "needs SmolLM2: make model")
    def test_the_page_s_own_task(self):
        (example,) = re.findall(r"```python\n(# my_tasks.py.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
        names: dict = {}
        exec(example, names)
        task = names["Short"](MODEL)
        self.assertGreater(len(task.prompt(3)), 5)
        self.assertEqual(task.reward(3, task.tokenizer.encode("four")), -0.04)

    def test_own_tasks(self):
        module = types.ModuleType("own_task")
        module.Longer = type("Longer", (Share,), {"reward": lambda self, number, tokens: float(len(tokens))})
        sys.modules["own_task"] = module
        self.addCleanup(sys.modules.pop, "own_task")
        self.assertEqual(load_task("own_task:Longer", self.model).reward(0, [1, 2, 3]), 3.0)
        for name, message in (
            ("sums", "expected share, arithmetic or module:Class, got sums"),
            ("own_task:Shorter", "Shorter"),
            ("no_such_module:Task", "No module named 'no_such_module'"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                load_task(name, self.model)


class FlagsTest(unittest.TestCase):
    REQUIRED = ("--rollout=a:1", "--model=m", "--output=o")

    def test_recipe(self):
        flags = vars(train.parse(self.REQUIRED))
        self.assertLessEqual(set(train.NO_RECIPE), set(flags))
        self.assertEqual(
            (flags["on_gap"], train.parse([*self.REQUIRED, "--numerics=vanilla"]).on_gap), ("stop", "report")
        )

    def test_bad_flags_are_refused(self):
        for flag, message in (
            ("--correction=2", "only with --numerics vanilla"),
            ("--seed=-1", "expected 0 to 2^32 - 1, got -1"),
            ("--samples=0", "expected at least 1, got 0"),
            ("--temperature=0", "expected 0.001 to 1000, got 0.0"),
            ("--temperature=nan", "--temperature: expected 0.001 to 1000, got nan"),
            ("--lr=inf", "--lr: expected 0 or more, finite, got inf"),
            ("--weight_decay=nan", "--weight_decay: expected 0 or more, finite, got nan"),
            ("--max_norm=0", "--max_norm: expected above 0, got 0.0"),
            ("--max_norm=nan", "--max_norm: expected above 0, got nan"),
            ("--clip=-1", "--clip: expected 0 to 1, got -1.0"),
            ("--clip=nan", "--clip: expected 0 to 1, got nan"),
            ("--correction=nan", "--correction: expected 0 or more, got nan"),
        ):
            said = io.StringIO()
            with contextlib.redirect_stderr(said), self.assertRaises(SystemExit):
                train.parse([*self.REQUIRED, flag])
            self.assertIn(message, said.getvalue())


class GapTest(unittest.TestCase):
    def setUp(self):
        self.batch = [completion([-1.5, -0.25]), completion([-3.0, -0.5, -2.0], number=7)]
        self.trainer = [c.logprobs.copy() for c in self.batch]

    def test_equal(self):
        self.assertEqual(Gap.between(self.batch, self.trainer), Gap(5, 0, 0.0, 0.0, ""))

    def test_sees_one_bit(self):
        self.trainer[1][1] = np.nextafter(np.float32(-0.5), np.float32(0))
        gap = Gap.between(self.batch, self.trainer)
        self.assertEqual((gap.tokens, gap.unequal, gap.max_abs_dlogp), (5, 1, 2**-25))
        self.assertGreater(gap.kl, 0)
        self.assertIn(
            "prompt 7, sample 0, token 1: rollout -0.5 (0xbf000000), trainer -0.49999997", gap.first
        )

    def test_nan_and_the_sign_of_zero_count(self):
        self.trainer[0][0] = self.batch[0].logprobs[0] = np.nan
        self.assertEqual(Gap.between(self.batch, self.trainer).unequal, 1)
        self.batch[0].logprobs[:] = 0.0
        self.trainer[0][:] = -0.0
        self.assertEqual(Gap.between(self.batch, self.trainer).unequal, 2)

    def test_nothing_that_is_not_finite_vanishes(self):
        for odd in (np.nan, np.inf, -np.inf):
            for sides in (("rollout",), ("trainer",), ("rollout", "trainer")):
                with self.subTest(odd=odd, sides=sides):
                    self.setUp()
                    if "rollout" in sides:
                        self.batch[0].logprobs[0] = odd
                    if "trainer" in sides:
                        self.trainer[0][0] = odd
                    gap = Gap.between(self.batch, self.trainer)
                    self.assertEqual(gap.impossible, 1)
                    self.assertEqual(gap.unequal, int(len(sides) == 1 or np.isnan(odd)))
                    for total in (gap, gap + Gap(5, 0, 0.0, 0.0, ""), Gap(5, 0, 0.0, 0.0, "") + gap):
                        self.assertEqual(total.max_abs_dlogp, math.inf)
                        self.assertFalse(any(map(math.isfinite, (total.kl, total.kl_k1, total.kl_k2))), total)
                        self.assertEqual((total.impossible, bool(total.first)), (1, True))
        self.setUp()
        self.batch[0].logprobs[0] = self.trainer[0][0] = 5.0
        gap = Gap.between(self.batch, self.trainer)
        self.assertEqual((gap.unequal, gap.impossible), (0, 1))

    def test_kl_by_three_estimators(self):
        self.trainer[0][1] = -1.25
        gap = Gap.between(self.batch, self.trainer)
        self.assertAlmostEqual(gap.kl, (math.exp(-1) - 1 + 1) / 5)
        self.assertEqual((gap.kl_k1, gap.kl_k2), (1 / 5, 0.5 / 5))

    def test_others_are_refused(self):
        for trainer in (self.trainer[:1], [t.astype(np.float64) for t in self.trainer]):
            with self.assertRaisesRegex(ValueError, "expected float32"):
                Gap.between(self.batch, trainer)

    def test_sum(self):
        first = Gap(4, 1, 0.5, 0.25, "here", kl_k1=-0.5, kl_k2=1.0)
        second = Gap(12, 2, 0.75, 0.0, "there", kl_k1=0.5, kl_k2=2.0)
        self.assertEqual(first + second, Gap(16, 3, 0.75, 0.0625, "here", kl_k1=0.25, kl_k2=1.75))


class LossTest(unittest.TestCase):
    def setUp(self):
        self.logprobs = torch.tensor([-1.0, -2.0, -0.5, -1.5], requires_grad=True)
        self.terms = Terms(
            advantages=torch.tensor([1.0, -2.0, 0.5, 1.0]),
            weights=torch.full((4,), 0.25),
            sampled=torch.tensor([-1.25, -1.75, -3.0, -1.0]),
            stale=torch.tensor([False, False, False, True]),
        )
        self.old = torch.where(self.terms.stale, self.terms.sampled, self.logprobs.detach())

    def recipe(self, correction: float) -> Recipe:
        return Recipe(1.0, 0.2, 0.2, 1e-3, (0.9, 0.999), 0.0, 1.0, 64, 8, correction=correction)

    def test_as_isobit_s_without_correction(self):
        ours = it.functional.policy_loss(
            self.logprobs, self.terms.advantages, self.terms.weights, self.old, clip_low=0.2, clip_high=0.2
        )
        theirs = loss(self.logprobs, self.old, self.terms, self.recipe(0.0))
        self.assertAlmostEqual(ours.item(), theirs.item(), 6)
        gradients = [torch.autograd.grad(value, self.logprobs)[0] for value in (ours, theirs)]
        torch.testing.assert_close(*gradients)

    def test_correction_weighs_fresh_tokens_up_to_its_cap(self):
        plain, weighed = (
            torch.autograd.grad(loss(self.logprobs, self.old, self.terms, self.recipe(c)), self.logprobs)[0]
            for c in (0.0, 2.0)
        )
        torch.testing.assert_close(weighed / plain, torch.tensor([math.exp(0.25), math.exp(-0.25), 2.0, 1.0]))


def agree(rank: int, world: int) -> list:
    """What stop signals and errors of one rank do to all."""
    stop = ranks.StopSignal()
    seen = [ranks.from_rank_0("work", lambda: ("only rank 0", rank)), ranks.gathered({world - rank: rank})]
    stop.check()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)

    def stopped():
        raise ranks.Stopped

    for work in (
        stop.check,
        lambda: ranks.from_rank_0("a", stopped),
        lambda: ranks.from_rank_0("b", lambda: 1 // 0),
    ):
        try:
            seen.append(work())
        except (ranks.Stopped, ranks.RunError) as error:
            seen.append(f"{type(error).__name__} {error}")
    return seen


def folders(rank: int, world: int, path: Path) -> list[str]:
    messages = []
    for recipe, resume in (
        ({"lr": 1.0}, False),
        ({"lr": 1.0}, True),
        ({"lr": 2.0}, True),
        ({"lr": 1.0}, False),
    ):
        try:
            RunFolder(path, recipe, resume)
            messages.append("")
        except ValueError as error:
            messages.append(str(error))
    return messages


class RanksTest(unittest.TestCase):
    def test_all_end_as_one(self):
        first, second = run_ranks(2, agree)
        self.assertEqual(first[:2], [("only rank 0", 0), [1, 0]])
        for seen in (first, second):
            self.assertEqual(seen[:2], first[:2])
            self.assertEqual(
                seen[2:], ["Stopped ", "Stopped ", "RunError b: integer division or modulo by zero"]
            )

    def test_a_folder_keeps_its_recipe(self):
        with tempfile.TemporaryDirectory() as scratch:
            for messages in run_ranks(2, folders, Path(scratch) / "run"):
                self.assertEqual(messages[:2], ["", ""])
                self.assertRegex(messages[2], "holds another run: lr was 1.0 and is 2.0")
                self.assertRegex(messages[3], "--resume goes on with it")


if __name__ == "__main__":
    unittest.main()
