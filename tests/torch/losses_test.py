"""Losses of tokens, sequences and pairs: NaN in, NaN out; arguments that are refused; values and gradients
near float64; and gradients of a model whose bits depend on neither ranks nor passes nor threads."""

import math
import unittest
from dataclasses import dataclass

import torch
import torch.distributed as dist
from support import random_sequences, run_ranks, same_bits
from torch import Tensor
from training_test import gradients, make_qwen3

from isobit.torch import Batch, GradientSum, fully_shard, logprobs, plan
from isobit.torch import functional as F

NAN, INF = math.nan, math.inf
LENGTHS = [9, 5, 12, 3, 7, 17, 2, 6, 11, 4, 8, 5]
LANES, PACK_TOKENS, CONSTANT = 4, 22, 16


def one(value: float | None) -> Tensor | None:
    return None if value is None else torch.tensor([value])


class NaNTest(unittest.TestCase):
    # INVARIANT: a NaN reaches the loss and its gradient, on both sides of the clipping, as torch's min and
    # clamp have it.
    def test_nan_in_nan_out(self):
        for a in (1.0, -1.0):
            for name, logprob, old, reference, advantage, weight in (
                ("logprob", NAN, -1.0, None, a, 1.0),
                ("old", -1.0, NAN, None, a, 1.0),
                ("both -inf", -INF, -INF, None, a, 1.0),
                ("advantage", -1.0, -1.5, None, NAN, 1.0),
                ("advantage, ratio 1", -1.0, -1.0, None, NAN, 1.0),
                ("weight", -1.0, -1.0, None, a, NAN),
                ("weight, clipped", -1.0, -3.0, None, a, NAN),
                ("reference", -1.0, -1.0, NAN, a, 1.0),
                ("advantage, no old", -1.0, None, None, NAN, 1.0),
            ):
                with self.subTest(name, advantage=a):
                    x = torch.tensor([logprob], requires_grad=True)
                    rest = (one(advantage), one(weight), one(old), one(reference))
                    value = F.policy_loss(x, *rest, kl=0.1 if reference is not None else 0.0)
                    value.backward()
                    self.assertTrue(value.isnan() and x.grad.isnan(), (value, x.grad))

    def test_of_a_sequence_and_a_pair(self):
        for bad in (NAN, INF):  # infinity less infinity
            x = torch.tensor([-1.0, bad, -2.0, -1.0], requires_grad=True)
            other = torch.tensor([-1.0, bad, -2.0, -1.0])
            ones, lengths = torch.ones(2), [3, 1]
            for loss, reached in (
                (F.gspo_loss(x, ones, ones, other, lengths), 3),
                (F.dpo_loss(x, other, ones[:1], lengths), 4),
                (F.cispo_loss(x, torch.ones(4), torch.ones(4), other), 1),
            ):
                (gradient,) = torch.autograd.grad(loss, x)
                self.assertTrue(loss.isnan())
                self.assertEqual(int(gradient.isnan().sum()), reached)

    def test_finite_tokens_are_as_they_were(self):
        x = torch.tensor([-1.0, -1.0, -INF], requires_grad=True)
        old = torch.tensor([-1.0, -3.0, -1.0])
        values = F.token_losses(x, torch.ones(3), torch.ones(3), old)
        values.sum().backward()
        self.assertEqual([v.item() for v in values], [-1.0, torch.tensor(-1.2).item(), 0.0])
        self.assertEqual(x.grad.tolist(), [-1.0, 0.0, 0.0])


