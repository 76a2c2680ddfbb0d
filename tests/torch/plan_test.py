"""The cut of a batch (C10) against its definition by brute force, and sums in its order."""

import random
import unittest

import torch
from support import same_bits

from isobit.torch import Batch, GradientSum, plan
from isobit.torch.gradients import TreeCounter, tree_sum


def packs_by_definition(lengths: list[int], pack_tokens: int) -> list[list[int]]:
    """A sequence joins the last pack if the pack then has at most pack_tokens tokens, else it starts one."""
    packs: list[list[int]] = []
    for index, length in enumerate(lengths):
        if packs and sum(lengths[i] for i in packs[-1]) + length <= pack_tokens:
            packs[-1].append(index)
        else:
            packs.append([index])
    return packs


class PlanTest(unittest.TestCase):
    def test_packs_are_those_of_the_definition(self):
        rng = random.Random(1)
        for _ in range(200):
            lengths = [rng.randint(1, 40) for _ in range(rng.randint(0, 60))]
            pack_tokens, lanes = rng.randint(1, 80), 2 ** rng.randint(0, 6)
            cut = plan(lengths, pack_tokens, lanes)
            packs = packs_by_definition(lengths, pack_tokens)
            self.assertEqual([list(pack) for pack in cut.packs], packs)
            for index, pack in enumerate(packs):
                self.assertEqual(list(cut.pack(index // lanes, index % lanes)), pack)

    # INVARIANT: passes of all ranks together compute each pack once, and pass t of P covers lanes
    # [t*L/P, (t+1)*L/P), rank after rank.
    def test_passes_cover_neighbouring_lanes(self):
        rng = random.Random(2)
        for _ in range(200):
            lengths = [rng.randint(1, 9) for _ in range(rng.randint(1, 60))]
            lanes = 2 ** rng.randint(0, 5)
            world = 2 ** rng.randint(0, lanes.bit_length() - 1)
            per_pass = 2 ** rng.randint(0, (lanes // world).bit_length() - 1)
            cut = plan(lengths, 12, lanes)
            ranks = [list(cut.passes(rank, world, per_pass)) for rank in range(world)]
            count = cut.passes_per_slot(world, per_pass)
            self.assertEqual({len(passes) for passes in ranks}, {cut.slots * count})
            found = [pack for steps in zip(*ranks, strict=True) for step in steps for pack in step.packs]
            expected = [cut.pack(slot, lane) for slot in range(cut.slots) for lane in range(lanes)]
            self.assertEqual(found, expected)

    def test_a_pass_is_a_batch(self):
        lengths = [5, 3, 9, 2, 2]
        (step, *_) = plan(lengths, 8, lanes=4).passes(0, 1)
        self.assertEqual((step.sequences(), step.pack_sizes()), ([0, 1, 2, 3, 4], [2, 1, 2, 0]))
        batch = Batch.of([[1] * lengths[i] for i in step.sequences()], packs=step.pack_sizes())
        self.assertEqual(batch.packs, [0, 8, 17, 21, 21])

    def test_pairs_share_a_pack(self):
        lengths = [5, 4, 3, 2, 9, 9, 1, 1]
        self.assertEqual(plan(lengths, 14, together=2).packs, (range(4), range(4, 6), range(6, 8)))
        self.assertEqual(plan(lengths, 14).packs, (range(4), range(4, 5), range(5, 8)))  # control

    def test_refuses_what_it_cannot_cut(self):
        for arguments, message in (
            (([1, 0], 4), "lengths: expected at least 1, got 0 at 1"),
            (([1], 0), "pack_tokens: expected at least 1"),
            (([1], 4, 3), "lanes: expected a power of two"),
            (([1], 4, 128), "lanes: expected a power of two"),
            (([1] * 3, 4, 1, 2), "together: expected at least 1 and a divisor of the 3 sequences, got 2"),
            (([1], 4, 1, 0), "together: expected at least 1"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                plan(*arguments)
        cut = plan([1] * 8, 1)
        for arguments, message in (
            ((0, 3), "world: expected a power of two up to the 8 lanes, got 3"),
            ((0, 16), "world: expected"),
            ((0, 2, 8), "lanes_per_pass: expected a power of two up to 4"),
            ((2, 2), "rank: expected 0 to 1, got 2"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                list(cut.passes(*arguments))


class SumTest(unittest.TestCase):
    def test_counter_is_the_tree(self):
        for count in (1, 2, 4, 8, 16):
            values = list(torch.randn(count, 50).unbind())
            counter = TreeCounter()
            for value in values:
                counter.add(value.clone())
            expected = tree_sum([value.clone() for value in values])
            self.assertTrue(same_bits(counter.take(), expected))
            chain = values[0].clone()
            for value in values[1:]:
                chain += value
            self.assertEqual(same_bits(chain, expected), count < 4, "control: a chain differs")

    def test_counter_wants_a_power_of_two(self):
        counter = TreeCounter()
        for _ in range(3):
            counter.add(torch.ones(1))
        with self.assertRaisesRegex(ValueError, "got 3"):
            counter.take()

    # Two slots of four passes: a chain of two trees.
    def test_gradient_sum_is_a_chain_of_trees(self):
        parameter = torch.nn.Parameter(torch.zeros(64))
        values = list(torch.randn(8, 64).unbind())
        total = GradientSum([parameter], 4)
        for value in values:
            parameter.grad = value.clone()
            total.add_pass()
            self.assertIsNone(parameter.grad)
        total.finish()
        a, b, c, d, e, f, g, h = values
        self.assertTrue(same_bits(parameter.grad, ((a + b) + (c + d)) + ((e + f) + (g + h))))
        chain = torch.stack(values).cumsum(0)[-1]
        self.assertFalse(same_bits(parameter.grad, chain), "control")

    def test_gradient_sum_says_what_is_missing(self):
        parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        total = GradientSum([parameter], 2)
        with self.assertRaisesRegex(
            RuntimeError, r"parameter 0 \[3\]: expected a gradient in fp32, got none"
        ):
            total.add_pass()
        parameter.grad = torch.zeros(3, dtype=torch.bfloat16)
        with self.assertRaisesRegex(RuntimeError, "got torch.bfloat16"):
            total.add_pass()
        parameter.grad = None
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.zeros(3)
        total.add_pass()
        with self.assertRaisesRegex(RuntimeError, "expected 2 passes for each slot, got 1"):
            total.finish()
        parameter.grad = torch.zeros(3)
        with self.assertRaisesRegex(RuntimeError, "expected no gradients yet"):
            GradientSum([parameter], 2)

    # A pass whose gradients were refused can come again.
    def test_gradient_sum_takes_all_or_none(self):
        first, second = (torch.nn.Parameter(torch.zeros(3)) for _ in range(2))
        total = GradientSum([first, second], 1)
        first.grad = torch.ones(3)
        with self.assertRaisesRegex(RuntimeError, "parameter 1"):
            total.add_pass()
        second.grad = torch.ones(3)
        total.add_pass()
        total.finish()
        self.assertEqual([first.grad.tolist(), second.grad.tolist()], [[1.0] * 3] * 2)

    def test_gradient_sum_refuses(self):
        module = torch.nn.Linear(3, 3)
        for wrong in (0, -1, 3, 1.5):
            with self.assertRaisesRegex(ValueError, f"passes_per_slot: expected a power of two, got {wrong}"):
                GradientSum(module.parameters(), wrong)
        for wrong in ("weight", ("weight", "bias"), module.weight * 2):
            with self.assertRaisesRegex(TypeError, "(parameter 0|weight): expected a parameter, got"):
                GradientSum([wrong], 1)
        with self.assertRaisesRegex(ValueError, "expected each once"):
            GradientSum([module.weight, module.weight], 1)


if __name__ == "__main__":
    unittest.main()
