"""C11 to C14 of docs/NUMERICS.md: the gradients of the operations. Losses are in losses.py.

Names as on the page: dy is the gradient of y. bf16 values are float32 arrays, as everywhere here.
"""

from dataclasses import dataclass

import numpy as np

from numerics_reference import log_prob
from numerics_reference.arithmetic import (
    F32,
    INFINITY,
    LOG2E,
    STEP,
    bf16,
    exp2,
    fma,
    products,
    sigmoid,
    sum_of_squares,
    tree_of_products,
)

COLUMN_SUM_ROWS = 64


# ---- C11


def input_gradient(dy: np.ndarray, w: np.ndarray) -> np.ndarray:
    return bf16(products(dy, w.T))


def weight_gradient(dy: np.ndarray, x: np.ndarray) -> np.ndarray:
    """A pack sum: dy [rows, n], x [rows, k]."""
    return products(dy.T, x.T)


def column_sum(x: np.ndarray) -> np.ndarray:
    """Of the rows of a pack."""
    total = np.zeros(x.shape[1:], F32)
    for first in range(0, len(x), COLUMN_SUM_ROWS):
        block = np.zeros(x.shape[1:], F32)
        for row in x[first : first + COLUMN_SUM_ROWS]:
            block = block + row
        total = block if first == 0 else total + block
    return total


# ---- C12


def rms_norm_gradient(x, w, dy, eps) -> tuple[np.ndarray, np.ndarray]:
    """dx, and each row's term of dw; over the last axis."""
    n = F32(x.shape[-1])
    s = (F32(1) / np.sqrt(sum_of_squares(x) / n + eps))[..., None]
    h, g = x * s, dy * w
    m = (tree_of_products(g, h) / n)[..., None]
    return bf16(s * fma(-h, m, g)), dy * bf16(x * s)


def rotate_gradient(dy: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    da, db = np.split(dy, 2, axis=-1)
    return np.concatenate([bf16(fma(da, cos, db * sin)), bf16(fma(db, cos, -(da * sin)))], -1)


def swiglu_gradient(g: np.ndarray, u: np.ndarray, ds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """dg, du"""
    t = sigmoid(g)
    a = g * t
    return bf16((ds * u) * fma(a, F32(1) - t, t)), bf16(ds * a)


# ---- C13


@dataclass
class Attention:
    """One sequence: q, o, do [rows, heads, d], k, v [rows, KV heads, d], log_sums (L) [rows, heads]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    o: np.ndarray
    log_sums: np.ndarray


def attention_gradient(
    f: Attention, do: np.ndarray, window: int, scale: np.float32
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dq, dk, dv"""
    rows, heads, d = f.q.shape
    group = heads // f.k.shape[1]
    i, j = np.arange(rows)[:, None], np.arange(rows)[None]
    seen = (j <= i) & ((window == 0) | (j > i - window))
    r = F32(1.0 / np.sqrt(np.float64(d)))
    dots = tree_of_products(do, f.o)
    dq, dk, dv = (np.zeros_like(x) for x in (f.q, f.k, f.v))
    for kv_head in range(f.k.shape[1]):
        k, v = f.k[:, kv_head], f.v[:, kv_head]
        k_chain, v_chain = np.zeros((rows, d), F32), np.zeros((rows, d), F32)
        for h in range(kv_head * group, (kv_head + 1) * group):
            p = exp2(fma(products(f.q[:, h], k), scale, -f.log_sums[:, h, None]))
            ds = bf16(p * (products(do[:, h], v) - dots[:, h, None]))
            p, ds = np.where(seen, bf16(p), F32(0)), np.where(seen, ds, F32(0))
            v_chain = products(p.T, do[:, h].T, v_chain)
            k_chain = products(ds.T, f.q[:, h].T, k_chain)
            dq[:, h] = bf16(products(steps_backwards(ds), steps_backwards(k.T)) * r)
        dk[:, kv_head], dv[:, kv_head] = bf16(k_chain * r), bf16(v_chain)
    return dq, dk, dv


def steps_backwards(x: np.ndarray) -> np.ndarray:
    """The last axis padded to whole k16 steps, the last step first."""
    padded = np.pad(x, [(0, 0), (0, -x.shape[-1] % STEP)])
    return padded.reshape(len(x), -1, STEP)[:, ::-1].reshape(len(x), -1)


# ---- C14


def logit_gradient(z, targets, g, h, temperature) -> np.ndarray:
    """z [rows, vocab], -inf where filtered out; targets, g and h [rows]."""
    row = log_prob.sum_rows(z)
    kept = z != -INFINITY
    y = np.where(kept, z, row.max[:, None]) - row.max[:, None]
    p = exp2(y * LOG2E) * (F32(1) / row.sum)[:, None]
    d = p * fma(h[:, None], (row.distance / row.sum)[:, None] - y, -g[:, None])
    at = np.arange(len(z))
    d[at, targets] = d[at, targets] + g
    inverse = F32(1) / F32(temperature) if temperature > 0 else F32(1)
    return np.where(kept, bf16(d * inverse), F32(0))