class RefusedTest(unittest.TestCase):
    def setUp(self):
        self.logprobs = torch.tensor([-1.0, -0.5], requires_grad=True)
        self.ones, self.old = torch.ones(2), torch.tensor([-1.2, -0.4])

    def test_bounds(self):
        rest = (self.ones, self.ones, self.old)
        for name in ("clip_low", "clip_high"):
            for value in (-2.5, NAN, -INF):
                message = f"{name}: expected at least 0, got {value}"
                for loss in (F.policy_loss, F.token_losses, F.cispo_loss):
                    with self.assertRaisesRegex(ValueError, message):
                        loss(self.logprobs, *rest, **{name: value})
                with self.assertRaisesRegex(ValueError, message):
                    F.gspo_loss(self.logprobs, *rest, [1, 1], **{name: value})
                bounds = {"clip_low": 0.2, "clip_high": 0.2} | {name: value}
                with self.assertRaisesRegex(RuntimeError, f"isobit::policy_loss: {message}"):
                    torch.ops.isobit.policy_loss(self.logprobs, *rest, None, *bounds.values(), 0.0)
        for value in (-1.0, NAN, INF, 1e39):
            message = f"expected a finite number of at least 0, got {value}"
            with self.assertRaisesRegex(ValueError, f"kl: {message}".replace("+", "[+]")):
                F.policy_loss(self.logprobs, *rest, self.old, kl=value)
            with self.assertRaisesRegex(ValueError, f"beta: {message}".replace("+", "[+]")):
                F.dpo_loss(self.logprobs, self.old, self.ones[:1], [1, 1], beta=value)
        F.policy_loss(self.logprobs, *rest, clip_low=INF, clip_high=INF)  # control: not clipped at all

    def test_other_gradients(self):
        names = ("logprobs", "advantages", "weights", "old_logprobs", "reference_logprobs")
        values = (self.logprobs, self.ones, self.ones, self.old, self.old)
        for name in names[1:]:
            inputs = dict(zip(names, values, strict=True))
            inputs[name] = inputs[name].clone().requires_grad_()
            message = f"{name}: expected a tensor that requires no gradient"
            with self.assertRaisesRegex(ValueError, message):
                F.policy_loss(**inputs, kl=0.1)
            inputs[name] = inputs[name] * 2  # with a graph
            with self.assertRaisesRegex(ValueError, message):
                F.token_losses(**inputs, kl=0.1)
            with torch.no_grad():  # control
                F.token_losses(**inputs, kl=0.1)
        with self.assertRaisesRegex(ValueError, "old_logprobs: expected"):  # by the logprobs themselves
            F.policy_loss(self.logprobs, self.ones, self.ones, self.logprobs)
        hidden = torch.zeros(2, 16, dtype=torch.bfloat16, requires_grad=True)
        targets = torch.zeros(2, dtype=torch.int32)
        temperature = torch.ones(2, requires_grad=True)
        with self.assertRaisesRegex(ValueError, "isobit::logprobs: temperature: expected a tensor that"):
            F.logprobs(hidden, hidden.detach(), targets, packs=[0, 2], temperature=temperature)

    def test_lengths(self):
        rest = (self.ones, self.ones, self.old)
        for lengths in ([1], [1, 2], [3, -1]):
            with self.assertRaisesRegex(
                ValueError, r"lengths: expected their sum to be the length of x, \[2\], got"
            ):
                F.sequence_sums(self.old, lengths)
        with self.assertRaisesRegex(ValueError, "lengths: expected at least 1 token in each sequence"):
            F.gspo_loss(self.logprobs, *rest, [2, 0])
        with self.assertRaisesRegex(ValueError, "lengths: expected pairs of sequences, .* got 1"):
            F.dpo_loss(self.logprobs, self.old, self.ones[:1], [2])
        bounds = torch.tensor([0, 2, 1, 2], dtype=torch.int32)
        with self.assertRaisesRegex(RuntimeError, r"bounds: expected ascending values from 0 to 2, got"):
            torch.ops.isobit.sequence_sums(self.old, bounds)
        with self.assertRaisesRegex(RuntimeError, "function: expected exp, log, sigmoid or log_sigmoid"):
            torch.ops.isobit.loss_function(self.old, "sin")
        with self.assertRaisesRegex(ValueError, "batch_tokens: expected a number above 0, got 0"):
            F.token_mean_weights([1], 0)


