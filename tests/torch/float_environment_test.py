"""The caller's floating-point mode changes no bit: neither subnormal numbers flushed to zero
(torch.set_flush_denormal) nor another direction of rounding, before the first operator or later."""

import ctypes
import platform
import subprocess
import sys
import unittest

import torch
from support import random_sequences, same_bits
from training_test import LANES, LENGTHS, PACK_TOKENS, gradients, make_qwen3

import isobit.torch as it

ROUND_UP = {"x86_64": 0x800, "aarch64": 0x400000}  # fenv.h's FE_UPWARD


def step(scale: float) -> dict[str, torch.Tensor]:
    """Gradients, masters and moments of a step whose loss has this scale."""
    model = make_qwen3()
    sequences, advantages = random_sequences(LENGTHS, 83)
    cut = it.plan(LENGTHS, PACK_TOKENS, LANES)
    optimizer = it.AdamW(model.named_parameters(), lr=0.01)
    total = it.GradientSum(model.parameters(), cut.passes_per_slot(1, 1))
    for part in cut.passes(0, 1, 1):
        chosen = part.sequences()
        batch = it.Batch.of([sequences[i] for i in chosen], packs=part.pack_sizes())
        a = torch.cat([torch.empty(0), *(advantages[i] for i in chosen)])
        scores = it.logprobs(model, batch)
        it.functional.policy_loss(scores.logprobs, a, torch.full_like(a, scale)).backward()
        total.add_pass()
    total.finish()
    found = gradients(model)
    optimizer.step()
    for name, p in model.named_parameters():
        found |= {f"{name} {key}": t.clone() for key, t in optimizer.state[p].items()}
    return found


def flush_first() -> None:
    """In a process of its own: the operators' threads start while subnormal numbers are flushed."""
    torch.set_num_threads(2)
    x = torch.full((64, 64), 2.0**-130)
    torch.set_flush_denormal(True)
    flushed = it.functional.square_sums(x), it.functional.tree_sum(x.view(-1))
    torch.set_flush_denormal(False)
    kept = it.functional.square_sums(x), it.functional.tree_sum(x.view(-1))
    assert float(kept[1]) == 4096 * 2.0**-130
    assert all(map(same_bits, flushed, kept))


class FloatEnvironmentTest(unittest.TestCase):
    def setUp(self):
        if not torch.set_flush_denormal(False):
            self.skipTest("SKIPPED: this CPU cannot flush subnormal numbers")

    # INVARIANT: gradients, masters and moments have the same bits.
    def test_flushed_subnormals(self):
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # this one, which flushes, computes all
        # The squares of gradients are subnormal numbers at 1e-18, terms of gradients at 1e-30.
        for scale in (1e-18, 1e-30):
            expected = step(scale)
            torch.set_flush_denormal(True)
            try:
                found = step(scale)
                self.assertEqual(float(torch.tensor(1e-40) * 1), 0.0)  # as the caller had it, and a control
            finally:
                torch.set_flush_denormal(False)
            for name, t in expected.items():
                self.assertTrue(same_bits(found[name], t), (scale, name))

    def test_flushed_before_the_first_operator(self):
        code = "import float_environment_test as test; test.flush_first()"
        subprocess.run([sys.executable, "-c", code], cwd=sys.path[0], check=True)

    def test_rounding(self):
        libm = ctypes.CDLL("libm.so.6")
        x = torch.randn(37, 24, generator=torch.Generator().manual_seed(1))
        expected = it.functional.square_sums(x), it.functional.tree_sum(x.view(-1))
        libm.fesetround(ROUND_UP[platform.machine()])
        try:
            found = it.functional.square_sums(x), it.functional.tree_sum(x.view(-1))
            control = x.sum()
        finally:
            libm.fesetround(0)
        self.assertTrue(all(map(same_bits, found, expected)))
        self.assertFalse(same_bits(control, x.sum()), "control")

    def test_threads_that_flush(self):
        code = (
            "import torch; torch.set_num_threads(2); torch.set_flush_denormal(True);"
            "torch.ones(1 << 20).add(1); torch.set_flush_denormal(False);"
            "import isobit.torch as it; it.GradientSum([torch.nn.Parameter(torch.ones(2))], 1)"
        )
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        self.assertIn("got threads of torch that replace them by zero", ended.stderr)


if __name__ == "__main__":
    unittest.main()
