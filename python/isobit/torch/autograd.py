"""The gradients of the operators (C11 to C14), registered with autograd. Each saves only what its backward
pass reads; logits are computed again. FORMULAS, below, has them all."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from isobit.torch.environment import backward_environment
from isobit.torch.gradients import TreeCounter

_ops = torch.ops.isobit


def _embedding_setup(ctx, inputs, output):
    _, table, *rows, packs = inputs
    ctx.save_for_backward(*rows)
    ctx.vocab, ctx.packs = table.shape[0], packs


def _embedding(ctx, dy: Tensor):
    return _ops.embedding_backward(dy.contiguous(), *ctx.saved_tensors, ctx.vocab, ctx.packs)


def _qkv_setup(ctx, inputs, output):
    qkv, positions, cosine, sine, q_norm, k_norm, *ctx.shape, ctx.packs = inputs
    # Without norms, the backward pass only undoes the rotation, which needs no input.
    ctx.save_for_backward(None if q_norm is None else qkv, positions, cosine, sine, q_norm, k_norm)


def _qkv(ctx, dq: Tensor, dk: Tensor, dv: Tensor):
    gradients = (dq.contiguous(), dk.contiguous(), dv.contiguous())
    saved = ctx.saved_tensors  # read only once, since activation checkpointing unpacks them only once
    dqkv, dq_norm, dk_norm = _ops.qkv_backward(*gradients, *saved, *ctx.shape, ctx.packs)
    return (dqkv, None, None) if saved[-1] is None else (dqkv, dq_norm, dk_norm)


def _linear_setup(ctx, inputs, output):
    x, weights, biases, ctx.packs = inputs
    ctx.rows = [w.shape[0] for w in weights]
    ctx.has_bias = bool(biases)
    ctx.save_for_backward(x, *weights)


def _needs(flags: Any) -> bool:
    return any(flags) if isinstance(flags, (list, tuple)) else bool(flags)


def _linear(ctx, dy: Tensor):
    dy = dy.contiguous()
    x, *weights = ctx.saved_tensors
    needs_x, needs_weights, needs_biases, *_ = ctx.needs_input_grad
    dx = _ops.linear_backward_input(dy, weights) if _needs(needs_x) else None
    dweights: list[Tensor | None] = [None] * len(weights)
    if _needs(needs_weights):
        dweights = _ops.linear_backward_weights(dy, x, ctx.rows, ctx.packs)
    dbiases: list[Tensor | None] = [None] * len(weights) if ctx.has_bias else []
    if _needs(needs_biases):
        dbiases = list(_ops.column_sums(dy, ctx.packs).split(ctx.rows))
    return dx, dweights, dbiases


def _linear_add_setup(ctx, inputs, output):
    x, weight, *_, ctx.packs = inputs
    ctx.save_for_backward(x, weight)


def _linear_add(ctx, dy: Tensor):
    dy = dy.contiguous()
    x, weight = ctx.saved_tensors
    needs_x, needs_weight, needs_bias, needs_residual, *_ = ctx.needs_input_grad
    dx = _ops.linear_backward_input(dy, [weight]) if needs_x else None
    dweight = None
    if needs_weight:
        (dweight,) = _ops.linear_backward_weights(dy, x, [weight.shape[0]], ctx.packs)
    dbias = _ops.column_sums(dy, ctx.packs) if needs_bias else None
    return dx, dweight, dbias, dy if needs_residual else None


def _logprobs_setup(ctx, inputs, output):
    *tensors, ctx.block_rows, ctx.packs = inputs
    state = output[2]
    ctx.mark_non_differentiable(state)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, state)


def head_backward(
    dlogprobs: Tensor | None,
    dentropies: Tensor | None,
    tensors: Sequence[Tensor | None],
    block_rows: int,
    packs: Sequence[int],
    pack_sum: Callable[[Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of logprobs' hidden (bf16) and weight (fp32), computed pack by pack.

    tensors: hidden, weight, targets, the four tensors of Sampling, and the saved state. pack_sum: called with
    each pack's weight gradient.
    """
    hidden, weight, *rest = tensors
    if dlogprobs is None:
        dlogprobs = hidden.new_zeros(hidden.shape[0], dtype=torch.float32)
    dhidden = []
    dweight = TreeCounter()
    for begin, end in itertools.pairwise(packs):
        part = [None if t is None else t[begin:end].contiguous() for t in (dlogprobs, dentropies, hidden)]
        targets, *sampling, state = [None if t is None else t[begin:end] for t in rest]
        dx, dw = _ops.logprobs_backward(*part, weight, targets, *sampling, state, block_rows)
        if pack_sum is not None:
            pack_sum(dw)
        dhidden.append(dx)
        dweight.add(dw)
    return torch.cat(dhidden), dweight.take()


