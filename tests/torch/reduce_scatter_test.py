"""TreeReduceScatter on gloo processes against its definition."""

import unittest

import torch
import torch.distributed as dist
from support import run_ranks, same_bits
from torch import Tensor

from isobit.torch import TreeReduceScatter


def inputs_of(world: int, count: int) -> list[Tensor]:
    """A rank's gradients, of so different sizes that every order of a sum rounds in another way."""
    generator = torch.Generator().manual_seed(world)
    sizes = torch.exp2(torch.randint(-8, 9, (world, count), generator=generator))
    return list((torch.randn(world, count, generator=generator) * sizes).unbind())


def scatter(rank: int, world: int, count: int) -> tuple[Tensor, Tensor]:
    given = inputs_of(world, count)[rank]
    tree, plain = torch.empty(count // world), torch.empty(count // world)
    TreeReduceScatter()(tree, given.clone(), dist.group.WORLD, dist.ReduceOp.SUM)
    dist.reduce_scatter_tensor(plain, given.clone())
    return tree, plain


def refusals(rank: int, world: int) -> list[str]:
    messages = []
    for op, dtype, async_op in (
        (dist.ReduceOp.AVG, torch.float32, False),
        (dist.ReduceOp.SUM, torch.bfloat16, False),
        (dist.ReduceOp.SUM, torch.float32, True),
    ):
        try:
            t = torch.zeros(2, dtype=dtype)
            TreeReduceScatter()(t, t.repeat(world), dist.group.WORLD, op, async_op)
        except RuntimeError as error:
            messages.append(str(error))
    return messages


class TreeReduceScatterTest(unittest.TestCase):
    # INVARIANT: the balanced tree in rank order, each rank its chunk.
    def test_is_the_tree_in_rank_order(self):
        count = 1024
        for world in (1, 2, 4):
            results = run_ranks(world, scatter, count)
            level = inputs_of(world, count)
            while len(level) > 1:
                level = [a + b for a, b in zip(level[::2], level[1::2], strict=True)]
            tree, plain = (torch.cat([result[i] for result in results]) for i in (0, 1))
            self.assertTrue(same_bits(tree, level[0]), world)
            # Control: gloo's own sum goes round a ring. Two summands have only one order.
            self.assertEqual(same_bits(plain, level[0]), world < 4)

    def test_refuses_other_sums(self):
        for messages in run_ranks(2, refusals):
            self.assertEqual(len(messages), 3)
            self.assertIn("expected a plain sum without async_op, got RedOpType.AVG", messages[0])
            self.assertIn("expected float32, got torch.bfloat16", messages[1])
            self.assertIn("expected a plain sum without async_op", messages[2])

    def test_refuses_three_ranks(self):
        with self.assertRaisesRegex(RuntimeError, "expected the number of ranks to be a power of two, got 3"):
            run_ranks(3, scatter, 12)


if __name__ == "__main__":
    unittest.main()
