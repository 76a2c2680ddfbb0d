"""The forward pass of docs/NUMERICS.md (C9), with C3's layers, C4's ranks, C6's attention and the modes."""

import itertools
from dataclasses import dataclass

import numpy as np

from numerics_reference.arithmetic import (
    F32,
    INFINITY,
    LEAVES,
    STEP,
    Operand,
    bf16,
    chain,
    dot,
    exp2,
    fma,
    from_bits,
    leaf_bounds,
    maximum,
    products,
    rms_norm,
    rotate,
    swiglu,
    tree,
)
from numerics_reference.checkpoint import Config
from numerics_reference.rope import table

SPLIT = 512
LANES = 8


@dataclass
class Split:
    """A row's state in a split, and the split's result; arrays over rows."""

    max: np.ndarray
    sum: np.ndarray  # lanes [rows, 8] inside a split, their total behind it
    acc: np.ndarray  # [rows, head_dim]


def attend_split(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int, sees, scale: np.float32) -> Split:
    """Keys [first, first + 512) of one head: q [rows, d], k and v [keys, d], sees(keys) [rows, keys]."""
    rows, d = q.shape
    tile = 128 if d <= 128 else 64
    row = Split(np.full(rows, -INFINITY), np.zeros((rows, LANES), F32), np.zeros((rows, d), F32))
    for begin in range(first, min(first + SPLIT, len(k)), tile):
        keys = np.arange(begin, begin + tile)
        seen = sees(keys)
        some = seen.any(1)
        if not some.any():
            continue
        padded = [
            np.pad(x[begin : begin + tile], [(0, max(0, begin + tile - len(k))), (0, 0)]) for x in (k, v)
        ]
        scores = np.where(seen[some], products(q[some], padded[0]), -INFINITY)
        top = maximum(row.max[some], np.fmax.reduce(scores, axis=1))
        shift = top * scale
        alpha = exp2(row.max[some] * scale - shift)
        weights = exp2(fma(scores, scale, -shift[:, None]))
        lanes = row.sum[some] * alpha[:, None]
        for j in range(0, tile, LANES):
            lanes = lanes + weights[:, j : j + LANES]
        row.acc[some] = products(bf16(weights), padded[1].T, row.acc[some] * alpha[:, None])
        row.max[some], row.sum[some] = top, lanes
    return Split(row.max * scale, tree(list(row.sum.T)), row.acc)


def attend_head(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int, scale: np.float32) -> Split:
    """The last len(q) positions of len(k) over those before them: their folded splits."""
    rows, d = q.shape
    positions = np.arange(len(k) - rows, len(k))[:, None]

    def sees(keys: np.ndarray) -> np.ndarray:
        return (keys <= positions) & ((window == 0) | (keys > positions - window))

    total = Split(np.full(rows, -INFINITY), np.zeros(rows, F32), np.zeros((rows, d), F32))
    for first in range(0, len(k), SPLIT):
        split = attend_split(q, k, v, first, sees, scale)
        there = split.max != -INFINITY
        top = maximum(total.max, split.max)
        left, right = exp2(total.max[there] - top[there]), exp2(split.max[there] - top[there])
        total.sum[there] = total.sum[there] * left + split.sum[there] * right
        total.acc[there] = total.acc[there] * left[:, None] + split.acc[there] * right[:, None]
        total.max = top
    return total


def output_of(total: Split) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return bf16(total.acc * (F32(1) / total.sum)[:, None])