def _logprobs(ctx, dlogprobs: Tensor | None, dentropies: Tensor | None, _):
    if dlogprobs is None and dentropies is None:
        return None, None
    return head_backward(dlogprobs, dentropies, ctx.saved_tensors, ctx.block_rows, ctx.packs)


class TiedGradient:
    """Carries the gradient of a tied weight from the backward pass of lm_head to that of the embedding: C12's
    chains start from lm_head's pack sums. For one logprobs and one tied_embedding."""

    def __init__(self):
        self.head: object | None = None  # the logprobs call that stored the next two
        self.dweight: Tensor | None = None  # fp32 [vocab, hidden size]
        self.head_sums: list[Tensor] = []  # for each pack, fp32 [ids, hidden size]

    def take(self) -> tuple[Tensor | None, list[Tensor]]:
        taken = self.dweight, self.head_sums
        self.head, self.dweight, self.head_sums = None, None, []
        return taken

    def begin(self, head: object) -> None:
        """Drops what an earlier backward pass of this head stored and no embedding took."""
        if self.head is not None and self.head is not head:
            raise RuntimeError("TiedGradient: expected one logprobs for each tied_embedding, got two")
        self.take()
        self.head = head


class TiedLogProbs(torch.autograd.Function):
    """logprobs, with a weight gradient that goes to the backward pass of the embedding."""

    @staticmethod
    def forward(ctx, *inputs):
        *op_inputs, unique_ids, ctx.tied = inputs
        refuse_other_gradients("logprobs", op_inputs)
        ctx.head = object()
        *tensors, ctx.block_rows, ctx.packs = op_inputs
        logprobs, entropies, state = _ops.logprobs(*op_inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, state, unique_ids)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, dlogprobs, dentropies):
        if dlogprobs is None and dentropies is None:
            return (None,) * 11
        _refuse_create_graph()
        *tensors, unique_ids = ctx.saved_tensors
        ids, tied = unique_ids.long(), ctx.tied
        tied.begin(ctx.head)
        with backward_environment((dlogprobs, dentropies)):
            dhidden, tied.dweight = head_backward(
                dlogprobs,
                dentropies,
                tensors,
                ctx.block_rows,
                ctx.packs,
                lambda dw: tied.head_sums.append(dw[ids]),
            )
        return dhidden, *[None] * 10


class TiedEmbedding(torch.autograd.Function):
    """The embedding, with a gradient that includes lm_head's."""

    @staticmethod
    def forward(ctx, table, ids, rows, packs, tied):
        ctx.save_for_backward(*rows)
        ctx.vocab, ctx.packs, ctx.tied = table.shape[0], packs, tied
        return _ops.embedding(ids, table, *rows, packs)

    @staticmethod
    def backward(ctx, dy):
        _refuse_create_graph()
        dy, rows = dy.contiguous(), ctx.saved_tensors
        dtable, head_sums = ctx.tied.take()
        if dtable is None:
            dtable = _ops.embedding_backward(dy, *rows, ctx.vocab, ctx.packs)
        else:
            with backward_environment((dy,)):
                _ops.embedding_backward_tied(dy, *rows, torch.stack(head_sums), ctx.packs, dtable)
        return dtable, None, None, None, None


def _logits_setup(ctx, inputs, output):
    pass


def _logits(ctx, dlogits: Tensor):
    raise NotImplementedError("logits have no gradient: train on logprobs (isobit.torch.logprobs, or labels)")


def _saved_gradient_setup(ctx, inputs, output):
    """For an op that computes its gradient together with its value."""
    gradients = output[1]
    ctx.mark_non_differentiable(gradients)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(gradients)


def _saved_gradient(ctx, dvalues: Tensor | None, _) -> Tensor | None:
    (gradients,) = ctx.saved_tensors
    return None if dvalues is None else gradients * dvalues


def _tree_sum_setup(ctx, inputs, output):
    ctx.count = inputs[0].shape[0]


def _tree_sum(ctx, dsum: Tensor):
    return dsum.expand(ctx.count)


def _sequence_sums_setup(ctx, inputs, output):
    x, bounds = inputs
    ctx.count = x.shape[0]
    ctx.save_for_backward(bounds)


