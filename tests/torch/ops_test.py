"""The operators as PyTorch sees them: opcheck, gradients against float64 autograd of the same function,
dtypes, and errors. That their bits are the contract's is shown under tests/kernels; that they do not depend
on packs' places, on blocks or on passes, here and in training_test.py."""

import math
import unittest
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch
from support import same_bits
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from isobit import weight_digest
from isobit.torch import Batch, fakes, model_digest
from isobit.torch import functional as F
from isobit.torch_weights import digest
from isobit.weights import digest_of

BF16 = torch.bfloat16
ROWS, HIDDEN, HEADS, KV_HEADS, DIM, VOCAB = 37, 40, 4, 2, 16, 53
PACKS = [0, 20, 20, 33, 37]
SEQUENCES = [0, 7, 20, 33, 36]  # the last row is of no sequence


def random(*shape: int, dtype: torch.dtype = BF16, mean: float = 0.0) -> Tensor:
    t = torch.randn(shape) / max(shape) ** 0.25 + mean
    return t.to(dtype).requires_grad_(dtype == BF16)


def tables() -> tuple[Tensor, Tensor]:
    angles = torch.arange(64)[:, None] * 100.0 ** -torch.linspace(0, 1, DIM // 2)[None]
    return angles.cos().float(), angles.sin().float()


class Case:
    """An operator's arguments, and the same function of float64 tensors with the same values."""

    def __init__(self, op: Callable, arguments: tuple, reference: Callable[..., tuple[Tensor, ...]]):
        self.op, self.arguments, self.reference = op, arguments, reference

    def tensors(self) -> list[Tensor]:
        flat = [t for a in self.arguments for t in (a if isinstance(a, list) else [a])]
        return [t for t in flat if isinstance(t, Tensor)]


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    cosine, sine = (t[positions.long()][:, None].double() for t in tables())
    a, b = x.chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    heads = (q.view(ROWS, HEADS, DIM), *(t.view(ROWS, KV_HEADS, DIM) for t in (k, v)))
    q, k, v = (t.transpose(0, 1).repeat_interleave(HEADS // len(t.transpose(0, 1)), 0) for t in heads)
    row = torch.arange(ROWS)
    sequence = torch.bucketize(row, torch.tensor(SEQUENCES[1:]), right=True)
    seen = (sequence[:, None] == sequence[None]) & (row[:, None] >= row[None])
    seen &= row[None] > row[:, None] - (window or ROWS)
    scores = (q @ k.transpose(1, 2) / math.sqrt(DIM)).masked_fill(~seen, -math.inf)
    out = (scores.softmax(-1) @ v).transpose(0, 1).reshape(ROWS, -1)
    return out * (row < SEQUENCES[-1])[:, None]


def qkv_reference(qkv, positions, cosine, sine, q_norm, k_norm, *_):
    q, k, v = (t.reshape(ROWS, -1, DIM) for t in qkv.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], 1))
    if q_norm is not None:
        q, k = norm(q, q_norm), norm(k, k_norm)
    return rotate(q, positions).flatten(1), rotate(k, positions).flatten(1), v.flatten(1)


def logprobs_reference(hidden, weight, targets, temperature, *_):
    logits = hidden @ weight.T
    if temperature is not None:
        logits = logits / temperature[:, None]
    logs = logits.log_softmax(-1)
    return logs.gather(1, targets.long()[:, None])[:, 0], -(logs.exp() * logs).sum(-1), None


def loss_reference(logprobs, advantages, weights, old, reference, clip_low, clip_high, kl):
    value = -(advantages * logprobs)
    if old is not None:
        ratio = (logprobs - old).exp()
        value = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if reference is not None:
        x = reference - logprobs
        value = value + kl * (x.exp() - x - 1)
    return value * weights, None


def cases() -> dict[str, Case]:
    torch.manual_seed(1)
    o = torch.ops.isobit
    batch = Batch.of([torch.randint(9, (ROWS,))])  # so few ids that each has several rows
    positions = torch.randint(64, (ROWS,), dtype=torch.int32)
    qkv, q_norm, k_norm = random(ROWS, (HEADS + 2 * KV_HEADS) * DIM), random(DIM, mean=1), random(DIM, mean=1)
    q, k, v = random(ROWS, HEADS * DIM), random(ROWS, KV_HEADS * DIM), random(ROWS, KV_HEADS * DIM)
    cu_seqlens = torch.tensor(SEQUENCES, dtype=torch.int32)
    x, residual = random(ROWS, HIDDEN), random(ROWS, HIDDEN)
    weights = [random(n, HIDDEN) for n in (24, 8, 8)]
    biases = [random(n) for n in (24, 8, 8)]
    tokens = [random(ROWS, dtype=torch.float32) for _ in range(5)]
    tokens[0].requires_grad_()
    shape = (1e-6, HEADS, KV_HEADS, DIM, PACKS)
    targets = torch.randint(VOCAB, (ROWS,), dtype=torch.int32)
    temperature = torch.rand(ROWS) + 0.5
    linear = lambda x, w, b, _: (x @ torch.cat(w).T + (torch.cat(b) if b else 0),)  # noqa: E731
    return {
        "embedding": Case(
            o.embedding,
            (batch.ids, random(VOCAB, HIDDEN), batch.unique_ids, batch.starts, batch.rows_by_id, PACKS),
            lambda ids, table, *_: (table[ids.long()],)),
        "rms_norm": Case(
            o.rms_norm, (x, random(HIDDEN, mean=1), 1e-6, PACKS), lambda x, w, *_: (norm(x, w),)),
        "swiglu": Case(
            o.swiglu, (random(ROWS, 2 * HIDDEN),),
            lambda x: (torch.nn.functional.silu(x[:, :HIDDEN]) * x[:, HIDDEN:],)),
        "qkv": Case(o.qkv, (qkv, positions, *tables(), q_norm, k_norm, *shape), qkv_reference),
        "qkv without norms": Case(o.qkv, (qkv, positions, *tables(), None, None, *shape), qkv_reference),
        "attention": Case(
            o.attention, (q, k, v, cu_seqlens, SEQUENCES, DIM, 0),
            lambda q, k, v, *_: (attend(q, k, v, 0), None)),
        "attention with a window": Case(
            o.attention, (q, k, v, cu_seqlens, SEQUENCES, DIM, 5),
            lambda q, k, v, *_: (attend(q, k, v, 5), None)),
        "linear": Case(o.linear, (x, weights, [], PACKS), linear),
        "linear with biases": Case(o.linear, (x, weights, biases, PACKS), linear),
        "linear_add": Case(
            o.linear_add, (q, random(HIDDEN, HEADS * DIM), random(HIDDEN), residual, 32, PACKS),
            lambda x, w, b, residual, *_: (residual + (x @ w.T + b),)),
        "logprobs": Case(
            o.logprobs, (x, random(VOCAB, HIDDEN), targets, temperature, None, None, None, 16, PACKS),
            logprobs_reference),
        "policy_loss": Case(o.policy_loss, (*tokens[:3], None, None, 0.2, 0.3, 0.0), loss_reference),
        "clipped policy_loss": Case(o.policy_loss, (*tokens, 0.2, 0.3, 0.1), loss_reference),
        "tree_sum": Case(o.tree_sum, (tokens[0],), lambda x: (x.sum(),)),
        "sequence_sums": Case(
            o.sequence_sums, (tokens[0], torch.tensor([0, 3, 3, ROWS], dtype=torch.int32)),
            lambda x, _: (torch.stack([part.sum() for part in x.split([3, 0, ROWS - 3])]),)),
        **{
            f"loss_function {name}": Case(
                o.loss_function, (tokens[0].detach().abs().requires_grad_(), name),
                lambda x, name: (getattr(torch, name)(x), None))
            for name in ("exp", "log", "sigmoid")
        },
        "loss_function log_sigmoid": Case(
            o.loss_function, (tokens[0], "log_sigmoid"),
            lambda x, _: (torch.nn.functional.logsigmoid(x), None)),
    }  # fmt: skip


def in_float64(argument):
    if isinstance(argument, list):
        return [in_float64(item) for item in argument]
    if isinstance(argument, Tensor) and argument.is_floating_point():
        return argument.detach().double().requires_grad_(argument.requires_grad)
    return argument


def relative_error(got: Tensor, expected: Tensor) -> float:
    got, expected = got.detach(), expected.detach()
    return float((got.double() - expected).norm() / expected.norm().clamp(min=1e-30))


class ComparedWithFakes(TorchDispatchMode):
    """Calls each operator with fake tensors as well, and compares the results."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        if op.namespace == "isobit":
            self.names.add(op.name().split("::")[1])
            with FakeTensorMode() as mode:
                fake = op(*tree_map_only(Tensor, mode.from_tensor, args))
            real, fake = (
                [t if t is None else (t.shape, t.dtype, t.stride(), t.device) for t in tree_flatten(r)[0]]
                for r in (result, fake)
            )
            assert real == fake, f"{op.name()}: expected {real}, got {fake}"
        return result


class OperatorsTest(unittest.TestCase):
    def test_opcheck(self):
        checked = set()
        for name, case in cases().items():
            with self.subTest(name):
                opcheck(case.op.default, case.arguments)
            checked.add(case.op.default.name())
        x, sums = torch.randn(5, 7), torch.randn(6).double()
        state = [torch.randn(9) for _ in range(4)]
        opcheck(torch.ops.isobit.square_sums.default, (x,))
        opcheck(torch.ops.isobit.tree_sum64.default, (sums,))
        opcheck(torch.ops.isobit.weight_sums.default, (torch.randn(3, 8), 12, 5, 4))
        opcheck(torch.ops.isobit.column_sums.default, (torch.randn(37, 5).to(BF16), PACKS))
        opcheck(torch.ops.isobit.adamw.default, (*state, torch.randn(9).to(BF16), [0.1] * 8))
        opcheck(torch.ops.isobit.dither.default, (torch.zeros(9).to(BF16), state[0], 3, 1, 5))
        self.assertEqual(len(checked), 12)

    # INVARIANT: an operator's declaration says what it returns.
    def test_results_are_as_declared(self):
        operators = torch.ops.isobit
        with ComparedWithFakes() as compared:
            for case in cases().values():
                results = case.op(*case.arguments)
                results = results if isinstance(results, tuple) else (results,)
                results = [result for result in results if result.requires_grad]
                torch.autograd.backward(results, [torch.ones_like(result) for result in results])
            batch, table, tied = Batch.of([[1, 2, 3]]), random(VOCAB, HIDDEN), F.TiedGradient()
            h = F.tied_embedding(batch, table, tied)[batch.scored]
            F.logits(h, table)
            rows = (h, table, batch.targets)
            F.logprobs(*rows, packs=batch.scored_packs, batch=batch, tied=tied).logprobs.sum().backward()
            operators.square_sums(torch.randn(5, 7))
            operators.tree_sum64(torch.randn(6).double())
            operators.weight_sums(torch.randn(3, 8), 8, 0, 0)
            state = [torch.zeros(9) for _ in range(4)]
            operators.adamw(*state, None, [0.1] * 8)
            operators.dither(torch.zeros(9).to(BF16), state[0], 3, 1, 5)
        declared = {line.split(":")[0] for line in operators.operator_results().splitlines()}
        self.assertEqual(compared.names, declared)

    def test_a_wrong_declaration_is_an_error(self):
        schema = torch.ops.isobit.rms_norm_backward.default._schema
        x, weight = torch.zeros(3, 5).to(BF16), torch.zeros(5).to(BF16)
        dx, dw = fakes.fake_of(schema, "like(x), fp32(*weight.shape)")(x, x, weight, 1e-6, [0, 3])
        self.assertEqual((dx.shape, dx.dtype), (x.shape, x.dtype))
        self.assertEqual((dw.shape, dw.dtype), (weight.shape, torch.float32))
        for wrong, message in (
            ("like(x), fp32(*weight.shape", "expected a Python expression, got 'like"),
            ("", "expected a Python expression, got ''"),
            ("like(x), fp32(*w.shape)", "expected names of arguments, got w"),
            ("like(x), f32(*weight.shape)", "expected names of arguments, got f32"),
            ("like(x)", "expected 2, as in the schema, got 1"),
            ("None", "expected 2, as in the schema, got 0"),
        ):
            with self.assertRaisesRegex(ValueError, f"result of isobit::rms_norm_backward: {message}"):
                fakes.fake_of(schema, wrong)

    def test_weight_sums_are_those_of_numpy(self):
        generator = np.random.default_rng(1)
        for rows, columns in ((1, 1), (7, 1), (3, 5), (4, 8), (5, 70001), (900, 12), (3, 40000)):
            bits = generator.integers(0, 1 << 16, (rows, columns), dtype=np.uint16)
            for first_row, first_column in ((0, 0), (2, columns // 8 * 4)):
                with self.subTest(rows=rows, columns=columns, first_row=first_row):
                    block = bits[:, first_column:].copy()
                    expected = weight_digest.block_sums(block, columns, first_row, first_column)
                    values = torch.from_numpy(block).view(BF16)
                    *sums, _ = torch.ops.isobit.weight_sums(values, columns, first_row, first_column).tolist()
                    self.assertEqual([value % 2**64 for value in sums], expected.tolist())

    def test_the_digest_of_a_model_is_that_of_numpy(self):
        for dtype in (torch.float32, BF16, torch.float16):
            model = nn.Sequential(nn.Linear(12, 5), nn.Linear(5, 3, bias=False)).to(dtype)
            with mock.patch.object(digest, "block_sums", side_effect=AssertionError("NumPy")):
                by_operator = model_digest(model)
            with mock.patch.object(digest, "_has_operator", lambda: False):
                self.assertEqual(model_digest(model), by_operator)
            self.assertEqual(digest_of(dict(model.named_parameters())), by_operator)

    def test_results_and_gradients_are_near_float64(self):
        for name in cases():
            with self.subTest(name):
                case = cases()[name]  # with tensors of its own, whose gradients start from none
                exact = Case(None, tuple(in_float64(a) for a in case.arguments), None)
                expected = case.reference(*exact.arguments)
                got = case.op(*case.arguments)
                got = got if isinstance(got, tuple) else (got,)
                pairs = [(a, b) for a, b in zip(got, expected, strict=False) if b is not None]
                upstream = [torch.randn_like(a.float()).to(a.dtype) for a, _ in pairs]
                for a, b in pairs:
                    self.assertLess(relative_error(a, b), 0.01)
                for t in case.tensors():
                    if t.requires_grad:
                        t.grad_dtype = None  # whatever the operator returns
                torch.autograd.backward([a for a, _ in pairs], upstream)
                torch.autograd.backward([b for _, b in pairs], [g.double() for g in upstream])
                for t, e in zip(case.tensors(), exact.tensors(), strict=True):
                    if t.requires_grad:
                        self.assertLess(relative_error(t.grad, e.grad), 0.02, t.shape)
                        token_rows = t.dim() == 2 and len(t) == ROWS
                        self.assertEqual(t.grad.dtype, BF16 if token_rows else torch.float32)

    # Filters have no simple float64 reference; a filter that keeps all is none, and one that does not
    # differs.
    def test_filters_reach_the_rows(self):
        case = cases()["logprobs"]
        hidden, weight, targets, *_ = case.arguments

        def run(**sampling):
            return F.logprobs(hidden, weight, targets, packs=PACKS, **sampling).logprobs

        def constant(value, dtype=torch.float32):
            return torch.full((ROWS,), value, dtype=dtype)

        plain = run()
        self.assertTrue(same_bits(run(top_k=constant(0, torch.int32)), plain))
        self.assertTrue(same_bits(run(top_p=constant(1.0)), plain))
        self.assertTrue(same_bits(run(min_p=constant(0.0)), plain))
        self.assertTrue(
            torch.equal(run(top_k=constant(1, torch.int32)).isinf(), run(min_p=constant(1.0)).isinf())
        )
        self.assertFalse(same_bits(run(top_p=constant(0.5)), plain))

    # INVARIANT: the logits' blocks change no bit.
    def test_block_rows_change_no_bit(self):
        results = []
        for block_rows in (16, 32, 1024):
            case = cases()["logprobs"]
            hidden, weight, targets, *_ = case.arguments
            weight.grad_dtype = torch.float32
            logprobs, entropies = F.logprobs(hidden, weight, targets, packs=PACKS, block_rows=block_rows)
            (logprobs.sum() + entropies.sum()).backward()
            results.append((logprobs, entropies, hidden.grad, weight.grad))
        for other in results[1:]:
            self.assertTrue(all(map(same_bits, other, results[0])))

    def test_packs_change_gradients_of_parameters(self):
        for name in ("embedding", "rms_norm", "qkv", "linear with biases", "linear_add", "logprobs"):
            with self.subTest(name):
                whole = self.parameter_gradients(name, PACKS)
                self.assertTrue(all(map(same_bits, self.parameter_gradients(name, PACKS), whole)))
                other = self.parameter_gradients(name, [0, ROWS])
                self.assertFalse(any(map(same_bits, other, whole)), "control: other packs")

    def parameter_gradients(self, name: str, packs: list[int]) -> list[Tensor]:
        case = cases()[name]
        outputs = case.op(*case.arguments[:-1], packs)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        parameters = [t for t in case.tensors() if t.requires_grad and not (t.dim() == 2 and len(t) == ROWS)]
        for parameter in parameters:
            parameter.grad_dtype = torch.float32
        torch.manual_seed(3)
        kept = [t for t in outputs if t.requires_grad]
        # Of so different sizes that every order of a sum rounds in another way.
        sizes = [torch.exp2(torch.randint(-14, 15, t.shape)) for t in kept]
        torch.autograd.backward(
            kept, [(torch.randn(t.shape) * s).to(t.dtype) for t, s in zip(kept, sizes, strict=True)]
        )
        return [parameter.grad for parameter in parameters]

    def test_no_rows(self):
        batch = Batch.of([], packs=[0, 0])
        weight, bias, table = random(VOCAB, HIDDEN), random(VOCAB), random(VOCAB, HIDDEN)
        norm_weight = random(HIDDEN, mean=1)
        parameters = [weight, bias, norm_weight, table]
        for parameter in parameters:
            parameter.grad_dtype = torch.float32
        h = F.rms_norm(F.embedding(batch, table), norm_weight, 1e-6, batch.packs)
        scores = F.logprobs(h[batch.scored], weight, batch.targets, packs=batch.scored_packs)
        (scores.logprobs.sum() + F.linear(h, [weight], [bias], batch.packs).float().sum()).backward()
        for parameter in parameters:
            self.assertTrue(same_bits(parameter.grad, torch.zeros(parameter.shape)))

    def test_square_sums_of_no_columns(self):
        self.assertTrue(same_bits(F.square_sums(torch.ones(4, 0)), torch.zeros(4, dtype=torch.float64)))

    # INVARIANT: no gradient of a tied weight is lost.
    def test_a_tied_gradient_has_one_head(self):
        batch, table, tied = Batch.of([[1, 2, 3]]), random(VOCAB, HIDDEN), F.TiedGradient()
        table.grad_dtype = torch.float32
        h = F.tied_embedding(batch, table, tied)
        rows = (h[batch.scored], table, batch.targets)
        heads = [F.logprobs(*rows, packs=batch.scored_packs, batch=batch, tied=tied) for _ in range(2)]
        with self.assertRaisesRegex(RuntimeError, "expected one logprobs for each tied_embedding, got two"):
            (heads[0].logprobs.sum() + heads[1].logprobs.sum()).backward()

    def test_logits_have_no_gradient(self):
        h, weight = random(3, HIDDEN), random(VOCAB, HIDDEN)
        logits = F.logits(h, weight)
        self.assertLess(relative_error(logits.detach(), (h.double() @ weight.double().T).detach()), 1e-3)
        with self.assertRaisesRegex(NotImplementedError, "logits have no gradient"):
            logits.sum().backward()


class ErrorsTest(unittest.TestCase):
    def expect(self, message: str, op: Callable, *arguments) -> None:
        with self.assertRaisesRegex(RuntimeError, message):
            op(*arguments)

    def test_errors_name_what_was_expected_and_what_came(self):
        x, w = torch.zeros(8, 32, dtype=BF16), torch.zeros(4, 32, dtype=BF16)
        self.expect(
            r"isobit::linear: x: expected bfloat16 \[8, 32\] on cpu, got float32 \[8, 32\] on cpu",
            F.linear, x.float(), [w], [], [0, 8])  # fmt: skip
        self.expect(
            r"linear: weights: expected bfloat16 \[4, 32\] on cpu, got bfloat16 \[4, 16\] on cpu",
            F.linear, x, [w, w[:, :16].contiguous()], [], [0, 8])  # fmt: skip
        self.expect(
            r"linear: x: .* got not contiguous bfloat16 \[8, 32\] on cpu",
            F.linear, torch.zeros(32, 8, dtype=BF16).T, [w], [], [0, 8])  # fmt: skip
        self.expect("linear: weights: expected 1 to 3 matrices, got 4", F.linear, x, [w] * 4, [], [0, 8])
        self.expect("linear: biases: expected none or 1, got 2", F.linear, x, [w], [w[0], w[0]], [0, 8])
        self.expect("linear_add: unit: expected at least 1", F.linear_add, x, w, None, x, 0, [0, 8])
        self.expect("swiglu: gate_up: expected an even number of columns, got 31", F.swiglu, x[:, 1:])
        self.expect("tree_sum: x: expected 1 dimension, got 2", F.tree_sum, x)
        self.expect("attention: q: expected 2 dimensions, got 1", F.attention, x[0], x, x,
                    torch.tensor([0, 8], dtype=torch.int32), [0, 8], 16)  # fmt: skip

    def test_packs(self):
        x, w = torch.zeros(8, 32, dtype=BF16), torch.zeros(32, dtype=BF16)
        for packs in ([], [0], [0, 7], [1, 8], [0, 4, 2, 6, 8], [0, 1, 2, 8], [0] * 128 + [8]):
            self.expect("packs: expected ascending bounds of 1, 2, 4, .. 64 packs, from 0 to 8", F.rms_norm,
                        x, w, 1e-6, packs)  # fmt: skip

    def test_indices_out_of_range(self):
        table = torch.zeros(5, 32, dtype=BF16)
        batch = Batch.of([[0, 5]])
        self.expect("ids: expected values from 0 to 4, got 5 at 1", F.embedding, batch, table)
        for bad in (-1, 5):
            targets = torch.tensor([0, bad], dtype=torch.int32)
            with self.assertRaisesRegex(
                RuntimeError, f"targets: expected values from 0 to 4, got {bad} at 1"
            ):
                F.logprobs(table[:2], table, targets, packs=[0, 2])

    # INVARIANT: NaN is no filter that keeps all.
    def test_sampling_out_of_range(self):
        table, targets = torch.zeros(2, 32, dtype=BF16), torch.zeros(2, dtype=torch.int32)
        for name, bad in (
            ("temperature", (math.nan, -1.0, math.inf)),
            ("top_p", (math.nan, 0.0, 1.5)),
            ("min_p", (math.nan, -0.1, 2.0)),
            ("top_k", (-2,)),
        ):
            for value in bad:
                values = torch.tensor([1, value], dtype=torch.int32 if name == "top_k" else torch.float32)
                with self.assertRaisesRegex(RuntimeError, f"logprobs: {name}: expected values .* at 1"):
                    F.logprobs(table, table, targets, packs=[0, 2], **{name: values})

    def test_kl_without_a_reference(self):
        values = torch.zeros(3)
        with self.assertRaisesRegex(ValueError, "kl: expected reference_logprobs with kl 0.1, got none"):
            F.policy_loss(values, values, values, kl=0.1)


if __name__ == "__main__":
    unittest.main()
