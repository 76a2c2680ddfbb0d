"""Backward passes that add to each other's gradients without GradientSum: an error at once, on any number
of ranks, unless the trainer said that each is a whole slot.
And modules under FSDP2 otherwise than by fully_shard."""

import unittest
from collections.abc import Callable

import torch
from support import Model, batch_of, random_sequences, run_ranks, same_bits
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from training_test import LANES, LENGTHS, PACK_TOKENS, gradients, loss_of, make_qwen3, run_step

from isobit.torch import GradientSum, accumulate_slots, fully_shard, keep_fp32_gradients, plan

CUT = plan(LENGTHS, PACK_TOKENS, LANES)
DATA = random_sequences(LENGTHS, 83)


def pass_losses(model: nn.Module, rank: int, world: int, lanes_per_pass: int | None) -> list[Callable]:
    parts = CUT.passes(rank, world, lanes_per_pass)
    return [lambda part=part: loss_of(model, *batch_of(part, *DATA)) for part in parts]


def refusal(work: Callable) -> str:
    """What work() says that it refuses, or "no error"."""
    try:
        work()
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return "no error"


def accumulate(rank: int, world: int, lanes_per_pass: int | None, slots: bool) -> str | dict[str, Tensor]:
    model = fully_shard(make_qwen3().float())
    if slots:
        accumulate_slots(model)

    def work() -> None:
        for loss in pass_losses(model, rank, world, lanes_per_pass):
            loss().backward()

    said = refusal(work)
    return gradients(model) if said == "no error" else said


def accumulate_before_ranks(rank: int, world: int) -> list[str]:
    """FSDP2's own way to sum passes, while it is on and after one pass."""
    model = fully_shard(make_qwen3().float())
    first, second, *_ = pass_losses(model, rank, world, 1)
    model.set_requires_gradient_sync(False)
    said = [refusal(lambda: first().backward())]
    model.set_requires_gradient_sync(True)
    return [*said, refusal(lambda: first().backward()), refusal(lambda: second().backward())]


def settings_that_change_gradients(rank: int, world: int) -> list[str]:
    changes: tuple[Callable, ...] = (
        lambda model: model.set_gradient_divide_factor(2.0),
        lambda model: model.model.layers[1].set_force_sum_reduction_for_comms(False),
        lambda model: model.model.layers[0].set_requires_gradient_sync(False),
        lambda model: model,
    )
    said = []
    for change in changes:
        model = fully_shard(make_qwen3().float())
        change(model)
        said.append(refusal(lambda model=model: pass_losses(model, rank, world, None)[0]()))
    return said


def shard_inside_with_torch(rank: int, world: int) -> list[str]:
    """What a pass says of torch's fully_shard on layers, below several roots, and without gradients."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    said = []
    roots: tuple[Callable, ...] = (
        lambda model: fully_shard(model, blocks=[]),
        lambda model: torch_fully_shard(model, mp_policy=policy),
        lambda model: fully_shard(model, blocks=model.model.layers[1:]),
    )
    for root in roots:
        model = make_qwen3().float()
        layers = model.model.layers
        for layer in layers[:1] if root is roots[2] else layers:
            torch_fully_shard(layer, mp_policy=policy)
        root(model)
        said.append(refusal(lambda model=model: pass_losses(model, rank, world, None)[0]()))
    with torch.no_grad():
        return [*said, refusal(pass_losses(model, rank, world, None)[0])]


def own_model_inside_torch(rank: int, world: int) -> str:
    model = Model(dtype=torch.float32)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    torch_fully_shard(model.layers[0], mp_policy=policy)
    fully_shard(model, blocks=[])
    return refusal(pass_losses(model, rank, world, None)[0])


class AccumulationTest(unittest.TestCase):
    # INVARIANT: the second of two passes that add up in .grad fails.
    def test_plain(self):
        for own in (False, True):
            model = Model() if own else make_qwen3()
            if own:
                keep_fp32_gradients(model)
            first, second, *_ = pass_losses(model, 0, 1, 1)
            first().backward()
            torch.autograd.grad(second(), [next(model.parameters())])  # adds to nothing
            with self.assertRaisesRegex(RuntimeError, "sum passes with isobit.torch.GradientSum") as raised:
                second().backward()
            self.assertIn(str(raised.exception).split()[0], dict(model.named_parameters()))
            model.zero_grad(set_to_none=False)
            with self.assertRaisesRegex(RuntimeError, r"zero_grad\(\), to None"):
                second().backward()
            model.zero_grad()
            second().backward()

    def test_after_the_sum_is_finished(self):
        model = make_qwen3()
        run_step(model, CUT, 0, 1, None, DATA)
        with self.assertRaisesRegex(RuntimeError, "GradientSum"):
            pass_losses(model, 0, 1, 1)[0]().backward()

    def test_ranks(self):
        for world, lanes_per_pass in ((1, 1), (2, 1), (2, None)):
            for said in run_ranks(world, accumulate, lanes_per_pass, False):
                self.assertIn("sum passes with isobit.torch.GradientSum", str(said))
                self.assertIn(str(said).split()[0], dict(make_qwen3().named_parameters()))

    # INVARIANT: passes that are whole slots add up to C10's chain, on any number of ranks.
    def test_slots(self):
        expected = make_qwen3()
        run_step(expected, CUT, 0, 1, None, DATA)
        model = make_qwen3()
        accumulate_slots(model)
        for loss in pass_losses(model, 0, 1, None):
            loss().backward()
        for found in (gradients(model), *(run_ranks(w, accumulate, None, True)[0] for w in (1, 2))):
            for name, gradient in gradients(expected).items():
                self.assertTrue(same_bits(found[name], gradient), name)
        passes = run_ranks(1, accumulate, 1, True)[0]
        same = [same_bits(passes[name], g) for name, g in gradients(expected).items()]
        self.assertFalse(all(same), "control: of passes that are no slots the sum has other bits")

    def test_before_ranks(self):
        for world in (1, 2):
            off, on, again = run_ranks(world, accumulate_before_ranks)[0]
            self.assertIn("set_requires_gradient_sync(False): expected True", off)
            self.assertEqual(on, "no error")
            self.assertIn("sum passes with isobit.torch.GradientSum", again)

    def test_settings(self):
        divided, averaged, unsynced, unchanged = run_ranks(2, settings_that_change_gradients)[0]
        self.assertIn("got set_gradient_divide_factor(2.0)", divided)
        self.assertIn("model.layers.1: expected sums of gradients", averaged)
        self.assertIn("model.layers.0: set_requires_gradient_sync(False)", unsynced)
        self.assertEqual(unchanged, "no error")

    # INVARIANT: torch's fully_shard on any module is refused, but for passes without gradients.
    def test_inside(self):
        *with_gradients, without = run_ranks(2, shard_inside_with_torch)[0]
        for said in with_gradients:
            self.assertRegex(
                said, "^(model.layers.0|FSDPQwen3\\w+): expected isobit.torch.fully_shard, got torch's"
            )
        self.assertEqual(without, "no error")
        self.assertIn("layers.0: expected isobit.torch.fully_shard", run_ranks(2, own_model_inside_torch)[0])

    def test_sums_name_parameters(self):
        p = nn.Parameter(torch.ones(2))
        with self.assertRaisesRegex(ValueError, "expected each once, got a and b, which are the same"):
            GradientSum([("a", p), ("b", p)], 1)
        total = GradientSum([("a", p)], 1)
        with self.assertRaisesRegex(RuntimeError, r"a \[2\]: expected a gradient in fp32, got none"):
            total.add_pass()


if __name__ == "__main__":
    unittest.main()
