"""clip_grad_norm_ and AdamW against C15 written out, on 1, 2 and 4 ranks, and after a restart."""

import io
import math
import pickle
import tempfile
import unittest
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from support import run_ranks, same_bits
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from isobit.torch import AdamW, clip_grad_norm_

# Rows that no number of ranks divides, fewer rows than ranks, vectors, columns that are not a multiple of 4.
SHAPES = {"embedding": (37, 24), "norm": (24,), "weight": (3, 5), "last": (129, 7)}
OPTIONS = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {name: torch.exp2(torch.randint(-6, 7, s, generator=generator)) for name, s in SHAPES.items()}
    return {name: torch.randn(s, generator=generator) * sizes[name] for name, s in SHAPES.items()}


class Parameters(nn.Module):
    """Parameters with the values of seed 0: whole, or sharded over all ranks."""

    def __init__(self, world: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.mesh = init_device_mesh("cpu", (world,)) if world > 0 else None
        for name, value in values(0).items():
            self.register_parameter(name, nn.Parameter(self.placed(value.to(dtype))))

    def placed(self, t: Tensor) -> Tensor:
        return t.clone() if self.mesh is None else distribute_tensor(t.clone(), self.mesh, [Shard(0)])

    def set_gradients(self, seed: int) -> None:
        for name, value in values(seed).items():
            parameter = self.get_parameter(name)
            parameter.grad_dtype = torch.float32
            parameter.grad = self.placed(value)

    def whole(self) -> dict[str, Tensor]:
        full = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in self.named_parameters()}
        return {name: t.detach().clone() for name, t in full.items()}


def norm_by_definition(gradients: list[Tensor]) -> float:
    """C15 in numpy, one row at a time. An exact fma of float64: products of fp32 values are exact there."""

    def tree(x: np.ndarray) -> np.ndarray:
        x = np.concatenate([x, np.zeros(2 ** math.ceil(math.log2(max(len(x), 1))) - len(x))])
        while len(x) > 1:
            x = x[::2] + x[1::2]
        return x[0] if len(x) else np.float64(0)

    total = None
    for gradient in gradients:
        rows = gradient.numpy().astype(np.float64).reshape(len(gradient), -1)
        sums = []
        for row in rows:
            row = np.concatenate([row, np.zeros(-len(row) % 4)]).reshape(-1, 4)
            leaf = row[:, 0] * row[:, 0]
            for i in (1, 2, 3):
                leaf = row[:, i] * row[:, i] + leaf
            sums.append(tree(leaf))
        parameter = tree(np.array(sums))
        total = parameter if total is None else total + parameter
    return math.sqrt(total)


def adamw_by_definition(steps: int) -> dict[str, Tensor]:
    """C15's formulas in numpy's float32, for the gradients of seeds 1, 2, ..."""
    f = np.float32
    b1, b2 = OPTIONS["betas"]
    lr, eps, decay = OPTIONS["lr"], OPTIONS["eps"], OPTIONS["weight_decay"]
    p = {name: value.numpy().copy() for name, value in values(0).items()}
    m = {name: np.zeros_like(value) for name, value in p.items()}
    v = {name: np.zeros_like(value) for name, value in p.items()}
    b1n, b2n = 1.0, 1.0
    for n in range(1, steps + 1):
        b1n, b2n = b1n * b1, b2n * b2
        for name, gradient in values(n).items():
            g = gradient.numpy()
            p[name] = p[name] * f(1 - lr * decay)
            m[name] = f(b1) * m[name] + f(1 - b1) * g
            v[name] = f(b2) * v[name] + f(1 - b2) * (g * g)
            root = np.sqrt(v[name]) * f(1 / math.sqrt(1 - b2n)) + f(eps)
            p[name] = p[name] - f(lr / (1 - b1n)) * (m[name] / root)
    return {name: torch.from_numpy(value) for name, value in p.items()}


def train(world: int, steps: int, model: Parameters, optimizer: torch.optim.Optimizer, first: int = 1):
    norms = []
    for seed in range(first, first + steps):
        model.set_gradients(seed)
        norms.append(clip_grad_norm_(model.named_parameters(), 1.0))
        optimizer.step()
    return norms


def train_sharded(rank: int, world: int, steps: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = Parameters(world)
    optimizer = AdamW(model.parameters(), **OPTIONS)
    return train(world, steps, model, optimizer), model.whole()


def save(rank: int, world: int, folder: str) -> None:
    model = Parameters(world)
    optimizer = AdamW(model.parameters(), **OPTIONS)
    train(world, 3, model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)},
             checkpoint_id=folder)  # fmt: skip