class Float64Test(unittest.TestCase):
    """Beside the formulas of the papers, by torch in float64."""

    def test_losses(self):
        generator = torch.Generator().manual_seed(4)
        lengths = [3, 1, 40, 9]
        n = sum(lengths)
        draw = lambda size: torch.randn(size, generator=generator)  # noqa: E731
        old, reference, a, w = draw(n) - 2, draw(n) - 2, draw(n), draw(n).abs()
        sequence_a, sequence_w, pair_w = draw(4), draw(4).abs(), draw(2).abs()
        exact = {name: t.double() for name, t in locals().items() if isinstance(t, Tensor)}

        def sums(x: Tensor) -> Tensor:
            return torch.stack([part.sum() for part in x.split(lengths)])

        def gspo(x: Tensor) -> Tensor:
            ratio = (sums(x - exact["old"]) / torch.tensor(lengths)).exp()
            clipped = ratio.clamp(1 - 0.2, 1 + 0.3)
            values = -torch.minimum(ratio * exact["sequence_a"], clipped * exact["sequence_a"])
            return (values * exact["sequence_w"]).sum()

        def cispo(x: Tensor) -> Tensor:
            ratio = (x.detach() - exact["old"]).exp().clamp(0.1, 5)
            return -(ratio * exact["a"] * x * exact["w"]).sum()

        def dpo(x: Tensor) -> Tensor:
            s = sums(x - exact["reference"])
            return -(torch.nn.functional.logsigmoid(0.4 * (s[::2] - s[1::2])) * exact["pair_w"]).sum()

        for ours, theirs in (
            (lambda x: F.gspo_loss(x, sequence_a, sequence_w, old, lengths, 0.2, 0.3), gspo),
            (lambda x: F.cispo_loss(x, a, w, old, 0.9, 4.0), cispo),
            (lambda x: F.dpo_loss(x, reference, pair_w, lengths, 0.4), dpo),
        ):
            values = old + draw(n) * 0.3
            x, y = values.clone().requires_grad_(), values.double().requires_grad_()
            loss, expected = ours(x), theirs(y)
            loss.backward()
            expected.backward()
            torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-5, atol=1e-6)
            self.assertGreater(int((x.grad != 0).sum()), 0)

    def test_weights(self):
        lengths = [3, 0, 2]
        expected = {
            "token mean": (F.token_mean_weights(lengths, 7), [1 / 7] * 5),
            "sequence mean": (F.sequence_mean_weights(lengths, 4), [1 / 12] * 3 + [1 / 8] * 2),
            "constant": (F.constant_weights(lengths, 4, 100), [1 / 400] * 5),
        }
        for name, (weights, values) in expected.items():
            self.assertTrue(same_bits(weights, torch.tensor(values, dtype=torch.float32)), name)

    def test_sequence_sums_are_trees(self):
        lengths = [5, 0, 1, 3000, 17]
        x = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(1), requires_grad=True)
        sums = F.sequence_sums(x, lengths)
        for got, part in zip(sums, x.split(lengths), strict=True):
            self.assertTrue(same_bits(got, F.tree_sum(part)))
        upstream = torch.randn(5)
        sums.backward(upstream)
        self.assertTrue(same_bits(x.grad, upstream.repeat_interleave(torch.tensor(lengths))))


# ---- A model's gradients


@dataclass
class Terms:
    """What the losses of a pass read."""

    lengths: list[int]
    old: Tensor  # [tokens], as reference
    reference: Tensor
    advantages: Tensor  # [sequences], as token_advantages [tokens]
    token_advantages: Tensor


