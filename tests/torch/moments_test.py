"""AdamW whose moments are kept in bf16, or in host memory: the bits of C15's second implementation, on 1, 2
and 4 ranks and after a restart, and no drift of what is rounded at every step."""

import copy
import math
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from optimizer_test import OPTIONS, Parameters, equal, train, values
from support import run_ranks, same_bits
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from isobit.torch import AdamW
from isobit.torch import adamw as adamw_module
from isobit.torch import functional as F
from isobit.torch.adamw import step_factors

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from numerics_reference.training import Adam, dithered

BF16 = torch.bfloat16


def optimizer_of(model: Parameters, **options) -> AdamW:
    return AdamW(model.named_parameters(), **OPTIONS, moments=BF16, **options)


def trained(steps: int, dtype: torch.dtype = torch.float32, **options) -> tuple[dict[str, Tensor], AdamW]:
    model = Parameters(0, dtype)
    optimizer = optimizer_of(model, **options)
    train(0, steps, model, optimizer)
    return model.whole(), optimizer


def train_sharded(rank: int, world: int, steps: int) -> dict[str, Tensor]:
    model = Parameters(world)
    train(world, steps, model, optimizer_of(model))
    return model.whole()


def save(rank: int, world: int, folder: str) -> None:
    model = Parameters(world)
    optimizer = optimizer_of(model)
    train(world, 3, model, optimizer)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)


def resume(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    model = Parameters(world)
    optimizer = optimizer_of(model)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(world, 2, model, optimizer, first=4)
    return model.whole()


class MomentsTest(unittest.TestCase):
    # INVARIANT: the page alone says what a step makes of moments in bf16.
    def test_step_is_that_of_the_definition(self):
        model = Parameters(0, BF16)
        optimizer = optimizer_of(model)
        (b1, b2), names = OPTIONS["betas"], ("lr", "eps")
        adam = Adam(b1=b1, b2=b2, decay=OPTIONS["weight_decay"], moments_in_bf16=True,
                    **{name: OPTIONS[name] for name in names})  # fmt: skip
        expected = {name: value.to(BF16).float().numpy() for name, value in values(0).items()}
        for seed in (1, 2, 3, 4):
            model.set_gradients(seed)
            optimizer.step()
            gradients = {name: value.numpy() for name, value in values(seed).items()}
            expected = adam.step(expected, gradients, np.float32(1))
            for name, parameter in model.named_parameters():
                for key, i in (("master", 0), ("exp_avg", 1), ("exp_avg_sq", 2)):
                    kept = optimizer.state[parameter][key].float()
                    self.assertTrue(same_bits(kept, torch.from_numpy(adam.state[name][i])), (name, key, seed))
                self.assertTrue(same_bits(parameter.detach().float(), torch.from_numpy(expected[name])))

    def test_dither_is_that_of_the_definition(self):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1000, generator=generator) * torch.exp2(torch.randn(1000, generator=generator) * 30)
        x[:4] = torch.tensor([3.4e38, -3.4e38, 0.0, 1e-45])
        for step, moment, first in ((1, 0, 0), (7, 1, 12345), (2**31, 1, 2**40 + 3)):
            out = torch.empty(1000, dtype=BF16)
            F.dither_(out, x, step, moment, first)
            expected = torch.from_numpy(dithered(x.numpy(), step, moment, first)).to(BF16)
            self.assertTrue(same_bits(out, expected))
            self.assertFalse(same_bits(out, x.to(BF16)), "control")
        for wrong in ((0, 0, 0), (1, 2, 0), (1, 0, -1)):
            with self.assertRaisesRegex(RuntimeError, "step, moment, first: expected"):
                F.dither_(out, x, *wrong)

    # INVARIANT: neither ranks, nor parts of a parameter, nor where the state lies changes a bit.
    def test_any_number_of_ranks_and_parts(self):
        expected, _ = trained(5)
        with mock.patch.object(adamw_module, "_CHUNK", 7):
            self.assertTrue(equal(trained(5)[0], expected))
        for dtype in (torch.float32, BF16):
            self.assertTrue(equal(trained(5, dtype, offload=True)[0], trained(5, dtype)[0]))
        for world in (1, 2, 4):
            for parameters in run_ranks(world, train_sharded, 5):
                self.assertTrue(equal(parameters, expected), world)
        fp32 = Parameters(0)
        train(0, 5, fp32, AdamW(fp32.parameters(), **OPTIONS))
        self.assertFalse(equal(fp32.whole(), expected), "control")

    def test_resumed_on_other_ranks(self):
        expected, _ = trained(5)
        for saved_on, resumed_on in ((2, 4), (4, 1)):
            with tempfile.TemporaryDirectory() as folder:
                run_ranks(saved_on, save, folder)
                for parameters in run_ranks(resumed_on, resume, folder):
                    self.assertTrue(equal(parameters, expected), (saved_on, resumed_on))

    def test_state_dicts(self):
        expected, _ = trained(5, BF16)
        for offload in (False, True):
            model = Parameters(0, BF16)
            optimizer = optimizer_of(model)
            train(0, 3, model, optimizer)
            state = copy.deepcopy(optimizer.state_dict())
            optimizer = optimizer_of(model, offload=offload)
            optimizer.load_state_dict(state)
            train(0, 2, model, optimizer, first=4)
            self.assertTrue(equal(model.whole(), expected))
        other = AdamW(model.named_parameters(), **OPTIONS)
        with self.assertRaisesRegex(ValueError, "expected moments in torch.float32.*another recipe"):
            other.load_state_dict(optimizer.state_dict())
        with self.assertRaisesRegex(ValueError, "moments: expected torch.float32 or torch.bfloat16"):
            AdamW(model.parameters(), moments=torch.float16)

    def test_bytes_of_a_parameter(self):
        for moments, expected in ((torch.float32, 12), (BF16, 8)):
            model = Parameters(0, BF16)
            optimizer = AdamW(model.parameters(), moments=moments)
            train(0, 1, model, optimizer)
            held = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if t.ndim)
            self.assertEqual(held, expected * sum(p.numel() for p in model.parameters()))

    # INVARIANT: a moment that changes by less than half a distance of bf16 neighbours still follows its
    # gradients; one that is rounded to the nearest does not.
    def test_no_drift(self):
        count, steps, b2 = 4096, 400, 0.999
        ratios = {}
        for kept in ("dithered", "nearest"):
            generator = torch.Generator().manual_seed(0)
            p, m, v = (torch.zeros(count) for _ in range(3))
            exact = np.zeros(count)
            for n in range(1, steps + 1):
                size = 1.0 if n <= steps // 4 else 0.01  # gradients become smaller as a model learns
                g = torch.randn(count, generator=generator) * size
                F.adamw_(p, m, v, g, None, step_factors(n, 1e-3, (0.9, b2), 1e-8, 0.0))
                exact = b2 * exact + (1 - b2) * g.double().numpy() ** 2
                rounded = v.to(BF16)
                if kept == "dithered":
                    F.dither_(rounded, v, n, 1, 0)
                v = rounded.float()
            ratios[kept] = float(np.exp(np.log(v.double().numpy() / exact).mean()))
        self.assertLess(abs(math.log(ratios["dithered"])), 0.01, ratios)
        self.assertGreater(math.log(ratios["nearest"]), 0.1, "control")


if __name__ == "__main__":
    unittest.main()
