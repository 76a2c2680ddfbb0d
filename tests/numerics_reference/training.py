"""C10 and C15 of docs/NUMERICS.md: one optimizer step of a model, from the passes over whole sequences."""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from numerics_reference import log_prob
from numerics_reference.arithmetic import (
    F32,
    INFINITY,
    LOG2E,
    bf16,
    chain,
    fma,
    leaf_bounds,
    log,
    padded_tree,
    rms_norm,
    rotate,
    swiglu,
)
from numerics_reference.checkpoint import Config
from numerics_reference.forward import Model, attend_head, cacheable, output_of
from numerics_reference.gradients import (
    Attention,
    attention_gradient,
    column_sum,
    input_gradient,
    logit_gradient,
    rms_norm_gradient,
    rotate_gradient,
    swiglu_gradient,
    weight_gradient,
)
from numerics_reference.noise import philox
from numerics_reference.sampling import Parameters, kept


@dataclass(frozen=True)
class Sequence:
    """Tokens, of which those from prompt_length on are scored."""

    tokens: list[int]
    prompt_length: int = 1
    sampling: Parameters = field(default_factory=Parameters)


# From a sequence's index in the batch and its logprobs to the gradients of logprobs and entropies.
Loss = Callable[[int, np.ndarray], tuple[np.ndarray, np.ndarray]]


# ---- C10


def packs_of(lengths: list[int], pack_tokens: int) -> list[list[int]]:
    """The indices of each pack's sequences."""
    packs: list[list[int]] = []
    for index, length in enumerate(lengths):
        if packs and sum(lengths[i] for i in packs[-1]) + length <= pack_tokens:
            packs[-1].append(index)
        else:
            packs.append([index])
    return packs


def gradients(model: "Training", batch: list[Sequence], pack_tokens: int, lanes: int, loss: Loss) -> dict:
    """The gradient of every parameter, fp32."""
    packs = packs_of([len(sequence.tokens) for sequence in batch], pack_tokens)
    sums = [model.pack_sums([(i, batch[i]) for i in pack], loss) for pack in packs]
    total = {}
    for name, parameter in model.parameters.items():
        pack_sums = [pack[name] for pack in sums]
        pack_sums += [np.zeros_like(parameter)] * (-len(packs) % lanes)
        slots = [
            padded_tree(np.stack(pack_sums[slot : slot + lanes], -1))
            for slot in range(0, len(pack_sums), lanes)
        ]
        total[name] = chain(slots)
    return total


# ---- C9 forwards, keeping what C9 backwards needs


@dataclass
class Layer:
    """What one sequence leaves in a layer. Heads are [rows, heads, d]."""

    residual: np.ndarray  # its input
    h: np.ndarray = None  # after input_layernorm
    q_raw: np.ndarray = None  # before norm and rotation
    k_raw: np.ndarray = None
    attention: Attention = None
    middle: np.ndarray = None  # the residual between attention and MLP
    h2: np.ndarray = None  # after post_attention_layernorm
    gate: np.ndarray = None
    up: np.ndarray = None
    s: np.ndarray = None


@dataclass
class Saved:
    tokens: list[int]
    layers: list[Layer] = field(default_factory=list)
    last: np.ndarray = None  # the last residual
    h: np.ndarray = None  # model.norm of it, scored rows
    dlogits: np.ndarray = None