def resume(rank: int, world: int, folder: str) -> dict[str, Tensor]:
    model = Parameters(world)
    optimizer = AdamW(model.parameters(), **OPTIONS)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    train(world, 2, model, optimizer, first=4)
    return model.whole()


def step_with_nan_on_last_rank(rank: int, world: int) -> tuple[str, bool]:
    """What a step says whose only NaN lies in the last rank's shard, and whether it left all unchanged."""
    model = Parameters(world)
    optimizer = AdamW(model.named_parameters(), **OPTIONS)
    train(world, 1, model, optimizer)
    before, moments = model.whole(), shards_of(optimizer)
    model.set_gradients(2)
    gradient = model.get_parameter("embedding").grad.to_local()
    if rank == world - 1:
        gradient[-1, 3] = math.nan
    try:
        optimizer.step()
        message = "no error"
    except FloatingPointError as error:
        message = str(error)
    unchanged = equal(model.whole(), before) and all(map(same_bits, shards_of(optimizer), moments))
    return message, unchanged


def shards_of(optimizer: AdamW) -> list[Tensor]:
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    return [
        (t.to_local() if isinstance(t, DTensor) else t).clone() for state in states for t in state.values()
    ]


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(same_bits(a[name], b[name]) for name in a)


class OptimizerTest(unittest.TestCase):
    def test_norm_is_that_of_the_definition(self):
        model = Parameters(0)
        model.set_gradients(1)
        before = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = clip_grad_norm_(model.parameters(), math.inf)
        self.assertEqual(float(norm), norm_by_definition(list(before.values())))
        self.assertTrue(equal({name: p.grad for name, p in model.named_parameters()}, before))
        clip_grad_norm_(model.parameters(), 2.5)
        factor = torch.tensor(2.5 / (float(norm) + float.fromhex("0x1.0c6f7a0b5ed8dp-20"))).float()
        for name, parameter in model.named_parameters():
            self.assertTrue(same_bits(parameter.grad, before[name] * factor))

    def test_step_is_that_of_the_definition(self):
        model = Parameters(0)
        optimizer = AdamW(model.parameters(), **OPTIONS)
        for seed in (1, 2, 3, 4):
            model.set_gradients(seed)
            optimizer.step()
        self.assertTrue(equal(model.whole(), adamw_by_definition(4)))

    def test_torchs_adamw_differs(self):
        ours, theirs = Parameters(0), Parameters(0)
        optimizers = [AdamW(ours.parameters(), **OPTIONS), torch.optim.AdamW(theirs.parameters(), **OPTIONS)]
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            train(0, 5, model, optimizer)
        self.assertFalse(equal(ours.whole(), theirs.whole()), "control")
        for name, value in theirs.whole().items():
            torch.testing.assert_close(ours.whole()[name], value, rtol=1e-4, atol=1e-5)

    # INVARIANT: norm and parameters do not depend on the number of ranks.
    def test_any_number_of_ranks(self):
        model = Parameters(0)
        norms = train(0, 5, model, AdamW(model.parameters(), **OPTIONS))
        for world in (1, 2, 4):
            for sharded_norms, parameters in run_ranks(world, train_sharded, 5):
                self.assertTrue(all(map(same_bits, sharded_norms, norms)), world)
                self.assertTrue(equal(parameters, model.whole()), world)

    # INVARIANT: a run that was stopped and goes on with another number of ranks has the bits of one that was
    # not.
    def test_resumed_on_other_ranks(self):
        whole = Parameters(0)
        train(0, 5, whole, AdamW(whole.parameters(), **OPTIONS))
        for saved_on, resumed_on in ((2, 4), (4, 1)):
            with tempfile.TemporaryDirectory() as folder:
                run_ranks(saved_on, save, folder)
                for parameters in run_ranks(resumed_on, resume, folder):
                    self.assertTrue(equal(parameters, whole.whole()), (saved_on, resumed_on))

    def test_bf16_parameters_have_masters(self):
        model, masters = Parameters(0, torch.bfloat16), Parameters(0, torch.bfloat16)
        masters.float()
        optimizers = [AdamW(m.parameters(), **OPTIONS) for m in (model, masters)]
        for step in (1, 2, 3):
            for m, optimizer in zip((model, masters), optimizers, strict=True):
                train(0, 1, m, optimizer, first=step)
            if step == 2:  # the same, stopped and started again from torch's form of the state
                saved = io.BytesIO()
                torch.save(optimizers[0].state_dict(), saved)
                saved.seek(0)
                state = torch.load(saved, weights_only=True)
                optimizers[0] = AdamW(model.parameters(), **OPTIONS)
                optimizers[0].load_state_dict(state)
        for name, master in masters.named_parameters():
            parameter = model.get_parameter(name)
            self.assertTrue(same_bits(optimizers[0].state[parameter]["master"], master.detach()))
            self.assertTrue(same_bits(parameter.detach(), master.detach().to(torch.bfloat16)))

    def test_nan_names_the_parameter_and_changes_nothing(self):
        for bad in (math.nan, math.inf):
            model = Parameters(0)
            model.set_gradients(1)
            model.get_parameter("weight").grad[2, 1] = bad
            before = {name: p.grad.clone() for name, p in model.named_parameters()}
            with self.assertRaisesRegex(FloatingPointError, "the gradient of weight holds NaN or infinity"):
                clip_grad_norm_(model.named_parameters(), 1.0)
            self.assertTrue(equal({name: p.grad for name, p in model.named_parameters()}, before))
            self.assertFalse(math.isfinite(clip_grad_norm_(model.parameters(), 1.0, check_finite=False)))

    # INVARIANT: a norm of NaN is not a reason to leave the other gradients as they are.
    def test_a_norm_of_nan_reaches_every_gradient(self):
        model = Parameters(0)
        model.set_gradients(1)
        model.get_parameter("weight").grad[2, 1] = math.nan
        clip_grad_norm_(model.parameters(), 1.0, check_finite=False)
        self.assertTrue(all(p.grad.isnan().all() for p in model.parameters()))

    # INVARIANT: AdamW refuses a gradient with NaN or infinity on its own, on all ranks, before any update.
    def test_step_refuses_what_is_not_finite(self):
        for bad in (math.nan, math.inf, -math.inf):
            for named in (True, False):
                model = Parameters(0, torch.bfloat16)
                optimizer = AdamW(model.named_parameters() if named else model.parameters(), **OPTIONS)
                model.set_gradients(1)
                model.get_parameter("embedding").grad = None
                gradient = model.get_parameter("last").grad
                gradient[128, 6] = bad
                before = model.whole()
                name = "last" if named else "parameter 3"
                with self.assertRaisesRegex(
                    FloatingPointError, f"^the gradient of {name} holds NaN or infinity"
                ):
                    optimizer.step()
                self.assertTrue(equal(model.whole(), before))
                self.assertEqual(len(optimizer.state), 0)
                gradient[128, 6] = 0.5
                optimizer.step()
                self.assertFalse(equal(model.whole(), before), "control")

    def test_all_ranks_refuse_what_one_holds(self):
        expected = ("the gradient of embedding holds NaN or infinity", True)
        self.assertEqual(run_ranks(2, step_with_nan_on_last_rank), [expected] * 2)

    def test_refuses(self):
        model = Parameters(0)
        for wrong, message in (
            ({"lr": -1.0}, "lr: expected at least 0"),
            ({"lr": math.inf}, "lr: expected at least 0 and finite"),
            ({"betas": (0.9,)}, "betas: expected two numbers"),
            ({"betas": (0.9, 1.0)}, "betas: expected two numbers between 0 and 1"),
            ({"weight_decay": math.nan}, "weight_decay: expected at least 0"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                AdamW(model.parameters(), **wrong)
            optimizer = pickle.loads(pickle.dumps(AdamW([model.get_parameter("norm")])))
            with self.assertRaisesRegex(ValueError, message):
                optimizer.add_param_group({"params": [model.get_parameter("last")], **wrong})
            optimizer.add_param_group({"params": [model.get_parameter("last")], "lr": 0.5})

    # INVARIANT: numbers that a scheduler or a saved state brings are checked as those of the constructor.
    def test_refuses_numbers_set_later(self):
        for change, message in (
            ({"lr": math.nan}, r"param_groups\[0\]: lr: expected at least 0 and finite, got nan"),
            ({"lr": torch.tensor(math.inf)}, "lr: expected at least 0 and finite"),
            ({"lr": -0.1}, "lr: expected at least 0"),
            ({"lr": 1e38}, "expected numbers whose factors float32 can hold"),
            ({"betas": (1.5, 0.9)}, "betas: expected two numbers between 0 and 1"),
            ({"eps": -1.0}, "eps: expected at least 0"),
            ({"weight_decay": math.nan}, "weight_decay: expected at least 0"),
            ({"maximize": True}, "maximize: expected False, got True: that is another optimizer"),
            ({"amsgrad": True}, "amsgrad: expected False"),
            ({"decoupled_weight_decay": False}, "decoupled_weight_decay: expected True"),
        ):
            model = Parameters(0, torch.bfloat16)
            optimizer = AdamW(model.parameters(), **OPTIONS)
            model.set_gradients(1)
            state, before = optimizer.state_dict(), model.whole()
            optimizer.param_groups[0].update(change)
            with self.assertRaisesRegex(ValueError, message):
                optimizer.step()
            self.assertTrue(equal(model.whole(), before))
            state["param_groups"][0].update(change)
            other = AdamW(model.parameters(), **OPTIONS)
            with self.assertRaisesRegex(ValueError, message):
                other.load_state_dict(state)
            self.assertEqual(other.param_groups[0]["lr"], OPTIONS["lr"])
            with self.assertRaisesRegex(ValueError, message.removeprefix(r"param_groups\[0\]: ")):
                AdamW([{"params": list(model.parameters()), **change}])

    # INVARIANT: a gradient of another dtype leaves all parameters as they were.
    def test_step_refuses_rounded_gradients(self):
        model, rounded = Parameters(0), nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        optimizer = AdamW([*model.parameters(), rounded])
        model.set_gradients(1)
        rounded.grad = torch.zeros(3, dtype=torch.bfloat16)
        before = model.whole()
        with self.assertRaisesRegex(RuntimeError, "parameter 4: .* got torch.bfloat16 with torch.bfloat16"):
            optimizer.step()
        self.assertTrue(equal(model.whole(), before))

    def test_clipping_refuses(self):
        model = Parameters(0)
        model.set_gradients(1)
        for wrong in (0.0, -1.0, math.nan):
            with self.assertRaisesRegex(ValueError, f"max_norm: expected above 0, got {wrong}"):
                clip_grad_norm_(model.parameters(), wrong)
        with self.assertRaisesRegex(ValueError, "expected each once"):
            clip_grad_norm_([*model.parameters(), *model.parameters()], 1.0)

    def test_clipping_takes_a_single_parameter(self):
        model = Parameters(0)
        model.set_gradients(1)
        parameter = model.get_parameter("last")
        expected = norm_by_definition([parameter.grad])
        self.assertEqual(float(clip_grad_norm_(parameter, 1.0)), expected)
        self.assertLess(float(parameter.grad.norm()), 1.001)

    # Whatever torch's default dtype is: bfloat16 cannot count beyond 256.
    def test_steps_are_counted_in_fp32(self):
        model = Parameters(0)
        model.set_gradients(1)
        optimizer = AdamW(model.parameters())
        torch.set_default_dtype(torch.bfloat16)
        try:
            optimizer.step()
        finally:
            torch.set_default_dtype(torch.float32)
        self.assertEqual({s["step"].dtype for s in optimizer.state.values()}, {torch.float32})

    # torch.optim.AdamW's state of a bf16 parameter has no master.
    def test_goes_on_from_torchs_state(self):
        models = [Parameters(0, torch.bfloat16) for _ in range(2)]
        theirs = torch.optim.AdamW(models[0].parameters(), **OPTIONS)
        for parameter in models[0].parameters():
            parameter.grad = torch.zeros_like(parameter)
        theirs.step()
        models[1].load_state_dict(models[0].state_dict())
        optimizer = AdamW(models[1].parameters(), **OPTIONS)
        optimizer.load_state_dict(theirs.state_dict())
        models[1].set_gradients(1)
        optimizer.step()
        for parameter in models[1].parameters():
            state = optimizer.state[parameter]
            self.assertEqual(int(state["step"]), 2)
            self.assertTrue(same_bits(state["master"].to(torch.bfloat16), parameter.detach()))

    def test_closure(self):
        model = Parameters(0)

        def closure() -> float:
            model.set_gradients(1)
            return 1.5

        step: Callable = AdamW(model.parameters(), **OPTIONS).step
        self.assertEqual(step(closure), 1.5)


if __name__ == "__main__":
    unittest.main()