def _sequence_sums(ctx, dsums: Tensor):
    (bounds,) = ctx.saved_tensors
    return dsums.repeat_interleave(bounds.diff(), output_size=ctx.count)


# For each op: the arguments that have a gradient, and either the op that computes it (_by_operator) or two
# functions: one that saves tensors, and the backward pass, which returns the gradients of those arguments.
FORMULAS = {
    "embedding": ({"table"}, _embedding_setup, _embedding),
    "rms_norm": ({"x", "weight"}, "rms_norm_backward"),
    "swiglu": ({"gate_up"}, "swiglu_backward"),
    "qkv": ({"qkv", "q_norm", "k_norm"}, _qkv_setup, _qkv),
    "attention": ({"q", "k", "v"}, "attention_backward"),
    "linear": ({"x", "weights", "biases"}, _linear_setup, _linear),
    "linear_add": ({"x", "weight", "bias", "residual"}, _linear_add_setup, _linear_add),
    "logits": ({"hidden", "weight"}, _logits_setup, _logits),
    "logprobs": ({"hidden", "weight"}, _logprobs_setup, _logprobs),
    "policy_loss": ({"logprobs"}, _saved_gradient_setup, _saved_gradient),
    "loss_function": ({"x"}, _saved_gradient_setup, _saved_gradient),
    "tree_sum": ({"x"}, _tree_sum_setup, _tree_sum),
    "sequence_sums": ({"x"}, _sequence_sums_setup, _sequence_sums),
}


def _schema(op: str) -> torch.FunctionSchema:
    return getattr(_ops, op).default._schema


def _by_operator(op: str, gradient_op: str) -> tuple[Callable, Callable]:
    """Returns the two functions for an op whose first result alone has a gradient. The gradient op takes the
    gradient of that result, then arguments and results of the op, by their names, tensors first."""
    names = [value.name for value in (*_schema(op).arguments, *_schema(op).returns)]
    saved = _schema(gradient_op).arguments[1:]
    indices = [names.index(argument.name) for argument in saved]
    tensors = sum("Tensor" in str(argument.type) for argument in saved)

    def setup(ctx, inputs, output):
        outputs = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(*outputs[1:])
        ctx.set_materialize_grads(len(outputs) == 1)
        values = [(*inputs, *outputs)[i] for i in indices]
        ctx.save_for_backward(*values[:tensors])
        ctx.others = values[tensors:]

    def backward(ctx, gradient: Tensor | None, *_):
        if gradient is None:
            return (None,) * len(FORMULAS[op][0])
        return getattr(_ops, gradient_op)(gradient.contiguous(), *ctx.saved_tensors, *ctx.others)

    return setup, backward


def _refuse_create_graph() -> None:
    if torch.is_grad_enabled():
        raise NotImplementedError("gradients have no gradient: expected a backward pass without create_graph")


def _formula(op: str, backward: Callable) -> Callable:
    """Returns a backward pass that refuses create_graph and returns a gradient or None for each argument."""
    has_gradient = [argument.name in FORMULAS[op][0] for argument in _schema(op).arguments]

    def formula(ctx, *upstream):
        _refuse_create_graph()
        with backward_environment(upstream):
            gradients = backward(ctx, *upstream)
        gradients = iter(gradients if isinstance(gradients, tuple) else (gradients,))
        return tuple(next(gradients) if has else None for has in has_gradient)

    return formula


def refuse_other_gradients(op: str, inputs: Sequence[Any]) -> None:
    """Raises ValueError if an argument requires a gradient that the op does not have. autograd would leave it
    None."""
    differentiable = FORMULAS[op][0]
    for argument, value in zip(_schema(op).arguments, inputs, strict=False):
        if argument.name in differentiable or not isinstance(value, Tensor) or not value.requires_grad:
            continue
        raise ValueError(
            f"isobit::{op}: {argument.name}: expected a tensor that requires no gradient, since the operator"
            " has none for it (use detach()), got one that does"
        )


def _checked(op: str, setup: Callable) -> Callable:
    def checked_setup(ctx, inputs, output):
        refuse_other_gradients(op, inputs)
        setup(ctx, inputs, output)

    return checked_setup


def register() -> None:
    for op, (_, *formula) in FORMULAS.items():
        setup, backward = formula if len(formula) == 2 else _by_operator(op, *formula)
        torch.library.register_autograd(
            f"isobit::{op}", _formula(op, backward), setup_context=_checked(op, setup)
        )