def cacheable(k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """k and v [rows, heads, d] as C6 caches them: it replaces a head whose v is not finite."""
    finite = np.isfinite(v).all(-1, keepdims=True)
    return np.where(finite, k, from_bits(0x7FFF0000)), np.where(finite, v, F32(0))


class Model:
    """One sequence. Each call of step() is a step of the service, which matters only in mode vanilla."""

    def __init__(self, config: Config, parameters: dict, positions: int, mode: str = "tree", ranks: int = 1):
        self.config, self.parameters, self.mode, self.ranks = config, parameters, mode, ranks
        self.cos, self.sin = table(positions, config.head_dim, config.theta, config.scaling)
        none = np.zeros((0, config.kv_heads, config.head_dim), F32)
        self.cache = [(none, none)] * config.layers
        self.residual = np.zeros((0, config.hidden), F32)

    def step(self, tokens: list[int], last_only: bool = False) -> np.ndarray:
        """The logits after each of the next tokens, or after the last one; fp32 [rows, vocab]."""
        config = self.config
        self.residual = self.parameters["model.embed_tokens.weight"][tokens]
        for layer in range(config.layers):
            name = f"model.layers.{layer}."
            h = rms_norm(self.residual, self.parameters[name + "input_layernorm.weight"], config.eps)
            self.attention_block(h, layer, name + "self_attn.")
            h = rms_norm(self.residual, self.parameters[name + "post_attention_layernorm.weight"], config.eps)
            gate, up = (self.linear(h, f"{name}mlp.{part}_proj") for part in ("gate", "up"))
            bounds = leaf_bounds(config.intermediate)
            self.add_residual(swiglu(gate, up), f"{name}mlp.down_proj", bounds)
        h = rms_norm(
            self.residual[-1:] if last_only else self.residual,
            self.parameters["model.norm.weight"],
            config.eps,
        )
        head = "model.embed_tokens" if config.tied else "lm_head"
        return self.sum_leaves(h, self.parameters[head + ".weight"])

    def attention_block(self, h: np.ndarray, layer: int, name: str) -> None:
        config = self.config
        q, k, v = (
            self.linear(h, f"{name}{part}_proj").reshape(len(h), -1, config.head_dim) for part in "qkv"
        )
        if config.qk_norm:
            q = rms_norm(q, self.parameters[name + "q_norm.weight"], config.eps)
            k = rms_norm(k, self.parameters[name + "k_norm.weight"], config.eps)
        first = len(self.cache[layer][0])
        cos, sin = (x[first : first + len(h), None] for x in (self.cos, self.sin))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (np.concatenate(pair) for pair in zip(self.cache[layer], cacheable(k, v), strict=True))
        self.cache[layer] = (k, v)
        group = config.heads // config.kv_heads
        heads = [
            attend_head(q[:, i], k[:, i // group], v[:, i // group], config.windows[layer], config.scale)
            for i in range(config.heads)
        ]
        columns = config.heads * config.head_dim
        bounds = leaf_bounds(columns, group * config.head_dim)
        self.add_residual(np.concatenate([output_of(head) for head in heads], -1), name + "o_proj", bounds)

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        y = self.sum_leaves(x, self.parameters[name + ".weight"])
        bias = self.parameters.get(name + ".bias")
        return bf16(y if bias is None else y + bias)

    def sum_leaves(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        bounds = leaf_bounds(x.shape[1])
        return chain(leaf_sums(x, w, bounds)) if self.mode != "vanilla" else split_sum(x, w, bounds)

    def add_residual(self, x: np.ndarray, name: str, bounds: list[int]) -> None:
        w = self.parameters[name + ".weight"]
        partials = []
        for rank in range(self.ranks):
            own = bounds[LEAVES * rank // self.ranks : LEAVES * (rank + 1) // self.ranks + 1]
            partials.append(split_sum(x, w, own) if self.mode == "vanilla" else tree(leaf_sums(x, w, own)))
        total = self.over_ranks(partials)
        bias = self.parameters.get(name + ".bias", F32(0))
        self.residual = bf16(self.residual + bf16(total + bias))

    def over_ranks(self, partials: list[np.ndarray]) -> np.ndarray:
        if self.ranks == 1 or self.mode == "tree":
            return tree(partials)
        sent = np.stack([bf16(partial).ravel() for partial in partials])
        elements = np.arange(sent.shape[1])
        start = np.zeros_like(elements)
        if self.mode == "vanilla":
            start = (elements // -(-sent.shape[1] // self.ranks) + 1) % self.ranks
        total = sent[start, elements]
        for hop in range(1, self.ranks):
            total = bf16(total + sent[(start + hop) % self.ranks, elements])
        return total.reshape(partials[0].shape)


def leaf_sums(x: np.ndarray, w: np.ndarray, bounds: list[int]) -> list[np.ndarray]:
    return [products(x[:, a:b], w[:, a:b]) for a, b in itertools.pairwise(bounds)]


def split_sum(x: np.ndarray, w: np.ndarray, bounds: list[int]) -> np.ndarray:
    """A layer of mode vanilla: splits of k16 steps instead of leaves."""
    steps = [
        slice(k, min(k + STEP, end))
        for begin, end in itertools.pairwise(bounds)
        for k in range(begin, end, STEP)
    ]
    count = next(splits for splits, most in ((8, 4), (4, 16), (2, 64), (1, len(x))) if len(x) <= most)
    total = np.zeros((len(x), len(w)), F32)
    for i in range(count):
        split = np.zeros_like(total)
        for step in steps[i * len(steps) // count : (i + 1) * len(steps) // count]:
            split = dot(split, Operand(x[:, None, step]), Operand(w[None, :, step]))
        total = total + split
    return total