TOKENS = sum(LENGTHS) - len(LENGTHS)
LOSSES = {
    "DAPO": lambda x, t: F.policy_loss(
        x, t.token_advantages, F.token_mean_weights(t.lengths, TOKENS), t.old, clip_low=0.2, clip_high=0.28
    ),
    "GRPO": lambda x, t: F.policy_loss(
        x, t.token_advantages, F.sequence_mean_weights(t.lengths, len(LENGTHS)), t.old, t.reference, kl=0.05
    ),
    "Dr. GRPO": lambda x, t: F.policy_loss(
        x, t.token_advantages, F.constant_weights(t.lengths, len(LENGTHS), CONSTANT), t.old
    ),
    "CISPO": lambda x, t: F.cispo_loss(
        x, t.token_advantages, F.token_mean_weights(t.lengths, TOKENS), t.old
    ),
    "GSPO": lambda x, t: F.gspo_loss(
        x, t.advantages, torch.full_like(t.advantages, 1 / len(LENGTHS)), t.old, t.lengths, 0.1, 0.1
    ),
    "DPO": lambda x, t: F.dpo_loss(
        x, t.reference, torch.full((len(t.lengths) // 2,), 2 / len(LENGTHS)), t.lengths
    ),
    # Of the pieces: SimPO, with lengths that divide and a margin.
    "own": lambda x, t: own_loss(F.sequence_sums(x, t.lengths) / torch.tensor([float(n) for n in t.lengths])),
}  # fmt: skip


def own_loss(means: Tensor) -> Tensor:
    return F.tree_sum(-F.log_sigmoid(2.0 * (means[0::2] - means[1::2]) - 0.5) * (2 / len(LENGTHS)))


def divided_by_the_pass(x: Tensor, t: Terms) -> Tensor:
    """Control: a mean of the pass alone."""
    return F.policy_loss(x, t.token_advantages, F.token_mean_weights(t.lengths, max(len(x), 1)), t.old)


def joined(parts: list[Tensor], chosen: list[int]) -> Tensor:
    return torch.cat([torch.empty(0), *(parts[i] for i in chosen)])


def step(loss, rank: int = 0, world: int = 1, lanes_per_pass: int | None = None) -> dict[str, Tensor]:
    """The gradients of one step; on FSDP2 if there is a group."""
    model = make_qwen3()
    if dist.is_initialized():
        fully_shard(model.float())
    sequences, _ = random_sequences(LENGTHS, 83)
    generator = torch.Generator().manual_seed(7)
    old, reference = ([torch.randn(n - 1, generator=generator) - 4.4 for n in LENGTHS] for _ in range(2))
    advantages = torch.randn(len(LENGTHS), generator=generator)
    cut = plan(LENGTHS, PACK_TOKENS, LANES, together=2)
    total = GradientSum(model.parameters(), cut.passes_per_slot(world, lanes_per_pass))
    for part in cut.passes(rank, world, lanes_per_pass):
        chosen = part.sequences()
        batch = Batch.of([sequences[i] for i in chosen], packs=part.pack_sizes())
        terms = Terms(
            batch.scored_lengths,
            joined(old, chosen),
            joined(reference, chosen),
            advantages[chosen],
            advantages[chosen][batch.scored_sequences],
        )
        loss(logprobs(model, batch).logprobs, terms).backward()
        total.add_pass()
    total.finish()
    return gradients(model)


def steps(rank: int, world: int, lanes_per_pass: int | None) -> dict[str, dict[str, Tensor]]:
    return {name: step(loss, rank, world, lanes_per_pass) for name, loss in LOSSES.items()}


class InvarianceTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.expected = steps(0, 1, None)

    def same(self, results: dict[str, dict[str, Tensor]], where: object) -> None:
        for loss, expected in self.expected.items():
            for name, gradient in expected.items():
                self.assertTrue(same_bits(results[loss][name], gradient), (where, loss, name))

    def test_the_losses_differ(self):
        found = [g["model.layers.0.mlp.down_proj.weight"] for g in self.expected.values()]
        for i, gradient in enumerate(found):
            self.assertTrue(gradient.isfinite().all() and gradient.any())
            self.assertFalse(any(same_bits(gradient, other) for other in found[:i]))

    # INVARIANT: how many lanes a pass has changes no bit of the gradients of a loss.
    def test_lanes_per_pass(self):
        for lanes_per_pass in (1, 2):
            self.same(steps(0, 1, lanes_per_pass), lanes_per_pass)

    # INVARIANT: nor how many ranks there are.
    def test_ranks(self):
        for world, lanes_per_pass in ((1, None), (2, None), (4, None), (2, 1)):
            for results in run_ranks(world, steps, lanes_per_pass):
                self.same(results, (world, lanes_per_pass))

    # INVARIANT: nor how many threads.
    def test_threads(self):
        before = torch.get_num_threads()
        x = torch.randn(200_000, generator=torch.Generator().manual_seed(1))
        lengths = [len(x) // 4] * 4
        found, control = set(), set()
        try:
            for threads in (1, 2, 3, 4):
                torch.set_num_threads(threads)
                self.same(steps(0, 1, None), f"{threads} threads")
                found.add(
                    (F.tree_sum(x).item(), *F.sequence_sums(x, lengths).tolist(), F.exp(x).sum(0).dtype)
                )
                control.add(x.sum().item())
        finally:
            torch.set_num_threads(before)
        self.assertEqual(len(found), 1)
        self.assertGreater(len(control), 1, "control: torch's sum")

    def test_controls_differ(self):
        results = [step(divided_by_the_pass, lanes_per_pass=n) for n in (None, 1)]
        name = "model.layers.0.mlp.down_proj.weight"
        self.assertFalse(same_bits(results[0][name], results[1][name]))


if __name__ == "__main__":
    unittest.main()