class Training:
    """A model's passes. parameters: name -> bf16 values, a tied weight once."""

    def __init__(self, config: Config, parameters: dict, positions: int):
        self.config, self.parameters = config, parameters
        self.ops = Model(config, parameters, positions)
        self.head = "model.embed_tokens.weight" if config.tied else "lm_head.weight"

    def forward(self, sequence: Sequence) -> Saved:
        c, p = self.config, self.parameters
        saved = Saved(sequence.tokens)
        residual = p["model.embed_tokens.weight"][sequence.tokens]
        for index in range(c.layers):
            name = f"model.layers.{index}."
            layer = Layer(residual)
            layer.h = rms_norm(residual, p[name + "input_layernorm.weight"], c.eps)
            layer.attention = self.attend(layer, index, name + "self_attn.")
            o = layer.attention.o.reshape(len(residual), -1)
            bounds = leaf_bounds(o.shape[1], c.heads // c.kv_heads * c.head_dim)
            layer.middle = self.add_residual(residual, o, name + "self_attn.o_proj", bounds)
            layer.h2 = rms_norm(layer.middle, p[name + "post_attention_layernorm.weight"], c.eps)
            layer.gate, layer.up = (
                self.ops.linear(layer.h2, f"{name}mlp.{part}_proj") for part in ("gate", "up")
            )
            layer.s = swiglu(layer.gate, layer.up)
            residual = self.add_residual(
                layer.middle, layer.s, name + "mlp.down_proj", leaf_bounds(c.intermediate)
            )
            saved.layers.append(layer)
        saved.last = residual
        return saved

    def attend(self, layer: Layer, index: int, name: str) -> Attention:
        c, p, rows = self.config, self.parameters, len(layer.h)
        layer.q_raw, layer.k_raw, v = (
            self.ops.linear(layer.h, f"{name}{part}_proj").reshape(rows, -1, c.head_dim) for part in "qkv"
        )
        q, k = layer.q_raw, layer.k_raw
        if c.qk_norm:
            q = rms_norm(q, p[name + "q_norm.weight"], c.eps)
            k = rms_norm(k, p[name + "k_norm.weight"], c.eps)
        cos, sin = (x[:rows, None] for x in (self.ops.cos, self.ops.sin))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = cacheable(k, v)
        group = c.heads // c.kv_heads
        heads = [
            attend_head(q[:, i], k[:, i // group], v[:, i // group], c.windows[index], c.scale)
            for i in range(c.heads)
        ]
        outputs = np.stack([output_of(head) for head in heads], 1)
        log_sums = np.stack([fma(log(head.sum), LOG2E, head.max) for head in heads], 1)
        return Attention(q, k, v, outputs, log_sums)

    def add_residual(self, residual, x, name, bounds) -> np.ndarray:
        self.ops.residual = residual
        self.ops.add_residual(x, name, bounds)
        return self.ops.residual

    def score(self, saved: Saved, sequence: Sequence, index: int, loss: Loss) -> None:
        """Logits of the scored rows, and their gradient."""
        rows = slice(sequence.prompt_length - 1, len(sequence.tokens) - 1)
        targets = np.array(sequence.tokens[sequence.prompt_length :], np.int64)
        saved.h = rms_norm(saved.last, self.parameters["model.norm.weight"], self.config.eps)[rows]
        logits = self.ops.sum_leaves(saved.h, self.parameters[self.head])
        temperature = sequence.sampling.temperature
        z = np.array([filtered(row, sequence.sampling) for row in logits]).reshape(logits.shape)
        row = log_prob.sum_rows(z)
        saved.logprobs = log_prob.log_prob(z[np.arange(len(z)), targets], row)
        saved.entropies = log_prob.entropy(row)
        g, h = loss(index, saved.logprobs)
        saved.dlogits = logit_gradient(z, targets, g, h, temperature)

    # ---- C9 backwards

    def pack_sums(self, pack: list[tuple[int, Sequence]], loss: Loss) -> dict:
        """The pack sum of every parameter."""
        passes = []
        for index, sequence in pack:
            saved = self.forward(sequence)
            self.score(saved, sequence, index, loss)
            passes.append(saved)
        sums = {}
        w = self.parameters[self.head]
        dlogits = np.concatenate([saved.dlogits for saved in passes])
        head_sum = weight_gradient(dlogits, np.concatenate([saved.h for saved in passes]))
        dresiduals = []
        terms = []
        for (_, sequence), saved in zip(pack, passes, strict=True):
            dh = np.zeros_like(saved.last)
            dh[sequence.prompt_length - 1 : -1] = input_gradient(saved.dlogits, w)
            dx, term = self.norm_gradient("model.norm.weight", saved.last, dh)
            dresiduals.append(dx)
            terms.append(term)
        sums["model.norm.weight"] = column_sum(np.concatenate(terms))
        for index in reversed(range(self.config.layers)):
            layers = [saved.layers[index] for saved in passes]
            dresiduals = self.layer_gradient(index, layers, dresiduals, sums)
        table = np.zeros_like(self.parameters["model.embed_tokens.weight"])
        if self.config.tied:
            table = head_sum
        else:
            sums["lm_head.weight"] = head_sum
        for saved, dresidual in zip(passes, dresiduals, strict=True):
            for token, row in zip(saved.tokens, dresidual, strict=True):
                table[token] = table[token] + row
        sums["model.embed_tokens.weight"] = table
        return sums

    def norm_gradient(self, name: str, x: np.ndarray, dy: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return rms_norm_gradient(x, self.parameters[name], dy, self.config.eps)

    def layer_gradient(self, index: int, layers: list[Layer], dresiduals: list, sums: dict) -> list:
        """The gradients of a layer's input, one a sequence; adds its parameters' pack sums."""
        c, name = self.config, f"model.layers.{index}."
        bounds = np.cumsum([0] + [len(layer.h) for layer in layers])

        def rows(field_name: str) -> np.ndarray:
            return np.concatenate([getattr(layer, field_name) for layer in layers])

        dy = np.concatenate(dresiduals)
        ds = self.linear_gradient([name + "mlp.down_proj"], rows("s"), dy, sums)
        dgate, dup = swiglu_gradient(rows("gate"), rows("up"), ds)
        parts = [name + "mlp.gate_proj", name + "mlp.up_proj"]
        dh = self.linear_gradient(parts, rows("h2"), np.concatenate([dgate, dup], -1), sums)
        dx, terms = self.norm_gradient(name + "post_attention_layernorm.weight", rows("middle"), dh)
        sums[name + "post_attention_layernorm.weight"] = column_sum(terms)
        dy = bf16(dy + dx)

        o = np.concatenate([layer.attention.o.reshape(len(layer.h), -1) for layer in layers])
        do = self.linear_gradient([name + "self_attn.o_proj"], o, dy, sums)
        dqkv = []
        for layer, begin, end in zip(layers, bounds[:-1], bounds[1:], strict=True):
            heads = do[begin:end].reshape(layer.attention.o.shape)
            dqkv.append(attention_gradient(layer.attention, heads, c.windows[index], c.scale))
        dq = self.heads_gradient("q", index, layers, [d[0] for d in dqkv], sums)
        dk = self.heads_gradient("k", index, layers, [d[1] for d in dqkv], sums)
        dv = np.concatenate([d[2] for d in dqkv])
        together = np.concatenate([d.reshape(len(dy), -1) for d in (dq, dk, dv)], -1)
        parts = [f"{name}self_attn.{part}_proj" for part in "qkv"]
        dh = self.linear_gradient(parts, rows("h"), together, sums)
        dx, terms = self.norm_gradient(name + "input_layernorm.weight", rows("residual"), dh)
        sums[name + "input_layernorm.weight"] = column_sum(terms)
        dy = bf16(dy + dx)
        return [dy[begin:end] for begin, end in itertools.pairwise(bounds)]

    def linear_gradient(self, names: list[str], x: np.ndarray, dy: np.ndarray, sums: dict) -> np.ndarray:
        """dx of matrices one below the other; adds their pack sums and those of their biases."""
        column = 0
        for name in names:
            own = dy[:, column : column + len(self.parameters[name + ".weight"])]
            column += own.shape[1]
            sums[name + ".weight"] = weight_gradient(own, x)
            if name + ".bias" in self.parameters:
                sums[name + ".bias"] = column_sum(own)
        return input_gradient(dy, np.concatenate([self.parameters[name + ".weight"] for name in names]))

    def heads_gradient(self, which: str, index: int, layers: list[Layer], dy: list, sums: dict) -> np.ndarray:
        cos, sin = self.ops.cos, self.ops.sin
        dy = np.concatenate([rotate_gradient(d, cos[: len(d), None], sin[: len(d), None]) for d in dy])
        if not self.config.qk_norm:
            return dy
        name = f"model.layers.{index}.self_attn.{which}_norm.weight"
        raw = np.concatenate([getattr(layer, which + "_raw") for layer in layers])
        dx, terms = self.norm_gradient(name, raw, dy)
        sums[name] = chain(list(column_sum(terms)))  # [heads, d]
        return dx


def filtered(logits: np.ndarray, p: Parameters) -> np.ndarray:
    """z of a training row; -inf where filtered out."""
    if p.temperature == 0:
        return logits
    z = logits * (F32(1) / F32(p.temperature))
    out = np.full_like(z, -INFINITY)
    ids = kept(z, p)
    out[ids] = z[ids]
    return out


# ---- C15


def clip_factor(order: list[str], gradients: dict, max_norm: float) -> tuple[float, np.float32]:
    """The norm, and what every gradient is multiplied by."""
    total = 0.0
    for index, name in enumerate(order):
        g = gradients[name].astype(np.float64)
        g = g[:, None] if g.ndim == 1 else g
        padded = np.pad(g, [(0, 0), (0, -g.shape[1] % 4)]).reshape(len(g), -1, 4)
        # The square of an fp32 is exact in float64, so an fma is a product and a sum.
        q = padded[..., 0] * padded[..., 0]
        for i in (1, 2, 3):
            q = padded[..., i] * padded[..., i] + q
        parameter = float(padded_tree(padded_tree(q)))
        total = parameter if index == 0 else total + parameter
    norm = math.sqrt(total)
    ratio = max_norm / (norm + float.fromhex("0x1.0c6f7a0b5ed8dp-20"))
    return norm, F32(1.0 if ratio >= 1 else ratio)


def dithered(x: np.ndarray, n: int, moment: int, first: int = 0) -> np.ndarray:
    """A moment of step n as it is kept in bf16; its first element is element `first` of the parameter."""
    i = np.uint64(first) + np.arange(x.size, dtype=np.uint64)
    block, low = i >> np.uint64(3), i & np.uint64(7)
    words = np.stack(philox(n, block & np.uint64(0xFFFFFFFF), block >> np.uint64(32), moment, 1))
    word = words[(low >> np.uint64(1)).astype(np.int64), np.arange(x.size)]
    noise = (word >> (np.uint64(16) * (low & np.uint64(1)))) & np.uint64(0xFFFF)
    bits = np.ascontiguousarray(x, F32).reshape(-1).view(np.uint32).astype(np.uint64)
    sign, rest = bits >> np.uint64(31), bits & np.uint64(0x7FFFFFFF)
    kept = np.minimum((rest + noise) >> np.uint64(16), np.uint64(0x7F7F))
    finite = rest < 0x7F800000
    kept = np.where(finite, kept, rest >> np.uint64(16))  # infinity; a NaN is not asked for
    return ((sign << np.uint64(31)) | (kept << np.uint64(16))).astype(np.uint32).view(F32).reshape(x.shape)


@dataclass
class Adam:
    """The numbers of AdamW, as decimal numbers are in float64, and the state of each parameter."""

    lr: float
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    decay: float = 0.01
    moments_in_bf16: bool = False
    n: int = 0
    state: dict = field(default_factory=dict)  # name -> p, m, v

    def step(self, parameters: dict, gradients: dict, clip: np.float32) -> dict:
        """The parameters after the step, bf16."""
        self.n += 1
        b1n, b2n = self.b1, self.b2
        for _ in range(self.n - 1):
            b1n, b2n = b1n * self.b1, b2n * self.b2
        keep, b1, c1, b2, c2, rate, root, eps = (
            F32(x)
            for x in (
                1 - self.lr * self.decay,
                self.b1,
                1 - self.b1,
                self.b2,
                1 - self.b2,
                self.lr / (1 - b1n),
                1 / math.sqrt(1 - b2n),
                self.eps,
            )
        )
        out = {}
        for name, working in parameters.items():
            zeros = np.zeros_like(working)
            p, m, v = self.state.get(name, (working, zeros, zeros))
            g = gradients[name] * clip
            p = p * keep
            m = b1 * m + c1 * g
            v = b2 * v + c2 * (g * g)
            p = p - rate * (m / (np.sqrt(v) * root + eps))
            if self.moments_in_bf16:
                m, v = dithered(m, self.n, 0), dithered(v, self.n, 1)
            self.state[name] = (p, m, v)
            out[name] = bf16(p)
        return out
